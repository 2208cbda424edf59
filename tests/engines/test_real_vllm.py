"""The real vLLM with a tiny model of random weights, on the CPU. A start takes most of a minute."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from engine_helpers import REPOSITORY, alive, eventually
from vllm_plans import vllm_spec

from flexinfer.engines.errors import (
    EngineError,
    EngineExited,
    EngineNotFound,
    EnginePortTaken,
    EngineStartError,
    EngineStopped,
    ExitStatus,
)
from flexinfer.engines.gpus import Devices
from flexinfer.engines.launcher import descendants, process_table
from flexinfer.engines.logs import EngineLog
from flexinfer.engines.ports import free_port
from flexinfer.engines.process import Engine
from flexinfer.engines.sweep import find
from flexinfer.engines.vllm import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

START_S = 400.0  # ten times what it takes on an idle machine
# bfloat16 goes to AMX kernels where the processor has them. 0.32 does not ask for permission to use
# them: unless a larger product did before, the first request kills its worker.
SMALL = {
    "enforceEager": True,
    "dtype": "float32",
    "maxNumSeqs": 4,
    "kvCacheMemoryBytes": "64Mi",
}


class Shop:
    """Makes engines of one installation and one model, and stops what is left of them."""

    def __init__(self, executable: Path, folder: Path) -> None:
        self.backend = Vllm()
        self.found = self.backend.find_executable({"FLEXINFER_VLLM": str(executable)})
        self.weights = folder / "tiny"
        self._folder = folder
        self._engines: list[Engine] = []
        assert self.found.python is not None
        maker = REPOSITORY / "tests/fakes/tiny_llama.py"
        subprocess.run([self.found.python, maker, self.weights], check=True, timeout=120)

    def engine(self, weights: Path | None = None, port: int | None = None, **block: Any) -> Engine:
        environ = {**os.environ, "FLEXINFER_COMPILE_CACHE": str(self._folder / "compiled")}
        spec = vllm_spec(**{**SMALL, **block})
        where = weights or self.weights
        plan = self.backend.plan(spec, where, Devices(), port or free_port(), self.found, environ)
        log = EngineLog("tiny", self._folder / f"log-{len(self._engines)}", echo=False)
        self._engines.append(Engine(self.backend, spec, plan, log))
        return self._engines[-1]

    async def close(self) -> None:
        for engine in self._engines:
            await engine.stop(grace_s=0)
            assert find(engine.launch_id) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shop]:
    named = os.environ.get("FLEXINFER_TEST_VLLM")
    if not named:
        pytest.skip("FLEXINFER_TEST_VLLM names no vllm")
    try:
        shop = Shop(Path(named), tmp_path_factory.mktemp("vllm"))
    except EngineNotFound as error:
        pytest.skip(str(error))
    yield shop
    await shop.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(shop: Shop) -> Engine:
    """One engine for all questions, with every setting that a CPU has a use for."""
    template = shop.weights / "other.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    engine = shop.engine(
        tensorParallelSize=1,
        pipelineParallelSize=1,
        maxModelLen=2048,
        maxNumBatchedTokens=512,
        gpuMemoryUtilization="0.2",
        kvCacheDtype="auto",
        loadFormat="safetensors",
        tokenizer=str(shop.weights),
        trustRemoteCode=False,
        enablePrefixCaching=False,
        enableChunkedPrefill=True,
        blockSize=32,
        attentionBackend="CPU_ATTN",
        chatTemplate=str(template),
        toolCallParser="hermes",
        enableAutoToolChoice=True,
        runner="generate",
        convert="none",
        extraArgs=["--seed", "1"],
    )
    assert engine.plan.warnings == ()
    await engine.start(START_S)
    return engine


def tree(engine: Engine) -> dict[int, str]:
    """Return what runs below the launcher: process ids and titles."""
    assert engine.launcher_pid is not None
    found = {}
    for pid in descendants(process_table(), engine.launcher_pid):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        found[pid] = title
    return found


def pid_of(engine: Engine, title: str) -> int:
    (pid,) = (pid for pid, words in tree(engine).items() if words.startswith(title))
    return pid


def listening(engine: Engine) -> set[str]:
    """Return the addresses that its processes listen on, as the kernel writes them."""
    inodes = set()
    for pid in tree(engine):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.add(words[1].partition(":")[0])
    return found


async def post(engine: Engine, path: str, **body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{engine.url}{path}", json=body) as response,
    ):
        return response.status, await response.json()


async def metric(engine: Engine, name: str) -> float:
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"{engine.url}/metrics") as response,
    ):
        text = await response.text()
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name}{{"))
    return float(line.split()[-1])


HI = [{"role": "user", "content": "Say hi."}]


# -- one that runs


async def test_chat(running: Engine, shop: Shop) -> None:
    name = shop.backend.request_model(running.spec, shop.weights)
    status, answer = await post(
        running, "/v1/chat/completions", model=name, messages=HI, max_tokens=4, ignore_eos=True
    )
    assert status == 200
    assert answer["model"] == "tiny"
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["message"]["role"] == "assistant"
    await running.check()


async def test_a_stream_with_its_usage(running: Engine) -> None:
    body = {
        "model": "tiny",
        "messages": HI,
        "max_tokens": 5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{running.url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200
        events = [line[6:] async for line in response.content if line.startswith(b"data: ")]
    assert events[-1].strip() == b"[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


async def test_completions(running: Engine) -> None:
    status, answer = await post(
        running, "/v1/completions", model="tiny", prompt="One, two,", max_tokens=3, ignore_eos=True
    )
    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["usage"]["completion_tokens"] == 3


async def test_what_a_generative_model_does_not_do(running: Engine) -> None:
    # It says nothing of embeddings: the route is not there. The gateway has the words for it.
    status, answer = await post(running, "/v1/embeddings", model="tiny", input="a")
    assert (status, answer) == (404, {"detail": "Not Found"})


async def test_another_model_is_refused(running: Engine) -> None:
    status, answer = await post(running, "/v1/chat/completions", model="other", messages=HI)
    assert status == 404
    assert "`other` does not exist" in answer["error"]["message"]


async def test_a_client_that_leaves_stops_the_work(running: Engine) -> None:
    made_before = await metric(running, "vllm:generation_tokens_total")
    most = 2000
    body = {
        "model": "tiny",
        "prompt": "One",
        "max_tokens": most,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{running.url}/v1/completions", json=body) as response,
    ):
        await response.content.readline()
        assert await metric(running, "vllm:num_requests_running") == 1
        response.close()
    end = time.monotonic() + 30
    while await metric(running, "vllm:num_requests_running") > 0:
        assert time.monotonic() < end
        await asyncio.sleep(0.1)
    made = await metric(running, "vllm:generation_tokens_total") - made_before
    assert 0 < made < most
    await running.check()


async def test_nothing_listens_but_on_loopback(running: Engine) -> None:
    assert listening(running) == {"0100007F"}


async def test_stop_leaves_nothing(running: Engine) -> None:
    pids = tree(running)
    assert any(title.startswith("VLLM::EngineCore") for title in pids.values())
    await running.stop()
    assert running.exited.result() == ExitStatus(code=0)
    assert find(running.launch_id) == []
    assert not [pid for pid in pids if alive(pid)]


# -- those that die


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(shop: Shop) -> tuple[Engine, Engine]:
    """Two engines to be killed; starting them together saves half a minute."""
    engines = shop.engine(), shop.engine()
    await asyncio.gather(*(engine.start(START_S) for engine in engines))
    return engines


async def test_a_killed_engine_core_is_seen_and_explained(
    two: tuple[Engine, Engine], shop: Shop
) -> None:
    engine = two[0]
    os.kill(pid_of(engine, "VLLM::EngineCore"), signal.SIGKILL)
    # Its health goes first, then it leaves by itself, in the way of an ordinary end.
    end = time.monotonic() + 30
    with pytest.raises(EngineError):
        while time.monotonic() < end:
            await engine.check()
            await asyncio.sleep(0.1)
    async with asyncio.timeout(60):
        status = await asyncio.shield(engine.exited)
    with pytest.raises(EngineExited, match="the engine ended: EngineCore ended"):
        await engine.check()
    reason = shop.backend.explain(engine.plan, status, engine.log.tail(200))
    assert "EngineCore ended" in reason
    await engine.stop()
    assert find(engine.launch_id) == []


async def test_a_killed_server_leaves_nothing(two: tuple[Engine, Engine], shop: Shop) -> None:
    engine = two[1]
    pids = tree(engine)
    assert len(pids) >= 3  # the server, EngineCore, a worker or a resource tracker
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    status = await asyncio.shield(engine.exited)
    assert status.signal == signal.SIGKILL
    assert "SIGKILL" in shop.backend.explain(engine.plan, status, engine.log.tail())
    # Nobody calls stop: the launcher ends the rest by itself.
    await eventually(lambda: not find(engine.launch_id), timeout_s=40)
    await eventually(lambda: not [pid for pid in pids if alive(pid)])


# -- those that never start


async def test_a_start_that_fails_says_why(shop: Shop, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(shop.weights, broken)
    (broken / "config.json").write_text('{"architectures": [')

    async def fails(reason: str, engine: Engine) -> EngineStartError:
        with pytest.raises(EngineStartError, match=reason) as failed:
            await engine.start(START_S)
        assert find(engine.launch_id) == []
        return failed.value

    with socket.create_server(("127.0.0.1", 0)) as other:
        *_, taken = await asyncio.gather(
            fails(r"broken/config\.json is not valid JSON", shop.engine(broken)),
            fails(
                r"one sequence of 2048 tokens needs .* maxModelLen \d+ would fit",
                shop.engine(kvCacheMemoryBytes="1Mi"),
            ),
            fails("does not know the arguments --bogus", shop.engine(extraArgs=["--bogus"])),
            # It binds before it loads, so that this costs no load.
            fails("its port is taken", shop.engine(port=other.getsockname()[1])),
        )
    assert isinstance(taken, EnginePortTaken)


async def test_a_start_that_is_stopped_while_it_loads(shop: Shop) -> None:
    engine = shop.engine()
    starting = asyncio.create_task(engine.start(START_S))
    # From here on it is deaf to SIGTERM until the model is there.
    await eventually(lambda: "Initializing a V1 LLM engine" in "\n".join(engine.log.tail()), 200)
    began = time.monotonic()
    await engine.stop()
    with pytest.raises(EngineStopped):
        await starting
    assert find(engine.launch_id) == []
    assert time.monotonic() - began < shop.backend.stop.grace_s
