"""One engine as a process: start it, watch it, stop it. The verbs are safe in any state."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from flexinfer.engines.backend import Backend
from flexinfer.engines.errors import (
    EngineExited,
    EnginePortTaken,
    EngineStartError,
    EngineStartTimeout,
    EngineStopped,
    EngineStuck,
    EngineUnresponsive,
    ExitStatus,
)
from flexinfer.engines.launch import Launch, new_launch_id
from flexinfer.engines.launcher import descendants, process_table
from flexinfer.engines.logs import EngineLog
from flexinfer.engines.spec import EngineSpec, LaunchPlan
from flexinfer.engines.sweep import sweep_orphans
from flexinfer.engines.vram import VramWatch

_PROBE_TIMEOUT_S = 2.0
# Readiness is asked for often at first, for engines that load in a moment, then less: loading on a
# busy machine is not to be slowed down by questions. A line of output that says ready goes before.
_POLL_S = 0.015
_POLL_LATE_S = 0.2
_POLL_LATE_AFTER_S = 5.0
_LAST_WORDS_S = 0.5
_WORDS_OF_A_FAILURE = 200
_BUSY_SHARE = 0.1

_log = logging.getLogger(__name__)


class Engine:
    """One start of one engine. It does not start again: make another.

    Created in the event loop that uses it. `launch_id` identifies the start on this machine. With
    `vram`, a stop also waits until the GPUs have their memory back, and a start until the last
    engine's is; `vram_kept` and `vram_missing` say if that was not so in time. `admit` is called in
    a thread when the GPUs are free, just before the process is made; it raises `EngineStartError`
    to prevent that.
    """

    def __init__(
        self,
        backend: Backend,
        spec: EngineSpec,
        plan: LaunchPlan,
        log: EngineLog,
        launch_id: str | None = None,
        *,
        vram: VramWatch | None = None,
        admit: Callable[[], None] | None = None,
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.log = log
        self.launch_id = launch_id or new_launch_id()
        self.started_in_s: float | None = None
        self.vram_kept: str | None = None
        self.vram_missing: str | None = None
        self._backend = backend
        self._vram = vram
        self._admit = admit
        self._launch = Launch(
            self.launch_id,
            log.feed,
            name=spec.name,
            python=plan.python,
            stop=backend.stop,
        )
        loop = asyncio.get_running_loop()
        self._fatal: asyncio.Future[str] = loop.create_future()
        self._stop_asked: asyncio.Future[None] = loop.create_future()
        self._probe_now = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._client: aiohttp.ClientSession | None = None
        self._ready = False
        self._answered_at = 0.0

    # -- what it is

    @property
    def url(self) -> str:
        """Where it listens, without a slash at the end."""
        return self.plan.url

    @property
    def pid(self) -> int | None:
        """The engine's process; None before it was started."""
        return self._launch.pid

    @property
    def launcher_pid(self) -> int | None:
        """The process that owns the engine; None before it was started."""
        return self._launch.launcher_pid

    @property
    def exited(self) -> asyncio.Future[ExitStatus]:
        """A future of how its process ends, for any reason. Shared: shield it, do not cancel it."""
        return self._launch.exited

    # -- verbs

    async def start(self, timeout_s: float) -> None:
        """Start it and return when it answers.

        Raises `EngineStartError` at once when it exits, says that it has failed, or cannot be run;
        `EngineStartTimeout` after `timeout_s`; `EngineStopped` if `stop` was called meanwhile.
        After any of them, and after a cancellation, no process is left.
        """
        began = time.monotonic()
        forget = self.log.listen(self._hear)
        try:
            async with asyncio.timeout(timeout_s):
                await self._start()
        except TimeoutError:
            tail = self.log.tail()
            await self.stop()
            raise EngineStartTimeout(f"not ready within {timeout_s:g} s", log_tail=tail) from None
        except BaseException:
            await self.stop()
            raise
        finally:
            forget()
        self._ready = True
        self._answered_at = time.monotonic()
        self.started_in_s = self._answered_at - began

    async def check(self, timeout_s: float = 5.0) -> None:
        """Return if the engine works. Raises `EngineExited` or `EngineUnresponsive`.

        An engine that does not answer in time but uses the processor is busy, not broken, for as
        long as its plan says.
        """
        await self._raise_if_exited()
        client = self._session()
        busy_before = await asyncio.to_thread(_cpu_seconds, self.pid)
        asked = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                alive = await self._backend.is_alive(client, self.url)
        except TimeoutError:
            waited = time.monotonic() - asked
            used = await asyncio.to_thread(_cpu_seconds, self.pid) - busy_before
            silent_s = time.monotonic() - self._answered_at
            if used >= _BUSY_SHARE * waited and silent_s < self.plan.busy_limit_s:
                return
            await self._raise_if_exited()
            raise EngineUnresponsive(f"no answer within {timeout_s:g} s") from None
        if alive:
            self._answered_at = time.monotonic()
            return
        # Its port closes a moment before its end is known.
        await asyncio.wait([self.exited], timeout=0.1)
        await self._raise_if_exited()
        raise EngineUnresponsive("it refuses or fails the health request")

    async def stop(self, *, grace_s: float | None = None) -> None:
        """End it and every process of it; return when none is left.

        May be called in any state, also while `start` runs, and again, then with a shorter
        `grace_s` than the first time. Cancelling the caller does not cancel the stop. Raises
        `EngineStuck` if processes survive SIGKILL.
        """
        if not self._stop_asked.done():
            self._stop_asked.set_result(None)
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(grace_s))
        elif grace_s is not None and not self._stopping.done():
            await self._launch.stop(grace_s=grace_s)
        await asyncio.shield(self._stopping)

    # -- start

    async def _start(self) -> None:
        if self._stop_asked.done():
            raise EngineStopped("stopped before it was started")
        try:
            killed = await asyncio.to_thread(sweep_orphans)
        except EngineStuck as error:
            raise EngineStartError(f"left from an earlier start: {error}") from error
        if killed:
            _log.warning("ended %d processes that an earlier start left behind", len(killed))
        self.log.clear()
        if self._vram is not None:
            self.vram_missing = await self._vram.before_start()
            if self.vram_missing is not None:
                self.log.note(f"memory of the last engine is missing: {self.vram_missing}")
        if self._admit is not None:
            await asyncio.to_thread(self._admit)
        self.log.note(f"starting {Path(self.plan.argv[0]).name} on {self.url}")
        await self._launch.spawn(self.plan.argv, self.plan.env, self.plan.cwd)
        ready = asyncio.get_running_loop().create_task(self._until_loaded())
        try:
            events: list[asyncio.Future[Any]] = [ready, self._fatal, self.exited, self._stop_asked]
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            if self._stop_asked.done():
                raise EngineStopped("stopped while it was starting")
            if self.exited.done() or self._fatal.done():
                raise await self._failure()
            await ready
        finally:
            ready.cancel()

    def _hear(self, line: str) -> None:
        reason = self._backend.fatal_line(line)
        if reason is not None and not self._fatal.done():
            self._fatal.set_result(reason)
        if self._backend.ready_line(line):
            self._probe_now.set()

    async def _until_loaded(self) -> None:
        await self._until_ready()
        await self._backend.load(self._session(), self.plan)

    async def _until_ready(self) -> None:
        client = self._session()
        began = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    if await self._backend.is_ready(client, self.url):
                        return
            except TimeoutError:
                pass  # it accepts connections before it answers them
            late = time.monotonic() - began > _POLL_LATE_AFTER_S
            try:
                async with asyncio.timeout(_POLL_LATE_S if late else _POLL_S):
                    await self._probe_now.wait()
                self._probe_now.clear()
                began = time.monotonic()  # it says that it is ready: ask often again
            except TimeoutError:
                continue

    async def _failure(self) -> EngineStartError:
        """Say why the start has failed. Its first bad line is seldom its best: hear it out."""
        await asyncio.wait([self.exited], timeout=_LAST_WORDS_S)
        tail = self.log.tail()
        status = self.exited.result() if self.exited.done() else None
        # Processes that fail one after the other each add a traceback; the first says why.
        words = self.log.tail(_WORDS_OF_A_FAILURE)
        reason = await asyncio.to_thread(
            self._backend.explain, self.plan, status or ExitStatus(), words
        )
        kind = EnginePortTaken if self._backend.port_taken(tail) else EngineStartError
        return kind(reason, log_tail=tail, exit=status)

    # -- the rest

    async def _raise_if_exited(self) -> None:
        if self.exited.done():
            status, words = self.exited.result(), self.log.tail(_WORDS_OF_A_FAILURE)
            reason = await asyncio.to_thread(self._backend.explain, self.plan, status, words)
            raise EngineExited(status, reason=reason, log_tail=self.log.tail())

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            # A connection of its own for each question: a kept one would answer for a server that
            # takes no new ones any more.
            connector = aiohttp.TCPConnector(force_close=True, limit=4)
            self._client = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._client

    async def _stop(self, grace_s: float | None) -> None:
        if grace_s is None and not self._ready:
            grace_s = self._backend.stop.start_grace_s
        try:
            await self._launch.stop(grace_s=grace_s)
            if self._vram is not None and self.pid is not None:
                self.vram_kept = await self._vram.wait_back()
        finally:
            if self._client is not None:
                await self._client.close()
            self.log.flush()
            if self.exited.done() and self.pid is not None:
                self.log.note(f"stopped: {self.exited.result()}")
            if self.vram_kept is not None:
                self.log.note(self.vram_kept)


def _cpu_seconds(pid: int | None) -> float:
    """Return the processor time that `pid` and what descends from it have used so far, in seconds.

    Of some engines a child does the work. What has ended meanwhile no longer counts.
    """
    if pid is None:
        return 0.0
    table = process_table()
    return sum(map(_own_cpu_seconds, (pid, *descendants(table, pid))))


def _own_cpu_seconds(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return 0.0
    fields = text[text.rindex(b")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
