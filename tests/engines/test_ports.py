"""A free port for an engine."""

from __future__ import annotations

import socket

import pytest

from flexinfer.engines.errors import EngineConfigError
from flexinfer.engines.ports import FIRST, LAST, LOOPBACK, free_port


def test_nobody_listens_on_it() -> None:
    port = free_port()
    assert FIRST <= port <= LAST
    taken = socket.create_server((LOOPBACK, port))
    with taken, pytest.raises(EngineConfigError, match="no free port"):
        free_port(first=port, last=port)
    assert free_port(first=port, last=port) == port
