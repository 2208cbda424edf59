from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """\
import flexinfer.local.loopback, socket
from concurrent.futures import ThreadPoolExecutor
import grpc
from ray._common.tls_utils import add_port_to_grpc_server

server = grpc.server(ThreadPoolExecutor(1))
port = add_port_to_grpc_server(server, "[::]:0")
server.start()
# Another address of loopback is free if the server did not take all addresses.
with socket.socket() as probe:
    probe.bind(("127.0.0.2", port))
flexinfer.local.loopback.narrow()
server.stop(None)
"""


def test_a_server_for_every_interface_is_on_loopback_only() -> None:
    pytest.importorskip("grpc")
    # In a process of its own: the change is one of the process.
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_ray_still_binds_as_expected() -> None:
    replica = pytest.importorskip("ray.serve._private.replica")
    with open(replica.__file__) as file:
        assert 'add_port_to_grpc_server(self._server, "[::]:0")' in file.read()
