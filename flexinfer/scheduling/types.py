"""The scheduler's words: nodes with GPU slots, models with demand, targets with reasons.

All times are durations in seconds, measured by whoever fills them in: the scheduler has no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True)
class Node:
    """A Ray node that can host models."""

    id: str
    slots: int
    """GPUs of the node; 0 for a node that hosts CPU models only."""


@dataclass(frozen=True)
class Replica:
    """One replica of a model, where it is."""

    node: str | None
    """Node id; None while Ray has not placed it."""


@dataclass(frozen=True)
class Demand:
    """What clients want of one model now."""

    queued: int = 0
    running: int = 0
    oldest_wait_s: float = 0.0
    idle_s: float = 0.0
    """Since the last request ended; counts only when nothing is queued or running."""
    load: bool = False
    """A user's wish that the model be up."""
    unload: bool = False
    """A user's wish that the model go, as soon as nothing runs."""
    retry_in_s: float = 0.0
    """After a failed activation: how long no new one is tried."""

    @property
    def busy(self) -> bool:
        return self.running > 0

    @property
    def wanted(self) -> bool:
        return self.queued > 0 or self.running > 0 or self.load


@dataclass(frozen=True)
class Model:
    """One ModelDeployment as the scheduler sees it."""

    name: str
    gpus: int = 1
    """GPUs that one replica needs, all on one node; 0 for a CPU model."""
    replicas: int = 1
    """The most replicas that may run; 0 parks the model."""
    min_replicas: int | None = None
    """None: stays up while nobody needs its GPUs. 0: scales to zero. >= 1: is never evicted."""
    priority: int = 100
    idle_timeout_s: float = 300.0
    nodes: frozenset[str] | None = None
    """Ids of the nodes that it may run on; None for any."""
    demand: Demand = field(default_factory=Demand)
    running: tuple[Replica, ...] = ()
    """Replicas that hold their GPUs now: starting, serving or draining."""
    target: int = 0
    """The last target, which the replicas are moving to."""

    @property
    def parked(self) -> bool:
        return self.replicas == 0

    def may_run_on(self, node: Node) -> bool:
        return self.nodes is None or node.id in self.nodes


class Reason(StrEnum):
    """Why a model has its target."""

    PARKED = "Parked"
    DEMAND = "Demand"
    WISHED = "Wished"
    MINIMUM = "Minimum"
    CAPACITY_FREE = "CapacityFree"
    IDLE_TIMEOUT = "IdleTimeout"
    NO_DEMAND = "NoDemand"
    UNLOADED = "Unloaded"
    GIVES_WAY = "GivesWay"
    WAITING_FOR_GPU = "WaitingForGpu"
    UNSCHEDULABLE = "Unschedulable"
    BACKING_OFF = "BackingOff"


@dataclass(frozen=True)
class Target:
    replicas: int
    reason: Reason
    message: str = ""
    placement: tuple[str, ...] = ()
    """Node ids that justify the target, one a replica (CPU models included where nodes exist)."""


@dataclass(frozen=True)
class Decision:
    targets: Mapping[str, Target]
