"""Keep the replicas' own gRPC servers on loopback.

Ray Serve gives every replica a gRPC server for calls between deployments, and binds it to every
interface; there is no setting for that. All workers of our Ray import this module at their start
(`RAY_preload_python_modules`), which puts the servers where everything else of Ray already is.
"""

from __future__ import annotations

import sys
from typing import Any

EVERYWHERE = ("[::]:", "0.0.0.0:")
_NAME = "add_port_to_grpc_server"
_USER = "ray.serve._private.replica"


def narrowed(address: str) -> str:
    """`address` (``host:port``), on loopback if it was on every interface."""
    for host in EVERYWHERE:
        if address.startswith(host):
            return "127.0.0.1:" + address.removeprefix(host)
    return address


def narrow() -> None:
    """From now on, gRPC servers of this process listen on loopback; safe to call twice."""
    from ray._common import tls_utils

    add_port = tls_utils.add_port_to_grpc_server
    if getattr(add_port, "narrowed", False):
        return

    def add_narrowed_port(server: Any, address: str) -> Any:
        return add_port(server, narrowed(address))

    add_narrowed_port.narrowed = True  # type: ignore[attr-defined]
    tls_utils.add_port_to_grpc_server = add_narrowed_port
    # It may have taken the function by its name already.
    if _USER in sys.modules:
        setattr(sys.modules[_USER], _NAME, add_narrowed_port)


narrow()
