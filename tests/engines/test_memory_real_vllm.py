"""What is read from a config, against what the real vLLM's own code reads from it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flexinfer.engines.executables import interpreter_of
from flexinfer.engines.memory.hf_config import read_config
from tests.engines.memory_models import TINY, hf_model

pytestmark = pytest.mark.vllm

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
# vLLM looks at each architecture in a process of its own, so these are few.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama3": LLAMA
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2048,
        }
    },
    "linear": LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "fp32": LLAMA | {"torch_dtype": "float32"},
    "yarn": LLAMA
    | {
        "head_dim": None,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
    },
    "gemma2": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 512,
    },
    "deepseek": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
}

_SCRIPT = """
import json, sys
from types import SimpleNamespace
from vllm.config import ModelConfig
one = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
for path in sys.argv[1:]:
    model = ModelConfig(model=path, skip_tokenizer_init=True)
    print("FOUND", json.dumps([
        path, model.max_model_len, model.get_head_size(), model.get_num_kv_heads(one),
        model.get_total_num_hidden_layers(), str(model.dtype),
        getattr(model.hf_text_config, "layer_types", None),
    ]))
"""


def test_configs_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    named = os.environ.get("FLEXINFER_TEST_VLLM")
    if not named:
        pytest.skip("FLEXINFER_TEST_VLLM names no vllm")
    python = interpreter_of(Path(named))
    assert python is not None
    paths = [hf_model(tmp_path / name, TINY, **config) for name, config in CONFIGS.items()]
    found = subprocess.run(
        [str(python), "-c", _SCRIPT, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(tmp_path / "cache")},
        check=False,
    )
    lines = [line[6:] for line in found.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(lines) == len(CONFIGS), found.stderr[-2000:]
    for line in lines:
        path, longest, head, kv_heads, layers, dtype, types = json.loads(line)
        ours = read_config(Path(path))
        name = Path(path).name
        width = ours.kv_width if ours.latent else ours.kv_width // 2
        assert (ours.longest, width, ours.layers) == (longest, head, layers), name
        assert (1 if ours.latent else ours.kv_heads) == kv_heads, name
        assert dtype == "torch.bfloat16", name  # fp32 as well
        if types is not None:
            windowed = [window is not None for window in ours.windows]
            assert windowed == [each == "sliding_attention" for each in types], name
