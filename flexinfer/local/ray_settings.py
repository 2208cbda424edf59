"""How Ray is started on one machine: its command line and its environment. Pure."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import flexinfer
from flexinfer.engines.gpus import MASK, OTHER_MASKS
from flexinfer.local.ports import LOOPBACK, PortPlan
from flexinfer.local.state import LOG_DIR_VARIABLE
from flexinfer.translate import serve_environment

# Ray prestarts as many workers as the node has CPUs; our actors ask for none.
_CPUS = 3
# Nothing of ours goes through the object store, and Ray wants 75 MB at least.
_OBJECT_STORE_BYTES = 100_000_000
# Ray keeps what replicas print, which is what engines print: they have rotated files of their own.
_RAY_LOG_BYTES = 16 << 20

_LOOPBACK_MODULE = "flexinfer.local.loopback"
# How replicas and models name a node of a cluster.
_NODE_LABEL = "flexinfer.ai/node"

GPU_MASKS = (MASK, *OTHER_MASKS)
# They would lead Ray's own tools, or our Ray, to another cluster or another token.
_NOT_INHERITED = frozenset(
    {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_TOKEN", *GPU_MASKS}
)


@dataclass(frozen=True)
class RaySettings:
    """One Ray head. `haproxy` is the executable that becomes HAProxy, None for Serve's own proxy;
    `token_file` holds the token that Ray's ports ask for."""

    work_dir: Path
    ports: PortPlan
    gpus: int
    token_file: Path
    log_dir: Path
    haproxy: Path | None = None

    @property
    def ray_dir(self) -> Path:
        """Ray's own directory: logs and sockets."""
        return self.work_dir / "ray"

    @property
    def dashboard_url(self) -> str:
        """Where the dashboard will be."""
        return f"http://{LOOPBACK}:{self.ports.dashboard}"


def ray_executable() -> Path:
    """The `ray` command of this interpreter's environment."""
    return Path(sys.executable).parent / "ray"


def ray_command(settings: RaySettings) -> list[str]:
    """The command that runs the head in the foreground, all of its ports on loopback."""
    ports = settings.ports
    first_worker, last_worker = ports.workers
    options = {
        "node-ip-address": LOOPBACK,
        "port": ports.gcs,
        "include-dashboard": "true",
        "dashboard-host": LOOPBACK,
        "dashboard-port": ports.dashboard,
        "dashboard-agent-listen-port": ports.agent_http,
        "dashboard-agent-grpc-port": ports.agent_grpc,
        "ray-client-server-port": ports.client_server,
        "runtime-env-agent-port": ports.runtime_env_agent,
        "metrics-export-port": ports.metrics,
        "node-manager-port": ports.node_manager,
        "object-manager-port": ports.object_manager,
        "min-worker-port": first_worker,
        "max-worker-port": last_worker,
        "num-cpus": _CPUS,
        "num-gpus": settings.gpus,
        "object-store-memory": _OBJECT_STORE_BYTES,
        "labels": f"{_NODE_LABEL}={label_value(platform.node())}",
        # It sends what workers print to drivers; there is none.
        "include-log-monitor": "false",
        "temp-dir": settings.ray_dir,
    }
    # The script by its interpreter: its first line may be too long for the kernel, or outdated.
    command = [sys.executable, str(ray_executable()), "start", "--head", "--block"]
    command.append("--disable-usage-stats")
    return [*command, *(f"--{name}={value}" for name, value in options.items())]


def label_value(text: str) -> str:
    """`text` as the value of a Ray label, which may not hold every character."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("._-") or "localhost"


def ray_environment(settings: RaySettings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of Ray and of all that runs on it, on top of the user's own `environ`."""
    ports = settings.ports
    kept = {name: value for name, value in environ.items() if name not in _NOT_INHERITED}
    design = serve_environment(
        haproxy_dir=settings.work_dir,
        haproxy_stats_port=ports.haproxy_stats,
        haproxy_metrics_port=ports.haproxy_metrics,
        auth_mode="token",
    )
    own = {
        "AUTOSCALER_METRIC_PORT": str(ports.autoscaler_metrics),
        "DASHBOARD_METRIC_PORT": str(ports.dashboard_metrics),
        LOG_DIR_VARIABLE: str(settings.log_dir),
        "PYTHONPATH": _python_path(kept.get("PYTHONPATH")),
        "RAY_AUTH_TOKEN_PATH": str(settings.token_file),
        # Ray replaces a loopback address by one that the network can reach, unless it knows that
        # the cluster will never have a second machine.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_preload_python_modules": ",".join(
            [*design["RAY_preload_python_modules"].split(","), _LOOPBACK_MODULE]
        ),
        "RAY_ROTATION_BACKUP_COUNT": "1",
        "RAY_ROTATION_MAX_BYTES": str(_RAY_LOG_BYTES),
    }
    own["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] = str(ports.fallback_http)
    own["RAY_SERVE_FALLBACK_PROXY_GRPC_PORT"] = str(ports.fallback_grpc)
    for protocol, (first, last) in (("HTTP", ports.ingress_http), ("GRPC", ports.ingress_grpc)):
        own[f"RAY_SERVE_DIRECT_INGRESS_MIN_{protocol}_PORT"] = str(first)
        own[f"RAY_SERVE_DIRECT_INGRESS_MAX_{protocol}_PORT"] = str(last)
    if settings.haproxy is None:
        own["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    else:
        own["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(settings.haproxy)
    return {**kept, **design, **own}


def _python_path(given: str | None) -> str:
    """Ray's workers import the package from where this process has it, installed or not."""
    root = str(Path(flexinfer.__file__).parents[1])
    others = [entry for entry in (given or "").split(":") if entry and entry != root]
    return ":".join([root, *others])
