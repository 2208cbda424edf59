"""The memory plan: what a model will need of its GPUs, and whether that is free.

`plan_memory` reads a model's own files, `judge` compares the plan with `free_vram`. Formulas of the
engines are each in a module of its own: `mlc`, `vllm`, `llamacpp`, `ollama`.
"""

from flexinfer.engines.memory.plan import plan_memory
from flexinfer.engines.memory.types import (
    Knob,
    MemoryPlan,
    MemoryPlanError,
    Proposal,
    Share,
    Verdict,
)
from flexinfer.engines.memory.verdict import gib, judge
from flexinfer.engines.memory.vram import free_vram, least_vram

__all__ = [
    "Knob",
    "MemoryPlan",
    "MemoryPlanError",
    "Proposal",
    "Share",
    "Verdict",
    "free_vram",
    "gib",
    "judge",
    "least_vram",
    "plan_memory",
]
