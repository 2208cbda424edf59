"""The memory of llama.cpp.

From llama.cpp 0c1e57098: `llama_kv_cache` (one tensor for K and one for V a layer, cells times
streams), `llama_kv_cache_iswa` (layers with a window have a smaller cache),
`llama_model::load_tensors` (which layers go to which device), `llama_memory_recurrent`. The compute
buffers are what its graph allocator finds; the formula for them here was fitted to its log (see
`compute_bytes`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexinfer.api.blocks import LlamaCppBlock
from flexinfer.engines.memory.common import (
    RUNTIME_BYTES,
    divide_up,
    fields_of,
    knob,
    said_in,
    token_step,
    with_arguments,
    with_block,
)
from flexinfer.engines.memory.gguf_header import GgufModel, block_size, read_gguf
from flexinfer.engines.memory.gguf_model import Shape, shape_of
from flexinfer.engines.memory.types import Knob, MemoryPlan, MemoryPlanError, Share
from flexinfer.engines.spec import EngineSpec

_AUTO_SLOTS = 4
_BATCH, _UBATCH = 2048, 512
_PAD = 256  # cells of a cache come in multiples of it
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_LAYER = re.compile(r"blk\.(\d{1,5})\.")
_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch)?exps")
_KNOBS = {"context_size": "contextSize", "parallel": "parallel", "n_gpu_layers": "nGPULayers"}
_ARGUMENTS = {
    **dict.fromkeys(("-c", "--ctx-size"), "context_size"),
    **dict.fromkeys(("-np", "--parallel"), "parallel"),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), "n_gpu_layers"),
    **dict.fromkeys(("-b", "--batch-size"), "batch_size"),
    **dict.fromkeys(("-ub", "--ubatch-size"), "ubatch_size"),
    **dict.fromkeys(("-fa", "--flash-attn"), "flash_attention"),
    **dict.fromkeys(("-ctk", "--cache-type-k"), "cache_type_k"),
    **dict.fromkeys(("-ctv", "--cache-type-v"), "cache_type_v"),
    **dict.fromkeys(("-sm", "--split-mode"), "split_mode"),
    **dict.fromkeys(("-ts", "--tensor-split"), "tensor_split"),
    **dict.fromkeys(("-mg", "--main-gpu"), "main_gpu"),
    **dict.fromkeys(("-ncmoe", "--n-cpu-moe"), "n_cpu_moe"),
}


@dataclass(frozen=True)
class Run:
    """How a model is run. `context` are tokens of all streams together, `streams` the caches that
    share it evenly, `rows` how many tokens of a batch have logits; `gpu_layers` counts the output
    layer, None for all. `split` are the GPUs' shares."""

    context: int
    sequences: int
    streams: int
    ubatch: int
    rows: int
    flash: bool
    type_k: str
    type_v: str
    gpu_layers: int | None
    split_mode: str
    split: tuple[float, ...]
    main: int
    cpu_moe: int

    @property
    def cells(self) -> int:
        """Cells of one stream's cache."""
        return divide_up(max(1, divide_up(self.context, self.streams)), _PAD) * _PAD


@dataclass(frozen=True)
class Loaded:
    """A model's header and what it says."""

    file: GgufModel
    shape: Shape


def load(path: Path) -> Loaded:
    """Read the header of a GGUF file. Raises `MemoryPlanError`."""
    file = read_gguf(path)
    return Loaded(file, shape_of(file))


def plan(spec: EngineSpec, weights: Path, vram_bytes: int | None) -> MemoryPlan:
    """Plan a llama-cpp model; see `plan_memory`."""
    block = spec.block
    if not isinstance(block, LlamaCppBlock):
        raise MemoryPlanError(f"{spec.name}: the settings are not those of llama-cpp")
    words = block.extra_args
    unified = None
    if {"-kvu", "--kv-unified"} & set(words):
        unified = True
    elif {"-no-kvu", "--no-kv-unified"} & set(words):
        unified = False
    block = with_arguments(block, words, _ARGUMENTS)
    changes: dict[str, object] = {"extra_args": []}
    if unified is not None:
        changes["kv_unified"] = unified
    block = block.model_copy(update=changes)
    weights = _file(weights)
    base = weights.parent
    beside = [sum(tensor.size for tensor in read_gguf(base / path).tensors) for path in block.lora]
    projector = read_gguf(base / block.mmproj) if block.mmproj else None
    draft = load(base / block.draft_model) if block.draft_model else None
    extras = _Extras(sum(beside), projector, draft)
    fields = fields_of("spec.llamacpp", _KNOBS, said_in(words, _ARGUMENTS, "spec.llamacpp"))
    return _plan(spec, block, load(weights), extras, fields)


def _file(weights: Path) -> Path:
    """The one model of a directory, or `weights` itself."""
    if not weights.is_dir():
        return weights
    found = [
        path
        for path in sorted(weights.glob("*.gguf"))
        if not path.name.startswith("mmproj") and not _LATER_PART.search(path.name)
    ]
    if len(found) != 1:
        raise MemoryPlanError(f"{weights} holds {len(found)} GGUF models: name the file")
    return found[0]


@dataclass(frozen=True)
class _Extras:
    """What is loaded beside the model: bytes of adapters, a projector, a draft model."""

    adapters: int
    projector: GgufModel | None
    draft: Loaded | None


def _run(spec: EngineSpec, block: LlamaCppBlock, model: Loaded) -> Run:
    sequences = block.parallel or _AUTO_SLOTS
    unified = block.kv_unified
    if unified is None:
        unified = block.parallel is None
    context = block.context_size or model.shape.trained
    batch = min(block.batch_size or _BATCH, max(1, context))
    layers = block.n_gpu_layers
    count = max(1, spec.gpus)
    return Run(
        context=context,
        sequences=sequences,
        streams=1 if unified else sequences,
        ubatch=min(block.ubatch_size or _UBATCH, batch),
        rows=sequences,
        flash=block.flash_attention != "off",
        type_k=block.cache_type_k or "f16",
        type_v=block.cache_type_v or "f16",
        gpu_layers=layers if isinstance(layers, int) else None,
        split_mode=block.split_mode or "layer",
        split=_split(block.tensor_split, count),
        main=min(block.main_gpu or 0, count - 1),
        cpu_moe=block.n_cpu_moe or 0,
    )


def _split(text: str | None, count: int) -> tuple[float, ...]:
    if text is None:
        return (1.0 / count,) * count
    try:
        parts = [max(0.0, float(part)) for part in re.split("[,/]", text)]
    except ValueError:
        raise MemoryPlanError(f"tensorSplit {text[:40]} is no list of numbers") from None
    parts = [*parts[:count], *[0.0] * (count - len(parts))]
    total = sum(parts)
    if not 0 < total < float("inf"):
        raise MemoryPlanError(f"tensorSplit {text[:40]} gives no GPU anything")
    return tuple(part / total for part in parts)


def _plan(
    spec: EngineSpec,
    block: LlamaCppBlock,
    model: Loaded,
    extras: _Extras,
    fields: Mapping[str, str],
) -> MemoryPlan:
    run = _run(spec, block, model)
    shares = share_out(model, run, gpus=spec.gpus)
    if extras.draft is not None:
        layers = block.draft_gpu_layers
        own = replace(
            run,
            type_k="f16",
            type_v="f16",
            gpu_layers=layers if isinstance(layers, int) else None,
            cpu_moe=0,
        )
        shares = [
            _add(share, other)
            for share, other in zip(
                shares, share_out(extras.draft, own, gpus=spec.gpus), strict=True
            )
        ]
    if extras.projector is not None:
        size = sum(tensor.size for tensor in extras.projector.tensors)
        shares[run.main] = _add(shares[run.main], Share(size, 0, size // 2))
    if extras.adapters:
        shares[run.main] = _add(shares[run.main], Share(extras.adapters, 0, 0))
    if spec.gpus:
        shares = [_add(share, Share(0, 0, RUNTIME_BYTES)) for share in shares]
    notes = ["compute buffers are an estimate"]
    if spec.gpus and (block.n_gpu_layers is None or not block.context_size):
        notes.append("llama-server lowers an absent nGPULayers and contextSize until they fit")
    if extras.projector is not None:
        notes.append("the projector's buffers are taken to be half its size")
    return MemoryPlan(
        backend=spec.backend,
        gpus=spec.gpus,
        per_gpu=tuple(shares),
        context_tokens=run.cells,
        cache_tokens=run.cells * run.streams,
        sequences=run.sequences,
        kv_bytes_per_token=token_bytes(model.shape, run),
        slack_bytes=slack_of(shares),
        notes=tuple(notes),
        knobs=_knobs(spec, block, model, extras, run, fields),
    )


def _add(one: Share, other: Share) -> Share:
    return Share(one.weights + other.weights, one.kv + other.kv, one.buffers + other.buffers)


def row_bytes(values: int, type_name: str) -> int:
    """Bytes of a row of `values` values in a type such as `q8_0`. Raises `MemoryPlanError`."""
    per_block, size = block_size(type_name)
    return divide_up(values, per_block) * size


def token_bytes(shape: Shape, run: Run) -> int:
    """Bytes that one more token takes in the caches of layers that keep all tokens."""
    return sum(
        row_bytes(layer.k, run.type_k) + row_bytes(layer.v, run.type_v)
        for layer in shape.layers
        if layer.window is None
    )


def layer_kv_bytes(shape: Shape, run: Run, index: int) -> int:
    """Bytes of one layer's cache, all streams; of its recurrent state, in fp32, all sequences.

    The cells of a layer with a window: the window of each sequence that shares the cache, and a
    batch, in multiples of 256.
    """
    if index >= len(shape.layers):
        return 0
    layer = shape.layers[index]
    cells = run.cells
    if layer.window is not None:
        shared = run.sequences if run.streams == 1 else 1
        cells = divide_up(min(cells, layer.window * shared + run.ubatch), _PAD) * _PAD
    token = row_bytes(layer.k, run.type_k) + row_bytes(layer.v, run.type_v)
    return cells * run.streams * token + layer.state * 4 * run.sequences


def compute_bytes(shape: Shape, run: Run, *, logits: bool = True) -> int:
    """The compute buffer of one device. An estimate.

    Inputs and the widest point of the graph: with flash attention the MLP (four hidden states and
    three times its width, fp32, for each token of a batch) and the attention's mask in f16; without
    it, the attention's scores of all heads in fp32. Or the logits, where they are more. Within an
    eighth of what llama-server's log says on the CPU for Llama, Qwen and Gemma models.
    """
    batch = run.ubatch
    mlp = batch * (4 * shape.hidden + 3 * shape.wide) * 4
    rows = run.rows * (shape.vocab + shape.hidden) * 4 if logits and shape.generates else 0
    cells = run.cells if shape.layers else batch
    masks = [cells]
    windows = {layer.window for layer in shape.layers if layer.window is not None}
    masks += [min(cells, window + batch) for window in windows]
    if run.flash:
        return batch * 20 + batch * sum(masks) * 2 + max(mlp, rows)
    scores = batch * (cells * shape.heads + 6 * shape.hidden) * 4
    return batch * 20 + batch * sum(masks) * 4 + max(mlp, rows, scores)


def share_out(model: Loaded, run: Run, *, gpus: int) -> list[Share]:
    """What each GPU holds of a model, or what RAM holds if there is none.

    Layers go to the GPUs in order, the last ones if not all do; the token embedding stays in RAM
    unless it is the output layer as well, the output layer is on the last GPU.
    """
    shape = model.shape
    if gpus == 0:
        cache = sum(layer_kv_bytes(shape, run, i) for i in range(shape.blocks))
        size = sum(tensor.size for tensor in model.file.tensors)
        return [Share(size, cache, compute_bytes(shape, run))]
    units = shape.blocks + 1
    offloaded = units if run.gpu_layers is None else min(run.gpu_layers, units)
    first = units - offloaded
    places = [_place(i - first, offloaded, run) if i >= first else None for i in range(units)]
    weights, kv = [0.0] * gpus, [0.0] * gpus
    even = run.split_mode in ("row", "tensor")

    def put(sums: list[float], size: int, place: int | None, *, spread: bool) -> None:
        if place is None:
            return
        if spread:
            for index, part in enumerate(run.split):
                sums[index] += size * part
        else:
            sums[place] += size

    names = {tensor.name for tensor in model.file.tensors}
    tied = None if "output.weight" in names else "token_embd.weight"
    for tensor in model.file.tensors:
        match = _LAYER.match(tensor.name)
        layer = int(match[1]) if match else None
        if layer is not None and layer < shape.blocks:
            if layer < run.cpu_moe and _EXPERTS.search(tensor.name):
                continue
            put(weights, tensor.size, places[layer], spread=even)
        elif tensor.name.startswith("output") or tensor.name == tied:
            put(weights, tensor.size, places[-1], spread=even)
    for index in range(shape.blocks):
        size = layer_kv_bytes(shape, run, index)
        put(kv, size, places[index], spread=run.split_mode == "tensor")
    used = [part > 0 for part in run.split] if run.split_mode != "none" else [False] * gpus
    used[run.main] = True
    last = places[-1]
    return [
        Share(
            int(weights[i]),
            int(kv[i]),
            compute_bytes(shape, run, logits=i == last) if used[i] and offloaded else 0,
        )
        for i in range(gpus)
    ]


def _place(index: int, count: int, run: Run) -> int:
    """The GPU of one of `count` offloaded layers."""
    if run.split_mode in ("none", "row"):
        return run.main
    reached = 0.0
    for gpu, part in enumerate(run.split):
        reached += part
        if index / count < reached - 1e-9:
            return gpu
    return max(gpu for gpu, part in enumerate(run.split) if part > 0)


def slack_of(shares: Sequence[Share]) -> int:
    """How much lower than estimated the buffers of a GPU may be: half of them."""
    return max(share.buffers for share in shares) // 2


def _knobs(
    spec: EngineSpec,
    block: LlamaCppBlock,
    model: Loaded,
    extras: _Extras,
    run: Run,
    fields: Mapping[str, str],
) -> tuple[Knob, ...]:
    def replan(changes: dict[str, object]) -> MemoryPlan:
        changed = block.model_copy(update=changes)
        return _plan(with_block(spec, changed), changed, model, extras, fields)

    units = model.shape.blocks + 1
    layers = units if run.gpu_layers is None else min(units, run.gpu_layers)
    found = [
        knob(
            fields["context_size"],
            run.context,
            lambda value: replan({"context_size": value}),
            low=512,
            step=token_step(run.context),
        ),
        knob(
            fields["parallel"],
            run.sequences,
            lambda value: replan({"parallel": value}),
            low=1,
        ),
        knob(
            fields["n_gpu_layers"],
            layers,
            lambda value: replan({"n_gpu_layers": value}),
            low=1,
        ),
    ]
    return tuple(each for each in found if each is not None)
