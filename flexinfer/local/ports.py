"""The ports of one instance: a block of its own, so that several instances share a machine.

Ray needs more than a dozen fixed ports and three ranges. All are given explicitly: those it would
choose itself collide between instances, and some of its defaults listen on every interface.
"""

from __future__ import annotations

import errno
import ipaddress
import random
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from flexinfer.local.errors import LocalError, PortTaken

LOOPBACK = "127.0.0.1"

# Below the ports of engines, and below Linux's range for outgoing connections.
FIRST = 10_000
LAST = 19_999
_STEP = 100

_FIXED = (
    "gcs",
    "dashboard",
    "client_server",
    "agent_http",
    "agent_grpc",
    "runtime_env_agent",
    "metrics",
    "node_manager",
    "object_manager",
    "dashboard_metrics",
    "autoscaler_metrics",
    "haproxy_stats",
    "haproxy_metrics",
    "fallback_http",
    "fallback_grpc",
)
# A replica's direct-ingress port rests for minutes after its end: many are needed for few models.
_INGRESS = 500
_WORKERS = 800
BLOCK = _STEP + 2 * _INGRESS + _WORKERS


@dataclass(frozen=True)
class PortPlan:
    """The block of ports from `base`. Ranges are (first, last), both included."""

    base: int

    def __getattr__(self, name: str) -> int:
        """The fixed ports by their names, such as ``plan.dashboard``."""
        try:
            return self.base + _FIXED.index(name)
        except ValueError:
            raise AttributeError(name) from None

    @property
    def ingress_http(self) -> tuple[int, int]:
        """Direct-ingress ports of replicas."""
        first = self.base + _STEP
        return first, first + _INGRESS - 1

    @property
    def ingress_grpc(self) -> tuple[int, int]:
        """The same for gRPC, which is not used, but has a range that must not meet another."""
        first = self.base + _STEP + _INGRESS
        return first, first + _INGRESS - 1

    @property
    def workers(self) -> tuple[int, int]:
        """Ports of Ray's workers."""
        first = self.base + _STEP + 2 * _INGRESS
        return first, first + _WORKERS - 1


def plan_ports(taken: Collection[int] = (), *, avoid: Collection[int] = ()) -> PortPlan:
    """Choose a block that nobody listens in.

    `taken` are the bases of other instances, which may not listen yet; `avoid` single ports. Raises
    `LocalError` if there is none.
    """
    bases = list(range(FIRST, LAST + 2 - BLOCK, _STEP))
    random.shuffle(bases)
    for base in bases:
        block = range(base, base + BLOCK)
        if any(abs(base - other) < BLOCK for other in taken) or any(p in block for p in avoid):
            continue
        if all(is_free(LOOPBACK, port) for port in _used(PortPlan(base))):
            return PortPlan(base)
    raise LocalError(f"no {BLOCK} free ports in a row between {FIRST} and {LAST} for Ray")


def _used(plan: PortPlan) -> Iterator[int]:
    yield from range(plan.base, plan.base + len(_FIXED))
    yield from range(plan.ingress_http[0], plan.ingress_http[1] + 1)
    yield from range(plan.workers[0], plan.workers[1] + 1)


def is_free(host: str, port: int) -> bool:
    """Whether a program could listen on `port` of the address `host` now."""
    try:
        _try_to_bind(host, port)
    except OSError:
        return False
    return True


def _try_to_bind(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections that have ended may linger, a listener may not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def resolve_host(host: str) -> str:
    """The IP address that `--host` means. Raises `LocalError` for a name that has none."""
    bare = host.strip("[]")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LocalError(f"--host {host}: {error.strerror or error}") from error
    # IPv4 first, as Ray's own ports have it.
    addresses = sorted((entry[4][0] for entry in found), key=lambda text: ":" in str(text))
    return str(addresses[0])


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the IP address."""
    return ipaddress.ip_address(address).is_loopback


def check_port(address: str, port: int) -> None:
    """Raises `PortTaken` unless the API could listen on `port` of `address` and of loopback."""
    for host in dict.fromkeys([address, LOOPBACK]):
        try:
            _try_to_bind(host, port)
        except PermissionError as error:
            raise PortTaken(host, port, "reserved for the system administrator") from error
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise PortTaken(host, port, "already in use" if taken else str(error)) from error


def url_of(address: str, port: int) -> str:
    """The base URL of an API on `address`; an address that means all is shown as loopback."""
    ip = ipaddress.ip_address(address)
    if ip.is_unspecified:
        address = LOOPBACK
    elif ip.version == 6:
        address = f"[{address}]"
    return f"http://{address}:{port}"
