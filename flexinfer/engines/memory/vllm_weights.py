"""Which weights of a model are on which GPU under vLLM, and how large they are once loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flexinfer.api.blocks import VllmBlock
from flexinfer.engines.memory.common import divide_up
from flexinfer.engines.memory.hf_config import HfModel
from flexinfer.engines.memory.safetensors import Tensor
from flexinfer.engines.memory.tensors import PLAIN_FLOATS
from flexinfer.engines.memory.types import MemoryPlanError

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d+)\.")
_SEES = re.compile(r"(^|\.)(vision|visual|multi_modal|mm_|audio)")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.|^output\.")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)\.")
# Linear layers that vLLM does not divide: routers, and the first halves of latent attention.
_REPLICATED = re.compile(r"(\.gate|\.router|q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj)\.weight")
_KV_PROJECTION = re.compile(r"\.(k_proj|v_proj)\.")


@dataclass(frozen=True)
class Settings:
    """The settings in force. `length` is the longest sequence; `cache_type` and `type` are bytes
    of a value; `utilization` a share of the total; `tensors` and `stages` are parallel sizes."""

    length: int
    sequences: int
    batch: int
    block: int
    type: int
    cache_type: int
    utilization: float
    tensors: int
    stages: int


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """How many layers each stage has: the rest of the division goes to the last but one first."""
    if stages > layers:
        raise MemoryPlanError(f"{layers} layers cannot be divided among {stages} stages")
    counts = [layers // stages] * stages
    for index in range(2, layers % stages + 2):
        counts[-index] += 1
    return counts


def weights_of_stages(
    tensors: list[Tensor],
    block: VllmBlock,
    model: HfModel,
    settings: Settings,
    counts: list[int],
) -> list[int]:
    """Bytes of weights on each GPU of each stage.

    Matrices are divided among the GPUs of a stage, vectors and routers are not; KV projections
    only as far as there are KV heads. The embedding is in the first stage and the head in the last.
    """
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    sums = [0] * settings.stages
    for tensor in tensors:
        head, embedding = _HEAD.search(tensor.name), _EMBEDDING.search(tensor.name)
        if head and model.tied:
            continue  # the embedding again
        size = _loaded(tensor, block, model, settings, keep=bool(head or embedding))
        size = divide_up(size, _divisor(tensor, model, settings))
        match = _LAYER.search(tensor.name)
        if match and not _SEES.search(tensor.name) and len(match[1]) < 6:
            layer = int(match[1])
            if layer < model.layers:  # beyond are heads for speculation, loaded only on request
                sums[stage_of[layer]] += size
        elif head or "norm" in tensor.name:
            sums[-1] += size
        else:
            sums[0] += size
            if embedding and model.tied and settings.stages > 1:
                sums[-1] += size
    return sums


def _loaded(
    tensor: Tensor, block: VllmBlock, model: HfModel, settings: Settings, *, keep: bool
) -> int:
    """Bytes of a tensor once loaded: plain floats are converted, packed ones stay as they are."""
    if tensor.dtype not in PLAIN_FLOATS or (model.quantization and tensor.dtype == "F32"):
        return tensor.size  # beside packed weights, fp32 are their scales
    online = None if model.quantization else block.quantization
    if online and tensor.dimensions >= 2 and not keep:
        if online.startswith("fp8") or online == "ptpc_fp8":
            return tensor.count
        if online == "bitsandbytes":
            return divide_up(tensor.count * 33, 64)  # four bits, and a scale for every 64 values
    return tensor.count * settings.type


def _divisor(tensor: Tensor, model: HfModel, settings: Settings) -> int:
    whole = tensor.dimensions < 2 or _REPLICATED.search(tensor.name) or _SEES.search(tensor.name)
    if whole:
        return 1
    if _KV_PROJECTION.search(tensor.name) and not model.latent and model.kv_heads:
        return min(settings.tensors, model.kv_heads)
    return settings.tensors
