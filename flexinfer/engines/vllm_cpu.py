"""How much memory vLLM's KV cache gets on a CPU.

vLLM itself would take its share of *all* RAM (0.92) and refuse to start where less is free; older
versions take 4 GiB. Neither suits a machine that has other things to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexinfer.api.blocks import VllmBlock
from flexinfer.engines.memory.types import MemoryPlanError
from flexinfer.engines.memory.untrusted import read_json

GIB = 1 << 30
USUAL_GIB = 4
_BYTES = {"float32": 4, "float": 4}


def kv_cache_gib(weights: Path, block: VllmBlock, root: Path = Path("/")) -> int:
    """Return whole GiB for the KV cache: 4, or more where one longest sequence needs more, and at
    most half of what a NUMA node has free (vLLM binds itself to one)."""
    needed = -(-_sequence_bytes(_config(weights), block) // GIB)
    free = _available(root) // max(1, len(list(root.glob("sys/devices/system/node/node[0-9]*"))))
    return max(1, min(max(USUAL_GIB, needed), free // 2 // GIB))


def _sequence_bytes(config: dict[str, Any], block: VllmBlock) -> int:
    """Bytes of one sequence of the longest length: 2 (K and V) x layers x KV heads x head size x
    bytes of a value, for each token. 0 where config.json does not say."""
    heads = config.get("num_attention_heads")
    length = block.max_model_len or config.get("max_position_embeddings")
    layers = config.get("num_hidden_layers")
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim")
    if not size and isinstance(heads, int) and heads and isinstance(config.get("hidden_size"), int):
        size = config["hidden_size"] // heads
    value = _BYTES.get(block.dtype or "", 2)
    product = 2 * value
    for number in (length, layers, kv_heads, size):
        if not isinstance(number, int) or number <= 0:
            return 0
        product *= number
    return product


def _config(weights: Path) -> dict[str, Any]:
    try:
        read = read_json(weights / "config.json")
    except MemoryPlanError:
        return {}  # vLLM will say what is wrong with it
    inner = read.get("text_config")  # of models that also see or hear
    return {**read, **inner} if isinstance(inner, dict) else read


def _available(root: Path) -> int:
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return 2 * USUAL_GIB * GIB
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 2 * USUAL_GIB * GIB
