"""One engine: it becomes ready, or says at once why not; it is watched; it ends without a rest."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from engine_helpers import FAKE, Workshop, alive, eventually, wait_until

from flexinfer.engines import process
from flexinfer.engines.errors import (
    EngineExited,
    EnginePortTaken,
    EngineStartError,
    EngineStartTimeout,
    EngineStopped,
    EngineUnresponsive,
    ExitStatus,
)
from flexinfer.engines.launch import StopPolicy
from flexinfer.engines.launcher import environment_of
from flexinfer.engines.llamacpp import LlamaCpp
from flexinfer.engines.process import Engine
from flexinfer.engines.sweep import find


async def ask(engine: Engine, path: str, **body: Any) -> Any:
    async with aiohttp.ClientSession() as client:
        method = "POST" if body or path.startswith("/fake/h") else "GET"
        async with client.request(method, engine.url + path, json=body or None) as response:
            return await response.json()


async def test_starts_answers_and_stops(workshop: Workshop) -> None:
    engine = workshop.engine()
    await engine.start(timeout_s=20)
    assert engine.started_in_s is not None
    assert alive(engine.pid)
    await engine.check()
    answer = await ask(engine, "/v1/chat/completions", max_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2
    await engine.stop()
    assert engine.exited.result() == ExitStatus(signal=signal.SIGTERM)
    assert find(engine.launch_id) == []
    await engine.stop()


async def test_waits_for_a_model_that_loads(workshop: Workshop) -> None:
    engine = workshop.engine(FAKE_LOAD_S=0.3)
    await engine.start(timeout_s=20)
    assert engine.started_in_s is not None
    assert engine.started_in_s >= 0.3


async def test_an_exit_while_loading_ends_the_start(workshop: Workshop) -> None:
    engine = workshop.engine(FAKE_EXIT_LOADING=9)
    with pytest.raises(EngineStartError) as failed:
        await engine.start(timeout_s=600)
    assert failed.value.reason == "llama-server ended: exit code 9"
    assert failed.value.exit == ExitStatus(code=9)
    assert failed.value.log_tail[-1] == "giving up while loading"
    assert "giving up while loading" in failed.value.report()
    assert find(engine.launch_id) == []


async def test_a_fatal_line_ends_the_start_though_the_engine_hangs(workshop: Workshop) -> None:
    line = "allocating 100.00 MiB on device 0: cudaMalloc failed: out of memory"
    engine = workshop.engine(FAKE_FATAL_LINE=line, FAKE_HANG_LOADING="503")
    with pytest.raises(EngineStartError) as failed:
        await engine.start(timeout_s=600)
    assert failed.value.reason == f"not enough GPU memory: {line}"
    assert failed.value.exit is None
    assert find(engine.launch_id) == []


@pytest.mark.parametrize("kind", ["deaf", "503"])
async def test_an_engine_that_hangs_while_loading_has_a_deadline(
    workshop: Workshop, kind: str
) -> None:
    engine = workshop.engine(FAKE_HANG_LOADING=kind, FAKE_SPAWN_STUBBORN=1)
    with pytest.raises(EngineStartTimeout, match=r"not ready within 0\.5 s"):
        await engine.start(timeout_s=0.5)
    assert find(engine.launch_id) == []


async def test_a_cancelled_start_leaves_nothing(workshop: Workshop) -> None:
    engine = workshop.engine(FAKE_HANG_LOADING="503", FAKE_SPAWN_STUBBORN=1)
    start = asyncio.create_task(engine.start(timeout_s=600))
    await eventually(lambda: len(find(engine.launch_id)) == 3)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert find(engine.launch_id) == []


async def test_a_stop_ends_the_start_that_runs(workshop: Workshop) -> None:
    for pause in (0.0, 0.02, 0.2):
        engine = workshop.engine(FAKE_HANG_LOADING="deaf")
        start = asyncio.create_task(engine.start(timeout_s=600))
        await asyncio.sleep(pause)
        await engine.stop()
        with pytest.raises(EngineStopped):
            await start
        assert find(engine.launch_id) == []


async def test_stop_before_the_start(workshop: Workshop) -> None:
    engine = workshop.engine()
    await engine.stop()
    with pytest.raises(EngineStopped):
        await engine.start(timeout_s=20)


async def test_stop_ends_grandchildren_that_ignore_it(workshop: Workshop) -> None:
    engine = workshop.engine(FAKE_SPAWN_STUBBORN=1, FAKE_IGNORE_SIGTERM=1)
    await engine.start(timeout_s=20)
    assert len(find(engine.launch_id)) == 3
    await engine.stop(grace_s=0.1)
    assert find(engine.launch_id) == []
    assert engine.exited.result() == ExitStatus(signal=signal.SIGKILL)


async def test_a_start_has_a_grace_of_its_own(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaCpp, "stop", StopPolicy(grace_s=3600, start_grace_s=0.1))
    engine = workshop.engine(FAKE_IGNORE_SIGTERM=1, FAKE_HANG_LOADING="503")
    start = asyncio.create_task(engine.start(timeout_s=20))

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", engine.plan.port)) == 0

    await eventually(listens)  # it ignores the signal from before that on
    async with asyncio.timeout(60):
        await engine.stop()
    with pytest.raises(EngineStopped):
        await start
    assert engine.exited.result() == ExitStatus(signal=signal.SIGKILL)
    assert find(engine.launch_id) == []


async def test_a_second_stop_may_be_less_patient(workshop: Workshop) -> None:
    engine = workshop.engine(FAKE_IGNORE_SIGTERM=1)
    await engine.start(timeout_s=20)
    patient = asyncio.create_task(engine.stop(grace_s=600))
    await asyncio.sleep(0)
    await engine.stop(grace_s=0)
    await patient
    assert find(engine.launch_id) == []


async def test_says_that_its_port_is_taken(workshop: Workshop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = workshop.engine(port=port)
        with pytest.raises(EnginePortTaken, match=f"port {port} of 127.0.0.1 is taken"):
            await engine.start(timeout_s=20)


async def test_check_sees_an_engine_that_was_killed(workshop: Workshop) -> None:
    engine = workshop.engine()
    await engine.start(timeout_s=20)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineExited, match="killed by SIGKILL"):
        await engine.check()
    assert (await engine.exited).signal == signal.SIGKILL


async def test_check_sees_a_dead_engine_behind_a_live_port(workshop: Workshop) -> None:
    engine = workshop.engine()
    await engine.start(timeout_s=20)
    await ask(engine, "/fake/hang")
    assert (await ask(engine, "/health"))["status"] == "ok"
    with pytest.raises(EngineUnresponsive, match=r"no answer within 0\.2 s"):
        await engine.check(timeout_s=0.2)


async def test_check_takes_a_busy_engine_for_alive(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = workshop.engine()
    await engine.start(timeout_s=20)
    await ask(engine, "/fake/hang")
    used = iter(range(0, 1000, 10))
    monkeypatch.setattr(process, "_cpu_seconds", lambda pid: float(next(used)))
    await engine.check(timeout_s=0.1)
    monkeypatch.setattr(engine, "_answered_at", engine._answered_at - engine.plan.busy_limit_s)
    with pytest.raises(EngineUnresponsive):
        await engine.check(timeout_s=0.1)


async def test_a_crash_is_told_with_the_last_lines(workshop: Workshop) -> None:
    engine = workshop.engine(FAKE_CRASH_AFTER=3, FAKE_TOKENS_PER_S=0)
    await engine.start(timeout_s=20)
    with pytest.raises(aiohttp.ClientError):
        await ask(engine, "/v1/completions", max_tokens=10)
    assert await engine.exited == ExitStatus(signal=signal.SIGSEGV)
    with pytest.raises(EngineExited) as ended:
        await engine.check()
    assert "model loaded" in ended.value.log_tail


async def test_the_output_is_in_the_log_file(workshop: Workshop) -> None:
    engine = workshop.engine()
    await engine.start(timeout_s=20)
    await engine.stop()
    lines = (workshop.logs / "smol.log").read_text().splitlines()
    assert lines[0].startswith("flexinfer: starting fixed_rate_engine.py on http://127.0.0.1:")
    assert "model loaded" in lines
    assert lines[-1] == "flexinfer: stopped: killed by SIGTERM"


async def test_no_secret_reaches_the_engine(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ("FLEXINFER_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY")
    for name in secrets:
        monkeypatch.setenv(name, "hush")
    engine = workshop.engine(env={"MINE": "yes"})
    await engine.start(timeout_s=20)
    for pid in find(engine.launch_id):
        assert "hush" not in environment_of(pid).values()
    assert engine.pid is not None
    seen = environment_of(engine.pid)
    assert seen["MINE"] == "yes"
    assert seen["DO_NOT_TRACK"] == "1"


async def test_a_start_ends_what_an_earlier_one_left(
    workshop: Workshop, start_owner: Callable[..., Any]
) -> None:
    env = {"FAKE_SPAWN_STUBBORN": "1", "FAKE_HANG_LOADING": "deaf"}
    owner = start_owner([sys.executable, str(FAKE)], env)
    await eventually(lambda: len(find(owner.launch_id)) == 3)
    owner.process.send_signal(signal.SIGSTOP)
    os.kill(owner.launcher_pid, signal.SIGKILL)
    await eventually(lambda: not alive(owner.pid))
    assert len(find(owner.launch_id)) == 1
    engine = workshop.engine()
    await engine.start(timeout_s=20)
    assert find(owner.launch_id) == []


def test_engines_of_a_killed_owner_end(start_owner: Callable[..., Any]) -> None:
    env = {"FAKE_SPAWN_STUBBORN": "1", "FAKE_IGNORE_SIGTERM": "1"}
    owner = start_owner([sys.executable, str(FAKE)], env, grace_s=0.2)
    wait_until(lambda: len(find(owner.launch_id)) == 3)
    owner.kill()
    wait_until(lambda: not find(owner.launch_id))


def test_the_work_of_an_engines_child_is_the_engines() -> None:
    busy = "while True: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as parent:
        try:
            wait_until(lambda: process._cpu_seconds(parent.pid) > 1.0, 60)
            assert process._own_cpu_seconds(parent.pid) < 1.0
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    assert process._cpu_seconds(None) == 0
