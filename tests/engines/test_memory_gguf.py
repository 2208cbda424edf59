"""llama.cpp and Ollama: headers, layers, where they go, and what their caches take."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from flexinfer.api.blocks import LlamaCppBlock, OllamaBlock
from flexinfer.api.quantity import Quantity
from flexinfer.engines.memory import MemoryPlan, MemoryPlanError, judge, plan_memory
from flexinfer.engines.memory.common import RUNTIME_BYTES
from flexinfer.engines.memory.gguf_header import block_size, read_gguf
from flexinfer.engines.memory.gguf_model import shape_of
from flexinfer.engines.memory.llamacpp import row_bytes
from flexinfer.engines.memory.ollama import default_context
from flexinfer.engines.spec import EngineSpec
from tests.engines.memory_models import QWEN3_8B, TINY, XTX, gguf_model

GIB = 2**30
F16 = gguf.GGMLQuantizationType.F16
# K and V of one layer of TINY, one token, f16.
LAYER = 2 * TINY.kv_heads * TINY.head_dim * 2


def planned(file: Path, *, gpus: int = 1, **block: Any) -> MemoryPlan:
    spec = EngineSpec("m", "default", "llama-cpp", LlamaCppBlock(**block), gpus=gpus)
    return plan_memory(spec, file, vram_bytes=XTX)


def with_ollama(
    file: Path, *, gpus: int = 1, vram: int | None = XTX, env: Any = None, **block: Any
) -> MemoryPlan:
    spec = EngineSpec("m", "default", "ollama", OllamaBlock(**block), env=env or {}, gpus=gpus)
    return plan_memory(spec, file, vram_bytes=vram)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return gguf_model(tmp_path / "tiny.gguf", TINY)


def test_the_header_says_what_the_packages_reader_says(weights: Path) -> None:
    ours, theirs = read_gguf(weights), gguf.GGUFReader(weights)
    assert [(t.name, t.size) for t in ours.tensors] == [
        (str(t.name), int(t.n_bytes)) for t in theirs.tensors
    ]
    assert [t.shape for t in ours.tensors] == [
        tuple(int(n) for n in t.shape) for t in theirs.tensors
    ]
    for name, value in ours.values.items():
        assert theirs.fields[name].contents() == (list(value) if type(value) is tuple else value)
    tokens = theirs.fields["tokenizer.ggml.tokens"]
    assert ours.lengths["tokenizer.ggml.tokens"] == len(tokens.data)


def test_weights_are_the_tensors(weights: Path, tiny: Path) -> None:
    reader = gguf.GGUFReader(weights)
    size = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert planned(weights, gpus=0).weights_bytes == size
    matrices = sum(rows * columns for _, rows, columns in TINY.matrices())
    vectors = sum(count for _, count in TINY.vectors())
    assert planned(tiny, gpus=0).weights_bytes == matrices // 32 * 34 + vectors * 4


@pytest.mark.parametrize(
    ("name", "size"), [("f16", 128), ("f32", 256), ("q8_0", 68), ("q4_0", 36), ("q4_1", 40)]
)
def test_cache_types_come_in_blocks(name: str, size: int) -> None:
    assert row_bytes(64, name) == size


def test_an_unknown_cache_type(tiny: Path) -> None:
    with pytest.raises(MemoryPlanError, match="q9_9"):
        planned(tiny, cache_type_k="q9_9")
    assert block_size("Q8_0") == (32, 34)


def test_the_cache(tiny: Path) -> None:
    plan = planned(tiny, context_size=2048)
    assert plan.kv_bytes == 2048 * TINY.layers * LAYER
    assert plan.kv_bytes_per_token == TINY.layers * LAYER
    assert (plan.context_tokens, plan.sequences) == (2048, 4)
    # Without a context it is the model's own.
    assert planned(tiny).context_tokens == planned(tiny, context_size=0).context_tokens == 4096


def test_slots_share_the_context_or_divide_it(tiny: Path) -> None:
    shared = planned(tiny)
    assert (shared.context_tokens, shared.cache_tokens) == (4096, 4096)
    divided = planned(tiny, parallel=4)
    assert (divided.context_tokens, divided.cache_tokens) == (1024, 4096)
    unified = planned(tiny, parallel=4, kv_unified=True)
    assert unified.context_tokens == 4096
    # A slot has a multiple of 256 cells.
    assert planned(tiny, parallel=3, context_size=1000).cache_tokens == 3 * 512


def test_flags_in_extra_args_go_last(tiny: Path) -> None:
    plan = planned(tiny, context_size=4096, extra_args=["-c", "1024", "-np=2", "--kv-unified"])
    assert (plan.context_tokens, plan.sequences) == (1024, 2)
    assert planned(tiny, extra_args=["-np", "2", "--no-kv-unified"]).context_tokens == 2048


def test_layers_in_ram(tiny: Path) -> None:
    everything = planned(tiny)
    embedding = TINY.vocab * TINY.hidden // 32 * 34
    # The embedding stays in RAM in any case.
    assert everything.weights_bytes == planned(tiny, gpus=0).weights_bytes - embedding
    two = planned(tiny, n_gpu_layers=2)  # the output layer, and the last one
    assert two.kv_bytes == everything.kv_bytes // TINY.layers
    assert two.weights_bytes < everything.weights_bytes / 2
    none = planned(tiny, n_gpu_layers=0)
    assert (none.weights_bytes, none.kv_bytes, none.buffers_bytes) == (0, 0, RUNTIME_BYTES)
    assert planned(tiny, n_gpu_layers=99).per_gpu == planned(tiny, n_gpu_layers="all").per_gpu


def test_a_tied_embedding_is_on_the_gpu_as_the_output(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m.gguf", replace(TINY, tied=True))
    assert planned(file).weights_bytes == planned(file, gpus=0).weights_bytes


def test_layers_are_divided_among_gpus(tiny: Path) -> None:
    plan = planned(tiny, gpus=2)
    # Four layers and the output: three and two.
    token = 4096 * LAYER
    assert [share.kv for share in plan.per_gpu] == [3 * token, token]
    uneven = planned(tiny, gpus=2, tensor_split="1,4")
    assert [share.kv for share in uneven.per_gpu] == [token, 3 * token]
    whole = planned(tiny).weights_bytes
    assert plan.weights_bytes == uneven.weights_bytes == whole
    rows = planned(tiny, gpus=2, split_mode="row", main_gpu=1)
    assert [share.kv for share in rows.per_gpu] == [0, 4 * token]
    assert rows.per_gpu[0].weights == pytest.approx(whole / 2, abs=2)
    alone = planned(tiny, gpus=2, split_mode="none", main_gpu=1)
    assert alone.per_gpu[0].weights == alone.per_gpu[0].kv == 0
    with pytest.raises(MemoryPlanError, match="tensorSplit"):
        planned(tiny, gpus=2, tensor_split="0,0")
    with pytest.raises(MemoryPlanError, match="tensorSplit"):
        planned(tiny, gpus=2, tensor_split="a,b")


def test_models_in_parts(tmp_path: Path) -> None:
    whole = gguf_model(tmp_path / "whole.gguf", TINY)
    first = tmp_path / "m-00001-of-00002.gguf"
    gguf_model(first, TINY)
    second = tmp_path / "m-00002-of-00002.gguf"
    gguf_model(second, TINY)
    assert len(read_gguf(first).tensors) == 2 * len(read_gguf(whole).tensors)
    second.unlink()
    with pytest.raises(MemoryPlanError, match="00002-of-00002"):
        read_gguf(first)


def test_a_directory_with_one_model(tiny: Path) -> None:
    gguf_model(tiny.parent / "mmproj-tiny.gguf", TINY)
    assert planned(tiny.parent).per_gpu == planned(tiny).per_gpu
    gguf_model(tiny.parent / "other.gguf", TINY)
    with pytest.raises(MemoryPlanError, match="2 GGUF models"):
        planned(tiny.parent)


def test_files_beside_the_model(tiny: Path) -> None:
    plain = planned(tiny)
    gguf_model(tiny.parent / "extra.gguf", TINY)
    size = sum(tensor.size for tensor in read_gguf(tiny).tensors)
    adapter = planned(tiny, lora=["extra.gguf"])
    assert adapter.weights_bytes - plain.weights_bytes == size
    projector = planned(tiny, mmproj="extra.gguf")
    assert projector.weights_bytes - plain.weights_bytes == size
    assert projector.buffers_bytes > plain.buffers_bytes
    draft = planned(tiny, draft_model=str(tiny.parent / "extra.gguf"))
    assert draft.kv_bytes == 2 * plain.kv_bytes
    assert draft.weights_bytes == 2 * plain.weights_bytes
    in_ram = planned(tiny, draft_model="extra.gguf", draft_gpu_layers=0)
    assert in_ram.kv_bytes == plain.kv_bytes


def test_experts_in_ram(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m.gguf", TINY)
    data = file.read_bytes().replace(b"ffn_up.weight", b"ffn_up_exps.w")
    file.write_bytes(data)
    size = TINY.intermediate * TINY.hidden // 32 * 34
    whole = planned(file).weights_bytes
    assert whole - planned(file, n_cpu_moe=3).weights_bytes == 3 * size
    assert whole - planned(file, n_cpu_moe=99).weights_bytes == 4 * size


def test_latent_attention(tmp_path: Path) -> None:
    """DeepSeek 2: one K of latent width a token, and no V."""
    file = gguf_model(
        tmp_path / "m.gguf",
        TINY,
        architecture="deepseek2",
        attention__head_count_kv=1,
        attention__key_length=576,
        attention__value_length=512,
        attention__key_length_mla=192,
        attention__value_length_mla=128,
    )
    assert planned(file).kv_bytes_per_token == TINY.layers * 576 * 2


def test_kv_heads_by_layer(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m.gguf", TINY, attention__head_count_kv=[2, 0, 1, 2])
    assert planned(file).kv_bytes_per_token == 5 * 2 * TINY.head_dim * 2


def test_recurrent_layers_have_a_state_a_sequence(tmp_path: Path) -> None:
    ssm = {
        "ssm__conv_kernel": 4,
        "ssm__inner_size": 512,
        "ssm__state_size": 16,
        "ssm__group_count": 1,
    }
    mamba = gguf_model(
        tmp_path / "mamba.gguf",
        TINY,
        architecture="mamba",
        attention__head_count=0,
        attention__head_count_kv=0,
        **ssm,
    )
    state = (3 * (512 + 2 * 16) + 16 * 512) * 4
    plan = planned(mamba, parallel=2)
    assert plan.kv_bytes == 2 * TINY.layers * state
    assert plan.kv_bytes_per_token == 0
    hybrid = gguf_model(
        tmp_path / "hybrid.gguf",
        TINY,
        architecture="granitehybrid",
        attention__head_count_kv=[0, 2, 0, 0],
        **ssm,
    )
    plan = planned(hybrid, parallel=1, context_size=1024)
    assert plan.kv_bytes == 1024 * LAYER + 3 * state
    interval = gguf_model(tmp_path / "q.gguf", TINY, architecture="qwen3next", **ssm)
    plan = planned(interval, parallel=1, context_size=1024)
    assert plan.kv_bytes == 1024 * LAYER + 3 * state


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("newarch", {"ssm__inner_size": 512}),
        ("newarch", {"attention__sliding_window": 512}),
        ("deepseek32", {"attention__indexer__top_k": 64}),
    ],
)
def test_better_no_figure_than_a_wrong_one(
    tmp_path: Path, architecture: str, values: dict[str, Any]
) -> None:
    file = gguf_model(tmp_path / "m.gguf", TINY, architecture=architecture, **values)
    with pytest.raises(MemoryPlanError, match=f"{architecture} is not known"):
        planned(file)


def test_architectures_that_ignore_their_window(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m.gguf", TINY, attention__sliding_window=512)
    assert all(layer.window is None for layer in shape_of(read_gguf(file)).layers)


def test_encoders_have_no_cache(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m.gguf", TINY, architecture="bert")
    assert planned(file).kv_bytes == 0


def test_it_may_shrink_by_itself_and_says_so(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m.gguf", QWEN3_8B, architecture="qwen3")
    plan = planned(file)
    assert any("until they fit" in note for note in plan.notes)
    fixed = planned(file, context_size=8192, n_gpu_layers=37)
    assert not any("until they fit" in note for note in fixed.notes)
    verdict = judge(plan, [10 * GIB], XTX)
    fields = [proposal.settings[0][0] for proposal in verdict.proposals]
    assert fields == ["spec.llamacpp.contextSize", "spec.llamacpp.nGPULayers"]


@pytest.mark.parametrize(
    ("vram", "gpus", "context"),
    [
        (XTX, 1, 32768),
        (XTX, 2, 262144),
        (16 << 30, 1, 4096),
        (12 << 30, 2, 32768),
        (None, 1, 4096),
        (80 << 30, 1, 262144),
    ],
)
def test_ollamas_context_follows_the_gpus(vram: int | None, gpus: int, context: int) -> None:
    assert default_context(vram, gpus) == context


def test_ollama_gives_every_request_its_context(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m.gguf", QWEN3_8B, architecture="qwen3")
    assert with_ollama(file).context_tokens == 32768
    plan = with_ollama(file, context_length=8192, num_parallel=4)
    assert (plan.context_tokens, plan.cache_tokens) == (8192, 32768)
    assert plan.kv_bytes == 32768 * 147456
    # Never more than the model was trained for.
    assert with_ollama(file, context_length=1 << 20).context_tokens == 40960


def test_ollamas_cache_types_need_flash_attention(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m.gguf", QWEN3_8B, architecture="qwen3")
    plain = with_ollama(file)
    assert with_ollama(file, kv_cache_type="q8_0").kv_bytes == plain.kv_bytes * 34 // 64
    assert with_ollama(file, kv_cache_type="q4_0").kv_bytes == plain.kv_bytes * 18 // 64
    off = with_ollama(file, kv_cache_type="q8_0", flash_attention=False)
    assert off.kv_bytes == plain.kv_bytes


def test_ollamas_variables_and_parameters(tiny: Path) -> None:
    env = {
        "OLLAMA_CONTEXT_LENGTH": "1024",
        "OLLAMA_NUM_PARALLEL": "2",
        "OLLAMA_KV_CACHE_TYPE": "q8_0",
        "OLLAMA_FLASH_ATTENTION": "1",
    }
    plan = with_ollama(tiny, env=env)
    assert (plan.context_tokens, plan.sequences) == (1024, 2)
    assert plan.kv_bytes_per_token == TINY.layers * LAYER * 34 // 64
    parameters = {"num_ctx": "512", "num_gpu": "2"}
    plan = with_ollama(tiny, env=env, parameters=parameters)
    assert plan.context_tokens == 512
    assert plan.kv_bytes == 2 * 512 * LAYER * 34 // 64
    with pytest.raises(MemoryPlanError, match="num_ctx"):
        with_ollama(tiny, parameters={"num_ctx": "many"})


def test_memory_that_ollama_leaves_free(tiny: Path) -> None:
    difference = (
        with_ollama(tiny, gpu_overhead=Quantity("1Gi")).buffers_bytes
        - with_ollama(tiny).buffers_bytes
    )
    assert difference == GIB


def test_a_model_of_ollamas_store(tmp_path: Path, tiny: Path) -> None:
    data = tiny.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    blobs = tmp_path / "store" / "blobs"
    blobs.mkdir(parents=True)
    tiny.rename(blobs / f"sha256-{digest}")
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{digest}",
        "size": len(data),
    }
    manifest = tmp_path / "store" / "manifests" / "registry.ollama.ai" / "library" / "m" / "latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [layer]}))
    plan = with_ollama(manifest)
    assert plan.kv_bytes_per_token == TINY.layers * LAYER
    (blobs / f"sha256-{digest}").unlink()
    with pytest.raises(MemoryPlanError, match="not in its store"):
        with_ollama(manifest)
