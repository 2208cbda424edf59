"""The real vLLM through the whole of `flexinfer up`: from a manifest to an answer and to zero."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from up_process import Up, wait_for

from flexinfer.engines.executables import interpreter_of

VLLM = os.environ.get("FLEXINFER_TEST_VLLM", "")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    # Before any fixture: without vLLM there is no need for Ray.
    pytest.mark.skipif(not VLLM, reason="FLEXINFER_TEST_VLLM names no vllm"),
]

SCRIPT = Path(__file__).parents[1] / "fakes" / "tiny_llama.py"
START_S = 400


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = interpreter_of(Path(VLLM))
    assert python is not None
    folder: Path = tmp_path_factory.mktemp("weights") / "tiny-llama"
    subprocess.run([python, SCRIPT, folder], check=True, timeout=300)
    return folder


def manifest(weights: Path, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "ai.flexinfer/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": "tiny-llama"},
        "spec": {
            "backend": "vllm",
            "model": str(weights),
            "minReplicas": 0,
            "coldStartTimeoutSeconds": START_S,
            "resources": {"limits": {"amd.com/gpu": "0"}},
            "vllm": {"maxModelLen": 512, "maxNumSeqs": 4, "enforceEager": True},
            **spec,
        },
    }


def of_vllm(up: Up) -> list[psutil.Process]:
    """Every process of vLLM in this run: the server, and those that call themselves otherwise."""
    found = []
    for process in up.processes():
        try:
            words = " ".join(process.cmdline())
            python = process.environ().get("VLLM_CACHE_ROOT")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if python or "VLLM::" in words:
            found.append(process)
    return found


def test_answers_then_scales_to_zero_and_leaves_nothing(up: Up, weights: Path) -> None:
    messages: Any = [{"role": "user", "content": "Say hi."}]
    client = openai.OpenAI(
        base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=START_S + 60
    )
    with up.serving(manifest(weights, idleTimeoutSeconds=5)), client:
        assert up.model("tiny-llama")["state"] == "zero"  # type: ignore[index]
        answer = client.chat.completions.create(
            model="tiny-llama", messages=messages, max_tokens=4, extra_body={"ignore_eos": True}
        )
        assert answer.model == "tiny-llama"
        assert answer.usage is not None and answer.usage.completion_tokens == 4
        pieces = list(
            client.chat.completions.create(
                model="tiny-llama",
                messages=messages,
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
        )
        assert {piece.model for piece in pieces} == {"tiny-llama"}
        assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens == 4
        with pytest.raises(openai.APIStatusError) as refused:
            client.embeddings.create(model="tiny-llama", input="a")
        assert refused.value.status_code == 404
        assert "model tiny-llama does not serve /v1/embeddings" in refused.value.message
        assert len(of_vllm(up)) >= 3  # the server, EngineCore, a worker

        up.wait_state("tiny-llama", "zero")
        wait_for(lambda: not of_vllm(up), lambda: f"nothing is left of vLLM: {of_vllm(up)}", 60)
