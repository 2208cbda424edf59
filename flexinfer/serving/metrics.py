"""The gateway's Prometheus metrics. Buckets of loading times reach half an hour."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)
_SHORT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class GatewayMetrics:
    """One registry a gateway."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "flexinfer_requests_total",
            "Requests by how they ended.",
            ["model", "status"],
            registry=registry,
        )
        self.first_byte = Histogram(
            "flexinfer_time_to_first_byte_seconds",
            "From the request's last byte to the answer's first, queueing and loading included.",
            ["model"],
            buckets=_SHORT,
            registry=registry,
        )
        self.waiting = Histogram(
            "flexinfer_queue_wait_seconds",
            "How long requests waited for a place at an engine.",
            ["model"],
            buckets=_LONG,
            registry=registry,
        )
        self.activation = Histogram(
            "flexinfer_activation_seconds",
            "From the first waiting request to a serving replica.",
            ["model"],
            buckets=_LONG,
            registry=registry,
        )
        self.queued = Gauge(
            "flexinfer_queued_requests", "Requests that wait.", ["model"], registry=registry
        )
        self.running = Gauge(
            "flexinfer_running_requests", "Requests that run.", ["model"], registry=registry
        )
        self.replicas = Gauge(
            "flexinfer_serving_replicas", "Replicas that serve.", ["model"], registry=registry
        )
        self.failures = Counter(
            "flexinfer_activation_failures_total",
            "Replicas whose engine failed to start.",
            ["model"],
            registry=registry,
        )

    def forget(self, model: str) -> None:
        """Drop the gauges of a model that is no more; counters keep their history."""
        for gauge in (self.queued, self.running, self.replicas):
            gauge.remove(model)

    def render(self) -> bytes:
        return generate_latest(self._registry)
