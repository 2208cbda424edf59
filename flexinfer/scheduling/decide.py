"""The decision: which models should have how many replicas.

The rules, in a user's words:

1. A parked model (``replicas: 0``) is down, and its GPUs count as free.
2. A model that is asked for, that a user loaded, or whose ``minReplicas`` is at least 1 should be
   up; one without ``minReplicas`` should be up while there is room.
3. Who is up and wanted stays. Then those who wait get room: minimums first, then by priority,
   then who has waited longest. Free GPUs are used before anybody gives way.
4. For a waiter that found no room, idle models give way on one node where it can run: only as many
   as are needed, lowest priority first, then the longest idle. A model with running or queued
   requests, or one that a user is having loaded, never gives way here, nor one that holds its
   minimum against an equal or lower priority. Who is asked for by nobody waits for free GPUs.
5. An idle model with ``minReplicas: 0`` goes after its idle timeout.
6. A model whose activation failed is not tried again before its back-off has passed; what it
   serves with meanwhile stays.
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
    wishes: list[tuple[Model, int, Reason]] = []
    held: dict[str, list[str]] = {}
    for model in sorted(models, key=_firmness):
        settled = _settled(model, nodes)
        if settled is not None:
            targets[model.name] = settled
            continue
        wish, reason = _wish(model)
        wishes.append((model, wish, reason))
        # The target counts, not what still runs: a model that is draining has given its GPUs away.
        held[model.name] = room.hold(model, min(wish, model.target))
    stay: list[Model] = []
    waiting: list[tuple[Model, int, Reason]] = []
    # Only now the replicas that are on no node yet: they must not get a GPU that is in use.
    for model, wish, reason in wishes:
        placement = held[model.name]
        room.fill(model, placement, min(wish, model.target))
        kept = len(placement)
        targets[model.name] = Target(kept, reason, placement=tuple(placement))
        if kept:
            stay.append(model)
        if wish > kept and model.demand.retry_in_s <= 0:
            waiting.append((model, wish, reason))
    waiting.sort(key=_urgency)
    for model, wish, reason in waiting:
        # Who has just given way comes back in another decision, when its GPUs are really free.
        if targets[model.name].reason is not Reason.GIVES_WAY:
            targets[model.name] = _admit(model, wish, reason, room, stay, targets)
    return Decision(targets)


def _settled(model: Model, nodes: Sequence[Node]) -> Target | None:
    """Targets that need no look at anybody else."""
    if model.parked:
        return Target(0, Reason.PARKED, "replicas is 0: no request wakes it")
    if model.demand.retry_in_s > 0 and not model.demand.busy:
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
    rank = 0 if reason is Reason.MINIMUM else 1 if model.demand.wanted else 2
    return rank, -model.priority, -model.demand.oldest_wait_s, model.name


def _admit(
    model: Model,
    wish: int,
    reason: Reason,
    room: _Room,
    stay: list[Model],
    targets: dict[str, Target],
) -> Target:
    placement = list(targets[model.name].placement)
    may_evict = model.demand.wanted or reason is Reason.MINIMUM
    while len(placement) < wish:
        node = room.take(model)
        if node is None and not placement and may_evict:
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
        gains = {m.name: m.gpus * targets[m.name].placement.count(node.id) for m in holders}
        for holder in sorted(holders, key=lambda m: (m.priority, -m.demand.idle_s, m.name)):
            if free >= model.gpus:
                break
            leaving.append(holder)
            free += gains[holder.name]
        if free < model.gpus:
            continue
        # A large one that came last may have made room enough without some that came before.
        for holder in reversed(leaving.copy()):
            if free - gains[holder.name] >= model.gpus:
                leaving.remove(holder)
                free -= gains[holder.name]
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
    if holder.demand.wanted:
        return False
    return not (holder.min_replicas and holder.priority >= waiter.priority)


class _Room:
    """The free GPUs of each node while a decision is being made."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.id)
        self.free = {node.id: node.slots for node in self.nodes}

    def hold(self, model: Model, count: int) -> list[str]:
        """Count the GPUs that at most ``count`` replicas of a model hold already; their nodes."""
        placed: list[str] = []
        for replica in model.running:
            node = replica.node
            if len(placed) < count and node is not None and self.free.get(node, -1) >= model.gpus:
                self.free[node] -= model.gpus
                placed.append(node)
        return placed

    def fill(self, model: Model, placed: list[str], count: int) -> None:
        """Add nodes to ``placed`` until it has ``count``, or there is no room."""
        while len(placed) < count and (node := self.take(model)) is not None:
            placed.append(node)

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
