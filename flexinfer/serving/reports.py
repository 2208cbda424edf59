"""The gateway's word to the policies, as the flat numbers that Ray carries.

`record_autoscaling_stats` may return names and numbers only, so a report is spelled out in its
keys: ``<what>|<model>`` and ``<what>|<model>|<node>``. Names are DNS labels and node ids have no
bar in them.

A model's bounds and priority go this way too, and not into the policies' own parameters: those are
part of what Ray hashes into an application's code version (seen in 2.60), so a change of one would
restart the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flexinfer.scheduling import Demand, Node, Replica

_NODE = "node"
_REPLICAS = "replicas"
_ELIGIBLE = "eligible"
_DEMAND = {
    "queued": int,
    "running": int,
    "oldest_wait_s": float,
    "idle_s": float,
    "load": bool,
    "unload": bool,
    "retry_in_s": float,
}
_BOUNDS = {
    "gpus": int,
    "replicas": int,
    "min_replicas": int,
    "priority": int,
    "idle_timeout_s": float,
}
_ABSENT = -1


@dataclass(frozen=True)
class Bounds:
    """What a user set for one model: see `scheduling.Model`, whose fields these become."""

    gpus: int = 1
    replicas: int = 1
    min_replicas: int | None = None
    priority: int = 100
    idle_timeout_s: float = 300.0
    nodes: frozenset[str] | None = None


@dataclass(frozen=True)
class Report:
    """What one gateway replica knows: the nodes, and per model bounds, demand and replicas."""

    nodes: tuple[Node, ...] = ()
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    demands: Mapping[str, Demand] = field(default_factory=dict)
    replicas: Mapping[str, tuple[Replica, ...]] = field(default_factory=dict)


def encode(report: Report) -> dict[str, float]:
    """Spell a report out as Ray's custom metrics."""
    stats: dict[str, float] = {}
    for node in report.nodes:
        stats[f"{_NODE}||{node.id}"] = node.slots
    for model, bounds in report.bounds.items():
        for name in _BOUNDS:
            value = getattr(bounds, name)
            stats[f"{name}|{model}"] = float(_ABSENT if value is None else value)
        if bounds.nodes is not None:
            # An empty entry tells no node from any node.
            for node_id in ("", *bounds.nodes):
                stats[f"{_ELIGIBLE}|{model}|{node_id}"] = 1.0
    for model, demand in report.demands.items():
        for name in _DEMAND:
            stats[f"{name}|{model}"] = float(getattr(demand, name))
    for model, replicas in report.replicas.items():
        for replica in replicas:
            key = f"{_REPLICAS}|{model}|{replica.node or ''}"
            stats[key] = stats.get(key, 0.0) + 1
    return stats


def decode(stats: Mapping[str, float]) -> Report:
    """Read a report. Keys of Ray's own (running_requests) are passed over."""
    nodes: list[Node] = []
    bounds: dict[str, dict[str, float]] = defaultdict(dict)
    eligible: dict[str, set[str]] = defaultdict(set)
    demands: dict[str, dict[str, float]] = defaultdict(dict)
    replicas: dict[str, list[Replica]] = defaultdict(list)
    for key, value in stats.items():
        what, *rest = key.split("|")
        if what == _NODE and len(rest) == 2:
            nodes.append(Node(rest[1], int(value)))
        elif what == _REPLICAS and len(rest) == 2:
            replicas[rest[0]] += [Replica(rest[1] or None)] * int(value)
        elif what == _ELIGIBLE and len(rest) == 2:
            eligible[rest[0]].add(rest[1])
        elif what in _BOUNDS and len(rest) == 1:
            bounds[rest[0]][what] = value
        elif what in _DEMAND and len(rest) == 1:
            demands[rest[0]][what] = value
    return Report(
        nodes=tuple(sorted(nodes, key=lambda node: node.id)),
        bounds={model: _bounds(values, eligible.get(model)) for model, values in bounds.items()},
        demands={model: _demand(values) for model, values in demands.items()},
        replicas={model: tuple(found) for model, found in replicas.items()},
    )


def merge(reports: Iterable[Report]) -> Report:
    """One report of several gateways: demand adds up, waits and wishes are the strongest.

    Bounds come from all alike, but for the moment of a change; the last one's count.
    """
    found = list(reports)
    if len(found) == 1:
        return found[0]
    bounds: dict[str, Bounds] = {}
    demands: dict[str, Demand] = {}
    replicas: dict[str, tuple[Replica, ...]] = {}
    nodes: dict[str, Node] = {}
    for report in found:
        nodes |= {node.id: node for node in report.nodes}
        bounds |= report.bounds
        for model, demand in report.demands.items():
            demands[model] = _add(demands[model], demand) if model in demands else demand
        for model, seen in report.replicas.items():
            if len(seen) > len(replicas.get(model, ())):
                replicas[model] = seen
    return Report(tuple(nodes[key] for key in sorted(nodes)), bounds, demands, replicas)


def _bounds(values: Mapping[str, float], eligible: set[str] | None) -> Bounds:
    least = int(values.get("min_replicas", _ABSENT))
    return Bounds(
        gpus=int(values["gpus"]),
        replicas=int(values["replicas"]),
        min_replicas=None if least == _ABSENT else least,
        priority=int(values["priority"]),
        idle_timeout_s=values["idle_timeout_s"],
        nodes=None if eligible is None else frozenset(eligible - {""}),
    )


def _demand(values: Mapping[str, float]) -> Demand:
    return Demand(**{name: _DEMAND[name](value) for name, value in values.items()})


def _add(one: Demand, other: Demand) -> Demand:
    return Demand(
        queued=one.queued + other.queued,
        running=one.running + other.running,
        oldest_wait_s=max(one.oldest_wait_s, other.oldest_wait_s),
        idle_s=min(one.idle_s, other.idle_s),
        load=one.load or other.load,
        unload=one.unload or other.unload,
        retry_in_s=max(one.retry_in_s, other.retry_in_s),
    )
