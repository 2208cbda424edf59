"""A port for an engine to listen on."""

from __future__ import annotations

import random
import socket

from flexinfer.engines.errors import EngineConfigError

LOOPBACK = "127.0.0.1"

# Below Linux's default range for outgoing connections, so that no client socket takes the port
# between the test and the engine's own bind, and above the ports Ray gives its workers.
FIRST = 20_000
LAST = 32_767


def free_port(host: str = LOOPBACK, *, first: int = FIRST, last: int = LAST) -> int:
    """Return a TCP port of `host` that nobody listens on, from `first` to `last` at random.

    Nothing holds the port: the engine that gets it may still find it taken, and says so. Raises
    `EngineConfigError` if none of the range is free.
    """
    ports = range(first, last + 1)
    for port in random.sample(ports, k=min(len(ports), 1000)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise EngineConfigError(f"no free port of {host} between {first} and {last}")
