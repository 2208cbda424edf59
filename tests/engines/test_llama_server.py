"""The real llama-server with a real model, on the CPU."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_helpers import Workshop, alive, eventually, wait_until

from flexinfer.engines.errors import (
    EngineExited,
    EngineNotFound,
    EngineStartError,
    EngineUnresponsive,
    ExitStatus,
)
from flexinfer.engines.llamacpp import LlamaCpp
from flexinfer.engines.process import Engine
from flexinfer.engines.sweep import find

pytestmark = pytest.mark.llama

SMALL = {"contextSize": 512}


@pytest.fixture
def real(workshop: Workshop, weights: Path) -> Callable[..., Engine]:
    """Make an engine of the demo's llama-server: `real(weights=.., **block)`."""
    try:
        found = LlamaCpp().find_executable({"PATH": ""})
    except EngineNotFound as error:
        pytest.skip(str(error))

    def make(**options: Any) -> Engine:
        workshop.weights = options.pop("weights", weights)
        return workshop.engine(executable=found.path, **{**SMALL, **options})

    return make


async def chat(engine: Engine) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{engine.url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200
        answer: dict[str, Any] = await response.json()
        return answer


async def test_starts_answers_and_leaves_nothing(real: Callable[..., Engine]) -> None:
    engine = real()
    await engine.start(timeout_s=60)
    answer = await chat(engine)
    assert answer["model"] == "smol"
    assert answer["usage"]["completion_tokens"] == 4
    await engine.check()
    await engine.stop()
    assert engine.exited.result() == ExitStatus(code=0)
    assert find(engine.launch_id) == []


async def test_a_directory_with_one_model_will_do(
    real: Callable[..., Engine], weights: Path
) -> None:
    engine = real(weights=weights.parent)
    await engine.start(timeout_s=60)
    await engine.check()


async def test_embeddings(real: Callable[..., Engine]) -> None:
    engine = real(embeddings=True, pooling="mean")
    await engine.start(timeout_s=60)
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{engine.url}/v1/embeddings", json={"input": "hello"}) as response,
    ):
        answer = await response.json()
    assert len(answer["data"][0]["embedding"]) == 576


async def test_every_setting_at_once(real: Callable[..., Engine], weights: Path) -> None:
    engine = real(
        contextSize=1024,
        nGPULayers="auto",
        batchSize=256,
        ubatchSize=128,
        threads=2,
        threadsBatch=2,
        parallel=2,
        kvUnified=True,
        flashAttention="on",
        cacheTypeK="q8_0",
        cacheTypeV="q8_0",
        splitMode="layer",
        tensorSplit="1",
        mainGPU=0,
        nCPUMoE=0,
        chatTemplate="chatml",
        jinja=True,
        ropeFreqBase=10000.0,
        ropeFreqScale=1.0,
        loadMode="none",
        reasoningFormat="none",
        reasoningBudget=0,
        draftModel=str(weights),
        draftGPULayers=0,
        draftMax=4,
        draftMin=1,
        extraArgs=["--seed", "1"],
    )
    assert engine.plan.warnings == ()
    await engine.start(timeout_s=60)
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"{engine.url}/props") as response,
    ):
        assert (await response.json())["total_slots"] == 2
    await chat(engine)


async def test_a_truncated_model(
    real: Callable[..., Engine], weights: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    with weights.open("rb") as whole:
        cut.write_bytes(whole.read(30_000_000))
    engine = real(weights=cut)
    with pytest.raises(
        EngineStartError, match=r"model is corrupted or incomplete|cut\.gguf is incomplete"
    ) as failed:
        await engine.start(timeout_s=60)
    assert failed.value.exit == ExitStatus(code=1)
    assert find(engine.launch_id) == []


@pytest.mark.parametrize("content", [b"hello", b""])
async def test_a_file_that_is_no_model(
    real: Callable[..., Engine], tmp_path: Path, content: bytes
) -> None:
    # In its own words, or in ours where it ended before it had written them.
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(EngineStartError, match=r"is not GGUF|is not a GGUF file|is empty"):
        await real(weights=tmp_path / "bad.gguf").start(timeout_s=60)


async def test_a_model_that_went_away(
    real: Callable[..., Engine], weights: Path, tmp_path: Path
) -> None:
    gone = tmp_path / "gone.gguf"
    shutil.copy(weights, gone)
    engine = real(weights=gone)
    gone.unlink()
    with pytest.raises(EngineStartError, match=r"cannot open .*gone.gguf: No such file"):
        await engine.start(timeout_s=60)


async def test_an_argument_that_it_does_not_know(real: Callable[..., Engine]) -> None:
    with pytest.raises(EngineStartError, match="does not know the argument --bogus"):
        await real(extraArgs=["--bogus"]).start(timeout_s=60)


async def test_settings_that_exclude_each_other(real: Callable[..., Engine]) -> None:
    with pytest.raises(EngineStartError, match="requires flash_attn"):
        await real(cacheTypeV="q8_0", flashAttention="off").start(timeout_s=60)


async def test_check_sees_a_process_that_stands_still(real: Callable[..., Engine]) -> None:
    engine = real()
    await engine.start(timeout_s=60)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(EngineUnresponsive):
        await engine.check(timeout_s=0.3)
    os.kill(engine.pid, signal.SIGCONT)
    await engine.check()


async def test_an_engine_deep_in_a_prompt_is_alive(real: Callable[..., Engine]) -> None:
    engine = real(contextSize=8192, parallel=1)
    await engine.start(timeout_s=60)
    body = {"prompt": "one two three " * 2000, "max_tokens": 1}
    async with aiohttp.ClientSession() as client:
        asked = asyncio.create_task(client.post(f"{engine.url}/v1/completions", json=body))
        await eventually(lambda: "processing task" in "".join(engine.log.tail()))
        for _ in range(3):
            await engine.check(timeout_s=0.3)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_a_killed_engine_is_seen(real: Callable[..., Engine]) -> None:
    engine = real()
    await engine.start(timeout_s=60)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    assert (await engine.exited).signal == signal.SIGKILL
    with pytest.raises(EngineExited):
        await engine.check()


async def test_a_killed_launcher_takes_the_engine_along(real: Callable[..., Engine]) -> None:
    engine = real()
    await engine.start(timeout_s=60)
    assert engine.launcher_pid is not None
    os.kill(engine.launcher_pid, signal.SIGKILL)
    await engine.exited
    await eventually(lambda: not find(engine.launch_id))
    await engine.stop()


async def test_a_killed_owner_takes_the_engine_along(
    real: Callable[..., Engine], start_owner: Callable[..., Any]
) -> None:
    plan = real().plan
    owner = start_owner(list(plan.argv), dict(plan.env))
    assert alive(owner.pid)
    owner.kill()
    wait_until(lambda: not find(owner.launch_id))
