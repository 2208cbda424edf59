"""What the Serve controller knows of all models and gateways, shared by all policies in it.

All autoscaling policies run in the one controller process, so a module is a place that they share.
Everything here is soft: after a controller restart it fills itself within a tick.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flexinfer.scheduling import Decision, Demand, Model, Replica, Target, decide
from flexinfer.serving.reports import Bounds, Report

# The gateway reports ten times a second; a word this old says nothing about the present.
STALE_AFTER_S = 5.0


@dataclass
class _Entry:
    target: int
    running: int
    ongoing: float
    seen_at: float


@dataclass
class Registry:
    """Models as their policies last described them, and the last decision."""

    clock: Callable[[], float] = time.monotonic
    _models: dict[str, _Entry] = field(default_factory=dict)
    _report: Report | None = None
    _reported_at: float = 0.0
    _decision: Decision = field(default_factory=lambda: Decision({}))

    def report(self, report: Report) -> None:
        """The gateways' word, which arrived now."""
        self._report = report
        self._reported_at = self.clock()

    @property
    def fresh(self) -> bool:
        return self._report is not None and self.clock() - self._reported_at < STALE_AFTER_S

    def model(self, name: str, *, target: int, running: int, ongoing: float) -> None:
        """A model's policy tells what Ray knows: target and running replicas, requests."""
        self._models[name] = _Entry(target, running, ongoing, self.clock())

    def decide(self) -> Mapping[str, Target]:
        """Decide anew for all models; returns the targets."""
        now = self.clock()
        for name in [n for n, e in self._models.items() if now - e.seen_at > STALE_AFTER_S]:
            del self._models[name]
        if self.fresh:
            assert self._report is not None
            models = [
                self._model(name, entry, bounds, self._report)
                for name, entry in self._models.items()
                if (bounds := self._report.bounds.get(name)) is not None
            ]
            self._decision = decide(self._report.nodes, models)
        return self._decision.targets

    def target(self, name: str) -> int:
        """How many replicas a model should have now.

        While no gateway is heard, what is up stays up within the bounds that were heard last, and
        requests that Ray itself counts (a client that calls the deployment's handle) bring a model
        up.
        """
        entry = self._models[name]
        if not self.fresh:
            wanted = max(entry.target, 1 if entry.ongoing > 0 else 0)
            bounds = self._report.bounds.get(name) if self._report is not None else None
            if bounds is None:
                return wanted
            return min(max(wanted, bounds.min_replicas or 0), bounds.replicas)
        decided = self._decision.targets.get(name)
        return decided.replicas if decided is not None else entry.target

    @staticmethod
    def _model(name: str, entry: _Entry, bounds: Bounds, report: Report) -> Model:
        seen = report.replicas.get(name, ())
        unseen = max(0, entry.running - len(seen))
        return Model(
            name=name,
            gpus=bounds.gpus,
            replicas=bounds.replicas,
            min_replicas=bounds.min_replicas,
            priority=bounds.priority,
            idle_timeout_s=bounds.idle_timeout_s,
            nodes=bounds.nodes,
            demand=report.demands.get(name, Demand()),
            running=(*seen, *[Replica(None)] * unseen),
            target=entry.target,
        )


REGISTRY = Registry()
