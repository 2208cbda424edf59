"""A gateway's side of a lease: one connection to one replica, for as long as both are there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from flexinfer.serving.lease import LEASE_WORD, notice_vanishing
from flexinfer.serving.status import ReplicaStatus

_CONNECT_S = 5.0
_RETRY_S = 0.2
_ATTEMPTS = 5
_MAX_LINE = 1 << 20

_log = logging.getLogger(__name__)


class Link:
    """Holds a lease. Calls `on_status` for every status, `on_lost` once when the lease has ended.

    `start` begins; `close` ends it from this side and awaits its task. Both callbacks run in the
    event loop and must not block.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: str,
        on_status: Callable[[ReplicaStatus], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.address = address
        self.key = key
        self._on_status = on_status
        self._on_lost = on_lost
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        # Not by the task itself: one that is cancelled before its first step runs nothing at all.
        self._task.add_done_callback(lambda _: self._on_lost())

    def release(self) -> None:
        """End the lease soon, without waiting; `close` waits."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        self.release()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_RETRY_S)
            if await self._hold():
                break

    async def _hold(self) -> bool:
        """Hold one connection; True if it was a lease, False if none came about."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(*self.address, limit=_MAX_LINE)
        except (OSError, TimeoutError) as error:
            _log.info("no lease from %s:%d: %s", *self.address, error)
            return False
        held = False
        notice_vanishing(writer)
        try:
            writer.write(LEASE_WORD + self.key.encode() + b"\n")
            await writer.drain()
            while line := await reader.readline():
                held = True
                self._on_status(ReplicaStatus.model_validate_json(line))
        except (OSError, ValueError) as error:  # ValueError: no status, or a line without end
            _log.info("lost the lease of %s:%d: %s", *self.address, error)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return held
