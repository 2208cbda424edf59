"""A directory of weights in MLC's form, small and of random content, for the fake engine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

FAKE = Path(__file__).with_name("mlc_llm.py")


def write_model(directory: Path, *, index: str = "tensor-cache.json", **config: Any) -> Path:
    """Write a model; keywords replace what its configuration says. Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    model_config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "context_window_size": 4096,
        "prefill_chunk_size": 2048,
        "tensor_parallel_shards": 1,
        "max_batch_size": 128,
    }
    whole = {
        "version": "0.1.0",
        "model_type": "qwen3",
        "quantization": "q4f16_1",
        "model_config": model_config,
        "vocab_size": 256,
        "context_window_size": 4096,
        "sliding_window_size": -1,
        "prefill_chunk_size": 2048,
        "attention_sink_size": -1,
        "tensor_parallel_shards": 1,
        "pipeline_parallel_stages": 1,
        "conv_template": {"name": "qwen3"},
        **config,
    }
    (directory / "mlc-chat-config.json").write_text(json.dumps(whole))
    shard = bytes(range(256)) * 16
    (directory / "params_shard_0.bin").write_bytes(shard)
    record = {
        "name": "model.embed_tokens.q_weight",
        "shape": [len(shard) // 4],
        "dtype": "uint32",
        "format": "raw",
        "nbytes": len(shard),
        "byteOffset": 0,
    }
    cache = {
        "metadata": {"ParamSize": 1, "ParamBytes": float(len(shard)), "BitsPerParam": 4.5},
        "records": [
            {
                "dataPath": "params_shard_0.bin",
                "format": "raw-shard",
                "nbytes": len(shard),
                "md5sum": hashlib.md5(shard).hexdigest(),
                "records": [record],
            }
        ],
    }
    (directory / index).write_text(json.dumps(cache))
    return directory


def write_program(directory: Path, python: str) -> Path:
    """Write the console script `mlc_llm`, as an installer does, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "mlc_llm"
    script.write_text(
        f"#!{python}\nimport os, sys\nos.execv(sys.executable, [sys.executable, {str(FAKE)!r}, "
        "*sys.argv[1:]])\n"
    )
    script.chmod(0o755)
    return script
