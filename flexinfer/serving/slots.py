"""Replicas as a gateway holds them, and the places at their engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flexinfer.serving.errors import RequestError
from flexinfer.serving.link import Link
from flexinfer.serving.status import EngineAddress, ReplicaState, ReplicaStatus


@dataclass(eq=False)
class Replica:
    """One replica on which the gateway holds a lease, or is taking one."""

    id: str
    node: str
    link: Link
    local: bool
    """Whether its engine's loopback is this process's."""
    status: ReplicaStatus | None = None
    since: float = field(default_factory=time.monotonic)
    running: set[Slot] = field(default_factory=set)
    preempt: asyncio.TimerHandle | None = None

    @property
    def state(self) -> ReplicaState:
        return self.status.state if self.status is not None else ReplicaState.STARTING

    @property
    def engine(self) -> EngineAddress | None:
        return self.status.engine if self.status is not None else None


class Slot:
    """One request's right to use an engine, from `acquire` to `release`."""

    def __init__(
        self, replica: Replica, engine: EngineAddress, give_back: Callable[[Slot], None]
    ) -> None:
        self.replica = replica
        self.engine = engine
        self.lost: asyncio.Future[RequestError] = asyncio.get_running_loop().create_future()
        """Set when the request has to end: its replica is gone, or had to leave."""
        self._give_back = give_back
        self._released = False

    def release(self) -> None:
        """Give the place to the next; safe to call twice."""
        if not self._released:
            self._released = True
            self._give_back(self)
