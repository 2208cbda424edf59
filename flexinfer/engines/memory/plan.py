"""What a model will need of its GPUs, from its own files and its settings."""

from __future__ import annotations

from pathlib import Path

from flexinfer.engines.memory.types import MemoryPlan, MemoryPlanError
from flexinfer.engines.spec import EngineSpec


def plan_memory(spec: EngineSpec, weights: Path, *, vram_bytes: int | None) -> MemoryPlan:
    """Compute what the engine of `spec` needs, in bytes.

    Reads headers and configs only, believes none of them, and takes tenths of a second.

    Args:
        spec: the model; paths in its block are as they are on this machine.
        weights: what the engine is given: a directory (mlc-llm, vllm) or a file.
        vram_bytes: the memory of each GPU, None if it is not known. Some settings are shares of
            it, and some engines take what there is.

    Raises:
        MemoryPlanError: the files or settings do not tell.
    """
    if spec.backend == "mlc-llm":
        from flexinfer.engines.memory.mlc import plan
    elif spec.backend == "vllm":
        from flexinfer.engines.memory.vllm import plan
    elif spec.backend == "llama-cpp":
        from flexinfer.engines.memory.llamacpp import plan
    elif spec.backend == "ollama":
        from flexinfer.engines.memory.ollama import plan
    else:
        raise MemoryPlanError(f"the memory of backend {spec.backend} is not known")
    return plan(spec, weights, vram_bytes)
