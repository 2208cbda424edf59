"""Warnings come back as data, and only where they are due."""

from __future__ import annotations

from typing import Any

import pytest

from flexinfer.api import ModelCache, ModelDeployment, Notice, notices_for


def model(name: str = "m", **spec: Any) -> ModelDeployment:
    given = {"backend": "llama-cpp", "model": "weights.gguf", **spec}
    return ModelDeployment.model_validate({"metadata": {"name": name}, "spec": given})


def cache(name: str, **spec: Any) -> ModelCache:
    given = {"source": "HF://org/repo", **spec}
    return ModelCache.model_validate({"metadata": {"name": name}, "spec": given})


def mlc(weights: str = "Llama-q4f16_1-MLC", **block: Any) -> ModelDeployment:
    return model(backend="mlc-llm", model=weights, mlcllm=block)


def reasons(*models: ModelDeployment, gpus: int | None = None, **kwargs: Any) -> list[str]:
    found = notices_for(models, kwargs.get("caches", ()), gpus=gpus)
    return [notice.reason for notice in found]


def gpus(count: int) -> dict[str, Any]:
    return {"limits": {"amd.com/gpu": str(count)}}


def test_nothing_to_say() -> None:
    assert reasons(model()) == []
    assert reasons(mlc(modelLibPath="/models/lib.so", jitPolicy="OFF")) == []


@pytest.mark.parametrize(
    ("weights", "resources", "due"),
    [
        ("Qwen3-8B-q4f16_1-MLC", {}, True),
        ("org/qwen3-32b-Q4F16_0", {}, True),
        ("Qwen3-8B-q4f32_1-MLC", {}, False),
        ("Qwen2.5-7B-q4f16_1-MLC", {}, False),
        ("Qwen3-8B-q4f16_1-MLC", {"limits": {"nvidia.com/gpu": "1"}}, False),
        ("Qwen3-8B-q4f16_1-MLC", {"limits": {"amd.com/gpu": "0"}}, False),
    ],
)
def test_qwen3_in_q4f16(weights: str, resources: dict[str, Any], due: bool) -> None:
    one = model(
        backend="mlc-llm", model=weights, resources=resources, mlcllm={"modelLibPath": "l.so"}
    )
    assert reasons(one) == (["Qwen3Q4F16OnROCm"] if due else [])


def test_qwen3_in_q4f16_by_the_source_of_its_cache() -> None:
    one = model(backend="mlc-llm", model="chat", modelCacheRef="c", mlcllm={"modelLibPath": "l.so"})
    source = cache("c", source="HF://mlc-ai/Qwen3-8B-q4f16_1-MLC")
    assert reasons(one, caches=[source]) == ["Qwen3Q4F16OnROCm"]


def test_other_backends_do_not_care() -> None:
    assert reasons(model(backend="vllm", model="Qwen3-8B-q4f16_1")) == []


@pytest.mark.parametrize(
    ("block", "due"),
    [
        ({}, ["JITInUse"]),
        ({"jitPolicy": "ON"}, ["JITInUse"]),
        ({"jitPolicy": "REDO"}, ["JITInUse"]),
        ({"jitPolicy": "READONLY"}, []),
        ({"jitPolicy": "OFF"}, ["JITOffWithoutLibrary"]),
        ({"modelLibPath": "l.so"}, []),
        ({"modelLibPath": "l.so", "jitPolicy": "OFF"}, []),
        ({"modelLibPath": "l.so", "jitPolicy": "REDO"}, ["JITPolicyUnused"]),
    ],
)
def test_jit(block: dict[str, Any], due: list[str]) -> None:
    assert reasons(mlc(**block)) == due


def test_gpu_memory_bytes() -> None:
    (notice,) = notices_for([mlc(modelLibPath="l.so", gpuMemoryBytes=23_000_000_000)], [])
    assert notice.reason == "GPUMemoryBytesTranslated"
    assert notice.field == "spec.mlcllm.gpuMemoryBytes"
    assert notice.resource == "ModelDeployment/default/m"
    both = mlc(modelLibPath="l.so", gpuMemoryBytes=1, overrides={"gpuMemoryUtilization": "0.8"})
    assert "used instead" in notices_for([both], [])[0].message


def test_a_cache_that_is_not_there() -> None:
    one = model(modelCacheRef="c")
    assert reasons(one) == ["ModelCacheNotFound"]
    assert reasons(one, caches=[cache("c")]) == []
    other = ModelCache.model_validate(
        {"metadata": {"name": "c", "namespace": "else"}, "spec": {"source": "HF://a/b"}}
    )
    assert reasons(one, caches=[other]) == ["ModelCacheNotFound"]


def test_more_gpus_than_there_are() -> None:
    assert reasons(model(resources=gpus(3)), gpus=2) == ["NotEnoughGPUs"]
    assert reasons(model(resources=gpus(2)), gpus=2) == []
    assert reasons(model(), gpus=0) == ["NotEnoughGPUs"]
    assert reasons(model(resources=gpus(0)), gpus=0) == []
    assert reasons(model(resources=gpus(3)), gpus=None) == []
    assert reasons(model(resources=gpus(3), replicas=0), gpus=2) == []


@pytest.mark.parametrize(
    ("models", "total", "starved"),
    [
        # One GPU, held for ever.
        ([("a", {"minReplicas": 1}), ("b", {})], 1, ["b"]),
        ([("a", {"minReplicas": 1}), ("b", {"minReplicas": 0})], 1, ["b"]),
        # Room for both.
        ([("a", {"minReplicas": 1}), ("b", {})], 2, []),
        # A model of higher priority evicts the holder.
        ([("a", {"minReplicas": 1}), ("b", {"priority": 200})], 1, []),
        ([("a", {"minReplicas": 1, "priority": 50}), ("b", {})], 1, []),
        # Who only stays while nobody waits starves nobody.
        ([("a", {}), ("b", {})], 1, []),
        ([("a", {"minReplicas": 0}), ("b", {})], 1, []),
        # Two that both want to stay: the first read, or the one of higher priority, gets it.
        ([("a", {"minReplicas": 1}), ("b", {"minReplicas": 1})], 1, ["b"]),
        ([("a", {"minReplicas": 1}), ("b", {"minReplicas": 1, "priority": 200})], 1, ["a"]),
        # Several replicas, several GPUs.
        ([("a", {"minReplicas": 2, "replicas": 2}), ("b", {})], 2, ["b"]),
        ([("a", {"minReplicas": 1}), ("b", {"resources": gpus(2)})], 2, ["b"]),
        # Parked, on CPU, or impossible itself: holds nothing.
        ([("a", {"minReplicas": 1, "replicas": 0}), ("b", {})], 1, []),
        ([("a", {"minReplicas": 1, "resources": gpus(0)}), ("b", {})], 1, []),
    ],
)
def test_models_that_never_run(
    models: list[tuple[str, dict[str, Any]]], total: int, starved: list[str]
) -> None:
    found = notices_for([model(name, **spec) for name, spec in models], [], gpus=total)
    assert [notice.reason for notice in found] == ["NeverRuns"] * len(starved)
    assert [notice.resource.rpartition("/")[2] for notice in found] == starved


def test_it_names_who_holds_the_gpus() -> None:
    (notice,) = notices_for([model("a", minReplicas=1), model("b")], [], gpus=1)
    assert "needs 1 of 1 GPUs, and a with minReplicas >= 1" in notice.message


def test_a_notice_reads_as_one_line() -> None:
    notice = Notice("JITInUse", "it compiles", "ModelDeployment/default/m", "spec.mlcllm")
    assert str(notice) == "ModelDeployment/default/m: spec.mlcllm: it compiles (JITInUse)"
