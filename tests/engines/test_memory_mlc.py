"""MLC-LLM: its own estimate, which is reproduced, and what it really uses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexinfer.api.blocks import MlcLlmBlock, MlcOverrides
from flexinfer.engines.memory import MemoryPlan, MemoryPlanError, judge, plan_memory
from flexinfer.engines.memory.common import RUNTIME_BYTES
from flexinfer.engines.memory.mlc import capacity, estimated_temp
from flexinfer.engines.memory.mlc_files import Model, library_temp, read_model
from flexinfer.engines.spec import EngineSpec
from tests.engines.memory_models import (
    LLAMA3_8B,
    QWEN3_8B,
    QWEN3_32B,
    QWEN25_7B,
    TINY,
    XTX,
    Shape,
    mlc_model,
)

GIB = 2**30


def spec(gpus: int = 1, **block: Any) -> EngineSpec:
    return EngineSpec("m", "default", "mlc-llm", MlcLlmBlock(**block), gpus=gpus)


def overrides(**values: Any) -> MlcOverrides:
    return MlcOverrides(**values)


def planned(directory: Path, *, gpus: int = 1, vram: int | None = XTX, **block: Any) -> MemoryPlan:
    return plan_memory(spec(gpus, **block), directory, vram_bytes=vram)


def model(shape: Shape, quantization: str = "q4f16_1") -> Model:
    return Model(
        params=0,
        outside=0,
        layers_whole=0,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        vocab=151936,
        window=shape.context,
        chunk=2048,
        batch=128,
        shards=1,
        stages=1,
        type_bytes=4 if "f32" in quantization else 2,
        quantization=quantization,
    )


# What config.cc infers on a 7900 XTX, for nominal numbers of parameters and no temporaries.
@pytest.mark.parametrize(
    ("shape", "parameters", "bits", "sequences", "tokens"),
    [
        (QWEN3_8B, 8.19e9, 4.5, 4, 116284),
        (QWEN3_8B, 8.19e9, 4.5, 1, 116334),
        (QWEN3_8B, 8.19e9, 4.5, 128, 114217),
        (QWEN3_8B, 8.19e9, 5.0, 4, 112813),
        (QWEN25_7B, 7.62e9, 4.5, 4, 304824),
        (QWEN25_7B, 7.62e9, 5.0, 4, 296520),
        (QWEN3_32B, 32.76e9, 4.5, 4, 12430),
        (QWEN3_32B, 32.76e9, 4.5, 1, 12459),
        (QWEN3_32B, 32.76e9, 4.5, 128, 11264),
    ],
)
def test_mlcs_own_estimate(
    shape: Shape, parameters: float, bits: float, sequences: int, tokens: int
) -> None:
    found = capacity(
        model(shape), parameters * bits / 8, XTX * 0.85, chunk=2048, sequences=sequences, temp=0
    )
    assert found == tokens


@pytest.mark.parametrize(
    ("shape", "quantization", "bits"),
    [(QWEN3_8B, "q4f16_1", 4.5), (QWEN3_8B, "q4f32_1", 5.0), (QWEN3_32B, "q4f16_1", 4.5)],
)
def test_weights_have_so_many_bits(
    tmp_path: Path, shape: Shape, quantization: str, bits: float
) -> None:
    found = read_model(mlc_model(tmp_path / "m", shape, quantization))
    assert found.params / shape.parameters * 8 == pytest.approx(bits, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "quantization", "size"),
    [
        (QWEN25_7B, "q4f16_1", 57344),
        (QWEN25_7B, "q4f32_1", 114688),
        (QWEN3_8B, "q4f16_1", 147456),
        (QWEN3_8B, "q4f32_1", 294912),
        (QWEN3_32B, "q4f16_1", 262144),
    ],
)
def test_a_token_in_the_cache(tmp_path: Path, shape: Shape, quantization: str, size: int) -> None:
    plan = planned(mlc_model(tmp_path / "m", shape, quantization))
    assert plan.kv_bytes_per_token == size


def test_the_long_context_of_the_reference(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", QWEN25_7B, "q4f32_1")
    plan = planned(
        directory,
        mode="server",
        overrides=overrides(max_num_sequence=2, max_total_seq_length=131072),
    )
    # A page of 16 tokens beside 131072 x 114688 bytes.
    assert plan.kv_bytes == 131072 * 114688 + 16 * 114688
    assert plan.sequences == 2
    assert judge(plan, [XTX], XTX).fits is True


def test_figures_of_the_reference_for_the_32b_model(tmp_path: Path) -> None:
    plan = planned(mlc_model(tmp_path / "m", QWEN3_32B, "q4f16_1"), mode="local")
    assert plan.cache_tokens == 8192
    assert plan.needed_bytes / 1e9 == pytest.approx(22, abs=1)


def test_the_8b_model_at_32k_needs_more_than_the_reference_says(tmp_path: Path) -> None:
    """The reference's 12 GB are right for a KV cache of two bytes; that of q4f32_1 has four."""
    total = overrides(max_total_seq_length=32768)
    directory = mlc_model(tmp_path / "f32", QWEN3_8B, "q4f32_1")
    plan = planned(directory, mode="server", overrides=total)
    assert plan.kv_bytes == pytest.approx(32768 * 294912, rel=1e-3)
    assert plan.needed_bytes / 1e9 == pytest.approx(16, abs=1)
    halved = (plan.needed_bytes - plan.kv_bytes / 2) / 1e9
    assert halved == pytest.approx(12, abs=1)


def test_modes(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", QWEN3_8B, "q4f16_1")
    local, interactive, server = (
        planned(directory, mode=mode) for mode in ("local", "interactive", "server")
    )
    assert (local.sequences, local.cache_tokens) == (4, 8192)
    assert (interactive.sequences, interactive.cache_tokens) == (1, 40960)
    assert server.sequences == 128
    # All that fits, less than without the temporaries that the table above leaves out.
    assert 110_000 < server.cache_tokens < 114_217
    assert server.needed_bytes <= XTX * 0.85 + RUNTIME_BYTES + (4 << 20)  # and a page


def test_fp32_in_server_mode_overshoots_and_says_so(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", QWEN3_8B, "q4f32_1")
    plan = planned(directory, mode="server")
    # It overshoots by the whole cache that MLC believes in.
    assert plan.needed_bytes - XTX * 0.85 == pytest.approx(plan.kv_bytes / 2, rel=0.05)
    assert any("set maxTotalSeqLength" in note for note in plan.notes)
    verdict = judge(plan, [XTX - GIB // 2], XTX)
    assert verdict.fits is False
    assert verdict.proposals[0].settings[0][0] == "spec.mlcllm.overrides.maxTotalSeqLength"
    safe = planned(directory, mode="server", overrides=overrides(max_total_seq_length=32768))
    assert not any("maxTotalSeqLength" in note for note in safe.notes)


def test_total_is_not_clamped(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", QWEN3_32B, "q4f16_1")
    plan = planned(directory, overrides=overrides(max_total_seq_length=32768))
    assert plan.cache_tokens == 32768
    assert judge(plan, [XTX], XTX).fits is False


def test_mlc_refuses_weights_that_leave_no_room(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", QWEN3_32B, "q4f16_1")
    given = overrides(max_total_seq_length=4096, gpu_memory_utilization="0.70")
    plan = planned(directory, overrides=given)
    assert plan.refusal is not None and "no room" in plan.refusal
    verdict = judge(plan, [XTX], XTX)
    assert verdict.fits is False
    assert [proposal.settings[0][0] for proposal in verdict.proposals] == [
        "spec.mlcllm.overrides.gpuMemoryUtilization"
    ]


def test_bytes_are_a_share_of_the_memory(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", QWEN3_8B, "q4f16_1")
    in_bytes = planned(directory, mode="server", gpu_memory_bytes=23_000_000_000)
    share = overrides(gpu_memory_utilization="0.8931")
    as_share = planned(directory, mode="server", overrides=share)
    assert in_bytes.cache_tokens == pytest.approx(as_share.cache_tokens, rel=1e-3)
    # The field goes before the bytes, as in the engine's plan.
    both = planned(directory, mode="server", gpu_memory_bytes=1 << 30, overrides=share)
    assert both.cache_tokens == as_share.cache_tokens


def test_bytes_are_enough_where_the_gpu_is_not_known(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", QWEN3_8B, "q4f16_1")
    assert planned(directory, vram=None).cache_tokens == 8192
    with pytest.raises(MemoryPlanError, match="memory is not known"):
        planned(directory, vram=None, mode="server")
    known = planned(directory, vram=None, mode="server", gpu_memory_bytes=23_000_000_000)
    assert known.cache_tokens > 100_000


def test_overrides_in_mlcs_own_words(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", QWEN3_8B, "q4f16_1")
    raw = overrides(max_total_seq_length=1024, raw="max_total_seq_length=4096;max_num_sequence=2")
    plan = planned(directory, overrides=raw)
    assert (plan.cache_tokens, plan.sequences) == (4096, 2)
    with pytest.raises(MemoryPlanError, match="max_num_sequence"):
        planned(directory, overrides=overrides(raw="max_num_sequence=many"))


def test_tensor_parallel_shards(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", QWEN3_8B, "q4f16_1")
    one = planned(directory)
    two = planned(directory, gpus=2, overrides=overrides(tensor_parallel_shards=2))
    assert len(two.per_gpu) == 2
    assert two.per_gpu[0].kv == one.per_gpu[0].kv // 2
    # Embedding and head are on both.
    outside = 2 * 151936 * 4096 * 4.5 / 8
    assert two.per_gpu[0].weights == pytest.approx(
        (one.per_gpu[0].weights - outside) / 2 + outside, rel=1e-3
    )
    assert two.kv_bytes_per_token == one.kv_bytes_per_token
    lacking = planned(directory, gpus=1, overrides=overrides(tensor_parallel_shards=2))
    assert lacking.refusal is not None and "2 GPUs" in lacking.refusal
    with pytest.raises(MemoryPlanError, match="divided among 16"):
        planned(directory, gpus=16, overrides=overrides(tensor_parallel_shards=16))


def test_a_model_that_mlc_compiles_is_spread_over_its_gpus(tmp_path: Path) -> None:
    one = mlc_model(tmp_path / "one", QWEN3_8B, "q4f16_1")
    assert len(planned(one, gpus=2).per_gpu) == 2
    staged = planned(one, gpus=4, overrides=overrides(pipeline_parallel_stages=2))
    assert len(staged.per_gpu) == 4
    two = mlc_model(tmp_path / "two", QWEN3_8B, "q4f16_1", tensor_parallel_shards=2)
    alone = planned(two, gpus=1)
    assert len(alone.per_gpu) == 1
    assert alone.refusal is None


def test_shards_come_from_the_library_where_there_is_one(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", QWEN3_8B, "q4f16_1", tensor_parallel_shards=2)
    library = tmp_path / "lib.so"
    library.write_bytes(b"\x7fELF")
    plan = planned(
        directory,
        gpus=2,
        model_lib_path=str(library),
        overrides=overrides(tensor_parallel_shards=1),
    )
    assert len(plan.per_gpu) == 2


def test_pipeline_stages(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", QWEN3_8B, "q4f16_1")
    one = planned(directory)
    two = planned(directory, gpus=2, overrides=overrides(pipeline_parallel_stages=2))
    assert two.per_gpu[0].kv == one.per_gpu[0].kv // 2
    assert two.per_gpu[0].weights < one.per_gpu[0].weights


def test_temporaries_are_read_from_the_library(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    usage = {"batch_prefill": 300_000_000, "batch_decode": 1_000_000}
    metadata = json.dumps({"model_type": "qwen3", "memory_usage": usage}).encode()
    library.write_bytes(b"\x7fELF" + bytes(4096) + metadata + bytes(4096))
    assert library_temp(library) == 600_000_000
    directory = mlc_model(tmp_path / "m", QWEN3_8B, "q4f16_1")
    read = planned(directory, model_lib_path=str(library))
    assert not any("estimate" in note for note in read.notes)
    estimated = planned(directory)
    difference = read.needed_bytes - estimated.needed_bytes
    assert difference == 600_000_000 - estimated_temp(model(QWEN3_8B))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'"memory_usage":',
        b'"memory_usage": {"f": -1}',
        b'"memory_usage": {"f": 1e400}',
        b'"memory_usage": {"f": "much"}',
        b'"memory_usage": [1]',
        b'"memory_usage": ' + b"[" * 100_000,
        b'"memory_usage": {"f": 99999999999999999999}',
    ],
)
def test_libraries_that_tell_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    assert library_temp(path) is None
    assert library_temp(tmp_path / "absent.so") is None


def test_the_estimate_of_temporaries_against_a_log() -> None:
    """Llama 3 8B q4f16_1, chunk 8192, 48 sequences: MLC logged a temporary buffer of 1471.08 MiB,
    which holds the two workspaces as well."""
    llama = replace(model(LLAMA3_8B), chunk=8192, vocab=128256)
    workspaces = 8192 * 4 + 48 * 4 + (2 * 8192 + 48) * 4096 * 2
    workspaces += 48 * 20 + int(48 * 128256 * 16.125)
    assert (estimated_temp(llama) + workspaces) / 2**20 == pytest.approx(1471.08, rel=1e-3)


def test_draft_models_are_counted(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", QWEN3_8B, "q4f16_1")
    draft = mlc_model(tmp_path / "draft", TINY, "q4f16_1")
    alone = planned(directory)
    both = planned(directory, additional_models=[f"{draft},{tmp_path}/lib.so"])
    assert both.weights_bytes > alone.weights_bytes
    assert both.kv_bytes_per_token == alone.kv_bytes_per_token + 2 * 4 * 2 * 32 * 2
    embedding = planned(directory, embedding_model=str(draft), embedding_model_lib="x.so")
    assert embedding.weights_bytes == both.weights_bytes


def test_the_old_name_of_the_list_of_tensors(tmp_path: Path) -> None:
    old = mlc_model(tmp_path / "old", TINY, "q4f16_1", cache="ndarray-cache.json")
    new = mlc_model(tmp_path / "new", TINY, "q4f16_1")
    assert read_model(old) == read_model(new)


def test_bytes_are_those_of_memory_not_of_the_file(tmp_path: Path) -> None:
    """`nbytes` (here 1 everywhere) is what the file has, where fp32 is stored as bf16."""
    found = read_model(mlc_model(tmp_path / "m", TINY, "q4f32_1"))
    assert found.params / TINY.parameters * 8 == pytest.approx(5.0, rel=0.02)


@pytest.mark.parametrize("kind", ["rwkv6", "bert", "deepseek_v2", "mamba2"])
def test_models_of_another_make_are_unknown(tmp_path: Path, kind: str) -> None:
    directory = mlc_model(tmp_path / "m", TINY, "q4f16_1", model_type=kind)
    with pytest.raises(MemoryPlanError, match=kind):
        planned(directory)


def test_a_cpu_model_has_no_runtime_of_the_gpu(tmp_path: Path) -> None:
    directory = mlc_model(tmp_path / "m", TINY, "q4f16_1")
    on_cpu, on_gpu = planned(directory, gpus=0, vram=None), planned(directory)
    assert on_gpu.needed_bytes - on_cpu.needed_bytes == RUNTIME_BYTES
    assert judge(on_cpu, [], None).fits is None
