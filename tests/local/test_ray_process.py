from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_fakes import FakeServe

from flexinfer.engines.launcher import process_table
from flexinfer.local import ray_process
from flexinfer.local.dashboard import Dashboard
from flexinfer.local.errors import RayExited, StartTimeout
from flexinfer.local.events import Event, Phase
from flexinfer.local.logfiles import follow
from flexinfer.local.ports import PortPlan
from flexinfer.local.ray_process import RayProcess, write_token
from flexinfer.local.ray_settings import RaySettings

Program = Callable[[str], None]

# Starts a process that leaves its session, as Ray's do, and tells the pids.
TREE = """\
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    json.dump([os.getpid(), child.pid], file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Writes the program that runs in Ray's place; its argument is the path `pids`."""
    path = tmp_path / "program.py"
    command = [sys.executable, str(path), str(tmp_path / "pids")]
    monkeypatch.setattr(ray_process, "ray_command", lambda _: command)

    def write(text: str) -> None:
        path.write_text(text)

    return write


async def pids_in(path: Path) -> list[int]:
    """What the program writes to `path`, as soon as it has."""
    end = time.monotonic() + 20

    def wait() -> None:
        assert time.monotonic() < end, "the program writes nothing"
        time.sleep(0.01)

    found: list[int] = json.loads(await asyncio.to_thread(next, follow(path, wait)))
    return found


def settings(tmp_path: Path) -> RaySettings:
    return RaySettings(
        work_dir=tmp_path,
        ports=PortPlan(12_000),
        gpus=0,
        token_file=tmp_path / "token",
        log_dir=tmp_path / "logs",
    )


async def test_ready_when_the_dashboard_answers_and_gone_after_the_stop(
    program: Program, tmp_path: Path, serve: FakeServe
) -> None:
    program(TREE)
    ray = RayProcess(settings(tmp_path))
    told: list[Event] = []
    try:
        async with Dashboard(serve.url) as dashboard:
            await ray.start(dashboard, told.append)
        assert told == [Phase("starting Ray")]
        pids = await pids_in(tmp_path / "pids")
        assert pids[0] == ray.pid
    finally:
        await ray.stop()
    assert process_table().keys().isdisjoint(pids)
    await ray.stop()


async def test_an_end_during_the_start_is_told_at_once_with_its_last_words(
    program: Program, tmp_path: Path
) -> None:
    program("import sys; print('bad flag'); sys.exit(3)")
    ray = RayProcess(settings(tmp_path))
    # Nobody listens there.
    async with Dashboard("http://127.0.0.1:9") as dashboard:
        with pytest.raises(RayExited, match=r"exit code 3\n    bad flag"):
            await ray.start(dashboard, lambda _: None)
    await ray.stop()


async def test_a_start_that_takes_for_ever_has_an_end(program: Program, tmp_path: Path) -> None:
    program(TREE)
    ray = RayProcess(settings(tmp_path))
    try:
        async with Dashboard("http://127.0.0.1:9") as dashboard:
            with pytest.raises(StartTimeout, match="session_latest/logs"):
                await ray.start(dashboard, lambda _: None, timeout_s=0.2)
    finally:
        await ray.stop(force=True)


async def test_a_stop_during_the_start(program: Program, tmp_path: Path) -> None:
    program(TREE)
    ray = RayProcess(settings(tmp_path))
    async with Dashboard("http://127.0.0.1:9") as dashboard:
        start = asyncio.create_task(ray.start(dashboard, lambda _: None))
        pids = await pids_in(tmp_path / "pids")
        start.cancel()
        await asyncio.wait([start])
        await ray.stop(force=True)
    assert process_table().keys().isdisjoint(pids)


async def test_a_stop_before_the_start(tmp_path: Path) -> None:
    await RayProcess(settings(tmp_path)).stop()


def test_the_token_is_for_this_user_only(tmp_path: Path) -> None:
    token = write_token(tmp_path / "token")
    assert len(token) > 30
    assert (tmp_path / "token").read_text() == token
    assert os.stat(tmp_path / "token").st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_token(tmp_path / "token")
