"""The memory of MLC-LLM.

Formulas from MLC's `cpp/serve/config.cc` (`EstimateMemoryUsageOnMode`, `InferForKVCache`) and
`python/mlc_llm/quantization`, as of commit 79d603f. Its own estimate sizes the KV cache for two
bytes a value; the cache itself is made in the type of the model, which is fp32 for `q4f32_1`. So
two numbers are kept apart here: `capacity` is what MLC believes to fit, `_Parts` what is used.
"""

from __future__ import annotations

import json
import mmap
import re
from dataclasses import dataclass, replace
from pathlib import Path

from flexinfer.api.blocks import MlcLlmBlock, MlcOverrides
from flexinfer.engines.memory.common import (
    RUNTIME_BYTES,
    divide_up,
    knob,
    token_step,
    with_block,
)
from flexinfer.engines.memory.tensors import TVM
from flexinfer.engines.memory.types import Knob, MemoryPlan, MemoryPlanError, Share
from flexinfer.engines.memory.untrusted import Fields, elements, read_json, regular_file
from flexinfer.engines.spec import EngineSpec

UTILIZATION = 0.85  # the default of gpu_memory_utilization
_LOCAL_TOKENS, _LOCAL_SEQUENCES = 8192, 4  # what mode local caps at
_BATCH = 128  # gen_config's default of max_batch_size
_PAGE = 16  # tokens of a page of the KV cache
_TYPES = (("bf16", 2), ("f16", 2), ("f32", 4))
# Tensors that tensor parallelism leaves whole: it shards attention and the MLP only.
_WHOLE = re.compile(r"embed|lm_head|norm|(^|\.)(wte|wpe|head)\.")
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.\d+\.")
_NAMES = ("tensor-cache.json", "ndarray-cache.json")  # the second before September 2025
_UNPLANNED = re.compile(r"rwkv|mamba|bert|deepseek|gemma3|gemma4|qwen3_5|medusa|eagle")


@dataclass(frozen=True)
class Model:
    """A model as its files have it, before any sharding.

    `params` are the bytes of all weights on the GPU, of which `whole` are in no layer or in no
    shard (`layers_whole` those within layers). `chunk` is the compiled prefill chunk; `window` the
    longest sequence, None for no limit. `type_bytes` are the bytes of a value of the KV cache.
    """

    params: int
    outside: int
    layers_whole: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    window: int | None
    chunk: int
    batch: int
    shards: int
    stages: int
    type_bytes: int
    quantization: str


@dataclass(frozen=True)
class Settings:
    """The settings in force. `total` is the cache's tokens, None if MLC decides; `budget` the
    bytes of each GPU that it may use, None if nobody knows. `temp` are bytes that its compiled
    functions need, None for an estimate."""

    mode: str
    sequences: int | None
    total: int | None
    chunk: int | None
    window: int | None
    shards: int
    stages: int
    budget: float | None
    temp: int | None


def plan(spec: EngineSpec, weights: Path, vram_bytes: int | None) -> MemoryPlan:
    """Plan an mlc-llm model; see `plan_memory`."""
    block = spec.block
    if not isinstance(block, MlcLlmBlock):
        raise MemoryPlanError(f"{spec.name}: the settings are not those of mlc-llm")
    models = [read_model(weights)]
    models += [read_model(_model_path(text)) for text in block.additional_models]
    extra = read_model(Path(block.embedding_model)).params if block.embedding_model else 0
    temp = library_temp(Path(block.model_lib_path)) if block.model_lib_path else None
    return _plan(spec, block, models, extra, temp, vram_bytes)


def read_model(directory: Path) -> Model:
    """Read `mlc-chat-config.json` and the list of tensors. Raises `MemoryPlanError`."""
    config = Fields(read_json(directory / "mlc-chat-config.json"), "mlc-chat-config.json")
    kind = config.text("model_type", "")
    if _UNPLANNED.search(kind):
        raise MemoryPlanError(f"the memory of models of type {kind} is not known for mlc-llm")
    model = config.object("model_config")
    # A model that sees has its language part in here.
    text = model.object("text_config") if "text_config" in model else model
    quantization = config.text("quantization")
    size = next((size for name, size in _TYPES if name in quantization), None)
    if size is None:
        raise MemoryPlanError(f"quantization {quantization} names no type that is known")
    hidden = text.whole("hidden_size", "n_embd")
    heads = text.whole("num_attention_heads", "n_head", most=1 << 20)
    layers = text.whole("num_hidden_layers", "n_layer", most=1 << 16)
    head_dim = text.whole("head_dim", least=0, default=0) or max(1, hidden // heads)
    window = config.whole("context_window_size", least=-1, default=-1)
    chunk = config.whole("prefill_chunk_size", least=-1, most=1 << 30, default=-1)
    params, outside, whole = _tensors(directory)
    return Model(
        params=params,
        outside=outside,
        layers_whole=whole,
        layers=layers,
        heads=heads,
        kv_heads=text.whole("num_key_value_heads", default=heads, most=1 << 20),
        head_dim=head_dim,
        hidden=hidden,
        intermediate=text.whole("intermediate_size", "n_inner", default=4 * hidden),
        vocab=config.whole("vocab_size", default=text.whole("vocab_size", default=1)),
        window=window if window > 0 else None,
        chunk=chunk if chunk > 0 else 2048,
        batch=text.whole("max_batch_size", most=1 << 20, default=_BATCH),
        shards=config.whole("tensor_parallel_shards", most=1 << 10, default=1),
        stages=config.whole("pipeline_parallel_stages", most=1 << 10, default=1),
        type_bytes=size,
        quantization=quantization,
    )


def capacity(
    model: Model, params: float, memory: float, *, chunk: int, sequences: int, temp: float
) -> int:
    """The tokens of KV cache that MLC believes to fit, which may be none or fewer than none.

    `params` are the bytes of weights of one GPU, `memory` what it may use of it (bytes times
    utilisation), `chunk` the compiled prefill chunk; heads and layers of `model` are those of one
    GPU. The formula of `EstimateMemoryUsageOnMode`, 1.25 bytes a token for the page table included.
    """
    heads, dim = model.heads, model.head_dim
    token = dim * model.kv_heads * model.layers * 4 + 1.25
    rest = float(_kv_aux(model, chunk, sequences))
    rest += chunk * 4 + sequences * 4 + (2 * chunk + sequences) * dim * heads * 2
    rest += sequences * 20 + sequences * model.vocab * 16.125
    return int((memory - params - temp - rest) / token)


def _kv_aux(model: Model, chunk: int, sequences: int) -> int:
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    return (
        (sequences + 1) * 88
        + chunk * (heads + 1) * 8
        + chunk * dim * (heads + kv_heads) * 4
        + (48 << 20)
    )


def _model_path(text: str) -> Path:
    return Path(text.partition(",")[0])


def _tensors(directory: Path) -> tuple[int, int, int]:
    """Bytes of all tensors on the GPU, of those in no layer, and of those in layers that no
    sharding divides.

    From shapes and types: on disk, fp32 is written as bf16, so that the files are smaller.
    """
    path = next((directory / name for name in _NAMES if (directory / name).exists()), None)
    if path is None:
        raise MemoryPlanError(f"{directory} has neither {' nor '.join(_NAMES)}")
    total = outside = whole = 0
    for shard in Fields(read_json(path), path.name).list("records"):
        if not isinstance(shard, dict):
            raise MemoryPlanError(f"{path.name} has a record that is no object")
        for record in Fields(shard, path.name).list("records"):
            if not isinstance(record, dict):
                raise MemoryPlanError(f"{path.name} has a tensor that is no object")
            fields = Fields(record, path.name)
            name, dtype = fields.text("name"), fields.text("dtype")
            if dtype not in TVM:
                raise MemoryPlanError(f"{path.name}: {name} has the unknown type {dtype[:40]}")
            size = elements(record.get("shape"), name) * TVM[dtype]
            total += size
            if not _LAYER.search(name):
                outside += size
            elif _WHOLE.search(name):
                whole += size
    if total == 0:
        raise MemoryPlanError(f"{path.name} lists no tensors")
    return total, outside, whole


def library_temp(path: Path) -> int | None:
    """Twice the most that a function of a compiled library needs for its temporaries, in bytes.

    The library carries its metadata as JSON, with `memory_usage` of each function. None if that
    cannot be found in the file, which is read without being run.
    """
    key = b'"memory_usage":'
    try:
        with regular_file(path) as (file, size):
            if size < len(key):
                return None
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                at = data.find(key)
                text = data[at + len(key) : at + len(key) + (64 << 10)] if at >= 0 else b""
    except MemoryPlanError:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(text.decode("utf-8", "replace").lstrip())
    except (ValueError, RecursionError):
        return None
    sizes = list(found.values()) if isinstance(found, dict) else []
    if not sizes or not all(type(size) is int and 0 <= size < 1 << 40 for size in sizes):
        return None
    return 2 * int(max(sizes))


def estimated_temp(model: Model) -> int:
    """Twice what the prefill function holds at once, for want of a library to read it from.

    An estimate: gate and up projections together, and 2.75 hidden states a token. It gives the
    624 MiB a function that MLC's log says for Llama 3 8B q4f16_1 with a chunk of 8192.
    """
    token = (2 * model.intermediate + divide_up(11 * model.hidden, 4)) * model.type_bytes
    return 2 * model.chunk * token


def _raw(overrides: MlcOverrides) -> MlcOverrides:
    """`overrides` with what `raw` says, which MLC reads last."""
    changes: dict[str, object] = {}
    for part in (overrides.raw or "").split(";"):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in MlcOverrides.model_fields:
            continue
        digits = value.isascii() and value.isdigit()
        if name == "gpu_memory_utilization":
            changes[name] = value
        elif digits and len(value) < 16:
            changes[name] = int(value)
        else:
            raise MemoryPlanError(f"overrides.raw: {part} cannot be understood here")
    return overrides.model_copy(update=changes)


def _share_of(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise MemoryPlanError(f"gpu_memory_utilization {text} is no share of the memory")
    return value


def _settings(
    block: MlcLlmBlock, model: Model, temp: int | None, vram_bytes: int | None, gpus: int
) -> Settings:
    given = _raw(block.overrides)
    compiled = block.model_lib_path is not None  # then the library's shards count
    budget: float | None = None
    if given.gpu_memory_utilization is not None:
        share = _share_of(given.gpu_memory_utilization)
        budget = None if vram_bytes is None else vram_bytes * share
    elif block.gpu_memory_bytes is not None:
        budget = float(block.gpu_memory_bytes)
        budget = budget if vram_bytes is None else min(budget, vram_bytes)
    elif vram_bytes is not None:
        budget = vram_bytes * UTILIZATION
    shards = None if compiled else given.tensor_parallel_shards
    stages = None if compiled else given.pipeline_parallel_stages
    if shards is None and not compiled and gpus:
        shards = max(1, gpus // (stages or model.stages))  # the launch plan asks for as many
    return Settings(
        mode=block.mode,
        sequences=given.max_num_sequence,
        total=given.max_total_seq_length,
        chunk=given.prefill_chunk_size,
        window=given.context_window_size,
        shards=shards or model.shards,
        stages=stages or model.stages,
        budget=budget,
        temp=temp,
    )


def _plan(
    spec: EngineSpec,
    block: MlcLlmBlock,
    models: list[Model],
    extra: int,
    temp: int | None,
    vram_bytes: int | None,
) -> MemoryPlan:
    main = models[0]
    settings = _settings(block, main, temp, vram_bytes, spec.gpus)
    shards, stages = settings.shards, settings.stages
    for model in models:
        if model.kv_heads % shards or model.heads % shards:
            raise MemoryPlanError(
                f"{model.kv_heads} KV heads cannot be divided among {shards} shards"
            )
    parts = [_of_one_gpu(model, shards, stages) for model in models]
    sequences, window = _sequences(settings, main), _window(settings, main)
    fit = _fitting(models, parts, extra, settings, sequences)
    refusal = _refusal(spec, settings, fit)
    tokens = _tokens(settings, fit, sequences, window)
    pages = divide_up(tokens, _PAGE) + 1
    kv_token = sum(
        2 * part.layers * part.kv_heads * part.head_dim * part.type_bytes for part in parts
    )
    share = Share(
        weights=extra + sum(part.params for part in parts),
        kv=pages * _PAGE * kv_token,
        buffers=_buffers(parts, settings, sequences) + (RUNTIME_BYTES if spec.gpus else 0),
    )
    per_gpu = (share,) * (shards * stages if spec.gpus else 1)
    notes = _notes(settings, main, share, fit, tokens)
    return MemoryPlan(
        backend=spec.backend,
        gpus=spec.gpus,
        per_gpu=per_gpu,
        context_tokens=min(tokens, window) if window is not None else tokens,
        cache_tokens=tokens,
        sequences=sequences,
        kv_bytes_per_token=kv_token * len(per_gpu),
        refusal=refusal,
        notes=notes,
        knobs=_knobs(spec, block, models, extra, temp, vram_bytes, tokens, sequences),
    )


def _of_one_gpu(model: Model, shards: int, stages: int) -> Model:
    """The part of a model that one GPU has: heads and the layers' weights are divided, weights
    outside layers are not; with several stages, the one with most layers and all of the rest."""
    layers = divide_up(model.layers, stages)
    inside = model.params - model.outside - model.layers_whole
    held = (divide_up(inside, shards) + model.layers_whole) * layers // model.layers
    return replace(
        model,
        params=held + model.outside,
        layers=layers,
        heads=model.heads // shards,
        kv_heads=model.kv_heads // shards,
        intermediate=divide_up(model.intermediate, shards),
    )


def _sequences(settings: Settings, model: Model) -> int:
    if settings.sequences is not None:
        return settings.sequences
    default = {"local": min(_LOCAL_SEQUENCES, model.batch), "interactive": 1}
    return default.get(settings.mode, model.batch)


def _window(settings: Settings, model: Model) -> int | None:
    windows = [size for size in (settings.window, model.window) if size is not None]
    return min(windows) if windows else None


def _temp(parts: list[Model], settings: Settings) -> int:
    if settings.temp is not None:
        return settings.temp + sum(estimated_temp(part) for part in parts[1:])
    return sum(estimated_temp(part) for part in parts)


def _fitting(
    models: list[Model], parts: list[Model], extra: int, settings: Settings, sequences: int
) -> int | None:
    """The tokens that MLC believes to fit; None if the GPU's memory is not known."""
    if settings.budget is None:
        return None
    # MLC divides all weights by the stages, also those that only one of them has.
    params = sum(
        (part.params * models[i].layers // part.layers) // settings.stages
        if settings.stages > 1
        else part.params
        for i, part in enumerate(parts)
    )
    first = parts[0]
    if len(parts) > 1:  # several models: the tokens of a sequence are in the caches of all
        layers = sum(part.layers * part.kv_heads * part.head_dim for part in parts)
        first = replace(first, layers=layers // (first.kv_heads * first.head_dim))
    return capacity(
        first,
        params + extra,
        settings.budget,
        chunk=first.chunk,
        sequences=sequences,
        temp=_temp(parts, settings),
    )


def _tokens(settings: Settings, fit: int | None, sequences: int, window: int | None) -> int:
    """The tokens of the KV cache: as given, or as the mode infers them."""
    if settings.total is not None:
        return settings.total
    limits = [limit for limit in (fit,) if limit is not None]
    if settings.mode == "server":
        limits += [sequences * window] if window is not None else []
    else:
        limits += [window] if window is not None else []
        limits += [_LOCAL_TOKENS] if settings.mode == "local" else []
    if not limits or (fit is None and settings.mode != "local"):
        raise MemoryPlanError(
            f"mode {settings.mode} takes what fits, and the GPU's memory is not known"
        )
    return max(1, min(limits))


def _buffers(parts: list[Model], settings: Settings, sequences: int) -> int:
    total = _temp(parts, settings)
    for part in parts:
        chunk = min(part.chunk, settings.chunk or part.chunk)
        total += _kv_aux(part, chunk, sequences)
        states = (2 * chunk + sequences) * part.head_dim * part.heads
        total += chunk * 4 + sequences * 4 + states * part.type_bytes
    return total + sequences * 20 + int(sequences * parts[0].vocab * 16.125)


def _refusal(spec: EngineSpec, settings: Settings, fit: int | None) -> str | None:
    wanted = settings.shards * settings.stages
    if spec.gpus and wanted > spec.gpus:
        return f"it is compiled for {wanted} GPUs, and resources gives it {spec.gpus}"
    if fit is not None and fit <= 0 and settings.budget is not None:
        return (
            "MLC refuses to start: weights and buffers leave no room for a KV cache in the "
            f"{settings.budget / 2**30:.1f} GiB that it may use of each GPU"
        )
    return None


def _notes(
    settings: Settings, model: Model, share: Share, fit: int | None, tokens: int
) -> tuple[str, ...]:
    notes = []
    if model.type_bytes == 4 and settings.total is None and fit == tokens:
        over = share.total - (settings.budget or 0)
        notes.append(
            f"{model.quantization} has an fp32 KV cache, which MLC counts at half its size: by "
            f"itself it takes {over / 2**30:.1f} GiB more than it may use; set maxTotalSeqLength"
        )
    if settings.temp is None:
        notes.append("the temporary buffers are an estimate: no library was read")
    return tuple(notes)


def _knobs(
    spec: EngineSpec,
    block: MlcLlmBlock,
    models: list[Model],
    extra: int,
    temp: int | None,
    vram_bytes: int | None,
    tokens: int,
    sequences: int,
) -> tuple[Knob, ...]:
    def replan(changes: dict[str, object]) -> MemoryPlan:
        # What `raw` says goes last, so what it says now has to become fields of their own.
        overrides = _raw(block.overrides).model_copy(update={**changes, "raw": None})
        changed = block.model_copy(update={"overrides": overrides})
        return _plan(with_block(spec, changed), changed, models, extra, temp, vram_bytes)

    path = "spec.mlcllm.overrides"
    share = round(_current_share(block, vram_bytes) * 100)
    found = [
        knob(
            f"{path}.maxTotalSeqLength",
            tokens,
            lambda value: replan({"max_total_seq_length": value}),
            low=1024,
            step=token_step(tokens),
        ),
        knob(
            f"{path}.maxNumSequence",
            sequences,
            lambda value: replan({"max_num_sequence": value}),
            low=1,
        ),
        Knob(
            f"{path}.gpuMemoryUtilization",
            share,
            1,
            98,
            1,
            lambda value: replan({"gpu_memory_utilization": f"{value / 100:.2f}"}),
            lambda value: f'"{value / 100:.2f}"',
            is_share=True,
        ),
    ]
    return tuple(each for each in found if each is not None)


def _current_share(block: MlcLlmBlock, vram_bytes: int | None) -> float:
    given = _raw(block.overrides)
    if given.gpu_memory_utilization is not None:
        return _share_of(given.gpu_memory_utilization)
    if block.gpu_memory_bytes is not None and vram_bytes:
        return min(1.0, block.gpu_memory_bytes / vram_bytes)
    return UTILIZATION
