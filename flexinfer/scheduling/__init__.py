"""Who should be up, and where: demand and nodes in, targets out. Pure functions over plain data."""

from flexinfer.scheduling.decide import decide, unschedulable
from flexinfer.scheduling.types import Decision, Demand, Model, Node, Reason, Replica, Target

__all__ = [
    "Decision",
    "Demand",
    "Model",
    "Node",
    "Reason",
    "Replica",
    "Target",
    "decide",
    "unschedulable",
]
