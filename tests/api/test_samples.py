"""The examples of the CRD reference are read as a reader of it expects; so are the samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexinfer.api import LlamaCppBlock, Manifests, MlcLlmBlock, read_manifests

SAMPLES = Path(__file__).parents[2] / "crds" / "samples"


def read(name: str) -> Manifests:
    return read_manifests([SAMPLES / name])


def reasons(manifests: Manifests) -> list[tuple[str, str]]:
    return [(found.resource.rpartition("/")[2], found.reason) for found in manifests.notices]


@pytest.mark.parametrize("path", sorted(SAMPLES.iterdir()), ids=lambda path: path.name)
def test_each_sample_stands_alone(path: Path) -> None:
    assert read_manifests([path]).models


def test_all_samples_stand_together() -> None:
    assert len(read_manifests([SAMPLES]).files) == len(list(SAMPLES.iterdir()))


def test_the_demo_runs_on_cpu_and_scales_to_zero() -> None:
    demo = read("smollm2.yaml")
    (model,) = demo.models
    assert demo.notices == ()
    assert model.names == ("smollm2", "SmolLM2-135M-Instruct")
    assert (model.spec.gpus, model.spec.effective_min_replicas) == (0, 0)
    assert isinstance(model.spec.block, LlamaCppBlock)


def test_the_compiled_model_on_a_chosen_node() -> None:
    manifests = read("qwen3-8b-abliterated.yaml")
    (model,), (cache,) = manifests.models, manifests.caches
    spec, block = model.spec, model.spec.block
    assert isinstance(block, MlcLlmBlock)
    assert model.metadata.namespace == cache.metadata.namespace == "flexinfer-system"
    assert model.metadata.labels["gpu-vendor"] == "amd"
    assert (spec.backend, spec.gpus, spec.replicas) == ("mlc-llm", 1, 1)
    assert spec.effective_min_replicas is None
    assert (block.mode, block.jit_policy, block.gpu_memory_bytes) == ("server", "OFF", 23 * 10**9)
    assert block.overrides.prefill_chunk_size == 512
    assert block.overrides.max_total_seq_length == 32768
    assert spec.resources.requests["memory"].value == 16 * 2**30
    assert spec.resources.limits["cpu"].value == 8
    assert spec.node_selector == {"kubernetes.io/hostname": "cblevins-5930k"}
    check = spec.health_check
    assert (check.initial_delay_seconds, check.period_seconds) == (120, 30)
    assert (check.timeout_seconds, check.failure_threshold) == (10, 3)
    assert cache.spec.strategy == "SharedPVC"
    assert cache.spec.existing_claim_name == "mlc-models-nfs"
    assert cache.model_path == spec.model
    assert cache.spec.storage_size is not None
    assert cache.spec.storage_size.value == 20 * 2**30
    assert reasons(manifests) == [("qwen3-8b-abliterated", "GPUMemoryBytesTranslated")]


def test_the_model_in_ram() -> None:
    manifests = read("qwen3-8b-ram.yaml")
    (model,), (cache,) = manifests.models, manifests.caches
    assert model.spec.model_cache_ref == cache.name == "qwen3-8b-ram"
    assert model.spec.effective_min_replicas == 0
    assert model.spec.block == MlcLlmBlock(mode="local")
    assert cache.spec.strategy == "Memory"
    assert cache.spec.parsed_source is not None
    assert cache.spec.parsed_source.path == "mlc-ai/Qwen3-8B-abliterated-q4f16_1-MLC"
    assert reasons(manifests) == [
        ("qwen3-8b-chat", "Qwen3Q4F16OnROCm"),
        ("qwen3-8b-chat", "JITInUse"),
    ]


def test_two_models_on_two_nodes() -> None:
    manifests = read("split-nodes.yaml")
    hosts = [model.spec.node_selector["kubernetes.io/hostname"] for model in manifests.models]
    assert hosts == ["cblevins-5930k", "cblevins-7900xtx"]
    assert [model.spec.gpus for model in manifests.models] == [1, 1]
    assert reasons(manifests) == [("qwen3-32b", "Qwen3Q4F16OnROCm"), ("qwen3-32b", "JITInUse")]


def test_the_long_context_on_any_amd_node() -> None:
    manifests = read("qwen2-5-7b-128k.yaml")
    (model,) = manifests.models
    block = model.spec.block
    assert isinstance(block, MlcLlmBlock)
    assert block.overrides.max_num_sequence == 2
    assert block.overrides.max_total_seq_length == 131072
    assert block.overrides.prefill_chunk_size == 2048
    assert block.overrides.gpu_memory_utilization == "0.85"
    assert model.spec.node_selector == {"flexinfer.ai/gpu.vendor": "AMD"}
    assert manifests.notices == ()


# Parts of the reference that are no manifest of their own, as a user would paste them into one.
FRAGMENTS = {
    "a node": "nodeSelector: {kubernetes.io/hostname: cblevins-5930k}",
    "any AMD node": "nodeSelector: {flexinfer.ai/gpu.vendor: AMD}",
    "compiled, no JIT": (
        "mlcllm:\n    modelLibPath: /models/Qwen3-8B-abliterated-q4f32_1-MLC/lib_rocm_gfx1100.so\n"
        '    jitPolicy: "OFF"'
    ),
    "interactive": "mlcllm: {mode: interactive}",
}


@pytest.mark.parametrize("fragment", FRAGMENTS.values(), ids=FRAGMENTS)
def test_fragments_of_the_reference(tmp_path: Path, fragment: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(
        "apiVersion: ai.flexinfer/v1alpha1\nkind: ModelDeployment\nmetadata: {name: m}\n"
        f"spec:\n  backend: mlc-llm\n  model: m\n  {fragment}\n"
    )
    assert len(read_manifests([path]).models) == 1
