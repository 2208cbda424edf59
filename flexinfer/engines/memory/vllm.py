"""The memory of vLLM.

From vLLM 0.32: `request_memory` (utilisation times the *total* memory, which must be free at the
start), `determine_available_memory` (what is left of it after weights, the peak of a profiling run
and graphs becomes the KV cache), `AttentionSpec.max_memory_usage_bytes` (the cache must hold one
sequence of the longest length), `get_batch_defaults` and `get_pp_indices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexinfer.api.blocks import VllmBlock
from flexinfer.engines.memory.common import (
    RUNTIME_BYTES,
    divide_up,
    fields_of,
    knob,
    said_in,
    share_knob,
    token_step,
    with_arguments,
    with_block,
)
from flexinfer.engines.memory.hf_config import HfModel, read_config
from flexinfer.engines.memory.safetensors import read_tensors
from flexinfer.engines.memory.types import Knob, MemoryPlan, MemoryPlanError, Share
from flexinfer.engines.memory.vllm_weights import Settings, layers_of_stages, weights_of_stages
from flexinfer.engines.spec import EngineSpec

UTILIZATION = 0.92
#: What capturing HIP graphs takes. An estimate: vLLM measures it, a few hundred MiB are usual.
GRAPH_BYTES = 512 << 20

_BLOCK = 16  # tokens of a block of the KV cache where blockSize is absent
_TYPES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "float64": 8}
_CACHE_TYPES = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8"), 1),
    **{name: size for name, size in _TYPES.items() if size == 2},
}
_ARGUMENTS = {
    "--tensor-parallel-size": "tensor_parallel_size",
    "-tp": "tensor_parallel_size",
    "--pipeline-parallel-size": "pipeline_parallel_size",
    "-pp": "pipeline_parallel_size",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--kv-cache-memory-bytes": "kv_cache_memory_bytes",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--dtype": "dtype",
    "--quantization": "quantization",
    "-q": "quantization",
    "--block-size": "block_size",
}
_KNOBS = {
    "gpu_memory_utilization": "gpuMemoryUtilization",
    "max_model_len": "maxModelLen",
    "max_num_seqs": "maxNumSeqs",
}


@dataclass(frozen=True)
class _Files:
    """What was read, once for all plans with other settings. `stages` are the bytes of weights on
    each GPU of each stage: no setting that is turned later changes them. `fields` are the places
    in the manifest where settings are to be changed."""

    model: HfModel
    stages: tuple[int, ...]
    pickled: bool
    fields: Mapping[str, str]


def plan(spec: EngineSpec, weights: Path, vram_bytes: int | None) -> MemoryPlan:
    """Plan a vllm model; see `plan_memory`."""
    block = spec.block
    if not isinstance(block, VllmBlock):
        raise MemoryPlanError(f"{spec.name}: the settings are not those of vllm")
    said = said_in(block.extra_args, _ARGUMENTS, "spec.vllm")
    block = with_arguments(block, block.extra_args, _ARGUMENTS)
    block = block.model_copy(update={"extra_args": []})
    if block.load_format == "gguf" or weights.is_file():
        raise MemoryPlanError("the memory of GGUF files under vLLM is not known")
    model, tensors = read_config(weights), read_tensors(weights)
    settings = _settings(spec, block, model, vram_bytes)
    counts = layers_of_stages(model.layers, settings.stages)
    files = _Files(
        model=model,
        stages=tuple(weights_of_stages(tensors, block, model, settings, counts)),
        pickled=any(not tensor.dtype for tensor in tensors),
        fields=fields_of("spec.vllm", _KNOBS, said),
    )
    return _plan(spec, block, files, vram_bytes)


def _settings(spec: EngineSpec, block: VllmBlock, model: HfModel, vram: int | None) -> Settings:
    stages = block.pipeline_parallel_size or 1
    tensors = block.tensor_parallel_size or max(1, spec.gpus // stages)
    large = vram is not None and vram >= 70 << 30
    sequences = block.max_num_seqs or (1024 if large else 256)
    length = block.max_model_len or model.longest
    batch = block.max_num_batched_tokens
    if batch is None:
        batch = 16384 if vram is not None and vram >= 160 << 30 else 8192 if large else 2048
        if block.enable_chunked_prefill is False:
            batch = max(batch, length)
        batch = min(batch, sequences * length)
    size = _type_bytes(block, model)
    cache = block.kv_cache_dtype or "auto"
    if cache != "auto" and cache not in _CACHE_TYPES:
        raise MemoryPlanError(f"the size of values in a KV cache of type {cache} is not known")
    try:
        utilization = float(block.gpu_memory_utilization or UTILIZATION)
    except ValueError:
        raise MemoryPlanError("gpuMemoryUtilization is no number") from None
    return Settings(
        length=length,
        sequences=sequences,
        batch=batch,
        block=block.block_size or _BLOCK,
        type=size,
        cache_type=size if cache == "auto" else _CACHE_TYPES[cache],
        utilization=utilization,
        tensors=tensors,
        stages=stages,
    )


def _type_bytes(block: VllmBlock, model: HfModel) -> int:
    """Bytes of a value as vLLM computes with it: by itself it serves fp32 models in 16 bits."""
    name: str = block.dtype or "auto"
    if name == "auto":
        name = model.type or "float32"
        return 2 if name in ("float32", "float64") else _known_type(name)
    return _known_type(name)


def _known_type(name: str) -> int:
    if name not in _TYPES:
        raise MemoryPlanError(f"the size of values of type {name[:40]} is not known")
    return _TYPES[name]


def _plan(spec: EngineSpec, block: VllmBlock, files: _Files, vram: int | None) -> MemoryPlan:
    model = files.model
    settings = _settings(spec, block, model, vram)
    counts = layers_of_stages(model.layers, settings.stages)
    offload = int((block.cpu_offload_gb or 0) * 2**30) if spec.gpus else 0
    weights = [max(0, stage - offload) for stage in files.stages]
    given = block.kv_cache_memory_bytes
    kv = _sequence_bytes(model, settings, counts)
    need = list(kv)
    if given is not None:
        need = [max(int(given.value), 1)] * len(counts)
    estimate = _buffers(block, model, settings) + (RUNTIME_BYTES if spec.gpus else 0)
    slack = estimate // 2
    shares = [
        Share(weights[stage], need[stage], estimate)
        for stage in range(settings.stages)
        for _ in range(settings.tensors)
    ]
    per_gpu = tuple(shares) if spec.gpus else (_together(shares),)
    reserved = None
    if vram is not None and given is None and spec.gpus:
        reserved = -int(-vram * settings.utilization // 1)
    return MemoryPlan(
        backend=spec.backend,
        gpus=spec.gpus,
        per_gpu=per_gpu,
        context_tokens=settings.length,
        cache_tokens=settings.length,
        sequences=settings.sequences,
        kv_bytes_per_token=sum(_token_bytes(model, settings) * count for count in counts)
        * settings.tensors,
        reserved_bytes=reserved,
        refusal=_refusal(spec, block, model, settings, kv)
        or _too_little(settings, per_gpu, reserved, slack),
        slack_bytes=slack,
        doubt=_too_little(settings, per_gpu, reserved, 0),
        notes=_notes(block, files),
        knobs=_knobs(spec, block, files, vram, settings),
    )


def _together(shares: list[Share]) -> Share:
    return Share(
        sum(share.weights for share in shares),
        sum(share.kv for share in shares),
        sum(share.buffers for share in shares),
    )


def _token_bytes(model: HfModel, settings: Settings) -> int:
    """Bytes of one token in one layer's cache, on one GPU. A latent cache is the same on all of
    them, and every GPU has at least one KV head."""
    if model.latent:
        return model.kv_width * settings.cache_type
    if model.kv_heads == 0:
        return 0
    return max(1, model.kv_heads // settings.tensors) * model.kv_width * settings.cache_type


def _sequence_bytes(model: HfModel, settings: Settings, counts: list[int]) -> list[int]:
    """KV bytes that one sequence of the longest length takes on a GPU of each stage: whole blocks,
    and of layers with a window no more than the window and the tokens of a step."""
    token, size = _token_bytes(model, settings), settings.block
    found, layer = [], 0
    for count in counts:
        blocks = 0
        for window in model.windows[layer : layer + count]:
            if window is None:
                blocks += divide_up(settings.length, size)
            else:
                tokens = min(window - 1 + settings.batch, settings.length)
                blocks += min(divide_up(tokens, size) + 1, divide_up(settings.length, size) + 1)
        found.append(blocks * size * token)
        layer += count
    return found


def _buffers(block: VllmBlock, model: HfModel, settings: Settings) -> int:
    """The peak of the profiling run, and graphs.

    An estimate, rather too high: for each token of a step the MLP's three widest arrays and four
    hidden states; for each sequence the logits in fp32 and what sampling makes of them (six arrays
    of four bytes). For Llama 3 8B with 8192 tokens it gives 1.7 GiB, vLLM's log says 1.3 GiB.
    """
    wide = divide_up(model.intermediate, settings.tensors)
    steps = settings.batch * (3 * wide + 4 * model.hidden) * settings.type
    logits = 0 if model.kv_heads == 0 else settings.sequences * model.vocab * 24
    return steps + logits + (0 if block.enforce_eager else GRAPH_BYTES)


def _refusal(
    spec: EngineSpec,
    block: VllmBlock,
    model: HfModel,
    settings: Settings,
    kv: list[int],
) -> str | None:
    if spec.gpus and settings.tensors * settings.stages > spec.gpus:
        count = settings.tensors * settings.stages
        return f"it wants {count} GPUs, and resources gives it {spec.gpus}"
    if model.heads % settings.tensors:
        return (
            f"the model's {model.heads} attention heads cannot be divided among "
            f"{settings.tensors} GPUs: tensorParallelSize has to divide them"
        )
    given = block.kv_cache_memory_bytes
    if given is not None and int(given.value) < max(kv):
        return (
            f"kvCacheMemoryBytes {given} cannot hold one sequence of {settings.length} tokens, "
            f"which takes {max(kv) / 2**30:.2f} GiB"
        )
    return None


def _too_little(
    settings: Settings, per_gpu: tuple[Share, ...], reserved: int | None, slack: int
) -> str | None:
    """Why vLLM will not start with what it may use, if it needs `slack` less than is estimated."""
    most = max(share.total for share in per_gpu)
    if reserved is None or most - slack <= reserved:
        return None
    return (
        f"vLLM may use {reserved / 2**30:.1f} GiB of each GPU (gpuMemoryUtilization "
        f"{settings.utilization:g}), and one sequence of {settings.length} tokens needs "
        f"{most / 2**30:.1f} GiB"
    )


def _notes(block: VllmBlock, files: _Files) -> tuple[str, ...]:
    notes = ["activations and graphs are an estimate"]
    if files.pickled:
        notes.append("the weights are pickled: their size is that of the files, in one piece")
    if block.quantization and not files.model.quantization:
        known = block.quantization in ("fp8", "ptpc_fp8", "bitsandbytes")
        if not known:
            notes.append(f"weights are counted without quantization {block.quantization}")
    if block.speculative_config is not None:
        notes.append("a draft model of speculativeConfig is not counted")
    if block.enable_lora:
        notes.append("LoRA adapters are not counted")
    return tuple(notes)


def _knobs(
    spec: EngineSpec,
    block: VllmBlock,
    files: _Files,
    vram: int | None,
    settings: Settings,
) -> tuple[Knob, ...]:
    def replan(changes: dict[str, object]) -> MemoryPlan:
        changed = block.model_copy(update=changes)
        return _plan(with_block(spec, changed), changed, files, vram)

    found: list[Knob | None] = []
    if block.kv_cache_memory_bytes is None:
        found.append(
            share_knob(
                files.fields["gpu_memory_utilization"],
                settings.utilization,
                lambda text: replan({"gpu_memory_utilization": text}),
            )
        )
    found += [
        knob(
            files.fields["max_model_len"],
            settings.length,
            lambda value: replan({"max_model_len": value}),
            low=1024,
            step=token_step(settings.length),
        ),
        knob(
            files.fields["max_num_seqs"],
            settings.sequences,
            lambda value: replan({"max_num_seqs": value}),
            low=1,
        ),
    ]
    return tuple(each for each in found if each is not None)
