"""The engine blocks: YAML names, documented fields, and the values they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from flexinfer.api import (
    LlamaCppBlock,
    MlcLlmBlock,
    ModelCache,
    ModelDeployment,
    OllamaBlock,
    VllmBlock,
)
from flexinfer.api.base import ApiModel, wire_name
from flexinfer.api.blocks import BLOCK_NAMES, BLOCK_TYPES, Backend


def fields_below(model: type[ApiModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        yield f"{model.__name__}.{name}", info
        for part in (info.annotation, *get_args(info.annotation)):
            if isinstance(part, type) and issubclass(part, ApiModel):
                yield from fields_below(part)


ALL_FIELDS = dict([*fields_below(ModelDeployment), *fields_below(ModelCache)])


@pytest.mark.parametrize("name", ALL_FIELDS)
def test_every_field_is_described(name: str) -> None:
    description = ALL_FIELDS[name].description
    assert description
    assert description.rstrip("`").endswith(".")


@pytest.mark.parametrize(
    "name", [name for name, info in ALL_FIELDS.items() if info.default is None]
)
def test_every_field_that_may_be_absent_says_what_that_means(name: str) -> None:
    description = ALL_FIELDS[name].description or ""
    documented = ("Absent", "Set by", "ignored when read")
    assert any(word in description for word in documented), description


def test_each_backend_has_a_block() -> None:
    assert set(BLOCK_NAMES) == set(BLOCK_TYPES) == set(get_args(Backend))
    assert set(BLOCK_NAMES.values()) < set(ALL_FIELDS_OF_SPEC)


ALL_FIELDS_OF_SPEC = [name.partition(".")[2] for name in ALL_FIELDS if "Spec." in name]


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("n_gpu_layers", "nGPULayers"),
        ("main_gpu", "mainGPU"),
        ("n_cpu_moe", "nCPUMoE"),
        ("cpu_offload_gb", "cpuOffloadGB"),
        ("cache_type_k", "cacheTypeK"),
        ("model_lib_path", "modelLibPath"),
        ("gpu_memory_bytes", "gpuMemoryBytes"),
        ("max_total_seq_length", "maxTotalSeqLength"),
        ("kv_cache_dtype", "kvCacheDtype"),
        ("enable_lora", "enableLora"),
    ],
)
def test_yaml_names(attribute: str, name: str) -> None:
    assert wire_name(attribute) == name


@pytest.mark.parametrize("layers", [0, 33, "all", "auto"])
def test_gpu_layers(layers: int | str) -> None:
    assert LlamaCppBlock.model_validate({"nGPULayers": layers}).n_gpu_layers == layers


GOOD: list[tuple[type[ApiModel], dict[str, Any]]] = [
    (LlamaCppBlock, {"flashAttention": "on", "cacheTypeK": "q8_0", "extraArgs": ["--no-warmup"]}),
    (LlamaCppBlock, {"embeddings": True, "pooling": "mean", "ropeFreqBase": 1000000}),
    (LlamaCppBlock, {"draftModel": "draft.gguf", "draftMin": 1, "draftMax": 4}),
    (LlamaCppBlock, {"reasoningBudget": -1, "loadMode": "mmap+mlock", "tensorSplit": "3,1"}),
    (LlamaCppBlock, {"chatTemplate": "{{ a }}\n{{ b }}"}),
    (VllmBlock, {"gpuMemoryUtilization": "0.9", "kvCacheMemoryBytes": "4Gi", "cpuOffloadGB": 4}),
    (VllmBlock, {"enableLora": True, "loraModules": ["a=/models/a"]}),
    (VllmBlock, {"enableAutoToolChoice": True, "toolCallParser": "hermes"}),
    (
        MlcLlmBlock,
        {"speculativeMode": "small_draft", "additionalModels": ["/models/d,/models/d.so"]},
    ),
    (MlcLlmBlock, {"overrides": {"raw": "opt=O3", "contextWindowSize": 32768}}),
    (MlcLlmBlock, {"embeddingModel": "e", "embeddingModelLib": "e.so"}),
    (OllamaBlock, {"parameters": {"temperature": "0.7"}, "gpuOverhead": "1Gi"}),
    (OllamaBlock, {"modelfile": "SYSTEM be short\nTEMPLATE x"}),
]


@pytest.mark.parametrize(("block", "given"), GOOD)
def test_good_settings(block: type[ApiModel], given: dict[str, Any]) -> None:
    read = block.model_validate(given, by_alias=True, by_name=False)
    dumped = read.model_dump(by_alias=True, exclude_none=True)
    assert dumped.items() >= {k: v for k, v in given.items() if k != "overrides"}.items()


BAD: list[tuple[type[ApiModel], dict[str, Any], str]] = [
    (LlamaCppBlock, {"nGPULayers": "99"}, "nGPULayers"),
    (LlamaCppBlock, {"nGPULayers": -1}, "nGPULayers"),
    (LlamaCppBlock, {"nGpuLayers": 1}, "nGpuLayers"),
    (LlamaCppBlock, {"flashAttention": True}, "flashAttention"),
    (LlamaCppBlock, {"contextSize": "4096"}, "contextSize"),
    (LlamaCppBlock, {"parallel": 0}, "parallel"),
    (LlamaCppBlock, {"ropeFreqBase": 0}, "ropeFreqBase"),
    (LlamaCppBlock, {"ropeFreqBase": float("inf")}, "ropeFreqBase"),
    (LlamaCppBlock, {"chatTemplate": "a", "chatTemplateFile": "b"}, "chatTemplateFile"),
    (LlamaCppBlock, {"draftMax": 4}, "draftMax"),
    (LlamaCppBlock, {"draftModel": "d", "draftMin": 5, "draftMax": 4}, "draftMin"),
    (LlamaCppBlock, {"mmproj": "../x"}, "mmproj"),
    (LlamaCppBlock, {"extraArgs": "--x"}, "extraArgs"),
    (LlamaCppBlock, {"extraArgs": [4096]}, "extraArgs"),
    (LlamaCppBlock, {"env": {"A=B": "c"}}, "env"),
    (LlamaCppBlock, {"env": {"": "c"}}, "env"),
    (LlamaCppBlock, {"env": {"A": 1}}, "env"),
    (LlamaCppBlock, {"env": {"A": "a\0b"}}, "env"),
    (VllmBlock, {"gpuMemoryUtilization": 0.85}, "gpuMemoryUtilization"),
    (VllmBlock, {"gpuMemoryUtilization": "85%"}, "gpuMemoryUtilization"),
    (VllmBlock, {"gpuMemoryUtilization": "0"}, "gpuMemoryUtilization"),
    (VllmBlock, {"gpuMemoryUtilization": "1.1"}, "gpuMemoryUtilization"),
    (VllmBlock, {"swapSpace": 4}, "swapSpace"),
    (VllmBlock, {"loraModules": ["a=b"]}, "loraModules"),
    (VllmBlock, {"enableAutoToolChoice": True}, "enableAutoToolChoice"),
    (VllmBlock, {"cpuOffloadGB": -1}, "cpuOffloadGB"),
    (MlcLlmBlock, {"mode": "fast"}, "mode"),
    (MlcLlmBlock, {"jitPolicy": False}, "jitPolicy"),
    (MlcLlmBlock, {"gpuMemoryBytes": "23000000000"}, "gpuMemoryBytes"),
    (MlcLlmBlock, {"gpuMemoryBytes": 0}, "gpuMemoryBytes"),
    (MlcLlmBlock, {"overrides": {"maxNumSequence": "2"}}, "overrides"),
    (MlcLlmBlock, {"modelLibPath": "/models/../etc/x.so"}, "modelLibPath"),
    (MlcLlmBlock, {"embeddingModel": "e"}, "embeddingModel"),
    (MlcLlmBlock, {"embeddingModelLib": "e"}, "embeddingModelLib"),
    (OllamaBlock, {"extraArgs": []}, "extraArgs"),
    (OllamaBlock, {"keepAlive": "5m"}, "keepAlive"),
    (OllamaBlock, {"parameters": {"temperature": 0.7}}, "parameters"),
    (OllamaBlock, {"gpuOverhead": "1GB"}, "gpuOverhead"),
]


@pytest.mark.parametrize(("block", "given", "field"), BAD)
def test_bad_settings(block: type[ApiModel], given: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        block.model_validate(given, by_alias=True, by_name=False)
    assert {line["loc"][0] for line in caught.value.errors()} == {field}
