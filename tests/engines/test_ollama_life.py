"""A server of Ollama's from start to end, with the fake and with the real one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from engine_helpers import alive, eventually, wait_until
from ollama_helpers import Bench, ollama_spec

from flexinfer.engines.errors import (
    EngineExited,
    EnginePortTaken,
    EngineStartError,
    EngineStopped,
    EngineUnresponsive,
    ExitStatus,
)
from flexinfer.engines.process import Engine
from flexinfer.engines.sweep import find

# One thread: two that wait for each other on a busy machine take minutes for a word.
SMALL: dict[str, Any] = {"contextLength": 512, "parameters": {"num_thread": "1"}}


async def started(ollama: Bench, **options: Any) -> Engine:
    options["parameters"] = {**SMALL["parameters"], **options.get("parameters", {})}
    spec = ollama_spec(**{**SMALL, **options})
    engine = ollama.engine(await ollama.prepare(spec=spec), spec=spec)
    await engine.start(timeout_s=60)
    return engine


async def ask(engine: Engine, path: str, **body: Any) -> tuple[int, Any]:
    """Return status and content of an answer, its text if it is not JSON."""
    name = engine._backend.request_model(engine.spec, engine.plan.model)
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{engine.url}{path}", json={"model": name, **body}) as response,
    ):
        if response.content_type == "application/json":
            return response.status, await response.json()
        return response.status, await response.text()


async def until_ready(ollama: Bench, client: aiohttp.ClientSession, url: str) -> None:
    """Return when a server that was started by other means answers; fail after half a minute."""
    for _ in range(600):
        if await ollama.backend.is_ready(client, url):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it does not answer")


CHAT = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4}


async def test_starts_answers_and_leaves_nothing(ollama: Bench) -> None:
    engine = await started(ollama)
    assert len(ollama.runners()) == 1  # the model is loaded before anybody asks
    status, answer = await ask(engine, "/v1/chat/completions", **CHAT)
    assert status == 200
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] >= 1
    status, text = await ask(engine, "/v1/chat/completions", **CHAT, stream=True)
    assert status == 200
    assert text.rstrip().endswith("data: [DONE]")
    status, answer = await ask(engine, "/v1/completions", prompt="One, two,", max_tokens=4)
    assert status == 200 and answer["choices"][0]["text"]
    status, answer = await ask(engine, "/v1/embeddings", input="hello")
    assert status == 200 and answer["data"][0]["embedding"]
    await engine.check()
    await engine.stop()
    assert engine.exited.result() == ExitStatus(code=0)
    assert find(engine.launch_id) == []
    assert ollama.processes() == []


async def test_a_start_again_needs_no_preparation(ollama: Bench) -> None:
    first = await started(ollama)
    await first.stop()
    second = await started(ollama)
    assert ollama.said == []
    assert (await ask(second, "/v1/chat/completions", **CHAT))[0] == 200


async def test_two_replicas_share_a_store(ollama: Bench) -> None:
    engines = [await started(ollama), await started(ollama)]
    for engine in engines:
        assert (await ask(engine, "/v1/chat/completions", **CHAT))[0] == 200
    await engines[0].stop()
    await engines[1].check()
    assert (await ask(engines[1], "/v1/chat/completions", **CHAT))[0] == 200


async def test_a_killed_server_takes_its_runner_along(ollama: Bench) -> None:
    engine = await started(ollama)
    (runner,) = ollama.runners()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    assert (await engine.exited).signal == signal.SIGKILL
    await eventually(lambda: not alive(runner))
    with pytest.raises(EngineExited):
        await engine.check()


async def test_a_killed_launcher_takes_both_along(ollama: Bench) -> None:
    engine = await started(ollama)
    (runner,) = ollama.runners()
    assert engine.launcher_pid is not None
    os.kill(engine.launcher_pid, signal.SIGKILL)
    await engine.exited
    await eventually(lambda: not alive(runner) and not find(engine.launch_id))
    await engine.stop()


async def test_a_killed_owner_takes_both_along(
    ollama: Bench, start_owner: Callable[..., Any]
) -> None:
    manifest = await ollama.prepare()
    plan = ollama.engine(manifest).plan
    owner = start_owner(list(plan.argv), dict(plan.env))
    async with aiohttp.ClientSession() as client:
        await until_ready(ollama, client, plan.url)
        await ollama.backend.load(client, plan)
    assert len(ollama.runners()) == 1
    owner.kill()
    wait_until(lambda: not find(owner.launch_id) and not ollama.processes())


async def test_a_dead_runner_is_replaced_or_else_noticed(ollama: Bench) -> None:
    engine = await started(ollama)
    (runner,) = ollama.runners()
    os.kill(runner, signal.SIGKILL)
    await eventually(lambda: not alive(runner))
    await engine.check(timeout_s=30)
    (new,) = ollama.runners()
    assert new != runner
    # It cannot be loaded any more: to be up is not to work.
    os.kill(new, signal.SIGKILL)
    await eventually(lambda: not alive(new))
    engine.plan.model.unlink()
    with pytest.raises(EngineUnresponsive):
        await engine.check(timeout_s=30)


async def test_a_server_that_stands_still_is_noticed(ollama: Bench) -> None:
    engine = await started(ollama)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(EngineUnresponsive):
        await engine.check(timeout_s=0.3)
    os.kill(engine.pid, signal.SIGCONT)
    await engine.check(timeout_s=30)


async def test_a_model_that_went_away_after_its_preparation(ollama: Bench) -> None:
    manifest = await ollama.prepare()
    engine = ollama.engine(manifest)
    manifest.unlink()
    with pytest.raises(EngineStartError, match=r"does not load the model: model '.*' not found"):
        await engine.start(timeout_s=60)
    assert find(engine.launch_id) == []


async def test_a_port_that_is_taken(ollama: Bench) -> None:
    engine = ollama.engine(await ollama.prepare())
    with socket.socket() as other:
        other.bind((engine.plan.host, engine.plan.port))
        other.listen()
        with pytest.raises(EnginePortTaken, match=f"port {engine.plan.port} of 127.0.0.1 is taken"):
            await engine.start(timeout_s=60)
    assert find(engine.launch_id) == []


async def test_nothing_is_written_to_the_users_home(ollama: Bench) -> None:
    engine = await started(ollama)
    await engine.stop()
    assert not os.path.lexists(ollama.environ["HOME"])  # noqa: ASYNC240


@pytest.mark.parametrize("ollama", ["fake"], indirect=True)
class TestLoading:
    """What is over in a moment with a small model, drawn out."""

    async def test_a_start_that_is_stopped_while_it_loads(self, ollama: Bench) -> None:
        spec = ollama_spec(env={"FAKE_LOAD_S": "60"})
        engine = ollama.engine(await ollama.prepare(spec=spec), spec=spec)
        starting = asyncio.create_task(engine.start(timeout_s=60))
        await eventually(ollama.runners)
        await engine.stop()
        with pytest.raises(EngineStopped):
            await starting
        assert ollama.processes() == []

    async def test_a_load_whose_client_leaves_is_given_up(self, ollama: Bench) -> None:
        spec = ollama_spec(env={"FAKE_LOAD_S": "60"})
        engine = ollama.engine(await ollama.prepare(spec=spec), spec=spec)
        starting = asyncio.create_task(engine.start(timeout_s=60))
        await eventually(ollama.runners)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert ollama.processes() == []

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            ("model requires more system memory (9.9 GiB) than is available (1.0 GiB)", "9.9 GiB"),
            (
                "llama runner process has terminated: cudaMalloc failed: out of memory",
                "not enough GPU memory: cudaMalloc failed: out of memory",
            ),
        ],
    )
    async def test_its_reason_is_told(self, ollama: Bench, error: str, reason: str) -> None:
        spec = ollama_spec(env={"FAKE_LOAD_ERROR": error})
        engine = ollama.engine(await ollama.prepare(spec=spec), spec=spec)
        with pytest.raises(EngineStartError) as failed:
            await engine.start(timeout_s=60)
        assert reason in failed.value.reason
        assert find(engine.launch_id) == []

    async def test_a_server_that_ends_meanwhile_says_why(self, ollama: Bench) -> None:
        spec = ollama_spec(env={"FAKE_LOAD_S": "60"})
        engine = ollama.engine(await ollama.prepare(spec=spec), spec=spec)
        starting = asyncio.create_task(engine.start(timeout_s=60))
        await eventually(ollama.runners)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineStartError, match="killed by SIGKILL"):
            await starting
        assert ollama.processes() == []
