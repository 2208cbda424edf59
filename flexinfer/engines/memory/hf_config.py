"""What `config.json` of a model in the hub's format says about its layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexinfer.engines.memory.hf_types import ENCODERS, MLA, PLAIN
from flexinfer.engines.memory.types import MemoryPlanError
from flexinfer.engines.memory.untrusted import Fields, read_json

_POSITIONS = [
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
]
# Where max_position_embeddings is what comes out of the scaling, not what goes into it.
_SCALED_ALREADY = frozenset(
    [
        "default",
        "su",
        "longrope",
        "llama3",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
        "mrope",
    ]
)


@dataclass(frozen=True)
class HfModel:
    """The shape of a model. `kv_width` are the values that a token has in the cache of one layer,
    per KV head (K and V together; with `latent`, of the whole layer). `windows` has one entry a
    layer: its attention window in tokens, None for all tokens. Without a KV cache `kv_heads` is 0.
    `type` is the type of the weights as the config says, None if it does not.
    """

    kind: str
    layers: int
    heads: int
    kv_heads: int
    kv_width: int
    latent: bool
    hidden: int
    intermediate: int
    vocab: int
    windows: tuple[int | None, ...]
    longest: int
    type: str | None
    quantization: str | None
    tied: bool


def read_config(directory: Path) -> HfModel:
    """Read `config.json`. Raises `MemoryPlanError`, also for models that are not known here:
    no figure is better than a wrong one."""
    config = Fields(read_json(directory / "config.json"), "config.json")
    text = config
    for key in ("text_config", "llm_config", "language_config"):
        if key in config:
            text = config.object(key)
            break
    kind = text.text("model_type", config.text("model_type", ""))
    if kind not in PLAIN | MLA | ENCODERS:
        raise MemoryPlanError(
            f"model type {kind or 'unknown'} is not one whose KV cache is known here"
        )
    hidden = text.whole("hidden_size", "n_embd", "d_model", most=1 << 30)
    layers = text.whole("num_hidden_layers", "n_layer", "num_layers", "n_layers", most=1 << 14)
    heads = text.whole("num_attention_heads", "n_head", "n_heads", most=1 << 20)
    dim = text.whole("head_dim", "kv_channels", least=0, most=1 << 20, default=0)
    dim = dim or max(1, hidden // heads)
    latent = kind in MLA and "kv_lora_rank" in text
    kv_heads = 0 if kind in ENCODERS else _kv_heads(text, kind, heads)
    width = 2 * dim
    if latent:
        width = text.whole("kv_lora_rank", most=1 << 24) + text.whole(
            "qk_rope_head_dim", most=1 << 24
        )
    elif kind in MLA or kind == "minicpm3":
        raise MemoryPlanError(f"a model of type {kind} without kv_lora_rank is not known here")
    return HfModel(
        kind=kind,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        kv_width=width,
        latent=latent,
        hidden=hidden,
        intermediate=_intermediate(text, hidden),
        vocab=text.whole("vocab_size", "padded_vocab_size", most=1 << 30, default=1),
        windows=_windows(text, kind, layers),
        longest=_longest(directory, config, text, kind),
        type=_type(config, text),
        quantization=_quantization(config, text),
        tied=text.data.get("tie_word_embeddings", config.data.get("tie_word_embeddings")) is True,
    )


def _kv_heads(text: Fields, kind: str, heads: int) -> int:
    if kind == "falcon" and text.data.get("new_decoder_architecture") is not True:
        return 1 if text.data.get("multi_query") is True else heads
    if kind == "gpt_bigcode":
        return 1 if text.data.get("multi_query", True) is True else heads
    if kind == "dbrx":
        text = text.object("attn_config")
        return text.whole("kv_n_heads", most=1 << 20, default=heads)
    return text.whole(
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
        "num_attention_groups",
        most=1 << 20,
        default=heads,
    )


def _intermediate(text: Fields, hidden: int) -> int:
    """The widest that a token gets in an MLP: of a mixture, all experts that it goes through."""
    plain = text.whole(
        "intermediate_size", "ffn_hidden_size", "n_inner", most=1 << 30, default=4 * hidden
    )
    each = text.whole("moe_intermediate_size", least=0, most=1 << 30, default=0)
    used = text.whole("num_experts_per_tok", least=0, most=1 << 16, default=0)
    return max(plain, each * used) if each else plain * max(1, used)


def _windows(text: Fields, kind: str, layers: int) -> tuple[int | None, ...]:
    """The attention window of each layer, as vLLM takes it from a config."""
    window: int | None = None
    if "sliding_window" in text and text.data.get("use_sliding_window") is not False:
        window = text.whole("sliding_window", least=0, most=1 << 40) or None
    chunk = text.whole("attention_chunk_size", least=0, most=1 << 40, default=0) or None
    if "layer_types" in text:
        types = text.list("layer_types", most=1 << 14)
        if len(types) != layers:
            raise MemoryPlanError(f"config.json has {len(types)} layer types for {layers} layers")
        return tuple(_window_of(each, window, chunk) for each in types)
    if window is None and not (kind.startswith("llama4") and chunk):
        return (None,) * layers
    if kind == "gemma2":
        return tuple(None if i % 2 else window for i in range(layers))
    if kind.startswith("gemma3"):
        period = text.whole("sliding_window_pattern", most=1 << 14, default=6)
        return tuple(window if (i + 1) % period else None for i in range(layers))
    if kind == "cohere2":
        period = text.whole("sliding_window_pattern", most=1 << 14, default=4)
        return tuple(window if (i + 1) % period else None for i in range(layers))
    if kind == "gpt_oss":
        return tuple(None if i % 2 else window for i in range(layers))
    if kind.startswith("llama4"):
        return tuple(chunk if (i + 1) % 4 else None for i in range(layers))
    if kind.startswith("qwen2"):
        first = text.whole("max_window_layers", least=0, most=1 << 14, default=0)
        return tuple(window if i >= first else None for i in range(layers))
    if kind in ("mistral", "mixtral", "phi3", "starcoder2"):
        return (window,) * layers
    raise MemoryPlanError(f"which layers of a {kind} model have its sliding window is not known")


def _window_of(kind: Any, window: int | None, chunk: int | None) -> int | None:
    if kind == "full_attention":
        return None
    if kind == "sliding_attention" and window is not None:
        return window
    if kind == "chunked_attention" and chunk is not None:
        return chunk
    raise MemoryPlanError(f"the memory of layers of type {str(kind)[:40]} is not known")


def _longest(directory: Path, config: Fields, text: Fields, kind: str) -> int:
    """The longest sequence, as vLLM derives it where maxModelLen is absent."""
    found = [
        text.whole(key, most=1 << 40)
        for key in _POSITIONS
        if key in text and text.data[key] != float("inf")
    ]
    longest = float(min(found)) if found else 2048.0
    path = directory / "tokenizer_config.json"
    if path.exists():
        limit = read_json(path).get("model_max_length")
        if isinstance(limit, int | float) and not isinstance(limit, bool) and limit >= 1:
            longest = float(min(longest, limit))  # often 1e30, for no limit
    scaling = text.object("rope_scaling")
    if not scaling.data:
        scaling = text.object("rope_parameters")
    rope = scaling.data.get("rope_type", scaling.data.get("type", "default"))
    if rope == "longrope":
        return text.whole("original_max_position_embeddings", most=1 << 40, default=int(longest))
    if isinstance(rope, str) and rope not in _SCALED_ALREADY and not kind.startswith("gemma3"):
        longest *= max(1.0, scaling.number("factor", 1.0))
    return max(1, int(longest))


def _type(config: Fields, text: Fields) -> str | None:
    for fields in (config, text):
        for key in ("dtype", "torch_dtype"):
            if key in fields:
                return fields.text(key).removeprefix("torch.")
    return None


def _quantization(config: Fields, text: Fields) -> str | None:
    for fields in (config, text):
        for key in ("quantization_config", "compression_config"):
            if key in fields:
                return fields.object(key).text("quant_method", "quantized")
    return None
