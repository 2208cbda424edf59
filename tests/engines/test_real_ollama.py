"""What only the real Ollama can show: that settings reach the model, what it does to a store."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from engine_helpers import REPOSITORY, alive, eventually
from ollama_helpers import Bench, ollama_spec, tree
from test_ollama_life import CHAT, ask, started, until_ready

from flexinfer.engines.errors import EngineUnresponsive
from flexinfer.engines.ollama_store import model_blob
from flexinfer.engines.process import Engine

pytestmark = [pytest.mark.ollama, pytest.mark.parametrize("ollama", ["real"], indirect=True)]


async def get(engine: Engine, path: str) -> Any:
    async with aiohttp.ClientSession() as client, client.get(engine.url + path) as response:
        return await response.json()


async def show(engine: Engine) -> Any:
    return (await ask(engine, "/api/show"))[1]


async def test_settings_reach_the_model(ollama: Bench) -> None:
    engine = await started(
        ollama,
        contextLength=768,
        numParallel=2,
        flashAttention=True,
        kvCacheType="q8_0",
        gpuOverhead="1Gi",
        modelfile='SYSTEM """You\nare a pirate."""\nPARAMETER stop "<|never|>"',
        parameters={"temperature": "0.25", "stop": ' "quoted" '},
    )
    assert engine.plan.warnings == ()
    (loaded,) = (await get(engine, "/api/ps"))["models"]
    assert loaded["context_length"] == 768
    assert loaded["expires_at"] > "2100"
    told = await show(engine)
    assert told["system"] == "You\nare a pirate."
    assert '"<|never|>"' in told["parameters"]
    assert '" \\"quoted\\" "' in told["parameters"]
    assert "0.25" in told["parameters"]
    text = "\n".join(engine.log.tail(200))
    assert "Parallel:2" in text
    assert "FlashAttention:Enabled" in text
    assert "KvCacheType:q8_0" in text
    assert psutil.Process(engine.pid).environ()["OLLAMA_GPU_OVERHEAD"] == str(1 << 30)


async def test_embeddings_are_what_they_should_be(ollama: Bench) -> None:
    engine = await started(ollama)
    status, answer = await ask(engine, "/v1/embeddings", input=["hello", "world"])
    assert status == 200
    assert [len(entry["embedding"]) for entry in answer["data"]] == [576, 576]


async def test_it_serves_models_of_embeddings_only(ollama: Bench) -> None:
    only = ollama.directory / "only.gguf"
    only.write_bytes(with_pooling(ollama.weights.read_bytes()))
    spec = ollama_spec(contextLength=512)
    engine = ollama.engine(await ollama.prepare(only, spec=spec), spec=spec)
    await engine.start(timeout_s=60)
    assert len(ollama.runners()) == 1
    await engine.check(timeout_s=30)
    assert (await ask(engine, "/v1/embeddings", input="hello"))[0] == 200
    assert (await ask(engine, "/v1/chat/completions", **CHAT))[0] == 400


def with_pooling(gguf: bytes) -> bytes:
    """Return the file with `llama.pooling_type` in its header, by which Ollama knows that a model
    is for embeddings. What is added keeps the alignment of what follows."""
    magic, version, tensors, pairs = struct.unpack_from("<4sIQQ", gguf)

    def pair(key: bytes, kind: int, value: bytes) -> bytes:
        return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value

    added = pair(b"llama.pooling_type", 4, struct.pack("<I", 1))
    empty = pair(b"general.note", 8, struct.pack("<Q", 0))
    filler = b"x" * (-(len(added) + len(empty)) % 32)
    added += pair(b"general.note", 8, struct.pack("<Q", len(filler)) + filler)
    return struct.pack("<4sIQQ", magic, version, tensors, pairs + 2) + added + gguf[24:]


async def test_a_runner_that_stands_still_is_noticed(ollama: Bench) -> None:
    engine = await started(ollama)
    (runner,) = ollama.runners()
    os.kill(runner, signal.SIGSTOP)
    with pytest.raises(EngineUnresponsive):
        await engine.check(timeout_s=5)
    os.kill(runner, signal.SIGCONT)
    await engine.check(timeout_s=30)
    assert ollama.runners() == [runner]


async def test_it_never_writes_to_a_users_store(ollama: Bench) -> None:
    store = await users_store(ollama)
    before = tree(store)
    engine = ollama.engine(store / "manifests/registry.ollama.ai/library/mine/1")
    await engine.start(timeout_s=60)
    assert (await ask(engine, "/v1/chat/completions", **CHAT))[0] == 200
    (runner,) = ollama.runners()
    os.kill(runner, signal.SIGKILL)
    await eventually(lambda: not alive(runner))
    await engine.check(timeout_s=30)
    await engine.stop()
    assert tree(store) == before


@pytest.fixture
def open_directories(tmp_path: Path) -> Iterator[None]:
    """Let other users through to the test's own directory."""
    changed = [path for path in (tmp_path, *tmp_path.parents) if path.stat().st_uid == 0]
    modes = {path: path.stat().st_mode for path in changed}
    for path in changed:
        path.chmod(modes[path] | 0o755)
    yield
    for path, mode in modes.items():
        path.chmod(mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_a_store_that_it_may_only_read_will_do(ollama: Bench, open_directories: None) -> None:
    store = await users_store(ollama)
    for path in [store, *store.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    home = ollama.directory / "nobody"
    home.mkdir()
    os.chown(home, 65534, 65534)
    # The program may be in a place that others may not enter, such as a home.
    ollama.program = Path(shutil.copy2(ollama.program, ollama.directory / "ollama-for-all"))
    plan = ollama.engine(store / "manifests/registry.ollama.ai/library/mine/1").plan
    program = subprocess.Popen(  # noqa: ASYNC220
        plan.argv, env={**plan.env, "HOME": str(home)}, user=65534, group=65534, cwd="/"
    )
    try:
        async with aiohttp.ClientSession() as client:
            await until_ready(ollama, client, plan.url)
            await ollama.backend.load(client, plan)
            assert await ollama.backend.is_alive(client, plan.url)
    finally:
        program.terminate()
        program.wait(timeout=30)


async def users_store(ollama: Bench) -> Path:
    """A store as the user has one, with the model `mine:1`."""
    made = await ollama.prepare()
    store = ollama.directory / "users"
    target = store / "manifests/registry.ollama.ai/library/mine/1"
    target.parent.mkdir(parents=True)
    shutil.copy(made, target)
    shutil.copytree(ollama.store / "blobs", store / "blobs")
    return store


async def test_safetensors_are_converted(ollama: Bench) -> None:
    vllm = os.environ.get("FLEXINFER_TEST_VLLM")
    if not vllm:
        pytest.skip("FLEXINFER_TEST_VLLM names no vLLM, whose Python could make a model")
    python = Path(vllm).parent / "python"
    model = ollama.directory / "tiny"
    script = REPOSITORY / "tests/fakes/tiny_llama.py"
    subprocess.run([python, script, model], check=True, timeout=120)  # noqa: ASYNC221
    before = tree(model)
    spec = ollama_spec(contextLength=512)
    made = await ollama.prepare(model, spec=spec)
    assert "converting model" in ollama.said
    assert tree(model) == before
    # Only the converted model stays.
    assert model_blob(made).read_bytes()[:4] == b"GGUF"
    assert len(list((ollama.store / "blobs").iterdir())) == 4
    engine = ollama.engine(made, spec=spec)
    await engine.start(timeout_s=60)
    assert (await ask(engine, "/v1/chat/completions", **CHAT))[0] == 200
