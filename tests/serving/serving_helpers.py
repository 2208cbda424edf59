"""Doubles for the tests of the serving room: a clock, replicas without processes, waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

from flexinfer.serving.args import GatewayModel
from flexinfer.serving.backlog import Backlog
from flexinfer.serving.link import Link
from flexinfer.serving.slots import Replica
from flexinfer.serving.status import EngineAddress, ReplicaState, ReplicaStatus


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeLink:
    """A lease that remembers that it was given back."""

    address = ("127.0.0.1", 1)
    key = "key-of-the-lease"

    def __init__(self) -> None:
        self.released = False

    def release(self) -> None:
        self.released = True


def gateway_model(name: str = "m", **changes: Any) -> GatewayModel:
    return GatewayModel(
        **{"name": name, "names": [name], "backend": "llama-cpp", "model": "w.gguf", **changes}
    )


def replica_status(
    state: ReplicaState, *, port: int = 1, parallel: int = 1, engine: str = "engine", **changes: Any
) -> ReplicaStatus:
    address = EngineAddress(host="127.0.0.1", port=port, request_model=engine, parallel=parallel)
    ready = state in (ReplicaState.SERVING, ReplicaState.DRAINING)
    fields = {"state": state, "pid": 1, "engine": address if ready else None}
    return ReplicaStatus(**{**fields, **changes})


def add_replica(
    backlog: Backlog,
    state: ReplicaState | None = ReplicaState.SERVING,
    *,
    name: str = "r1",
    **changes: Any,
) -> Replica:
    """A replica of `backlog` in a state; None: nothing was heard of it yet."""
    replica = Replica(name, "node", cast(Link, FakeLink()), local=True)
    backlog.add(replica)
    if state is not None:
        backlog.update(replica, replica_status(state, **changes))
    return replica


async def settle() -> None:
    """Let every task run until it waits for something outside the event loop."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any], what: str = "", deadline_s: float = 10.0) -> None:
    """Wait until `condition()` is true; fails with its last value at the deadline."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"{what or condition}: still {value!r}"
        await asyncio.sleep(0.01)
