"""One program under a launcher: it starts, it is followed, and nothing of it ever stays."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import alive, eventually, wait_until

from flexinfer.engines.errors import (
    EngineConfigError,
    EngineStartError,
    EngineStopped,
    ExitStatus,
)
from flexinfer.engines.launch import Launch, StopPolicy, new_launch_id
from flexinfer.engines.launcher import LAUNCH_ID, LAUNCHER_MARK, environment_of, process_table
from flexinfer.engines.sweep import find, orphans, sweep, sweep_orphans

ENV = {"PATH": os.environ["PATH"]}
SLEEP = ["/bin/sleep", "600"]

# Ignores SIGTERM and starts two more of its kind: a child, and a daemon in a session of its own.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pids = [os.getpid()]
child = os.fork()
if child == 0:
    while True:
        time.sleep(60)
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    daemon = os.fork()
    if daemon == 0:
        while True:
            time.sleep(60)
    os.write(write, str(daemon).encode())
    os._exit(0)
print(os.getpid(), child, int(os.read(read, 20)), flush=True)
while True:
    time.sleep(60)
"""


class Output:
    """Collects what a program writes."""

    def __init__(self) -> None:
        self.data = b""

    def __call__(self, data: bytes) -> None:
        self.data += data

    def numbers(self) -> list[int]:
        """The numbers of its first line, once that is complete."""
        line, end, _ = self.data.partition(b"\n")
        return [int(word) for word in line.split()] if end else []


def ignored_signals(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(
        int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn")
    )


def launch(output: Output | None = None, **policy: Any) -> Launch:
    return Launch(new_launch_id(), output or Output(), stop=StopPolicy(**policy))


async def test_reports_the_exit_code_and_all_output() -> None:
    output = Output()
    started = launch(output)
    await started.spawn(["/bin/sh", "-c", "echo one; echo two >&2; exit 7"], ENV, Path("/"))
    assert await started.exited == ExitStatus(code=7)
    assert output.data == b"one\ntwo\n"
    await started.wait_gone()
    assert find(started.launch_id) == []


async def test_reports_the_signal_that_ended_it() -> None:
    started = launch()
    await started.spawn(["/bin/sh", "-c", "kill -SEGV $$"], ENV, Path("/"))
    status = await started.exited
    assert status == ExitStatus(signal=signal.SIGSEGV)
    assert str(status) == "killed by SIGSEGV"


async def test_stands_apart_from_its_owner() -> None:
    started = launch()
    pid = await started.spawn(SLEEP, {**ENV, "GIVEN": "yes", LAUNCHER_MARK: "1"}, Path("/tmp"))
    launcher = started.launcher_pid
    assert launcher is not None
    assert launcher != os.getpid()
    parent, _ = process_table()[launcher]
    assert parent != os.getpid(), "the launcher must not be a child of its owner"
    assert os.getsid(launcher) == launcher != os.getsid(0)
    assert os.getsid(pid) == launcher
    assert os.getpgid(pid) == pid
    assert environment_of(pid) == {**ENV, "GIVEN": "yes", LAUNCH_ID: started.launch_id}
    assert os.readlink(f"/proc/{pid}/cwd") == "/tmp"
    assert sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"]
    assert ignored_signals(pid) == 0
    await started.stop()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("/nowhere/engine", "cannot run /nowhere/engine: No such file or directory"),
        ("{plain}", "Permission denied"),
        ("{text}", "Exec format error"),
    ],
)
async def test_says_why_a_program_cannot_be_run(tmp_path: Path, program: str, words: str) -> None:
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "text").chmod(0o755)
    program = program.format(plain=tmp_path / "plain", text=tmp_path / "text")
    started = launch()
    with pytest.raises(EngineStartError, match=words):
        await started.spawn([program], ENV, Path("/"))
    await started.stop()
    assert find(started.launch_id) == []


async def test_says_that_a_command_is_too_long() -> None:
    started = launch()
    with pytest.raises(EngineConfigError, match="at most 1048576"):
        await started.spawn(["/bin/true", "x" * (1 << 20)], ENV, Path("/"))
    await started.stop()


async def test_says_that_the_directory_is_missing() -> None:
    started = launch()
    with pytest.raises(EngineStartError, match="cannot change to the directory /nowhere"):
        await started.spawn(SLEEP, ENV, Path("/nowhere"))
    await started.stop()


async def test_says_that_the_interpreter_is_missing() -> None:
    started = Launch(new_launch_id(), Output(), python=Path("/nowhere/python"))
    with pytest.raises(EngineStartError, match="cannot run /nowhere/python"):
        await started.spawn(SLEEP, ENV, Path("/"))
    await started.stop()


async def test_stop_asks_before_it_kills() -> None:
    output = Output()
    started = launch(output)
    script = "trap 'echo asked; exit 3' TERM; echo ready; while :; do sleep 0.02; done"
    await started.spawn(["/bin/sh", "-c", script], ENV, Path("/"))
    await eventually(lambda: b"ready" in output.data)
    await started.stop()
    assert output.data == b"ready\nasked\n"
    assert started.exited.result() == ExitStatus(code=3)
    assert find(started.launch_id) == []


async def test_stop_kills_what_does_not_listen_and_all_below_it() -> None:
    output = Output()
    started = launch(output, grace_s=0.1, leftover_s=0.1)
    await started.spawn([sys.executable, "-c", STUBBORN], ENV, Path("/"))
    pids = await eventually(output.numbers)
    assert len(pids) == 3
    assert all(map(alive, pids))
    await started.stop()
    assert not any(map(alive, pids))
    assert started.exited.result() == ExitStatus(signal=signal.SIGKILL)


async def test_a_later_stop_may_be_less_patient() -> None:
    output = Output()
    started = launch(output, grace_s=600)
    await started.spawn([sys.executable, "-c", STUBBORN], ENV, Path("/"))
    pids = await eventually(output.numbers)
    patient = asyncio.create_task(started.stop())
    await asyncio.sleep(0.05)
    assert not patient.done()
    await started.stop(grace_s=0)
    await patient
    assert not any(map(alive, pids))


async def test_what_a_program_leaves_behind_ends_with_it() -> None:
    output = Output()
    started = launch(output, leftover_s=0.1)
    script = STUBBORN.replace("while True:\n    time.sleep(60)\n", "os._exit(5)\n")
    assert script != STUBBORN
    await started.spawn([sys.executable, "-c", script], ENV, Path("/"))
    assert await started.exited == ExitStatus(code=5)
    await started.wait_gone()
    pids = output.numbers()
    assert len(pids) == 3
    assert not any(map(alive, pids))


async def test_stop_before_the_spawn_and_again_after() -> None:
    started = launch()
    await started.stop()
    with pytest.raises(EngineStopped):
        await started.spawn(SLEEP, ENV, Path("/"))
    await started.stop()


async def test_stop_while_it_spawns() -> None:
    for pause in (0.0, 0.005, 0.02, 0.04):
        started = launch()
        spawn = asyncio.create_task(started.spawn(SLEEP, ENV, Path("/")))
        await asyncio.sleep(pause)
        await started.stop()
        await asyncio.gather(spawn, return_exceptions=True)
        assert spawn.exception() is None or isinstance(spawn.exception(), EngineStopped)
        assert find(started.launch_id) == []


async def test_a_cancelled_spawn_leaves_nothing() -> None:
    for pause in (0.0, 0.005, 0.02, 0.04):
        started = launch()
        spawn = asyncio.create_task(started.spawn(SLEEP, ENV, Path("/")))
        await asyncio.sleep(pause)
        spawn.cancel()
        await asyncio.gather(spawn, return_exceptions=True)
        await started.wait_gone()
        assert find(started.launch_id) == []


async def test_a_killed_launcher_takes_the_program_along() -> None:
    output = Output()
    started = launch(output)
    await started.spawn([sys.executable, "-c", STUBBORN], ENV, Path("/"))
    pids = await eventually(output.numbers)
    assert started.launcher_pid is not None
    os.kill(started.launcher_pid, signal.SIGKILL)
    await started.wait_gone()
    assert not any(map(alive, pids))
    assert started.exited.done()
    await started.stop()


def test_a_killed_owner_takes_everything_along(start_owner: Callable[..., Any]) -> None:
    owner = start_owner([sys.executable, "-c", STUBBORN], grace_s=0.1)
    wait_until(lambda: len(find(owner.launch_id)) == 4)
    owner.kill()
    wait_until(lambda: not find(owner.launch_id) and not alive(owner.launcher_pid))


def test_a_fork_of_the_owner_does_not_keep_it_alive(start_owner: Callable[..., Any]) -> None:
    owner = start_owner(SLEEP, fork=True)
    assert alive(owner.pid)
    owner.kill()
    assert alive(owner.fork)
    wait_until(lambda: not find(owner.launch_id))


def test_a_program_can_end_in_order_when_its_owner_is_gone(
    start_owner: Callable[..., Any], tmp_path: Path
) -> None:
    # More last words than a pipe holds, and nobody there who reads them.
    done = tmp_path / "done"
    script = f"""
import signal, sys, time
def end(*_):
    for _ in range(3000):
        sys.stdout.write("x" * 1000 + "\\n")
    sys.stdout.flush()
    open({str(done)!r}, "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open({str(tmp_path / "up")!r}, "w").close()
while True:
    time.sleep(60)
"""
    owner = start_owner([sys.executable, "-c", script], grace_s=60)
    wait_until((tmp_path / "up").exists)
    owner.kill()
    wait_until(lambda: not find(owner.launch_id))
    assert done.exists()


def test_sweep_finds_by_session_what_hides_its_environment(
    start_owner: Callable[..., Any],
) -> None:
    # Without the launch id in its environment; the same session, so it is found by that.
    hidden = "import os, time; os.execve('/bin/sleep', ['sleep', '600'], {})"
    script = f"import os, sys, time\nif os.fork() == 0:\n    {hidden}\nwhile True: time.sleep(60)"
    owner = start_owner([sys.executable, "-c", script])
    members = wait_until(lambda: len(pids := find(owner.launch_id)) == 3 and pids)
    (hiding,) = wait_until(lambda: [pid for pid in members if not environment_of(pid)])
    owner.process.send_signal(signal.SIGSTOP)
    os.kill(owner.launcher_pid, signal.SIGKILL)
    wait_until(lambda: not alive(owner.pid))
    assert hiding in find(owner.launch_id, session=owner.launcher_pid)
    assert hiding in sweep(owner.launch_id, session=owner.launcher_pid)
    assert not alive(hiding)


def test_orphans_are_the_starts_without_a_launcher(start_owner: Callable[..., Any]) -> None:
    healthy = start_owner(SLEEP)
    owner = start_owner([sys.executable, "-c", STUBBORN])
    wait_until(lambda: len(find(owner.launch_id)) == 4)
    assert owner.launch_id not in orphans()
    owner.process.send_signal(signal.SIGSTOP)  # it would clean up by itself
    os.kill(owner.launcher_pid, signal.SIGKILL)
    wait_until(lambda: not alive(owner.pid))
    left = find(owner.launch_id)
    assert len(left) == 2
    assert sorted(orphans()[owner.launch_id]) == left
    assert sorted(sweep_orphans()) == left
    assert not any(map(alive, left))
    assert alive(healthy.pid)
