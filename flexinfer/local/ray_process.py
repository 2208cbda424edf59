"""Own a Ray head on this machine, as one process tree that leaves nothing behind.

Ray runs below our launcher: when this process ends, however it ends, the launcher ends Ray, its
workers, and the engines below them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from pathlib import Path
from typing import Any

from flexinfer.engines.errors import EngineError, ExitStatus
from flexinfer.engines.launch import Launch, StopPolicy, new_launch_id
from flexinfer.local.dashboard import Dashboard, Serve
from flexinfer.local.errors import DashboardError, RayExited, StartTimeout
from flexinfer.local.events import Phase, Tell
from flexinfer.local.ray_settings import (
    RaySettings,
    ray_command,
    ray_environment,
    ray_executable,
)

# Half a minute is usual on a small machine; a disk that has gone to sleep takes a while longer.
START_S = 180.0
# Engines get their end with their launchers' control pipes, at the same time as Ray gets its own.
_STOP = StopPolicy(grace_s=4.0, leftover_s=3.0)
_POLL_S = 0.25
_TAIL = 20


class RayProcess:
    """One Ray head. Created in the event loop that uses it; the verbs are safe in any state."""

    def __init__(self, settings: RaySettings) -> None:
        self.settings = settings
        self._last: deque[str] = deque(maxlen=200)
        self._launch = Launch(new_launch_id(), self._hear, name="ray", stop=_STOP)

    @property
    def exited(self) -> asyncio.Future[ExitStatus]:
        """A future of how Ray ends, for any reason. Shared: shield it, do not cancel it."""
        return self._launch.exited

    @property
    def pid(self) -> int | None:
        """The process of `ray start`; None before the start."""
        return self._launch.pid

    async def start(self, dashboard: Dashboard, tell: Tell, *, timeout_s: float = START_S) -> None:
        """Start Ray and return when its dashboard answers to `dashboard`.

        Raises `RayExited` at once if it ends, `StartTimeout` after `timeout_s`.
        """
        if not ray_executable().is_file():
            raise RayExited(f"there is no {ray_executable()}: pip install 'ray[serve]'")
        tell(Phase("starting Ray"))
        environment = ray_environment(self.settings, os.environ)
        try:
            await self._launch.spawn(ray_command(self.settings), environment, Path("/"))
        except EngineError as error:
            raise RayExited(f"Ray cannot be started: {error}") from error
        answered = asyncio.create_task(self._until_dashboard(dashboard))
        try:
            events: list[asyncio.Future[Any]] = [answered, self.exited]
            await asyncio.wait(events, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self.exited.done():
                raise self.failure("Ray ended while it started")
            if not answered.done():
                raise StartTimeout(
                    f"Ray's dashboard does not answer after {timeout_s:g} s; Ray's logs are in "
                    f"{self.settings.ray_dir}/session_latest/logs"
                )
            await answered
        finally:
            answered.cancel()

    async def stop(self, *, force: bool = False) -> None:
        """End Ray and everything on it; return when nothing is left. Raises `EngineStuck`."""
        await self._launch.stop(grace_s=0.0 if force else None)

    def failure(self, what: str) -> RayExited:
        """The error for Ray's end, with its last words."""
        status = self.exited.result() if self.exited.done() else ExitStatus()
        return RayExited(f"{what}: {status}", list(self._last)[-_TAIL:])

    async def _until_dashboard(self, dashboard: Dashboard) -> Serve:
        while True:
            try:
                return await dashboard.get()
            except DashboardError:
                await asyncio.sleep(_POLL_S)

    def _hear(self, data: bytes) -> None:
        self._last += [line for line in data.decode(errors="replace").splitlines() if line.strip()]


def write_token(path: Path) -> str:
    """Make a token for Ray's ports and keep it in `path`, for this user only."""
    token = secrets.token_urlsafe(32)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(token)
    return token
