"""The size of the KV cache on a CPU, on machines that are described by files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexinfer.api.blocks import VllmBlock
from flexinfer.engines.vllm_cpu import kv_cache_gib

# Qwen2.5-7B: 2 x 28 layers x 4 KV heads x 128 x 2 bytes = 57,344 bytes a token.
QWEN = {
    "max_position_embeddings": 32768,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
}


def machine(folder: Path, free_gib: float, nodes: int = 1) -> Path:
    (folder / "proc").mkdir()
    (folder / "proc/meminfo").write_text(
        f"MemTotal:       999 kB\nMemAvailable:   {int(free_gib * 2**20)} kB\n"
    )
    for number in range(nodes):
        (folder / f"sys/devices/system/node/node{number}").mkdir(parents=True)
    return folder


def size(folder: Path, config: Any, free_gib: float, nodes: int = 1, **block: Any) -> int:
    weights = folder / "weights"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps(config))
    root = machine(folder, free_gib, nodes)
    return kv_cache_gib(weights, VllmBlock.model_validate(block), root)


@pytest.mark.parametrize(
    ("config", "free_gib", "block", "gib"),
    [
        (QWEN, 64, {}, 4),  # 32768 tokens take 1.75 GiB
        (QWEN, 64, {"maxModelLen": 131072}, 7),
        (QWEN, 64, {"maxModelLen": 131072, "dtype": "float32"}, 14),
        (QWEN, 8, {"maxModelLen": 131072}, 4),
        (QWEN, 5, {}, 2),
        (QWEN, 0.5, {}, 1),
        ({"text_config": {**QWEN, "head_dim": 512}}, 64, {}, 7),
        ({**QWEN, "num_key_value_heads": None}, 64, {}, 13),
        ({"model_type": "mamba"}, 64, {}, 4),
        ([], 64, {}, 4),
    ],
)
def test_sizes(
    tmp_path: Path, config: Any, free_gib: float, block: dict[str, Any], gib: int
) -> None:
    assert size(tmp_path, config, free_gib, **block) == gib


def test_only_one_node_counts(tmp_path: Path) -> None:
    assert size(tmp_path, QWEN, 12, nodes=2) == 3


def test_files_that_say_nothing(tmp_path: Path) -> None:
    for text in ("{", "[" * 99999):
        (tmp_path / "config.json").write_text(text)
        assert kv_cache_gib(tmp_path, VllmBlock(), tmp_path) == 4
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    assert kv_cache_gib(tmp_path / "none", VllmBlock(), tmp_path) == 4
