"""What the files of an MLC model say: its configuration, its tensors, its compiled library."""

from __future__ import annotations

import json
import mmap
import re
from dataclasses import dataclass
from pathlib import Path

from flexinfer.engines.memory.tensors import TVM
from flexinfer.engines.memory.types import MemoryPlanError
from flexinfer.engines.memory.untrusted import Fields, elements, read_json, regular_file

_BATCH = 128  # gen_config's default of max_batch_size
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
