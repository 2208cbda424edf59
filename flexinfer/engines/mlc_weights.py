"""A directory of weights in MLC's form, as far as a start depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexinfer.engines.errors import EngineConfigError
from flexinfer.engines.memory.types import MemoryPlanError
from flexinfer.engines.memory.untrusted import read_json

CONFIG = "mlc-chat-config.json"
INDEX = "tensor-cache.json"
#: What the index was called until September 2025. Repositories often carry both.
OLD_INDEX = "ndarray-cache.json"


@dataclass(frozen=True)
class MlcWeights:
    """What `mlc-chat-config.json` says, and which index of the weights lies beside it.

    `quantization` is a name such as q4f16_1. `shards` and `stages` are over how many GPUs the model
    was configured to be spread: by layer, and by layers in turn.
    """

    directory: Path
    quantization: str
    shards: int
    stages: int
    old_index_only: bool

    @property
    def float32(self) -> bool:
        """Whether activations and the KV cache take four bytes a number (q4f32_1 and the like)."""
        return "f32" in self.quantization


def read_weights(directory: Path) -> MlcWeights:
    """Look at a model's directory. Raises `EngineConfigError` if MLC could not load it."""
    if not directory.is_dir():
        why = "is a file" if directory.exists() else "does not exist"
        raise EngineConfigError(f"MLC wants a directory with {CONFIG}: {directory} {why}")
    config = _config(directory)
    has_index = (directory / INDEX).is_file()
    has_old_index = (directory / OLD_INDEX).is_file()
    if not (has_index or has_old_index):
        raise EngineConfigError(f"{directory} has {CONFIG} but no weights: {INDEX} is missing")
    return MlcWeights(
        directory=directory.absolute(),
        quantization=str(config.get("quantization") or ""),
        shards=_count(config, "tensor_parallel_shards"),
        stages=_count(config, "pipeline_parallel_stages"),
        old_index_only=not has_index,
    )


def _config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    if not file.exists():
        hint = ""
        if (directory / "config.json").is_file():
            hint = (
                ": these are weights as they were published, `mlc_llm convert_weight` and "
                "`mlc_llm gen_config` turn them into MLC's"
            )
        elif any(directory.glob("*.gguf")):
            hint = ": a GGUF is for the backends llama-cpp and ollama"
        raise EngineConfigError(f"{directory} holds no {CONFIG}{hint}")
    try:
        return read_json(file)
    except MemoryPlanError as error:
        raise EngineConfigError(str(error)) from None


def _count(config: dict[str, Any], name: str) -> int:
    """A number that older files have in `model_config` only, or not at all; then it is 1."""
    inner = config.get("model_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        value = place.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return 1
