"""Writes models that have everything but weights: real shapes, real headers, sparse files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf

#: What amdgpu says of a Radeon RX 7900 XTX.
XTX = 25753026560

_HF_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "F8_E4M3": 1, "U8": 1}
_MLC_TYPES = {"q4f16_1": "float16", "q4f32_1": "float32"}


@dataclass(frozen=True)
class Shape:
    """A dense transformer as the Llama and Qwen families have it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    qk_norm: bool = False
    bias: bool = False
    tied: bool = False
    post_norms: bool = False
    context: int = 40960

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Name, output and input size of all matrices, names as on the hub."""
        yield "model.embed_tokens.weight", self.vocab, self.hidden
        for i in range(self.layers):
            at = f"model.layers.{i}"
            yield f"{at}.self_attn.q_proj.weight", self.heads * self.head_dim, self.hidden
            yield f"{at}.self_attn.k_proj.weight", self.kv_heads * self.head_dim, self.hidden
            yield f"{at}.self_attn.v_proj.weight", self.kv_heads * self.head_dim, self.hidden
            yield f"{at}.self_attn.o_proj.weight", self.hidden, self.heads * self.head_dim
            yield f"{at}.mlp.gate_proj.weight", self.intermediate, self.hidden
            yield f"{at}.mlp.up_proj.weight", self.intermediate, self.hidden
            yield f"{at}.mlp.down_proj.weight", self.hidden, self.intermediate
        if not self.tied:
            yield "lm_head.weight", self.vocab, self.hidden

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Name and size of all vectors."""
        for i in range(self.layers):
            at = f"model.layers.{i}"
            yield f"{at}.input_layernorm.weight", self.hidden
            yield f"{at}.post_attention_layernorm.weight", self.hidden
            if self.qk_norm:
                yield f"{at}.self_attn.q_norm.weight", self.head_dim
                yield f"{at}.self_attn.k_norm.weight", self.head_dim
            if self.post_norms:
                yield f"{at}.post_attention_norm.weight", self.hidden
                yield f"{at}.post_ffw_norm.weight", self.hidden
            if self.bias:
                yield f"{at}.self_attn.q_proj.bias", self.heads * self.head_dim
                yield f"{at}.self_attn.k_proj.bias", self.kv_heads * self.head_dim
                yield f"{at}.self_attn.v_proj.bias", self.kv_heads * self.head_dim
        yield "model.norm.weight", self.hidden

    @property
    def parameters(self) -> int:
        matrices = sum(rows * columns for _, rows, columns in self.matrices())
        return matrices + sum(size for _, size in self.vectors())


QWEN3_8B = Shape(4096, 36, 32, 8, 128, 12288, 151936, qk_norm=True)
QWEN3_32B = Shape(5120, 64, 64, 8, 128, 25600, 151936, qk_norm=True)
QWEN25_7B = Shape(3584, 28, 28, 4, 128, 18944, 152064, bias=True, context=131072)
LLAMA3_8B = Shape(4096, 32, 32, 8, 128, 14336, 128256, context=8192)
TINY = Shape(256, 4, 8, 2, 32, 512, 1024, context=4096)


def mlc_model(
    directory: Path,
    shape: Shape,
    quantization: str,
    *,
    cache: str = "tensor-cache.json",
    **config: Any,
) -> Path:
    """Write an MLC model: its configuration and the list of its tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    dtype = _MLC_TYPES[quantization]
    records: list[dict[str, Any]] = []
    for name, rows, columns in shape.matrices():
        stem = name.removesuffix("weight")
        records.append(_record(f"{stem}q_weight", [rows, columns // 8], "uint32"))
        records.append(_record(f"{stem}q_scale", [rows, columns // 32], dtype))
    records += [_record(name, [size], dtype) for name, size in shape.vectors()]
    shard = {"dataPath": "params_shard_0.bin", "format": "raw-shard", "records": records}
    (directory / cache).write_text(json.dumps({"metadata": {}, "records": [shard]}))
    data = {
        "version": "0.1.0",
        "model_type": "qwen3",
        "quantization": quantization,
        "vocab_size": shape.vocab,
        "context_window_size": shape.context,
        "sliding_window_size": -1,
        "prefill_chunk_size": 2048,
        "attention_sink_size": -1,
        "tensor_parallel_shards": 1,
        "pipeline_parallel_stages": 1,
        "model_config": {
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab,
            "max_batch_size": 128,
        },
        **config,
    }
    (directory / "mlc-chat-config.json").write_text(json.dumps(data))
    return directory


def _record(name: str, shape: list[int], dtype: str) -> dict[str, Any]:
    return {"name": name, "shape": shape, "dtype": dtype, "format": "f32-to-bf16", "nbytes": 1}


def hf_config(shape: Shape, **config: Any) -> dict[str, Any]:
    """The config of a model on the hub; keys given as None are left out."""
    data = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": shape.tied,
        **config,
    }
    return {key: value for key, value in data.items() if value is not None}


def hf_model(
    directory: Path, shape: Shape, *, dtype: str = "BF16", shards: int = 1, **config: Any
) -> Path:
    """Write a model as on the hub: `config.json` and safetensors files without content."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(shape, **config)))
    tensors: dict[str, tuple[str, list[int]]] = {}
    for name, rows, columns in shape.matrices():
        tensors[name] = (dtype, [rows, columns])
    for name, size in shape.vectors():
        tensors[name] = (dtype, [size])
    if shards == 1:
        safetensors(directory / "model.safetensors", tensors)
        return directory
    weight_map = {}
    names = list(tensors)
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        own = names[number::shards]
        safetensors(directory / file, {name: tensors[name] for name in own})
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def safetensors(path: Path, tensors: Mapping[str, tuple[str, list[int]]]) -> None:
    """Write a safetensors file whose data is one hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * _HF_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_norm": "post_attention_norm",
    "post_ffw_norm": "post_ffw_norm",
}


def gguf_model(
    path: Path,
    shape: Shape,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    architecture: str = "llama",
    vocabulary: Path | None = None,
    **values: Any,
) -> Path:
    """Write a GGUF file whose data is one hole. `values` go below the architecture's name, dots
    written as two underscores; None leaves a value out. With the `vocabulary` of another GGUF
    file llama-server can load it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    data: dict[str, Any] = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.intermediate,
        "attention__head_count": shape.heads,
        "attention__head_count_kv": shape.kv_heads,
        "attention__key_length": shape.head_dim,
        "attention__value_length": shape.head_dim,
        "vocab_size": shape.vocab,
        **values,
    }
    for name, value in data.items():
        key = f"{architecture}.{name.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    if vocabulary is not None:
        for name, content, kind_of_value, inner in _vocabulary(vocabulary):
            writer.add_key_value(name, content, kind_of_value, inner)
    size = 0
    for name, rows, columns in shape.matrices():
        size += _tensor(writer, _gguf_name(name), (rows, columns), kind)
    for name, length in shape.vectors():
        size += _tensor(writer, _gguf_name(name), (length,), gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.seek(0, 2)
        file.truncate(-(-file.tell() // 32) * 32 + size)
    return path


@cache
def _vocabulary(path: Path) -> list[tuple[str, Any, Any, Any]]:
    return [
        (
            field.name,
            field.contents(),
            field.types[0],
            field.types[1] if len(field.types) > 1 else None,
        )
        for field in gguf.GGUFReader(path).fields.values()
        if field.name.startswith("tokenizer.")
    ]


def _gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_NAMES[stem]}.{suffix}"


def _tensor(
    writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType
) -> int:
    per_block, block = gguf.GGML_QUANT_SIZES[kind]
    size = math.prod(shape) // per_block * block
    stored = shape
    if kind not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        stored = (*shape[:-1], shape[-1] // per_block * block)  # the writer wants bytes a row
    import numpy

    dtype = numpy.float32 if kind == gguf.GGMLQuantizationType.F32 else numpy.uint8
    writer.add_tensor_info(name, stored, numpy.dtype(dtype), size, raw_dtype=kind)
    return -(-size // 32) * 32
