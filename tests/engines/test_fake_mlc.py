"""The fake `mlc_llm` keeps to what is known of the real one, and the adapter lives with that."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import engine_helpers
import httpx
import psutil
import pytest
import pytest_asyncio
from engine_helpers import alive
from mlc_helpers import mlc_spec, plan, write_model, write_program

from flexinfer.engines.errors import (
    EngineExited,
    EnginePortTaken,
    EngineStartError,
    EngineUnresponsive,
    ExitStatus,
)
from flexinfer.engines.gpus import Devices
from flexinfer.engines.logs import EngineLog
from flexinfer.engines.mlc import MlcLlm
from flexinfer.engines.ports import free_port
from flexinfer.engines.process import Engine
from flexinfer.engines.sweep import find

# A start of this fake takes a fraction of a second; nothing here waits as long as this on purpose.
AMPLE_S = 60.0
wait_until = functools.partial(engine_helpers.wait_until, timeout_s=AMPLE_S)
eventually = functools.partial(engine_helpers.eventually, timeout_s=AMPLE_S)
CHAT = {"messages": [{"role": "user", "content": "Say hi."}]}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return write_program(tmp_path / "bin", sys.executable)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return write_model(tmp_path / "weights")


# -- the fake alone


class Run:
    """`mlc_llm serve` as a process of the test."""

    def __init__(self, argv: list[str], env: dict[str, str], port: int, log: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as output:
            self.process = psutil.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env=env)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def ready(self) -> Run:
        wait_until(lambda: "Uvicorn running on" in self.said or self.process.poll() is not None)
        assert self.process.poll() is None, self.said
        return self

    def end(self) -> int:
        code: int = self.process.wait(timeout=AMPLE_S)
        return code

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def post(self, body: Any, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=AMPLE_S, **more)

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*self.process.children(recursive=True), self.process]:
                process.kill()
        self.process.wait()


@pytest.fixture
def serve(program: Path, weights: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Run the fake: `serve("--mode", "server", model=.., FAKE_MLC_..=..)`."""
    runs: list[Run] = []

    def run(*arguments: str, model: Path | str = weights, **env: str) -> Run:
        port = free_port()
        argv = [str(program), "serve", str(model), "--device", "cpu", "--port", str(port)]
        environ = {**os.environ, "MLC_LLM_HOME": str(tmp_path / "home"), **env}
        log = tmp_path / f"{len(runs)}.log"
        runs.append(Run([*argv, *arguments], environ, port, log))
        return runs[-1]

    yield run
    for each in runs:
        each.kill()


def usage_error(program: Path, *arguments: str, home: Path) -> tuple[str, str]:
    done = subprocess.run(
        [program, *arguments],
        env={**os.environ, "MLC_LLM_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=AMPLE_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "usage:" in done.stdout
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--served-model-name", "x"], "unrecognized arguments: --served-model-name x"),
        (["--uds", "x"], "unrecognized arguments: --uds x"),
        (["--mode", "fast"], "argument --mode: invalid choice: 'fast'"),
        (
            ["--overrides", "max_total_sequence_length=1"],
            "arguments: --max_total_sequence_length=1",
        ),
        (["--overrides", "max_num_sequence=x"], "argument --max_num_sequence: invalid int value"),
        (["--port", "x"], "argument --port: invalid int value: 'x'"),
    ],
)
def test_arguments_that_are_wrong(
    program: Path, weights: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    home = tmp_path / "home"
    _, said = usage_error(program, "serve", str(weights), *arguments, home=home)
    assert message in said


def test_arguments_that_are_missing(program: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert usage_error(program, "serve", home=home)[1].startswith("the following arguments are")
    assert "invalid choice" in usage_error(program, "run", home=home)[1]


def test_what_ends_before_the_load(serve: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, env, words in (
        ({"model": "/nowhere"}, {}, "FileNotFoundError: Cannot find model /nowhere"),
        ({"model": tmp_path / "empty"}, {}, r"FileNotFoundError: Cannot find .*/mlc-chat-config"),
        ({}, {"MLC_JIT_POLICY": "off"}, "ValueError: Invalid MLC_JIT_POLICY"),
        ({}, {"MLC_JIT_POLICY": "OFF"}, "RuntimeError: JIT is disabled by MLC_JIT_POLICY=OFF"),
        ({}, {"MLC_JIT_POLICY": "READONLY"}, "RuntimeError: No cached model lib found"),
        ({}, {"FAKE_MLC_COMPILE_FAILS": "1"}, "RuntimeError: Cannot find compilation output"),
    ):
        run = serve(**arguments, **env)
        assert run.end() == 1
        assert re.search(words, run.said), run.said
    run = serve("--model-lib", "/nowhere/lib.so")
    assert run.end() == 1
    assert "The `model_lib` you passed in is not a file: /nowhere/lib.so." in run.said


def test_devices_are_looked_for_by_children(serve: Callable[..., Run]) -> None:
    auto = serve("--device", "auto", FAKE_MLC_GPUS="2").ready()
    looked = re.findall(r"device: (\w+):\d", auto.said)
    assert looked == ["cuda", "rocm", "rocm", "metal", "vulkan", "opencl", "cpu", "rocm"]
    assert "Using device: rocm:0" in auto.said
    run = serve("--device", "rocm:0", HIP_VISIBLE_DEVICES="1", FAKE_MLC_GPUS="2").ready()
    assert re.findall(r"Found device: (\S+)", run.said) == ["rocm:0"]
    # Both masks count, one after the other: of one device there is no second.
    both = {"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "1", "FAKE_MLC_GPUS": "2"}
    none = serve("--device", "rocm:0", **both)
    assert none.end() == 1
    assert "ValueError: Device is not found on your local environment: rocm:0" in none.said


def test_a_library_is_compiled_once(serve: Callable[..., Run], tmp_path: Path) -> None:
    libraries = tmp_path / "home" / "model_lib"
    first = serve().ready()
    (library,) = libraries.iterdir()
    assert re.fullmatch(r"[0-9a-f]{32}\.so", library.name)
    assert "Compiling using commands below:" in first.said
    assert f"Using cached model lib: {library}" in serve(MLC_JIT_POLICY="READONLY").ready().said
    # All of these make another library: what it is compiled for, and where.
    serve("--overrides", "max_num_sequence=2").ready()
    serve("--overrides", "prefill_chunk_size=64").ready()
    serve("--device", "rocm:0", FAKE_MLC_GPUS="1").ready()
    serve("--overrides", "opt=O3").ready()
    assert len(list(libraries.iterdir())) == 5
    # And these do not.
    serve("--overrides", "max_total_seq_length=64", "--mode", "server").ready()
    assert len(list(libraries.iterdir())) == 5
    before = library.stat().st_mtime_ns
    serve(MLC_JIT_POLICY="REDO").ready()
    assert library.stat().st_mtime_ns > before


def test_what_a_library_was_compiled_for_goes_before_overrides(
    serve: Callable[..., Run], tmp_path: Path
) -> None:
    library = tmp_path / "lib.so"
    library.write_text(json.dumps({"context_window_size": 64, "max_batch_size": 2}))
    overrides = "tensor_parallel_shards=2;context_window_size=128"
    run = serve("--model-lib", str(library), "--overrides", overrides).ready()
    assert f"Using library model: {library}" in run.said
    assert "max batch size is 2, max KV cache token capacity is 64," in run.said
    assert run.process.children() == []


def test_modes_and_overrides_make_the_plan(serve: Callable[..., Run]) -> None:
    for arguments, words in (
        (["--mode", "local"], "4, max KV cache token capacity is 4096, prefill chunk size is 2048"),
        (["--mode", "interactive"], "1, max KV cache token capacity is 4096, prefill"),
        (["--mode", "server"], "128, max KV cache token capacity is 524288, prefill chunk"),
        # As given, whether it fits or not.
        (
            ["--overrides", "max_num_sequence=3;max_total_seq_length=9999999"],
            "3 (specified by user), max KV cache token capacity is 9999999",
        ),
    ):
        run = serve(*arguments).ready()
        assert f"So max batch size is {words}" in run.said
        assert run.said.count("Under mode ") == 3
        assert "Estimated total single GPU memory usage: " in run.said


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"FAKE_MLC_GPU_BYTES": "60000000"}, "Insufficient GPU memory error: The available single"),
        ({"FAKE_MLC_FAIL": "oom"}, "ROCM HIP Error: hipMalloc"),
        ({"FAKE_MLC_FAIL": "unknown"}, "Check failed"),
    ],
)
def test_a_load_that_fails_hangs(
    serve: Callable[..., Run], env: dict[str, str], words: str
) -> None:
    run = serve(**env)
    wait_until(lambda: words in run.said)
    assert "Exception in thread Thread-1 (_background_loop):" in run.said
    with pytest.raises(psutil.TimeoutExpired):
        run.process.wait(timeout=0.5)
    assert not run.listens()
    run.process.terminate()
    assert run.end() == -signal.SIGTERM


def test_nothing_listens_while_it_loads(serve: Callable[..., Run]) -> None:
    run = serve(FAKE_MLC_LOAD_S="60")
    wait_until(lambda: "Estimated total" in run.said)
    assert not run.listens()
    run.process.terminate()
    assert run.end() == -signal.SIGTERM
    assert "Shutting down" not in run.said


def test_a_taken_port_is_found_after_the_load(serve: Callable[..., Run]) -> None:
    first = serve().ready()
    second = serve("--port", str(first.port))
    assert second.end() == 1
    assert "Estimated total" in second.said
    assert re.search(r"\[Errno 98\] error while .*: address already in use", second.said)


def test_its_end_waits_for_requests_and_is_by_the_signal(serve: Callable[..., Run]) -> None:
    run = serve(FAKE_MLC_TOKENS_PER_S="50").ready()
    body = {**CHAT, "stream": True, "max_tokens": 1_000_000}
    with httpx.Client() as idle, httpx.Client(timeout=AMPLE_S) as client:
        idle.get(f"{run.url}/v1/models")
        with client.stream("POST", f"{run.url}/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            run.process.terminate()
            wait_until(lambda: "Waiting for connections to close" in run.said)
            assert not run.listens()
            run.process.terminate()  # and again: that changes nothing
            for _ in range(5):
                next(lines)
            assert run.process.poll() is None
    assert run.end() == -signal.SIGTERM


def test_a_second_interrupt_is_obeyed(serve: Callable[..., Run]) -> None:
    run = serve(FAKE_MLC_TOKENS_PER_S="50").ready()
    body = {**CHAT, "stream": True, "max_tokens": 1_000_000}
    with httpx.stream("POST", f"{run.url}/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()  # the stream is closed with the last name for this
        next(lines)
        run.process.send_signal(signal.SIGINT)
        wait_until(lambda: "Waiting for connections to close" in run.said)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == -signal.SIGINT


# -- its API


def test_models_and_what_there_is_not(serve: Callable[..., Run], weights: Path) -> None:
    run = serve().ready()
    (model,) = httpx.get(f"{run.url}/v1/models").json()["data"]
    assert (model["id"], model["owned_by"]) == (str(weights), "MLC-LLM")
    assert httpx.get(f"{run.url}/health").status_code == 404
    assert httpx.get(f"{run.url}/v1/chat/completions").status_code == 405
    metrics = httpx.get(f"{run.url}/metrics").text
    assert "completion_tokens_sum\t0" in metrics.splitlines()


def test_an_api_key_guards_only_openais_part(serve: Callable[..., Run]) -> None:
    run = serve("--api-key", "k").ready()
    refused = run.post(CHAT)
    assert (refused.status_code, refused.json()) == (401, {"detail": "Invalid API Key"})
    answer = run.post({**CHAT, "max_tokens": 1}, headers={"authorization": "Bearer k"})
    assert answer.status_code == 200
    assert httpx.get(f"{run.url}/metrics").status_code == 200


def test_chat_and_completions(serve: Callable[..., Run]) -> None:
    run = serve(FAKE_MLC_TOKENS_PER_S="0").ready()
    chat = run.post({**CHAT, "model": "anything", "max_tokens": 3}).json()
    assert (chat["object"], chat["model"]) == ("chat.completion", "anything")
    assert chat["choices"][0]["message"]["content"] == "t0 t1 t2 "
    assert chat["choices"][0]["finish_reason"] == "length"
    assert chat["usage"]["prompt_tokens"] == 2
    assert chat["usage"]["completion_tokens"] == 3
    done = run.post({"prompt": "a b c", "max_tokens": 2, "n": 2}, "/v1/completions").json()
    assert [choice["text"] for choice in done["choices"]] == ["t0 t1 ", "t0 t1 "]


def test_usage_of_a_stream_comes_only_when_it_is_asked_for(serve: Callable[..., Run]) -> None:
    run = serve(FAKE_MLC_TOKENS_PER_S="0").ready()

    def events(**more: Any) -> list[Any]:
        text = run.post({**CHAT, "max_tokens": 2, "stream": True, **more}).text
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    plain = events()
    assert [event["choices"][0]["delta"]["content"] for event in plain] == ["t0 ", "t1 "]
    assert plain[-1]["choices"][0]["finish_reason"] == "length"
    assert events(stream_options={"include_usage": False})[-1]["choices"]
    last = events(stream_options={"include_usage": True})[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({**CHAT, "stream_options": {"include_usage": True}}, "/v1/chat/completions"),
        ({**CHAT, "stream": True, "stream_options": {}}, "/v1/chat/completions"),
        ({"prompt": "a", "stream": True, "stream_options": {}}, "/v1/completions"),
        ({}, "/v1/chat/completions"),
        ({"messages": [{"role": "developer", "content": "a"}]}, "/v1/chat/completions"),
        ({**CHAT, "max_tokens": "many"}, "/v1/chat/completions"),
        ([], "/v1/completions"),
    ],
)
def test_requests_of_the_wrong_form(serve: Callable[..., Run], body: Any, path: str) -> None:
    answer = serve().ready().post(body, path)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][0] == "body"


def test_requests_that_mlc_refuses(serve: Callable[..., Run]) -> None:
    run = serve("--overrides", "context_window_size=16").ready()
    user, system = CHAT["messages"][0], {"role": "system", "content": "a"}
    call = {"id": "1", "type": "function", "function": {"name": "f"}}
    for body, words in (
        ([user, system], "System prompt at position 1 in the message list is invalid."),
        (
            [user, {"role": "assistant", "tool_calls": [call]}],
            "Assistant message having `tool_calls` is not supported yet.",
        ),
        (
            [{"role": "user", "content": "word " * 17}],
            "Request prompt has 17 tokens in total, larger than the model input length limit 16.",
        ),
    ):
        answer = run.post({"messages": body})
        assert answer.status_code == 400
        assert isinstance(answer.json(), str)  # JSON inside of JSON
        assert json.loads(answer.json()) == {"object": "error", "message": words, "code": 400}


def test_the_user_is_the_id_and_ids_collide(serve: Callable[..., Run]) -> None:
    run = serve(FAKE_MLC_TOKENS_PER_S="20").ready()
    body = {**CHAT, "user": "me", "max_tokens": 100_000, "stream": True}
    with httpx.stream("POST", f"{run.url}/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines)[6:])["id"] == "me"
        second = run.post({**CHAT, "user": "me", "max_tokens": 1})
        assert (second.status_code, second.text) == (500, "Internal Server Error")
        assert 'The request id "me" already exists' in run.said
        assert run.post({**CHAT, "user": "you", "max_tokens": 1}).status_code == 200
        del lines
    # The client left, so the name is free again.
    wait_until(lambda: run.post({**CHAT, "user": "me", "max_tokens": 1}).status_code == 200)


def test_the_new_name_of_the_limit_is_not_known(serve: Callable[..., Run]) -> None:
    run = serve(FAKE_MLC_TOKENS_PER_S="0", FAKE_MLC_MAX_TOKENS="40").ready()
    answer = run.post({**CHAT, "max_completion_tokens": 2}).json()
    assert answer["usage"]["completion_tokens"] == 40


def test_embeddings(serve: Callable[..., Run], tmp_path: Path) -> None:
    refused = serve().ready().post({"input": "a"}, "/v1/embeddings")
    assert refused.status_code == 400
    other, library = write_model(tmp_path / "other"), tmp_path / "lib.so"
    library.touch()
    arguments = ["--embedding-model", str(other), "--embedding-model-lib", str(library)]
    answer = serve(*arguments).ready().post({"input": ["a", "b"]}, "/v1/embeddings")
    assert len(answer.json()["data"]) == 2


def test_requests_beyond_the_batch_wait(serve: Callable[..., Run]) -> None:
    run = serve("--mode", "interactive", FAKE_MLC_TOKENS_PER_S="50").ready()
    body = {**CHAT, "max_tokens": 100_000, "stream": True}
    url = f"{run.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body) as first:
        lines = first.iter_lines()
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json={**CHAT, "max_tokens": 1}, timeout=0.3)
    wait_until(lambda: run.post({**CHAT, "max_tokens": 1}).status_code == 200)


def test_a_dead_engine_thread_lists_models_still(serve: Callable[..., Run]) -> None:
    run = serve(FAKE_MLC_DIE_AFTER="3").ready()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{run.url}/v1/chat/completions", json=CHAT, timeout=1.0)
    assert "Exception in thread Thread-1 (_background_loop):" in run.said
    assert httpx.get(f"{run.url}/v1/models").status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{run.url}/metrics", timeout=0.3)


# -- under the adapter


@pytest_asyncio.fixture
async def start(
    program: Path, weights: Path, tmp_path: Path
) -> AsyncIterator[Callable[..., Engine]]:
    """Make an engine of the fake: `start(FAKE_MLC_..=.., **block)`."""
    engines: list[Engine] = []

    def make(*, model: Path = weights, devices: Devices | None = None, **options: Any) -> Engine:
        environ = {name: str(options.pop(name)) for name in tuple(options) if name.isupper()}
        environ = {**os.environ, **environ}
        port = options.pop("port", None) or free_port()
        devices = devices or Devices()
        spec = mlc_spec(len(devices.ids), **options)
        made = plan(program, model, devices=devices, spec=spec, environ=environ, port=port)
        log = EngineLog("qwen", tmp_path / "engine.log", echo=False)
        engines.append(Engine(MlcLlm(), spec, made, log))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop(grace_s=0)
        assert find(engine.launch_id) == []


async def chat(engine: Engine, **more: Any) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{engine.url}/v1/chat/completions", json={**CHAT, **more}) as response,
    ):
        assert response.status == 200
        answer: dict[str, Any] = await response.json()
        return answer


async def test_starts_answers_and_leaves_nothing(start: Callable[..., Engine]) -> None:
    engine = start()
    await engine.start(AMPLE_S)
    await engine.check()
    assert (await chat(engine, max_tokens=2))["usage"]["completion_tokens"] == 2
    await engine.stop()
    assert engine.exited.result() == ExitStatus(signal=signal.SIGTERM)
    assert find(engine.launch_id) == []


async def test_every_setting_at_once(start: Callable[..., Engine], tmp_path: Path) -> None:
    other, library = write_model(tmp_path / "other"), tmp_path / "lib.so"
    library.touch()
    engine = start(
        mode="server",
        modelLibPath=str(library),
        jitPolicy="OFF",
        overrides={
            "maxNumSequence": 2,
            "maxTotalSeqLength": 4096,
            "prefillChunkSize": 512,
            "gpuMemoryUtilization": "0.8",
            "contextWindowSize": 1024,
            "specDraftLength": 3,
            "raw": "spec_tree_width=2;prefix_cache_max_num_recycling_seqs=1",
        },
        speculativeMode="small_draft",
        additionalModels=[f"{other},{library}"],
        prefixCacheMode="disable",
        prefillMode="chunked",
        embeddingModel=str(other),
        embeddingModelLib=str(library),
        extraArgs=["--enable-debug", "--allow-methods", '["POST"]'],
    )
    assert engine.plan.warnings == ()
    await engine.start(AMPLE_S)
    assert "So max batch size is 2 (specified by user), max KV cache token capacity is 4096" in (
        "\n".join(engine.log.tail(50))
    )


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"FAKE_MLC_GPU_BYTES": 60_000_000}, "not enough GPU memory: MLC may use 51.000 MB"),
        ({"FAKE_MLC_FAIL": "oom"}, r"not enough GPU memory \(hipMalloc\)"),
        ({"FAKE_MLC_FAIL": "unknown"}, "mlc_llm failed: InternalError: .*nobody has seen this"),
    ],
)
async def test_a_hang_is_noticed_by_its_line(
    start: Callable[..., Engine], env: dict[str, Any], reason: str
) -> None:
    engine = start(**env)
    # The deadline is an hour away: only the line can end this.
    async with asyncio.timeout(AMPLE_S):
        with pytest.raises(EngineStartError, match=reason) as failed:
            await engine.start(timeout_s=3600)
    assert failed.value.exit is None
    assert any("_background_loop" in line for line in failed.value.log_tail)
    assert find(engine.launch_id) == []


@pytest.mark.parametrize(
    ("how", "reason", "number"),
    [
        ("segfault", r"crashed \(SIGSEGV\) while it allocated its buffers", signal.SIGSEGV),
        ("gpu-fault", "a memory access fault on the GPU: node-1", signal.SIGABRT),
    ],
)
async def test_a_crash_while_it_loads(
    start: Callable[..., Engine], how: str, reason: str, number: int
) -> None:
    with pytest.raises(EngineStartError, match=reason) as failed:
        await start(FAKE_MLC_FAIL=how).start(AMPLE_S)
    assert failed.value.exit == ExitStatus(signal=number)


async def test_weights_that_are_damaged(start: Callable[..., Engine], weights: Path) -> None:
    shard = weights / "params_shard_0.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(EngineStartError, match=r"damaged: params_shard_0\.bin does not have"):
        await start().start(AMPLE_S)


async def test_weights_with_the_old_index(start: Callable[..., Engine], tmp_path: Path) -> None:
    old = write_model(tmp_path / "old", index="ndarray-cache.json")
    engine = start(model=old)
    assert [notice.reason for notice in engine.plan.warnings] == ["OldWeightsIndex"]
    with pytest.raises(EngineStartError, match=r"ndarray-cache\.json is its old name"):
        await engine.start(AMPLE_S)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ({"jitPolicy": "OFF"}, 'jitPolicy "OFF" forbids'),
        ({"jitPolicy": "READONLY"}, "no library in the compile cache"),
        ({"overrides": {"raw": "max_foo=1"}}, "overrides: this mlc_llm does not know max_foo=1"),
        ({"extraArgs": ["--bogus"]}, "this mlc_llm does not know the argument --bogus"),
        ({"extraArgs": ["--device", "cuda:0"]}, "MLC finds no device cuda:0"),
        ({"env": {"MLC_JIT_POLICY": "off"}}, "Invalid MLC_JIT_POLICY"),
        ({"env": {"FAKE_MLC_COMPILE_FAILS": "1"}}, "could not compile the model"),
    ],
)
async def test_what_it_refuses(
    start: Callable[..., Engine], block: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EngineStartError, match=reason) as failed:
        await start(**block).start(AMPLE_S)
    assert failed.value.exit is not None and failed.value.exit.code in (1, 2)


async def test_a_taken_port(start: Callable[..., Engine]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EnginePortTaken, match=rf"port {port} of 127\.0\.0\.1 is taken"):
            await start(port=port).start(AMPLE_S)


async def test_another_engine_that_was_faster_to_the_port(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    first = start()
    await first.start(AMPLE_S)
    other = start(model=write_model(tmp_path / "other"), port=first.plan.port, FAKE_MLC_LOAD_S=60)
    # While it still loads, the first one answers for it.
    with pytest.raises(EnginePortTaken, match=f"another program answers on port {other.plan.port}"):
        await other.start(AMPLE_S)
    await first.check()


async def test_compiling_is_paid_once(start: Callable[..., Engine]) -> None:
    first = start()
    await first.start(AMPLE_S)
    assert any("Compiling using commands" in line for line in first.log.tail(50))
    await first.stop()
    again = start(jitPolicy="READONLY")
    await again.start(AMPLE_S)
    home = Path(again.plan.env["MLC_LLM_HOME"])
    assert len(os.listdir(home / "model_lib")) == 1
    assert os.listdir(again.plan.env["MLC_TEMP_DIR"]) == []


async def test_a_start_that_is_given_up_leaves_no_compiler(start: Callable[..., Engine]) -> None:
    engine = start(FAKE_MLC_COMPILE_S=600)
    starting = asyncio.create_task(engine.start(AMPLE_S))
    await eventually(lambda: any("Compiling" in line for line in engine.log.tail()))
    assert engine.pid is not None
    (compiler,) = await eventually(lambda: psutil.Process(engine.pid).children())
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert not alive(compiler.pid)
    assert find(engine.launch_id) == []


async def test_a_stop_while_it_loads(start: Callable[..., Engine]) -> None:
    engine = start(FAKE_MLC_LOAD_S=600)
    starting = asyncio.create_task(engine.start(AMPLE_S))
    await eventually(lambda: any("Estimated total" in line for line in engine.log.tail()))
    await engine.stop()
    assert engine.exited.result() == ExitStatus(signal=signal.SIGTERM)
    await asyncio.gather(starting, return_exceptions=True)


@pytest.mark.parametrize("stubborn", ["", "1"])
async def test_workers_of_other_shards_never_stay(
    start: Callable[..., Engine], stubborn: str
) -> None:
    overrides = {"tensorParallelShards": 3}
    for way in (signal.SIGKILL, None):
        engine = start(overrides=overrides, FAKE_MLC_STUBBORN_WORKERS=stubborn)
        await engine.start(AMPLE_S)
        assert engine.pid is not None
        workers = [child.pid for child in psutil.Process(engine.pid).children()]
        assert len(workers) == 2
        if way is None:
            await engine.stop()
        else:
            os.kill(engine.pid, way)
            await engine.exited
            await eventually(lambda engine=engine: not find(engine.launch_id))
        assert not any(map(alive, workers))


async def test_a_stop_does_not_wait_for_ever(start: Callable[..., Engine]) -> None:
    engine = start(FAKE_MLC_TOKENS_PER_S=20)
    await engine.start(AMPLE_S)
    streaming = asyncio.create_task(chat(engine, max_tokens=1_000_000))
    await eventually(lambda: any("Uvicorn" in line for line in engine.log.tail()))
    async with aiohttp.ClientSession() as client, client.get(f"{engine.url}/metrics") as response:
        assert response.status == 200
    await engine.stop(grace_s=0.3)
    assert engine.exited.result() == ExitStatus(signal=signal.SIGKILL)
    await asyncio.gather(streaming, return_exceptions=True)


async def test_a_dead_engine_thread_is_noticed(start: Callable[..., Engine]) -> None:
    engine = start(FAKE_MLC_DIE_AFTER=2)
    await engine.start(AMPLE_S)
    await engine.check()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await chat(engine)
    async with aiohttp.ClientSession() as client, client.get(f"{engine.url}/v1/models") as response:
        assert response.status == 200
    with pytest.raises(EngineUnresponsive, match="no answer within"):
        await engine.check(timeout_s=0.5)


async def test_a_crash_under_a_request_is_seen(start: Callable[..., Engine]) -> None:
    engine = start(FAKE_MLC_CRASH_AFTER=2)
    await engine.start(AMPLE_S)
    with pytest.raises(aiohttp.ClientError):
        await chat(engine)
    assert await engine.exited == ExitStatus(signal=signal.SIGSEGV)
    with pytest.raises(EngineExited):
        await engine.check()
