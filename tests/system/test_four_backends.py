"""All four backends on one GPU: each answers when it is asked, one engine at a time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from mlc_model import write_model
from up_process import MODEL_FILE, Up, wait_for

from flexinfer.engines.executables import interpreter_of
from flexinfer.engines.launcher import LAUNCH_ID

VLLM, OLLAMA = "FLEXINFER_TEST_VLLM", "FLEXINFER_TEST_OLLAMA"
HERE = Path(__file__).parent

pytestmark = [pytest.mark.ray, pytest.mark.llama, pytest.mark.vllm, pytest.mark.ollama]


def model(name: str, backend: str, weights: str, **more: Any) -> dict[str, Any]:
    """A ModelDeployment that says as little as a user would: one GPU, one engine at most."""
    return {
        "apiVersion": "ai.flexinfer/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name},
        "spec": {"backend": backend, "model": weights, "minReplicas": 0, **more},
    }


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    for variable in (VLLM, OLLAMA):
        if not os.environ.get(variable):
            pytest.skip(f"{variable} names no program")
    folder = tmp_path_factory.mktemp("four")
    python = interpreter_of(Path(os.environ[VLLM]))
    assert python is not None
    script = HERE.parent / "fakes" / "tiny_llama.py"
    subprocess.run([python, script, folder / "tiny-llama"], check=True, timeout=300)
    write_model(folder / "tiny-mlc")
    running = Up(
        folder,
        "--num-gpus",
        "1",
        env={
            "FLEXINFER_VLLM": os.environ[VLLM],
            "FLEXINFER_OLLAMA": os.environ[OLLAMA],
            "FLEXINFER_OLLAMA_STORE": str(folder / "ollama"),
        },
    )
    for document in (
        model("by-llama-cpp", "llama-cpp", MODEL_FILE, llamacpp={"contextSize": 1024}),
        model("by-mlc", "mlc-llm", str(folder / "tiny-mlc")),
        model("by-ollama", "ollama", MODEL_FILE, ollama={"contextLength": 1024}),
        model(
            "by-vllm",
            "vllm",
            str(folder / "tiny-llama"),
            vllm={"maxModelLen": 256, "enforceEager": True, "dtype": "float32"},
        ),
    ):
        running.write(document)
    try:
        yield running.start()
    finally:
        running.close()


class Watch:
    """Looks again and again which starts of engines have a living process."""

    def __init__(self, up: Up) -> None:
        self._up = up
        # Ray itself runs under a launcher too, and is no engine.
        self._ray = self._starts()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.most = 0
        self.looks = 0

    def _starts(self) -> set[str]:
        found = set()
        for process in self._up.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                found.add(process.environ().get(LAUNCH_ID, ""))
        return found - {""}

    def _run(self) -> None:
        while not self._end.wait(0.3):
            self.most = max(self.most, len(self._starts() - self._ray))
            self.looks += 1

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(30)


def test_each_answers_when_asked_and_one_is_there_at_a_time(one_gpu: Up) -> None:
    names = ["by-llama-cpp", "by-mlc", "by-ollama", "by-vllm"]
    for name in names:
        one_gpu.wait_known(name)
    client = openai.OpenAI(base_url=f"{one_gpu.url}/v1", api_key="none", max_retries=0, timeout=240)
    with client, Watch(one_gpu) as watch:
        assert {listed.id for listed in client.models.list()} == set(names)
        for name in [*names, names[0]]:
            answer = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "Say hi."}], max_tokens=4
            )
            assert answer.model == name
            assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 4, name
            pieces = list(
                client.chat.completions.create(
                    model=name,
                    messages=[{"role": "user", "content": "Say hi."}],
                    max_tokens=4,
                    stream=True,
                )
            )
            assert {piece.model for piece in pieces} == {name}
            assert any(choice.finish_reason for piece in pieces for choice in piece.choices)
            states = {other: (one_gpu.model(other) or {})["state"] for other in names}
            assert [other for other in names if states[other] == "serving"] == [name]
        wait_for(lambda: watch.looks > 10, "the watch has looked")
    assert watch.most == 1
