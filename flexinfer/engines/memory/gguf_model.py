"""What a GGUF header says about a model's layers, as llama.cpp reads it.

From `llama_model::create_memory`, `llama_hparams` and the models' `load_hparams`, llama.cpp
0c1e57098. Most architectures take the default there: K and V of every layer for every token. Those
that do not are listed here, and what looks as if it did not, without being listed, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexinfer.engines.memory.gguf_header import GgufModel, Value
from flexinfer.engines.memory.types import MemoryPlanError
from flexinfer.engines.memory.untrusted import whole

_ENCODERS = frozenset(
    [
        "bert",
        "jina-bert-v2",
        "jina-bert-v3",
        "nomic-bert",
        "nomic-bert-moe",
        "neo-bert",
        "eurobert",
        "modern-bert",
        "wavtokenizer-dec",
        "gemma-embedding",
        "dream",
        "llada",
        "llada-moe",
        "rnd1",
    ]
)
_RECURRENT = frozenset(["mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"])
# Layers without KV heads are recurrent in these; in the second kind by an interval.
_HYBRID = frozenset(
    ["jamba", "granitehybrid", "plamo2", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"]
)
_INTERVAL = frozenset(["qwen3next", "qwen35", "qwen35moe"])
# Every so many layers, the last (or the first) of them, see all tokens; the others a window.
_WINDOWED = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gemma4": 0,
    "cohere2": 4,
    "gpt-oss": 2,
    "llama4": 4,
    "olmo2": 4,
    "exaone4": 4,
    "smallthinker": 4,
}
_DEFAULT_WINDOW = {"gemma2": 4096, "llama4": 8192, "exaone4": 4096}
# These carry a window in their files, and llama.cpp does not use it.
_IGNORED = frozenset(
    ["llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "phi3", "starcoder2", "mistral3", "phimoe"]
)
_ODD = (".indexer.", ".wkv.", ".ssm.", ".kda.", ".shortconv.", ".lightning", ".linear_att")


@dataclass(frozen=True)
class Layer:
    """One layer's memory: values of K and of V a token (0 without a cache), the window in tokens
    (None for all), and values of recurrent state a sequence."""

    k: int
    v: int
    window: int | None = None
    state: int = 0


@dataclass(frozen=True)
class Shape:
    """The shape of a model. `blocks` counts all layers in the file, `layers` those that have
    memory; `trained` is the context that the model was trained for."""

    architecture: str
    blocks: int
    layers: tuple[Layer, ...]
    hidden: int
    wide: int
    heads: int
    vocab: int
    trained: int
    generates: bool


class _Keys:
    """The values below the architecture's name."""

    def __init__(self, model: GgufModel, architecture: str) -> None:
        self._values = model.values
        self._prefix = f"{architecture}."

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._values

    def get(self, key: str) -> Value | None:
        return self._values.get(self._prefix + key)

    def whole(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        value = self.get(key)
        if value is None:
            if default is None:
                raise MemoryPlanError(f"the header has no {self._prefix}{key}")
            return default
        return whole(value, self._prefix + key, least=least, most=1 << 40)

    def each(self, key: str, count: int, default: int) -> list[int]:
        """One number for each of `count` layers, from a list or from one for all."""
        value = self.get(key)
        if not isinstance(value, tuple):
            return [self.whole(key, default)] * count
        if len(value) < count:
            raise MemoryPlanError(f"{self._prefix}{key} has {len(value)} entries, not {count}")
        return [whole(each, self._prefix + key, least=0, most=1 << 40) for each in value[:count]]


def shape_of(model: GgufModel) -> Shape:
    """The shape of a model. Raises `MemoryPlanError`, also for one that is not known here."""
    architecture = model.values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise MemoryPlanError("the header has no general.architecture")
    keys = _Keys(model, architecture)
    known = architecture in _RECURRENT | _HYBRID | _INTERVAL | {"falcon-h1"}
    odd = [key for key in model.values if any(mark in key for mark in _ODD)]
    windowed = bool(keys.whole("attention.sliding_window", 0)) and architecture not in _IGNORED
    windowed = windowed and architecture not in _WINDOWED
    if (odd or windowed) and not known and architecture not in _ENCODERS:
        raise MemoryPlanError(f"the memory of architecture {architecture} is not known")
    blocks = keys.whole("block_count", least=1)
    if blocks > 1 << 14:
        raise MemoryPlanError(f"{blocks} layers are impossible")
    hidden = keys.whole("embedding_length", least=1)
    heads = keys.each("attention.head_count", blocks, 0)
    count = blocks - min(blocks - 1, keys.whole("nextn_predict_layers", 0))
    generates = architecture not in _ENCODERS
    layers = _layers(keys, architecture, count, hidden, heads) if generates else []
    return Shape(
        architecture=architecture,
        blocks=blocks,
        layers=tuple(layers),
        hidden=hidden,
        wide=_wide(keys, blocks, hidden),
        heads=max([*heads, 1]),
        vocab=_vocab(model, keys),
        trained=keys.whole("context_length", least=1),
        generates=generates,
    )


def _layers(
    keys: _Keys, architecture: str, count: int, hidden: int, heads: list[int]
) -> list[Layer]:
    kv = keys.each("attention.head_count_kv", count, 0)
    if "attention.head_count_kv" not in keys:
        kv = heads[:count]
    most = max([*heads, 1])
    k = keys.whole("attention.key_length", hidden // most)
    v = keys.whole("attention.value_length", hidden // most)
    latent = "attention.key_length_mla" in keys and "attention.value_length_mla" in keys
    windows = _windows(keys, architecture, count)
    state = _state(keys, hidden)
    recurrent = _recurrent(keys, architecture, count, kv)
    cached = _cached(keys, architecture, count)
    layers = []
    for i in range(count):
        here_k, here_v = k, v
        if windows[i] is not None:
            here_k = keys.whole("attention.key_length_swa", k)
            here_v = keys.whole("attention.value_length_swa", v)
        attends = cached[i] and (architecture == "falcon-h1" or not recurrent[i])
        layers.append(
            Layer(
                k=here_k * kv[i] if attends else 0,
                v=here_v * kv[i] if attends and not latent else 0,
                window=windows[i],
                state=state if recurrent[i] else 0,
            )
        )
    return layers


def _windows(keys: _Keys, architecture: str, count: int) -> list[int | None]:
    default = _DEFAULT_WINDOW.get(architecture, 0)
    if architecture == "exaone4" and count != 64:
        default = 0
    window = keys.whole("attention.sliding_window", default)
    if architecture == "llama4" and window:
        window = _DEFAULT_WINDOW["llama4"]
    if architecture == "smallthinker" and window:
        window = 4096
    if architecture not in _WINDOWED or not window:
        return [None] * count
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        if len(pattern) < count:
            raise MemoryPlanError("the pattern of sliding windows is too short")
        return [window if pattern[i] else None for i in range(count)]
    period = keys.whole("attention.sliding_window_pattern", _WINDOWED[architecture], least=0)
    if architecture == "gemma4" and pattern is None:
        raise MemoryPlanError("the header has no pattern of sliding windows")
    if period == 0:
        return [window] * count
    sees_all = 0 if architecture == "smallthinker" else period - 1
    return [None if i % period == sees_all else window for i in range(count)]


def _recurrent(keys: _Keys, architecture: str, count: int, kv: list[int]) -> list[bool]:
    if architecture in _RECURRENT or architecture == "falcon-h1":
        return [True] * count
    if architecture in _INTERVAL:
        listed = keys.get("attention.recurrent_layers")
        if isinstance(listed, tuple) and len(listed) >= count:
            return [bool(each) for each in listed[:count]]
        interval = keys.whole("full_attention_interval", 4, least=1)
        return [(i + 1) % interval != 0 for i in range(count)]
    if architecture.startswith("nemotron_h"):
        ff = keys.each("feed_forward_length", count, 0)
        return [kv[i] == 0 and ff[i] == 0 for i in range(count)]
    if architecture in _HYBRID:
        return [heads == 0 for heads in kv]
    return [False] * count


def _cached(keys: _Keys, architecture: str, count: int) -> list[bool]:
    """Which layers have a cache of their own and do not use an earlier one's."""
    own = count
    if architecture == "gemma3n":
        own = 20
    elif architecture == "gemma4":
        own = count - keys.whole("attention.shared_kv_layers", 0)
    return [i < own for i in range(count)]


def _state(keys: _Keys, hidden: int) -> int:
    """Values of recurrent state of one layer and one sequence: `n_embd_r` and `n_embd_s`."""
    if "wkv.head_size" in keys:
        shifts = keys.whole("token_shift_count", 2)
        return shifts * hidden + hidden * keys.whole("wkv.head_size")
    if "shortconv.l_cache" in keys:
        return hidden * max(0, keys.whole("shortconv.l_cache") - 1)
    inner, size = keys.whole("ssm.inner_size", 0), keys.whole("ssm.state_size", 0)
    kernel, groups = keys.whole("ssm.conv_kernel", 0), keys.whole("ssm.group_count", 0)
    return max(0, kernel - 1) * (inner + 2 * groups * size) + size * inner


def _wide(keys: _Keys, blocks: int, hidden: int) -> int:
    """The widest that a token gets in an MLP: of a mixture, all experts that it goes through."""
    plain = max(keys.each("feed_forward_length", blocks, 4 * hidden))
    each = max(
        keys.each("expert_feed_forward_length", blocks, plain if "expert_count" in keys else 0)
    )
    shared = keys.whole("expert_shared_feed_forward_length", 0)
    return max(plain, each * keys.whole("expert_used_count", 0) + shared)


def _vocab(model: GgufModel, keys: _Keys) -> int:
    tokens = model.lengths.get("tokenizer.ggml.tokens")
    if tokens is not None:
        return tokens
    if "vocab_size" in keys:
        return keys.whole("vocab_size", least=1)
    for tensor in model.tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return tensor.shape[1]
    return 1
