"""The memory of MLC-LLM.

Formulas from MLC's `cpp/serve/config.cc` (`EstimateMemoryUsageOnMode`, `InferForKVCache`) and
`python/mlc_llm/quantization`, as of commit 79d603f. Its own estimate sizes the KV cache for two
bytes a value; the cache itself is made in the type of the model, which is fp32 for `q4f32_1`. So
two numbers are kept apart here: `capacity` is what MLC believes to fit, the plan what is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flexinfer.api.blocks import MlcLlmBlock, MlcOverrides
from flexinfer.engines.memory.common import (
    RUNTIME_BYTES,
    divide_up,
    fields_of,
    knob,
    share_knob,
    token_step,
    with_block,
)
from flexinfer.engines.memory.mlc_files import Model, library_temp, read_model
from flexinfer.engines.memory.types import Knob, MemoryPlan, MemoryPlanError, Share
from flexinfer.engines.spec import EngineSpec

UTILIZATION = 0.85  # the default of gpu_memory_utilization
_LOCAL_TOKENS, _LOCAL_SEQUENCES = 8192, 4  # what mode local caps at
_PAGE = 16  # tokens of a page of the KV cache
_PATH = "spec.mlcllm.overrides"
_KNOBS = {
    "max_total_seq_length": "maxTotalSeqLength",
    "max_num_sequence": "maxNumSequence",
    "gpu_memory_utilization": "gpuMemoryUtilization",
}


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


@dataclass(frozen=True)
class _Inputs:
    """What does not change when settings are turned. `extra` are bytes of an embedding model,
    `temp` as in `Settings`, `fields` the places in the manifest where settings are changed."""

    models: list[Model]
    extra: int
    temp: int | None
    vram: int | None
    fields: Mapping[str, str]


def plan(spec: EngineSpec, weights: Path, vram_bytes: int | None) -> MemoryPlan:
    """Plan an mlc-llm model; see `plan_memory`."""
    block = spec.block
    if not isinstance(block, MlcLlmBlock):
        raise MemoryPlanError(f"{spec.name}: the settings are not those of mlc-llm")
    models = [read_model(weights)]
    models += [read_model(_model_path(text)) for text in block.additional_models]
    raw = {part.partition("=")[0].strip() for part in (block.overrides.raw or "").split(";")}
    inputs = _Inputs(
        models=models,
        extra=read_model(Path(block.embedding_model)).params if block.embedding_model else 0,
        temp=library_temp(Path(block.model_lib_path)) if block.model_lib_path else None,
        vram=vram_bytes,
        fields=fields_of(_PATH, _KNOBS, {name: f"{_PATH}.raw {name}" for name in raw}),
    )
    return _plan(spec, block, inputs)


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


def _plan(spec: EngineSpec, block: MlcLlmBlock, inputs: _Inputs) -> MemoryPlan:
    models, extra = inputs.models, inputs.extra
    main = models[0]
    settings = _settings(block, main, inputs.temp, inputs.vram, spec.gpus)
    shards, stages = settings.shards, settings.stages
    for model in models:
        if model.kv_heads % shards or model.heads % shards:
            raise MemoryPlanError(
                f"{model.kv_heads} KV heads cannot be divided among {shards} shards"
            )
    parts = [_of_one_gpu(model, shards, stages) for model in models]
    sequences, window = _sequences(settings, main), _window(settings, main)
    temp = _temp(parts, settings)
    slack = 0 if settings.temp is not None else temp // 2
    fit = _fitting(models, parts, extra, settings, sequences, temp)
    most = _fitting(models, parts, extra, settings, sequences, temp - slack)
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
        refusal=_too_few(spec, settings) or _no_room(settings, most),
        slack_bytes=slack + (RUNTIME_BYTES // 2 if spec.gpus else 0),
        doubt=_no_room(settings, fit),
        notes=notes,
        knobs=_knobs(spec, block, inputs, tokens, sequences),
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
    models: list[Model],
    parts: list[Model],
    extra: int,
    settings: Settings,
    sequences: int,
    temp: int,
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
        temp=temp,
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


def _too_few(spec: EngineSpec, settings: Settings) -> str | None:
    wanted = settings.shards * settings.stages
    if spec.gpus and wanted > spec.gpus:
        return f"it is compiled for {wanted} GPUs, and resources gives it {spec.gpus}"
    return None


def _no_room(settings: Settings, fit: int | None) -> str | None:
    """Why MLC will not start if it believes that `fit` tokens fit."""
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
    inputs: _Inputs,
    tokens: int,
    sequences: int,
) -> tuple[Knob, ...]:
    def replan(changes: dict[str, object]) -> MemoryPlan:
        # What `raw` says goes last, so what it says now has to become fields of their own.
        overrides = _raw(block.overrides).model_copy(update={**changes, "raw": None})
        changed = block.model_copy(update={"overrides": overrides})
        return _plan(with_block(spec, changed), changed, inputs)

    fields = inputs.fields
    share = _current_share(block, inputs.vram)
    found = [
        knob(
            fields["max_total_seq_length"],
            tokens,
            lambda value: replan({"max_total_seq_length": value}),
            low=1024,
            step=token_step(tokens),
        ),
        knob(
            fields["max_num_sequence"],
            sequences,
            lambda value: replan({"max_num_sequence": value}),
            low=1,
        ),
        share_knob(
            fields["gpu_memory_utilization"],
            share,
            lambda text: replan({"gpu_memory_utilization": text}),
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
