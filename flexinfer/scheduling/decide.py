"""The decision: which models should have how many replicas.

The rules, in a user's words:

1. A parked model (``replicas: 0``) is down, and its GPUs count as free.
2. A model that is asked for, that a user loaded, or whose ``minReplicas`` is at least 1 should be
   up; one without ``minReplicas`` should be up while there is room.
3. Who is up and wanted stays. Then those who wait get room: minimums first, then by priority,
   then who has waited longest. Free GPUs are used before anybody gives way.
4. For a waiter that found no room, idle models give way on one node where it can run: only as many
   as are needed, lowest priority first, then the longest idle. A model with running or queued
   requests never gives way here, nor one that holds its minimum against an equal or lower priority.
5. An idle model with ``minReplicas: 0`` goes after its idle timeout.
6. A model whose activation failed is not tried again before its back-off has passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexinfer.scheduling.types import Decision, Model, Node, Reason, Target


def unschedulable(model: Model, nodes: Sequence[Node]) -> str | None:
    """Why ``model`` can never run on ``nodes``, whoever else is up; None if it can."""
    if model.parked:
        return None
    if model.gpus == 0 and model.nodes is None:
        return None
    eligible = [node for node in nodes if model.may_run_on(node)]
    if not eligible:
        wanted = ", ".join(sorted(model.nodes or ())) or "any"
        return f"no node is eligible (wanted: {wanted})"
    largest = max(node.slots for node in eligible)
    if model.gpus > largest:
        return f"it needs {model.gpus} GPU(s) on one node; the largest eligible node has {largest}"
    return None


def decide(nodes: Sequence[Node], models: Iterable[Model]) -> Decision:
    """Targets for ``models`` on ``nodes``.

    Args:
        nodes: every node that may host models, each id once.
        models: every model, each name once, with what it has now.

    Returns:
        One target a model. A target never needs more GPUs than the nodes have, but it may count on
        GPUs of models whose own target has just become lower: Ray starts the new replica when they
        are free.
    """
    room = _Room(nodes)
    targets: dict[str, Target] = {}
    stay: list[Model] = []
    waiting: list[tuple[Model, int, Reason]] = []
    for model in sorted(models, key=_firmness):
        settled = _settled(model, nodes)
        if settled is not None:
            targets[model.name] = settled
            continue
        wish, reason = _wish(model)
        # The target counts, not what still runs: a model that is draining has given its GPUs away.
        placement = room.keep(model, min(wish, model.target))
        kept = len(placement)
        targets[model.name] = Target(kept, reason, placement=placement)
        if kept:
            stay.append(model)
        if wish > kept:
            waiting.append((model, wish, reason))
    waiting.sort(key=_urgency)
    for model, wish, reason in waiting:
        targets[model.name] = _admit(model, wish, reason, room, stay, targets)
    return Decision(targets)


def _settled(model: Model, nodes: Sequence[Node]) -> Target | None:
    """Targets that need no look at anybody else."""
    if model.parked:
        return Target(0, Reason.PARKED, "replicas is 0: no request wakes it")
    if model.demand.retry_in_s > 0:
        return Target(0, Reason.BACKING_OFF, f"next attempt in {model.demand.retry_in_s:.0f} s")
    never = unschedulable(model, nodes)
    if never is not None:
        return Target(0, Reason.UNSCHEDULABLE, never)
    return None


def _wish(model: Model) -> tuple[int, Reason]:
    """How many replicas the model would have with no one else there, and why."""
    minimum = min(model.min_replicas or 0, model.replicas)
    demand = model.demand
    if demand.unload and not demand.busy and not demand.queued:
        return minimum, Reason.MINIMUM if minimum else Reason.UNLOADED
    if demand.queued or demand.busy:
        return max(1, minimum, min(model.target, model.replicas)), Reason.DEMAND
    if demand.load:
        return max(1, minimum), Reason.WISHED
    if model.min_replicas is None:
        return model.replicas, Reason.CAPACITY_FREE
    if model.target > minimum:
        if demand.idle_s < model.idle_timeout_s:
            return min(model.target, model.replicas), Reason.DEMAND
        return minimum, Reason.IDLE_TIMEOUT
    return minimum, Reason.MINIMUM if minimum else Reason.NO_DEMAND


def _firmness(model: Model) -> tuple[bool, int, str]:
    """Who is counted first when, for once, more is up than fits: a node may just have been lost."""
    return not model.demand.busy, -model.priority, model.name


def _urgency(entry: tuple[Model, int, Reason]) -> tuple[int, int, float, str]:
    model, _, reason = entry
    rank = {Reason.MINIMUM: 0, Reason.CAPACITY_FREE: 2}.get(reason, 1)
    return rank, -model.priority, -model.demand.oldest_wait_s, model.name


def _admit(
    model: Model,
    wish: int,
    reason: Reason,
    room: _Room,
    stay: list[Model],
    targets: dict[str, Target],
) -> Target:
    have = targets[model.name]
    placement = list(have.placement)
    while len(placement) < wish:
        node = room.take(model)
        if node is None and not placement and reason is not Reason.CAPACITY_FREE:
            node = _make_room(model, room, stay, targets)
        if node is None:
            break
        placement.append(node)
    if placement:
        return Target(len(placement), reason, placement=tuple(placement))
    holders = ", ".join(sorted(m.name for m in stay if m.gpus > 0))
    return Target(0, Reason.WAITING_FOR_GPU, f"the GPUs are in use by {holders or 'others'}")


def _make_room(
    model: Model, room: _Room, stay: list[Model], targets: dict[str, Target]
) -> str | None:
    """Let idle models go on the node where that costs least; returns the node, or None."""
    best: tuple[tuple[int, int, float], str, list[Model]] | None = None
    for node in room.nodes:
        if not model.may_run_on(node):
            continue
        leaving: list[Model] = []
        free = room.free[node.id]
        holders = [m for m in stay if node.id in targets[m.name].placement and _may_go(m, model)]
        for holder in sorted(holders, key=lambda m: (m.priority, -m.demand.idle_s, m.name)):
            if free >= model.gpus:
                break
            leaving.append(holder)
            free += holder.gpus * targets[holder.name].placement.count(node.id)
        if free < model.gpus:
            continue
        cost = (
            max((m.priority for m in leaving), default=-1),
            len(leaving),
            -min((m.demand.idle_s for m in leaving), default=0.0),
        )
        if best is None or cost < best[0]:
            best = (cost, node.id, leaving)
    if best is None:
        return None
    _, node_id, leaving = best
    for holder in leaving:
        # All replicas of it go: Ray chooses which one stops, so fewer might be the wrong one.
        room.give_back(holder, targets[holder.name].placement)
        targets[holder.name] = Target(0, Reason.GIVES_WAY, f"gives way to {model.name}")
        stay.remove(holder)
    room.free[node_id] -= model.gpus
    return node_id


def _may_go(holder: Model, waiter: Model) -> bool:
    if holder.gpus == 0 or holder.name == waiter.name:
        return False
    if holder.demand.busy or holder.demand.queued:
        return False
    return not (holder.min_replicas and holder.priority >= waiter.priority)


class _Room:
    """The free GPUs of each node while a decision is being made."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.id)
        self.free = {node.id: node.slots for node in self.nodes}

    def keep(self, model: Model, count: int) -> tuple[str, ...]:
        """Count the GPUs that ``count`` replicas of a model hold already."""
        placed: list[str] = []
        for replica in model.running[:count]:
            if replica.node is not None and self.free.get(replica.node, -1) >= model.gpus:
                self.free[replica.node] -= model.gpus
                placed.append(replica.node)
        while len(placed) < count:
            node = self.take(model)
            if node is None:
                break
            placed.append(node)
        return tuple(placed)

    def take(self, model: Model) -> str | None:
        """The fullest node that still has room (so that large models find theirs), or None."""
        fitting = [
            node
            for node in self.nodes
            if model.may_run_on(node) and self.free[node.id] >= model.gpus
        ]
        if not fitting:
            return "" if model.gpus == 0 and not self.nodes else None
        node = min(fitting, key=lambda n: (self.free[n.id], n.id))
        self.free[node.id] -= model.gpus
        return node.id

    def give_back(self, model: Model, placement: Iterable[str]) -> None:
        for node_id in placement:
            if node_id in self.free:
                self.free[node_id] += model.gpus
