"""Own one process tree, and leave nothing of it behind.

This file needs only the standard library and runs as a program, by any Python 3.9 or newer, because
an engine usually lives in an environment of its own. It is not an engine launcher in particular:
whatever program is named in the command is started and owned.

How it is placed. The owner starts this file as a child; that child forks once more and leaves, so
that the launcher is nobody's direct child (Ray kills a worker's direct children with SIGKILL, which
would take away the only process that knows how to clean up). The launcher leads a session of its
own and is a *child subreaper*: whatever its tree orphans comes back to it.

    owner --control pipe--> launcher --fork--> program --> its own children
          <-report pipe----
          <-log pipe------- (the program's stdout and stderr)

Control: JSON lines. Its end (the owner closed it, or died) means: stop now.

    {"op": "exec", "argv": [..], "env": {..}, "cwd": "..", "signal": 15, "grace_s": 10.0,
     "leftover_s": 1.0}
    {"op": "stop", "signal": 15, "grace_s": 10.0}       (both keys optional)

Report: JSON lines.

    {"event": "launcher", "pid": 11}                    the launcher is there
    {"event": "started", "pid": 12}                     the program's exec succeeded
    {"event": "failed", "errno": 2, "error": "..."}     it did not; the launcher leaves
    {"event": "exited", "code": 0} or {.., "signal": 9} the program itself ended
    {"event": "stuck", "pids": [..]}                    SIGKILL has not ended these (kept trying)
    {"event": "gone"}                                   no process of the tree is left

Every process carries `FLEXINFER_LAUNCH_ID` in its environment, so that what survives a SIGKILL of
the launcher itself can be found (see `sweep.py`). The program itself does not: it has PDEATHSIG.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import sys
import time

LAUNCH_ID = "FLEXINFER_LAUNCH_ID"
LAUNCHER_MARK = "FLEXINFER_LAUNCHER"  # only in a launcher's own environment

DEFAULT_GRACE_S = 10.0
DEFAULT_LEFTOVER_S = 1.0
STUCK_AFTER_S = 5.0

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# What a program may expect to find at its default after an exec; Python ignores the first two.
_RESET_SIGNALS = ("SIGPIPE", "SIGXFSZ", "SIGTERM", "SIGINT", "SIGHUP", "SIGCHLD")


# --- reading /proc -----------------------------------------------------------------------------


def process_table() -> dict[int, tuple[int, int]]:
    """Return `{pid: (parent pid, session id)}` of all processes that are not zombies."""
    table: dict[int, tuple[int, int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                text = file.read()
        except OSError:
            continue  # ended since the listing
        # The name in parentheses may itself hold spaces and parentheses: cut after the last one.
        fields = text[text.rindex(b")") + 2 :].split()
        if fields[0] not in (b"Z", b"X"):
            table[int(entry)] = (int(fields[1]), int(fields[3]))
    return table


def descendants(table: dict[int, tuple[int, int]], root: int) -> list[int]:
    """Return the pids below `root` in `table`, without `root`."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that `pid` was started with; empty if it ended or may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            items = file.read().split(b"\0")
    except OSError:
        return {}
    pairs = (item.decode("utf-8", "surrogateescape").partition("=") for item in items if item)
    return {name: value for name, _, value in pairs}


# --- the launcher ------------------------------------------------------------------------------


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


class Launcher:
    """The program's owner: one command, one tree, one end."""

    def __init__(
        self, *, control: int, report: int, log: int, owner: int | None, launch_id: str
    ) -> None:
        self._control = control
        self._report_fd = report
        self._log = log  # our copy of the reading end, see _drain_log
        self._owner = owner
        self._launch_id = launch_id
        self._buffer = b""
        self._commands: list[dict[str, object]] = []
        self._owner_gone = False
        self._terminated = False  # SIGTERM or SIGINT to the launcher itself
        self._program: int | None = None
        self._status: int | None = None
        self._wake_read, wake_write = os.pipe()
        for fd in (self._wake_read, wake_write, control, log):
            os.set_blocking(fd, False)
        for name in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: None)  # the wake-up pipe is what counts
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._poll = select.poll()
        for readable in (self._wake_read, control):
            self._poll.register(readable, select.POLLIN)
        if owner is not None:
            self._poll.register(owner, select.POLLIN)

    def run(self) -> int:
        self._report(event="launcher", pid=os.getpid())
        command = self._wait_for_command()
        if command is None:
            return 0
        pid = self._spawn(command)
        if pid is None:
            return 1
        self._program = pid
        self._report(event="started", pid=pid)
        patient = self._wait_for_end(command)
        leftover_s = _seconds(command.get("leftover_s"), DEFAULT_LEFTOVER_S)
        self._clear(leftover_s if patient else 0.0)
        self._report(event="gone")
        return 0

    # -- events

    def _report(self, **event: object) -> None:
        line = json.dumps(event).encode() + b"\n"
        # Nobody reads any more once the owner is gone; the work is the same without a reader.
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._report_fd, line)

    def _turn(self, timeout_s: float | None) -> None:
        """Wait for anything to happen, at most `timeout_s`, and take it in."""
        wait = None if timeout_s is None else max(0, int(timeout_s * 1000) + 1)
        for fd, _ in self._poll.poll(wait):
            if fd == self._wake_read:
                names = os.read(fd, 4096)
                if signal.SIGTERM in names or signal.SIGINT in names:
                    self._terminated = True
            elif fd == self._control:
                self._read_control()
            elif fd == self._owner:
                self._lose_owner()
            elif fd == self._log:
                self._drain_log()
        self._reap()

    def _read_control(self) -> None:
        try:
            data = os.read(self._control, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self._lose_owner()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._commands += [json.loads(line) for line in lines if line.strip()]

    def _lose_owner(self) -> None:
        if self._owner_gone:
            return
        self._owner_gone = True
        self._poll.unregister(self._control)
        if self._owner is not None:
            self._poll.unregister(self._owner)
        # While the owner lives it reads the log. From now on somebody else has to, or the program
        # would block on a full pipe (or die of SIGPIPE) in the middle of its orderly end.
        self._poll.register(self._log, select.POLLIN)

    def _drain_log(self) -> None:
        try:
            if not os.read(self._log, 1 << 16):
                self._poll.unregister(self._log)
        except BlockingIOError:
            pass  # the owner's last reader was faster

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._program and self._status is None:
                self._status = status
                if os.WIFSIGNALED(status):
                    self._report(event="exited", signal=os.WTERMSIG(status))
                else:
                    self._report(event="exited", code=os.WEXITSTATUS(status))

    @property
    def _ended_by_owner(self) -> bool:
        return self._owner_gone or self._terminated

    # -- phases

    def _wait_for_command(self) -> dict[str, object] | None:
        while not self._ended_by_owner:
            for command in self._commands:
                if command.get("op") == "exec":
                    self._commands.clear()
                    self._turn(0)  # the owner may have left right behind its command
                    return None if self._commands or self._ended_by_owner else command
            if self._commands:  # stopped before anything was started
                return None
            self._turn(None)
        return None

    def _spawn(self, command: dict[str, object]) -> int | None:
        argv, env, cwd = command["argv"], command["env"], command.get("cwd") or "/"
        assert isinstance(argv, list) and isinstance(env, dict) and isinstance(cwd, str)
        env = {**env, LAUNCH_ID: self._launch_id}
        env.pop(LAUNCHER_MARK, None)  # with it, what is left of the program would seem to be owned
        told_read, told_write = os.pipe()  # close-on-exec: its end says that exec succeeded
        launcher = os.getpid()
        pid = os.fork()
        if pid == 0:
            step = f"change to the directory {cwd}"
            try:
                os.close(told_read)
                os.setpgid(0, 0)  # a program that signals its own group must not hit the launcher
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != launcher:
                    os._exit(1)  # the launcher ended before the line above took effect
                signal.set_wakeup_fd(-1)
                for name in _RESET_SIGNALS:
                    signal.signal(getattr(signal, name), signal.SIG_DFL)
                os.chdir(cwd)
                step = f"run {argv[0]}"
                os.execve(argv[0], argv, env)
            except BaseException as error:
                number = getattr(error, "errno", None) or 0
                text = f"cannot {step}: {os.strerror(number) if number else error}"
                os.write(told_write, json.dumps([number, text]).encode())
            finally:
                os._exit(127)
        os.close(told_write)
        with os.fdopen(told_read, "rb") as told:
            answer = told.read()
        if not answer:
            return pid
        os.waitpid(pid, 0)
        number, text = json.loads(answer)
        self._report(event="failed", errno=number, error=text)
        return None

    def _wait_for_end(self, command: dict[str, object]) -> bool:
        """Return when the program itself has ended; True if it did so without being killed."""
        assert self._program is not None
        deadline: float | None = None
        kills = 0
        while self._status is None:
            order: dict[str, object] | None = None
            if self._commands:
                order = {**command, **self._commands.pop(0)}
            elif deadline is None and self._ended_by_owner:
                order = command
            if order is not None:
                number = order.get("signal")
                self._signal(self._program, number if isinstance(number, int) else signal.SIGTERM)
                until = time.monotonic() + _seconds(order.get("grace_s"), DEFAULT_GRACE_S)
                deadline = until if deadline is None else min(deadline, until)
            elif deadline is not None and time.monotonic() >= deadline:
                if kills == 1:
                    self._report(event="stuck", pids=[self._program])
                kills += 1
                self._signal(self._program, signal.SIGKILL)
                deadline = time.monotonic() + STUCK_AFTER_S
            else:
                self._turn(None if deadline is None else deadline - time.monotonic())
        return kills == 0

    def _clear(self, leftover_s: float) -> None:
        """Ask what the program left behind to end, then kill it, until nothing is left."""
        left = self._left()
        for pid in left:
            self._signal(pid, signal.SIGTERM)
        pause = 0.002
        start = time.monotonic()
        told = False
        while left:
            waited = time.monotonic() - start
            if waited >= leftover_s:
                for pid in left:
                    self._signal(pid, signal.SIGKILL)
                if not told and waited >= leftover_s + STUCK_AFTER_S:
                    told = True
                    self._report(event="stuck", pids=left)
            self._turn(pause)
            pause = min(0.05, pause * 2)
            left = self._left()

    def _left(self) -> list[int]:
        self._reap()
        me = os.getpid()
        table = process_table()
        found = descendants(table, me)
        if found:
            return found
        # A subreaper gets every orphan of its tree back, so this finds nothing in ordinary life.
        return [
            pid
            for pid in table
            if pid != me and environment_of(pid).get(LAUNCH_ID) == self._launch_id
        ]

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        # PermissionError: it changed its user; the next turn reports it as stuck.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _seconds(value: object, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) else default


def _watch(pid: int) -> int | None:
    """Return a descriptor that becomes readable when `pid` ends; None where that cannot be had."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) == errno.ESRCH:
            raise
        return None  # an old kernel or a strict seccomp filter: the control pipe alone tells


def main(argv: list[str]) -> int:
    """Run as `launcher.py OWNER_PID CONTROL_FD REPORT_FD LOG_FD NAME`, fds inherited."""
    owner, control, report, log = (int(value) for value in argv[:4])
    for fd in (control, report, log):
        os.set_inheritable(fd, False)
    if os.getppid() != owner:
        return 1
    # Closed descriptors say that the owner is gone, unless a fork of the owner still holds them.
    # The process itself is the second witness.
    try:
        watch = _watch(owner)
    except ProcessLookupError:
        return 1
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    launch_id = os.environ[LAUNCH_ID]
    return Launcher(control=control, report=report, log=log, owner=watch, launch_id=launch_id).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
