"""The main job, for real: from a manifest to an answer, to zero, and back."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from up_process import Up, manifest, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.llama]


def events(response: httpx.Response) -> list[str]:
    return [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]


def client_of(up: Up, **more: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, **more)  # type: ignore[arg-type]


def test_answers_then_scales_to_zero_and_comes_back(up: Up) -> None:
    with up.serving(manifest("tiny", idleTimeoutSeconds=1)):
        assert up.model("tiny")["state"] == "zero"
        assert up.engines() == []

        answer = up.chat("tiny")
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "tiny"
        assert answer.json()["choices"][0]["message"]["content"]

        streamed = events(up.chat("tiny", stream=True))
        assert streamed[-1] == "[DONE]"
        assert json.loads(streamed[0])["object"] == "chat.completion.chunk"

        up.wait_state("tiny", "zero")
        up.wait_no_engine("tiny")
        assert "0" in up.run("get", "models").stdout

        assert up.chat("tiny").status_code == 200


def test_the_openai_client_works_unchanged(up: Up) -> None:
    document = manifest(
        "embedder",
        servedModelName="SmolLM2 135M",
        aliases=["gpt-4o-mini"],
        llamacpp={"embeddings": True, "pooling": "mean"},
    )
    with up.serving(manifest("talker"), document), client_of(up) as client:
        assert {"talker", "embedder", "SmolLM2 135M", "gpt-4o-mini"} <= {
            model.id for model in client.models.list()
        }
        assert client.models.retrieve("talker").owned_by == "flexinfer"

        messages = [{"role": "user", "content": "Say hi."}]
        chat = client.chat.completions.create(
            model="talker",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=4,
        )
        assert chat.choices[0].message.content and chat.model == "talker"
        pieces = list(
            client.chat.completions.create(  # type: ignore[call-overload]
                model="talker",
                messages=messages,
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert pieces[-1].usage.completion_tokens >= 1
        done = client.completions.create(model="talker", prompt="One, two,", max_tokens=4)
        assert done.choices[0].text
        vectors = client.embeddings.create(model="gpt-4o-mini", input=["a", "b"])
        assert len(vectors.data) == 2 and len(vectors.data[0].embedding) == 576

        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nobody", messages=messages)  # type: ignore[arg-type]
        with pytest.raises(openai.APIStatusError) as refused:
            client.embeddings.create(model="talker", input="a")
        assert refused.value.status_code == 501


def test_a_change_of_the_folder_reaches_only_what_it_names(up: Up) -> None:
    with up.serving(manifest("stays"), manifest("changes")):
        assert up.chat("stays").status_code == up.chat("changes").status_code == 200
        stays, changes = up.engine_pid("stays"), up.engine_pid("changes")

        up.write(manifest("changes", llamacpp={"contextSize": 1024}))
        wait_for(lambda: up.engine_pid("changes") != changes, "its engine is another one")
        assert up.chat("changes").status_code == 200
        assert up.engine_pid("stays") == stays

        broken = up.manifests / "broken.yaml"
        broken.write_text("apiVersion: ai.flexinfer/v1alpha1\nkind: ModelDeployment\n")
        wait_for(lambda: "broken.yaml" in up.output(), "its errors are printed")
        assert up.chat("stays").status_code == 200
        assert up.engine_pid("stays") == stays
        broken.unlink()


def test_ready_means_ready_whatever_the_initial_delay(up: Up) -> None:
    document = manifest("patient", fake={}, healthCheck={"initialDelaySeconds": 120})
    with up.serving(document):
        assert up.chat("patient").status_code == 200  # the client's own limit is 120 s
        assert up.model("patient")["activationSeconds"] < 100


def test_the_engine_sees_the_gpus_that_it_was_given(up: Up) -> None:
    def environment(name: str) -> dict[str, str]:
        import psutil

        return psutil.Process(up.engine_pid(name)).environ()

    one = {"limits": {"amd.com/gpu": "1"}}
    first = manifest("gpu-a", fake={}, resources=one)
    second = manifest("gpu-b", fake={}, resources=one)
    both = manifest("gpu-both", fake={}, resources={"limits": {"amd.com/gpu": "2"}})
    none = manifest("gpu-none", fake={})
    with up.serving(first, second, none):
        for name in ("gpu-a", "gpu-b", "gpu-none"):
            assert up.chat(name).status_code == 200
        masks = {name: environment(name) for name in ("gpu-a", "gpu-b", "gpu-none")}
    assert {masks["gpu-a"]["HIP_VISIBLE_DEVICES"], masks["gpu-b"]["HIP_VISIBLE_DEVICES"]} == {
        "0",
        "1",
    }
    assert masks["gpu-none"]["HIP_VISIBLE_DEVICES"] in ("", "-1")
    for environ in masks.values():
        for other in ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"):
            assert other not in environ
    with up.serving(both):
        assert up.chat("gpu-both").status_code == 200
        assert environment("gpu-both")["HIP_VISIBLE_DEVICES"] == "0,1"
