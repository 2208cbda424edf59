"""The plan of a model's memory: plain data.

EngineError
`- MemoryPlanError   the model's files do not tell what it needs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flexinfer.engines.errors import EngineError


class MemoryPlanError(EngineError):
    """The model's files, or its settings, do not tell how much memory it needs; with the reason.

    What of it is quoted from files is shown as it is, but for what no terminal should be sent.
    """

    def __init__(self, reason: str) -> None:
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason))


@dataclass(frozen=True)
class Share:
    """What one GPU holds, in bytes: its part of the weights, its part of the KV cache, and all
    buffers beside them (activations, workspaces, the runtime's own memory)."""

    weights: int
    kv: int
    buffers: int

    @property
    def total(self) -> int:
        """The sum of the three."""
        return self.weights + self.kv + self.buffers


@dataclass(frozen=True)
class Knob:
    """A setting that changes how much is needed.

    `field` is its path in the manifest, such as `spec.vllm.maxModelLen`. Values are whole numbers
    between `low` and `high` (for a share of the memory: hundredths), worth proposing in multiples
    of `step`; `current` is the value in force. `replan` computes the plan with another value and
    `render` writes a value as the manifest has it. `is_share` marks the share of the memory that
    an engine may use, of which neither less nor more is better in itself.
    """

    field: str
    current: int
    low: int
    high: int
    step: int
    replan: Callable[[int], MemoryPlan]
    render: Callable[[int], str] = str
    is_share: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine will need of its GPUs, or of RAM if `gpus` is 0.

    `per_gpu` are the shares in the order of the engine's devices, one for RAM if `gpus` is 0.
    `context_tokens` is the longest sequence, `cache_tokens` what the KV cache holds of all
    sequences together on one GPU, `sequences` how many run at once, `kv_bytes_per_token` what one
    more token takes on all GPUs together. `reserved_bytes` is what the engine takes of every GPU
    whatever it needs (vLLM), None if it takes what it needs. `refusal` says why the engine will
    not start with these settings, however much is free. Estimates are rather too high: up to
    `slack_bytes` of each GPU may turn out not to be needed, and `doubt` is a refusal that holds
    only if they are. `notes` are for people.
    """

    backend: str
    gpus: int
    per_gpu: tuple[Share, ...]
    context_tokens: int
    cache_tokens: int
    sequences: int
    kv_bytes_per_token: int
    reserved_bytes: int | None = None
    refusal: str | None = None
    slack_bytes: int = 0
    doubt: str | None = None
    notes: tuple[str, ...] = ()
    knobs: tuple[Knob, ...] = field(default=(), repr=False, compare=False)

    @property
    def weights_bytes(self) -> int:
        """The weights, on all GPUs together."""
        return sum(share.weights for share in self.per_gpu)

    @property
    def kv_bytes(self) -> int:
        """The KV cache, on all GPUs together."""
        return sum(share.kv for share in self.per_gpu)

    @property
    def buffers_bytes(self) -> int:
        """All buffers, on all GPUs together."""
        return sum(share.buffers for share in self.per_gpu)

    @property
    def total_bytes(self) -> int:
        """Everything, on all GPUs together."""
        return sum(share.total for share in self.per_gpu)

    @property
    def fullest(self) -> Share:
        """The share of the GPU that has the most to hold."""
        return max(self.per_gpu, key=lambda share: share.total)

    @property
    def needed_bytes(self) -> int:
        """What the fullest GPU must hold."""
        return self.fullest.total

    def claim(self, index: int, *, least: bool = False) -> int:
        """What the engine takes of the GPU `index`: what it reserves, or what it needs. With
        `least`, what it takes in any case."""
        needed = self.per_gpu[index].total - (self.slack_bytes if least else 0)
        return needed if self.reserved_bytes is None else max(needed, self.reserved_bytes)


@dataclass(frozen=True)
class Proposal:
    """Settings that would make a model fit: pairs of a field of the manifest and its value."""

    settings: tuple[tuple[str, str], ...]
    plan: MemoryPlan

    def __str__(self) -> str:
        return " and ".join(f"{name}: {value}" for name, value in self.settings)


@dataclass(frozen=True)
class Verdict:
    """Whether a plan fits. `fits` is None where nobody can tell, or where the difference is smaller
    than an estimate's error. `message` has the numbers and
    the best proposal; `proposals` are alternatives, the best first."""

    fits: bool | None
    message: str
    proposals: tuple[Proposal, ...] = ()
