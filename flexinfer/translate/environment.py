"""The environment that Ray and Ray Serve start with. Every variable is set here and nowhere else.

Ray reads them when its processes start, so they belong to whoever starts Ray: `flexinfer up`, or
the pods of a RayService. On a cluster without them everything works, slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PRELOADED_MODULES = ("flexinfer.serving.server", "flexinfer.serving.gateway")


@dataclass(frozen=True)
class Variable:
    """One environment variable, and why it has its value."""

    name: str
    value: str
    reason: str


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "RAY_SERVE_ENABLE_HA_PROXY",
        "1",
        "HAProxy takes the requests instead of a Python proxy, which costs 10 ms a first byte "
        "and is full at a few dozen streams.",
    ),
    Variable(
        "RAY_SERVE_THROUGHPUT_OPTIMIZED",
        "1",
        "Replicas run on one event loop and talk to each other without a detour.",
    ),
    Variable(
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
        "0",
        "With HAProxy every first deployment waits for this long before it stops, also one "
        "without a route: a model that gives way would hold its GPU for 30 s. The gateway, which "
        "needs the time, sets its own.",
    ),
    Variable(
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S",
        "0.05",
        "How soon a wish for a model becomes a replica. Less costs the controller more of a core "
        "than it gains.",
    ),
    Variable(
        "RAY_enable_worker_prestart",
        "1",
        "Each node keeps as many idle worker processes as it has CPUs, so that a replica does not "
        "wait for an interpreter to start.",
    ),
    Variable(
        "RAY_preload_python_modules",
        ",".join(PRELOADED_MODULES),
        "What a replica would import first is imported while the worker is idle.",
    ),
    Variable(
        "RAY_worker_maximum_startup_concurrency",
        "2",
        "Idle workers that start all at once on a small machine take the cores away from a model "
        "that starts in that moment.",
    ),
    Variable(
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
        "7200",
        "HAProxy is started anew whenever the list of models changes, and the old one is ended "
        "after this long with whatever still runs through it: after 120 s by default, which would "
        "cut long answers.",
    ),
    Variable(
        "RAY_SERVE_PORT_QUARANTINE_S",
        "150",
        "By default as long as the one above and half a minute more; few ports are needed again.",
    ),
    Variable(
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S",
        "60",
        "A proxy that is not up after this long is killed and made again, by default after 5 s, "
        "which a busy machine needs for its imports alone; and Serve's own start then fails.",
    ),
    Variable("RAY_USAGE_STATS_ENABLED", "0", "Nothing is reported to anybody."),
)

_HAPROXY_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}


def serve_environment(
    *,
    haproxy_dir: Path | None = None,
    haproxy_stats_port: int | None = None,
    haproxy_metrics_port: int | None = None,
    auth_mode: str | None = None,
) -> dict[str, str]:
    """The variables for everything that starts Ray, sorted by name.

    Args:
        haproxy_dir: where HAProxy's configuration and sockets go; short, because the paths of
            sockets are (about 100 bytes). None leaves Ray's own, which all instances of a machine
            share, users included.
        haproxy_stats_port: port of HAProxy's statistics; None leaves Ray's 8404.
        haproxy_metrics_port: port of HAProxy's metrics; None leaves Ray's 9101.
        auth_mode: `token` or `disabled`, for Ray's own ports. None leaves the choice to Ray, which
            asks for a token as soon as it finds one in the user's home.
    """
    environment = {variable.name: variable.value for variable in VARIABLES}
    if haproxy_dir is not None:
        for name, file in _HAPROXY_FILES.items():
            environment[name] = str(haproxy_dir / file) if file else str(haproxy_dir)
    if haproxy_stats_port is not None:
        environment["RAY_SERVE_HAPROXY_STATS_PORT"] = str(haproxy_stats_port)
    if haproxy_metrics_port is not None:
        environment["RAY_SERVE_HAPROXY_METRICS_PORT"] = str(haproxy_metrics_port)
    if auth_mode is not None:
        environment["RAY_AUTH_MODE"] = auth_mode
    return dict(sorted(environment.items()))


def missing_variables(environ: Mapping[str, str]) -> list[Variable]:
    """The variables of `VARIABLES` that `environ` lacks or has another value for."""
    return [variable for variable in VARIABLES if environ.get(variable.name) != variable.value]
