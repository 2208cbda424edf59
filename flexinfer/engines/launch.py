"""The owner's side of a launcher: start one program under it, follow it, end it.

Nothing here knows what the program is; `process.Engine` adds that. It works in any thread's event
loop, uvloop's too: asyncio's own subprocesses do not, and Ray runs a replica's loop in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexinfer.engines import launcher
from flexinfer.engines.errors import (
    EngineConfigError,
    EngineError,
    EngineStartError,
    EngineStopped,
    EngineStuck,
    ExitStatus,
)
from flexinfer.engines.sweep import sweep

# A command has to fit into the pipe, because nobody reads it before the launcher is up.
_PIPE_BYTES = 1 << 20
_LAUNCHER_ANSWERS_S = 60.0  # only a machine without any time to spare needs more than one

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StopPolicy:
    """How a program is asked to end.

    It gets `signal` and `grace_s` seconds, then SIGKILL. What it leaves behind gets SIGTERM and
    `leftover_s` seconds, then SIGKILL. `start_grace_s` is its grace while it starts, None for the
    same: some programs cannot hear the signal then.
    """

    signal: int = signal.SIGTERM
    grace_s: float = launcher.DEFAULT_GRACE_S
    leftover_s: float = launcher.DEFAULT_LEFTOVER_S
    start_grace_s: float | None = None


def new_launch_id() -> str:
    """Return an id for one start, unique on any machine."""
    return secrets.token_hex(8)


class Launch:
    """One program under a launcher of its own.

    Verbs may be called in any state and order, from one event loop. `on_output(data)` gets what the
    program writes to stdout and stderr, in the order of writing.
    """

    def __init__(
        self,
        launch_id: str,
        on_output: Callable[[bytes], None],
        *,
        name: str = "program",
        python: Path | None = None,
        stop: StopPolicy | None = None,
    ) -> None:
        self.launch_id = launch_id
        self.pid: int | None = None
        self.launcher_pid: int | None = None
        self._on_output = on_output
        self._name = name
        self._python = str(python or sys.executable)
        self._policy = stop or StopPolicy()
        self._loop = asyncio.get_running_loop()
        self._control = self._report = self._output = -1
        self._report_buffer = b""
        self._spawned = False
        self._stopping = False
        self._answer: asyncio.Future[None] = self._loop.create_future()
        self._exited: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._saw_gone = False
        self._stuck: tuple[int, ...] = ()
        self._cleaning: asyncio.Task[None] | None = None
        # A failure that nobody waits for is not news: it is reported where somebody asks.
        self._answer.add_done_callback(_retrieve)
        self._gone.add_done_callback(_retrieve)

    # -- verbs

    async def spawn(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> int:
        """Start the program and return its process id, once its exec has succeeded.

        Raises `EngineStartError` if it could not be started, `EngineStopped` if `stop` was called
        meanwhile. May be called once. When cancelled, nothing stays behind.
        """
        if self._stopping:
            raise EngineStopped("stopped before it was started")
        if self._spawned:
            raise RuntimeError("a launch spawns once")
        self._spawned = True
        command = {
            "op": "exec",
            "argv": [str(word) for word in argv],
            "env": dict(env),
            "cwd": str(cwd),
            "signal": int(self._policy.signal),
            "grace_s": self._policy.grace_s,
            "leftover_s": self._policy.leftover_s,
        }
        message = json.dumps(command).encode() + b"\n"
        if len(message) > _PIPE_BYTES:
            self._finish()
            raise EngineConfigError(
                f"command line and environment take {len(message)} bytes, at most {_PIPE_BYTES}"
            )
        # The thread cannot be stopped: what it started is taken over even if nobody waits for it.
        running = self._loop.run_in_executor(None, self._start_launcher, message)
        running.add_done_callback(self._adopt)
        try:
            async with asyncio.timeout(_LAUNCHER_ANSWERS_S):
                await asyncio.shield(self._answer)
        except TimeoutError:
            self._abandon()
            raise EngineStartError("the launcher does not answer") from None
        except asyncio.CancelledError:
            self._abandon()
            raise
        assert self.pid is not None
        return self.pid

    async def stop(self, *, grace_s: float | None = None) -> None:
        """End the program and all of its descendants; return when none of them is left.

        `grace_s` instead of the policy's; a shorter one may follow a longer one. Raises
        `EngineStuck` if processes survive SIGKILL.
        """
        self._stopping = True
        if not self._spawned:
            self._finish()
        patience = self._policy.grace_s if grace_s is None else grace_s
        if self._control >= 0:
            order: dict[str, Any] = {"op": "stop"}
            if grace_s is not None:
                order["grace_s"] = grace_s
            # Broken: the launcher has ended, and the report will say so. Full: it hangs, see below.
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._control, json.dumps(order).encode() + b"\n")
        limit = patience + self._policy.leftover_s + launcher.STUCK_AFTER_S + 1.0
        try:
            async with asyncio.timeout(limit):
                await asyncio.shield(self._gone)
        except TimeoutError:
            if self._stuck:
                raise EngineStuck(self._stuck) from None
            _log.warning("launcher %s of %s does not end", self.launcher_pid, self._name)
            await asyncio.to_thread(sweep, self.launch_id, session=self.launcher_pid)
            await asyncio.shield(self._gone)

    @property
    def exited(self) -> asyncio.Future[ExitStatus]:
        """A future of how the program itself ends. It is shared: shield it, do not cancel it."""
        return self._exited

    async def wait_gone(self) -> None:
        """Return when no process of this launch is left. Raises `EngineStuck`."""
        await asyncio.shield(self._gone)

    # -- start

    def _start_launcher(self, command: bytes) -> tuple[int, int, int]:
        """Run the launcher's first process to its end, which is at once; return our pipe ends."""
        # All ends are close-on-exec: no other child of ours can keep the launcher's signs from it.
        ours: list[int] = []
        theirs: list[int] = []
        try:
            control, write_control = os.pipe()
            ours.append(write_control)
            theirs.append(control)
            read_report, report = os.pipe()
            ours.append(read_report)
            theirs.append(report)
            read_output, output = os.pipe()
            ours.append(read_output)
            theirs.append(output)
            for fd in (write_control, read_output):
                with contextlib.suppress(PermissionError):  # over the user's pipe memory: 64 KiB do
                    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            for fd in ours:
                os.set_blocking(fd, False)
            if os.write(write_control, command) != len(command):
                raise EngineConfigError(f"a command of {len(command)} bytes does not fit the pipe")
            environment = {
                launcher.LAUNCH_ID: self.launch_id,
                launcher.LAUNCHER_MARK: "1",
                "PATH": os.environ.get("PATH", os.defpath),
            }
            argv = [self._python, "-I", "-S", launcher.__file__]
            argv += [str(os.getpid()), str(control), str(report), str(read_output), self._name]
            first = subprocess.Popen(
                argv,
                pass_fds=(control, report, read_output),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd="/",
            )
            first.wait()
            return write_control, read_report, read_output
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)

    # -- events

    def _adopt(self, running: asyncio.Future[tuple[int, int, int]]) -> None:
        error = running.exception()
        if error is not None:
            if isinstance(error, OSError):
                error = EngineStartError(f"cannot run {self._python}: {error}")
            self._fail(error)
            self._finish()
            return
        self._control, self._report, self._output = running.result()
        self._loop.add_reader(self._report, self._read_report)
        self._loop.add_reader(self._output, self._read_output)
        if self._stopping:
            self._close_control()

    def _abandon(self) -> None:
        self._stopping = True
        self._close_control()

    def _read_report(self) -> None:
        try:
            data = os.read(self._report, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._lose_launcher()
            return
        *lines, self._report_buffer = (self._report_buffer + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "launcher":
            self.launcher_pid = event["pid"]
        elif kind == "started":
            self.pid = event["pid"]
            if not self._answer.done():
                self._answer.set_result(None)
        elif kind == "failed":
            self._fail(EngineStartError(event["error"]))
        elif kind == "exited":
            # What the program wrote was in the pipe before its end was reported.
            self._read_output()
            self._exit(ExitStatus(code=event.get("code"), signal=event.get("signal")))
        elif kind == "stuck":
            self._stuck = tuple(event["pids"])
        elif kind == "gone":
            self._saw_gone = True

    def _read_output(self) -> None:
        for _ in range(64):  # bounded: a program that never stops printing must not hold the loop
            if self._output < 0:
                return
            try:
                data = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._close_output()
                return
            self._on_output(data)

    def _lose_launcher(self) -> None:
        """The launcher has ended: in order, or else whatever it left is ours to end."""
        self._loop.remove_reader(self._report)
        os.close(self._report)
        self._report = -1
        self._close_control()
        self._read_output()
        failed = self._answer.done() and self._answer.exception() is not None
        if not self._stopping:
            self._fail(EngineStartError("the launcher ended before it started the program"))
        if self._saw_gone or failed or self.launcher_pid is None:
            self._finish()
            return
        _log.warning("the launcher of %s was killed; ending what is left of it", self._name)
        self._cleaning = self._loop.create_task(self._clean_up())

    async def _clean_up(self) -> None:
        try:
            await asyncio.to_thread(sweep, self.launch_id, session=self.launcher_pid)
        except EngineError as error:
            self._finish(error)
        else:
            self._finish()

    def _fail(self, error: BaseException) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)

    def _exit(self, status: ExitStatus) -> None:
        if not self._exited.done():
            self._exited.set_result(status)

    def _finish(self, error: EngineError | None = None) -> None:
        self._fail(EngineStopped("stopped before it was started"))
        self._read_output()
        self._close_output()
        self._close_control()
        self._exit(ExitStatus())
        if self._gone.done():
            return
        if error is None:
            self._gone.set_result(None)
        else:
            self._gone.set_exception(error)

    def _close_control(self) -> None:
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def _close_output(self) -> None:
        if self._output >= 0:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = -1


def _retrieve(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
