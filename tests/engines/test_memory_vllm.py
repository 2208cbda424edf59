"""vLLM: weights from safetensors headers, KV cache from the config, shares of the total memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexinfer.api.blocks import VllmBlock
from flexinfer.api.quantity import Quantity
from flexinfer.engines.memory import MemoryPlan, MemoryPlanError, judge, plan_memory
from flexinfer.engines.memory.hf_config import read_config
from flexinfer.engines.memory.vllm import GRAPH_BYTES
from flexinfer.engines.spec import EngineSpec
from tests.engines.memory_models import (
    LLAMA3_8B,
    QWEN3_8B,
    QWEN25_7B,
    TINY,
    XTX,
    Shape,
    hf_config,
    hf_model,
    safetensors,
)

GIB = 2**30


def planned(directory: Path, *, gpus: int = 1, vram: int | None = XTX, **block: Any) -> MemoryPlan:
    spec = EngineSpec("m", "default", "vllm", VllmBlock(**block), gpus=gpus)
    return plan_memory(spec, directory, vram_bytes=vram)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return hf_model(tmp_path / "llama", LLAMA3_8B, model_type="llama", shards=4)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return hf_model(tmp_path / "qwen", QWEN3_8B)


def test_weights_as_vllms_log_has_them(llama: Path) -> None:
    """Llama 3 8B: "model weights take 14.96GiB", and 7.48 with tensor parallel 2."""
    assert planned(llama).per_gpu[0].weights / GIB == pytest.approx(14.96, abs=0.005)
    two = planned(llama, gpus=2)
    assert len(two.per_gpu) == 2
    assert two.per_gpu[0].weights / GIB == pytest.approx(7.48, abs=0.005)


def test_the_estimate_of_activations_against_a_log(llama: Path) -> None:
    """vLLM's log says 1.26 GiB at the peak, with 8192 tokens a step; the estimate is higher."""
    plan = planned(llama, max_num_batched_tokens=8192, enforce_eager=True)
    bare = planned(llama, gpus=0, max_num_batched_tokens=8192, enforce_eager=True)
    assert 1.26 < bare.buffers_bytes / GIB < 1.26 * 1.4
    assert plan.buffers_bytes > bare.buffers_bytes


@pytest.mark.parametrize(
    ("shape", "kind", "size"),
    [(QWEN25_7B, "qwen2", 57344), (QWEN3_8B, "qwen3", 147456), (LLAMA3_8B, "llama", 131072)],
)
def test_a_token_in_the_cache(tmp_path: Path, shape: Shape, kind: str, size: int) -> None:
    directory = hf_model(tmp_path / "m", shape, model_type=kind)
    assert planned(directory).kv_bytes_per_token == size
    assert planned(directory, kv_cache_dtype="fp8").kv_bytes_per_token == size // 2
    assert planned(directory, dtype="float32").kv_bytes_per_token == size * 2


def test_the_cache_must_hold_one_sequence(qwen: Path) -> None:
    plan = planned(qwen, max_model_len=10_000)
    assert plan.context_tokens == 10_000
    assert plan.kv_bytes == 10_000 * 147456
    # In whole blocks of 16 tokens, or as many as the block says.
    assert planned(qwen, max_model_len=10_001).kv_bytes == 10_016 * 147456
    assert planned(qwen, max_model_len=10_001, block_size=64).kv_bytes == 10_048 * 147456
    assert planned(qwen).context_tokens == 40960


def test_it_takes_a_share_of_the_total(llama: Path) -> None:
    plan = planned(llama)
    assert plan.reserved_bytes == pytest.approx(XTX * 0.92, abs=1)
    assert judge(plan, [XTX], XTX).fits is True
    # What it needs would be free, what it takes is not: vLLM does not start.
    verdict = judge(plan, [21 * GIB], XTX)
    assert verdict.fits is False
    (proposal, *_) = verdict.proposals
    assert proposal.settings == (("spec.vllm.gpuMemoryUtilization", '"0.87"'),)
    assert judge(planned(llama, gpu_memory_utilization="0.87"), [21 * GIB], XTX).fits is True
    assert judge(planned(llama, gpu_memory_utilization="0.88"), [21 * GIB], XTX).fits is False


def test_a_share_that_is_only_just_enough(llama: Path) -> None:
    """One sequence needs 17.7 GiB, 0.8 of that as an estimate that may be too high."""
    plan = planned(llama, gpu_memory_utilization="0.72")
    assert (plan.refusal, plan.doubt is None) == (None, False)
    verdict = judge(plan, [XTX], XTX)
    assert verdict.fits is None
    assert "too close to tell" in verdict.message
    assert verdict.proposals


def test_too_small_a_share(llama: Path) -> None:
    plan = planned(llama, gpu_memory_utilization="0.65")
    assert plan.refusal is not None and "one sequence of 8192 tokens" in plan.refusal
    verdict = judge(plan, [XTX], XTX)
    assert verdict.fits is False
    fields = [proposal.settings[0][0] for proposal in verdict.proposals]
    assert fields[0] == "spec.vllm.gpuMemoryUtilization"


def test_both_are_proposed_where_one_is_not_enough(qwen: Path) -> None:
    verdict = judge(planned(qwen), [20 * GIB], XTX)
    assert verdict.fits is False
    settings = dict(verdict.proposals[0].settings)
    assert set(settings) == {"spec.vllm.gpuMemoryUtilization", "spec.vllm.maxModelLen"}
    again = planned(
        qwen,
        gpu_memory_utilization=settings["spec.vllm.gpuMemoryUtilization"].strip('"'),
        max_model_len=int(settings["spec.vllm.maxModelLen"]),
    )
    assert judge(again, [20 * GIB], XTX).fits is True


def test_a_given_cache_is_not_a_share(llama: Path) -> None:
    plan = planned(llama, kv_cache_memory_bytes=Quantity("4Gi"))
    assert plan.reserved_bytes is None
    assert plan.kv_bytes == 4 * GIB
    small = planned(llama, kv_cache_memory_bytes=Quantity("512Mi"))
    assert small.refusal is not None and "kvCacheMemoryBytes 512Mi" in small.refusal
    (proposal, *_) = judge(small, [XTX], XTX).proposals
    assert proposal.settings == (("spec.vllm.maxModelLen", "4096"),)


def test_offloaded_weights(llama: Path) -> None:
    kept = planned(llama, cpu_offload_gb=5.0).weights_bytes
    assert planned(llama).weights_bytes - kept == 5 * GIB
    assert planned(llama, cpu_offload_gb=500.0).weights_bytes == 0


def test_graphs(llama: Path) -> None:
    difference = planned(llama).buffers_bytes - planned(llama, enforce_eager=True).buffers_bytes
    assert difference == GRAPH_BYTES


@pytest.mark.parametrize(
    ("stored", "config", "dtype", "size"),
    [
        ("F32", "float32", None, 2),  # vLLM serves fp32 in 16 bits unless told otherwise
        ("F32", "float32", "float32", 4),
        ("F32", "bfloat16", None, 2),
        ("BF16", "bfloat16", None, 2),
        ("BF16", "bfloat16", "float32", 4),
        ("F16", None, "half", 2),
    ],
)
def test_weights_are_converted(
    tmp_path: Path, stored: str, config: str | None, dtype: str | None, size: int
) -> None:
    directory = hf_model(tmp_path / "m", TINY, dtype=stored, torch_dtype=config)
    block = {} if dtype is None else {"dtype": dtype}
    assert planned(directory, **block).weights_bytes == TINY.parameters * size


def test_the_type_under_its_new_name(tmp_path: Path) -> None:
    directory = hf_model(tmp_path / "m", TINY)
    config = hf_config(TINY, torch_dtype=None) | {"dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    assert read_config(directory).type == "float32"


def test_quantised_weights_stay_as_they_are(tmp_path: Path) -> None:
    directory = hf_model(
        tmp_path / "m", TINY, quantization_config={"quant_method": "fp8"}, dtype="F8_E4M3"
    )
    assert planned(directory).weights_bytes == TINY.parameters


def test_quantisation_at_the_start(tmp_path: Path) -> None:
    directory = hf_model(tmp_path / "m", TINY)
    plain = planned(directory).weights_bytes
    fp8 = planned(directory, quantization="fp8").weights_bytes
    bits = planned(directory, quantization="bitsandbytes").weights_bytes
    assert bits < fp8 < plain
    other = planned(directory, quantization="torchao")
    assert other.weights_bytes == plain
    assert any("torchao" in note for note in other.notes)


def test_kv_heads_are_replicated_where_there_are_too_few(tmp_path: Path) -> None:
    directory = hf_model(tmp_path / "m", QWEN25_7B, model_type="qwen2")
    sizes = [planned(directory, gpus=gpus).per_gpu[0].kv for gpus in (1, 2, 4)]
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2]
    # Four heads on eight GPUs: one each, so each GPU has as much as with four.
    assert planned(directory, gpus=8).per_gpu[0].kv == sizes[2]


def test_pipeline_stages(tmp_path: Path) -> None:
    directory = hf_model(tmp_path / "m", QWEN3_8B)
    plan = planned(directory, gpus=4, tensor_parallel_size=1, pipeline_parallel_size=4)
    assert len(plan.per_gpu) == 4
    assert {share.kv for share in plan.per_gpu} == {9 * 40960 * 4096}
    # The embedding is in the first stage and the head in the last.
    first, second, third, last = (share.weights for share in plan.per_gpu)
    assert second == third
    assert first - second == 151936 * 4096 * 2
    assert last - second == 151936 * 4096 * 2 + 4096 * 2
    whole = planned(directory).weights_bytes
    assert plan.weights_bytes == whole
    three = planned(directory, gpus=5, tensor_parallel_size=1, pipeline_parallel_size=5)
    layers = [share.kv // (40960 * 4096) for share in three.per_gpu]
    assert layers == [7, 7, 7, 8, 7]


def test_more_parts_than_gpus(qwen: Path) -> None:
    plan = planned(qwen, gpus=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert plan.refusal == "it wants 4 GPUs, and resources gives it 2"


def test_heads_that_cannot_be_divided(qwen: Path) -> None:
    plan = planned(qwen, gpus=3)
    assert plan.refusal is not None
    assert plan.refusal.startswith("the model's 32 attention heads cannot be divided among 3 GPUs")


def test_latent_attention(tmp_path: Path) -> None:
    directory = hf_model(
        tmp_path / "m",
        TINY,
        model_type="deepseek_v3",
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
    )
    one = planned(directory)
    assert one.kv_bytes_per_token == TINY.layers * (512 + 64) * 2
    # Every GPU has all of it.
    assert planned(directory, gpus=4).per_gpu[0].kv == one.per_gpu[0].kv


def test_windows_bound_what_a_sequence_takes(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"] * (TINY.layers // 2)
    directory = hf_model(
        tmp_path / "m", TINY, sliding_window=512, layer_types=types, max_position_embeddings=65536
    )
    token = 2 * TINY.kv_heads * TINY.head_dim * 2
    plan = planned(directory, max_num_batched_tokens=1024)
    cells = 65536 + (-(-(512 - 1 + 1024) // 16) + 1) * 16
    assert plan.kv_bytes == TINY.layers // 2 * cells * token
    short = planned(directory, max_num_batched_tokens=1024, max_model_len=256)
    assert short.kv_bytes == TINY.layers // 2 * (256 + 256 + 16) * token


@pytest.mark.parametrize(
    ("kind", "config", "windows"),
    [
        ("gemma2", {"sliding_window": 4096}, [4096, None, 4096, None]),
        (
            "gemma3_text",
            {"sliding_window": 512, "sliding_window_pattern": 2},
            [512, None, 512, None],
        ),
        ("gpt_oss", {"sliding_window": 128}, [128, None, 128, None]),
        ("cohere2", {"sliding_window": 4096}, [4096, 4096, 4096, None]),
        ("mistral", {"sliding_window": 4096}, [4096] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, [None] * 4),
        (
            "qwen2",
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2},
            [None, None, 4096, 4096],
        ),
        ("llama4_text", {"attention_chunk_size": 8192}, [8192, 8192, 8192, None]),
    ],
)
def test_which_layers_have_a_window(
    tmp_path: Path, kind: str, config: dict[str, Any], windows: list[int | None]
) -> None:
    directory = hf_model(tmp_path / "m", TINY, model_type=kind, **config)
    assert list(read_config(directory).windows) == windows


def test_the_language_part_of_a_model_that_sees(tmp_path: Path) -> None:
    directory = hf_model(tmp_path / "m", TINY)
    config = {"model_type": "mistral3", "text_config": hf_config(TINY, model_type="mistral")}
    (directory / "config.json").write_text(json.dumps(config))
    assert planned(directory).kv_bytes_per_token == TINY.layers * 2 * 2 * 32 * 2


def test_without_head_dim_and_kv_heads(tmp_path: Path) -> None:
    directory = hf_model(tmp_path / "m", TINY, head_dim=None, num_key_value_heads=None)
    found = read_config(directory)
    assert (found.kv_width, found.kv_heads) == (2 * 256 // 8, 8)


@pytest.mark.parametrize(
    ("config", "tokenizer", "longest"),
    [
        ({"max_position_embeddings": 4096}, None, 4096),
        ({"max_position_embeddings": None}, None, 2048),
        ({"max_position_embeddings": 4096}, {"model_max_length": 1024}, 1024),
        ({"max_position_embeddings": 4096}, {"model_max_length": 1e30}, 4096),
        ({"max_position_embeddings": 4096}, {"model_max_length": 10**400}, 4096),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, None, 16384),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, None, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, None, 4096),
        (
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 2048},
            None,
            2048,
        ),
    ],
)
def test_the_longest_sequence(
    tmp_path: Path, config: dict[str, Any], tokenizer: dict[str, Any] | None, longest: int
) -> None:
    directory = hf_model(tmp_path / "m", TINY, **config)
    if tokenizer is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert read_config(directory).longest == longest


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "jamba"},
        {"model_type": "mamba2"},
        {"model_type": "something_new"},
        {"model_type": None},
        {"layer_types": ["linear_attention"] * 4},
        {"layer_types": ["full_attention"]},
        {"model_type": "glm4", "sliding_window": 128},
        {"model_type": "deepseek_v3"},
    ],
)
def test_better_no_figure_than_a_wrong_one(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(MemoryPlanError, match=r"known|layer types"):
        planned(hf_model(tmp_path / "m", TINY, **config))


def test_what_a_terminal_should_not_be_sent_is_not_quoted(tmp_path: Path) -> None:
    directory = hf_model(tmp_path / "m", TINY, model_type="\x1b[31m\ud800")
    with pytest.raises(MemoryPlanError, match=r"model type \\x1b\[31m\\ud800 is not"):
        planned(directory)


def test_encoders_have_no_cache(tmp_path: Path) -> None:
    plan = planned(hf_model(tmp_path / "m", TINY, model_type="bert"))
    assert plan.kv_bytes == plan.kv_bytes_per_token == 0


def test_flags_in_extra_args_go_last(qwen: Path) -> None:
    words = ["--max-model-len", "2048", "--gpu-memory-utilization=0.5", "--enforce-eager"]
    plan = planned(qwen, max_model_len=4096, extra_args=words)
    assert plan.context_tokens == 2048
    assert plan.reserved_bytes == pytest.approx(XTX / 2, abs=1)
    with pytest.raises(MemoryPlanError, match="--max-model-len 32k"):
        planned(qwen, extra_args=["--max-model-len", "32k"])
    with pytest.raises(MemoryPlanError, match="--max-model-len 99999"):
        planned(qwen, extra_args=["--max-model-len", "9" * 5000])
    with pytest.raises(MemoryPlanError, match="wants a value"):
        planned(qwen, extra_args=["--max-model-len"])


def test_tied_embeddings_are_loaded_once(tmp_path: Path) -> None:
    directory = hf_model(tmp_path / "m", TINY, tie_word_embeddings=True)
    untied = hf_model(tmp_path / "u", TINY)
    head = TINY.vocab * TINY.hidden * 2
    assert planned(untied).weights_bytes - planned(directory).weights_bytes == head


def test_layers_for_speculation_are_not_loaded(tmp_path: Path) -> None:
    directory = hf_model(tmp_path / "m", TINY)
    before = planned(directory).weights_bytes
    extra = {"model.layers.4.mtp.weight": ("BF16", [1024, 1024])}
    tensors = {"model.norm.weight": ("BF16", [256])} | extra
    safetensors(directory / "model-mtp.safetensors", tensors)
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    assert planned(directory).weights_bytes == before


def test_pickled_weights_count_as_their_files(tmp_path: Path) -> None:
    directory = hf_model(tmp_path / "m", TINY)
    (directory / "model.safetensors").unlink()
    with (directory / "pytorch_model.bin").open("wb") as file:
        file.truncate(1_000_000)
    plan = planned(directory)
    assert plan.weights_bytes == 1_000_000
    assert any("pickled" in note for note in plan.notes)


def test_on_cpu_the_parts_are_together(qwen: Path) -> None:
    plan = planned(qwen, gpus=0, vram=None)
    assert len(plan.per_gpu) == 1
    assert plan.reserved_bytes is None
    assert judge(plan, [], None).fits is None
