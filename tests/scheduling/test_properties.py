"""What holds for every decision, whatever the nodes, the models and what is up."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer.scheduling import Decision, Demand, Model, Node, Reason, Replica, decide
from flexinfer.scheduling import unschedulable as why_never

NODES = ("a", "b", "c")

demands = st.builds(
    Demand,
    queued=st.sampled_from([0, 0, 1, 5]),
    running=st.sampled_from([0, 0, 1, 5]),
    oldest_wait_s=st.sampled_from([0.0, 1.0, 60.0]),
    idle_s=st.sampled_from([0.0, 100.0, 299.0, 300.0, 1e6]),
    load=st.sampled_from([False, False, True]),
    unload=st.sampled_from([False, False, True]),
    retry_in_s=st.sampled_from([0.0, 0.0, 0.0, 5.0]),
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Node], list[Model]]:
    """Nodes, and models of which some are up: what is up fits onto the nodes."""
    nodes = [Node(name, draw(st.integers(0, 3))) for name in NODES[: draw(st.integers(0, 3))]]
    free = {node.id: node.slots for node in nodes}
    models = []
    for index in range(draw(st.integers(0, 6))):
        model = Model(
            f"m{index}",
            gpus=draw(st.integers(0, 3)),
            replicas=draw(st.integers(0, 3)),
            min_replicas=draw(st.sampled_from([None, None, 0, 1, 2])),
            priority=draw(st.sampled_from([1, 100, 900])),
            nodes=draw(st.none() | st.frozensets(st.sampled_from(NODES))),
            demand=draw(demands),
        )
        running = []
        for _ in range(draw(st.integers(0, 3))):
            places = [n.id for n in nodes if model.may_run_on(n) and free[n.id] >= model.gpus]
            if places:
                node = draw(st.sampled_from(places))
                free[node] -= model.gpus
                running.append(Replica(node))
        # Fewer than run: the rest is draining, and may be for a while.
        target = draw(st.integers(0, len(running)))
        models.append(replace(model, running=tuple(running), target=target))
    return nodes, models


def used(decision: Decision, models: list[Model]) -> Counter[str]:
    gpus = {model.name: model.gpus for model in models}
    taken: Counter[str] = Counter()
    for name, target in decision.targets.items():
        for node in target.placement:
            taken[node] += gpus[name]
    return taken


@given(situations())
def test_no_node_ever_needs_more_gpus_than_it_has(
    situation: tuple[list[Node], list[Model]],
) -> None:
    nodes, models = situation
    taken = used(decide(nodes, models), models)
    assert all(taken[node.id] <= node.slots for node in nodes)


@given(situations())
def test_every_model_has_a_target_within_its_bounds(
    situation: tuple[list[Node], list[Model]],
) -> None:
    nodes, models = situation
    decision = decide(nodes, models)
    assert decision.targets.keys() == {model.name for model in models}
    for model in models:
        target = decision.targets[model.name]
        assert 0 <= target.replicas <= model.replicas


@given(situations())
def test_every_replica_has_a_node_that_it_may_run_on(
    situation: tuple[list[Node], list[Model]],
) -> None:
    nodes, models = situation
    decision = decide(nodes, models)
    for model in models:
        target = decision.targets[model.name]
        assert len(target.placement) == target.replicas
        allowed = {node.id for node in nodes if model.may_run_on(node)}
        assert set(target.placement) <= (allowed or {""})


@given(situations())
def test_a_parked_model_is_down(situation: tuple[list[Node], list[Model]]) -> None:
    nodes, models = situation
    decision = decide(nodes, models)
    for model in models:
        if model.parked:
            assert decision.targets[model.name].replicas == 0
            assert decision.targets[model.name].reason is Reason.PARKED


@given(situations())
def test_a_model_gives_way_only_to_one_that_comes_up_in_its_place(
    situation: tuple[list[Node], list[Model]],
) -> None:
    nodes, models = situation
    decision = decide(nodes, models)
    by_name = {model.name: model for model in models}
    for model in models:
        target = decision.targets[model.name]
        if target.reason is not Reason.GIVES_WAY:
            continue
        waiter = by_name[target.message.removeprefix("gives way to ")]
        coming = decision.targets[waiter.name]
        assert coming.replicas >= 1
        assert waiter.target == 0 or not waiter.running
        assert waiter.demand.wanted or coming.reason is Reason.MINIMUM
        assert set(coming.placement) & {replica.node for replica in model.running}


@given(situations())
def test_every_model_that_gives_way_was_needed(
    situation: tuple[list[Node], list[Model]],
) -> None:
    nodes, models = situation
    decision = decide(nodes, models)
    free = {node.id: node.slots for node in nodes}
    for node, taken in used(decision, models).items():
        if node in free:
            free[node] -= taken
    for model in models:
        if decision.targets[model.name].reason is Reason.GIVES_WAY and model.target == 1:
            # Were there room left on its node for it to stay, it need not have gone.
            (replica, *others) = model.running
            assert others or replica.node is None or free[replica.node] < model.gpus


@given(situations())
def test_whoever_is_wanted_is_never_made_to_go(
    situation: tuple[list[Node], list[Model]],
) -> None:
    nodes, models = situation
    decision = decide(nodes, models)
    for model in models:
        demand = model.demand
        if model.parked or why_never(model, nodes) is not None:
            continue
        if demand.busy or (demand.wanted and demand.retry_in_s <= 0 and not demand.unload):
            kept = decision.targets[model.name].replicas
            assert kept >= min(model.target, model.replicas, 1)
        assert not (demand.wanted and decision.targets[model.name].reason is Reason.GIVES_WAY)


@given(situations())
def test_a_minimum_holds_against_equal_and_lower_priority(
    situation: tuple[list[Node], list[Model]],
) -> None:
    nodes, models = situation
    decision = decide(nodes, models)
    by_name = {model.name: model for model in models}
    for model in models:
        target = decision.targets[model.name]
        if model.min_replicas and target.reason is Reason.GIVES_WAY:
            waiter = by_name[target.message.removeprefix("gives way to ")]
            assert waiter.priority > model.priority


@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_nodes_and_models_does_not_matter(
    situation: tuple[list[Node], list[Model]], dice: random.Random
) -> None:
    nodes, models = situation
    first = decide(nodes, models)
    dice.shuffle(nodes)
    dice.shuffle(models)
    assert decide(nodes, models) == first


@given(situations())
def test_no_model_waits_while_there_is_room_for_it(
    situation: tuple[list[Node], list[Model]],
) -> None:
    nodes, models = situation
    decision = decide(nodes, models)
    taken = used(decision, models)
    for model in models:
        if decision.targets[model.name].reason is Reason.WAITING_FOR_GPU:
            for node in nodes:
                if model.may_run_on(node):
                    assert node.slots - taken[node.id] < model.gpus


@given(situations())
def test_what_can_never_run_says_so_and_only_that(
    situation: tuple[list[Node], list[Model]],
) -> None:
    nodes, models = situation
    decision = decide(nodes, models)
    for model in models:
        target = decision.targets[model.name]
        if target.reason is Reason.UNSCHEDULABLE:
            assert target.message == why_never(model, nodes)
        elif why_never(model, nodes) is not None:
            assert target.reason is Reason.BACKING_OFF


@settings(max_examples=300)
@given(situations())
def test_with_the_same_demand_decisions_come_to_rest(
    situation: tuple[list[Node], list[Model]],
) -> None:
    """Models must not push each other out in turns while nothing changes."""
    nodes, models = situation
    before: Decision | None = None
    for _ in range(2 * len(models) + 3):
        decision = decide(nodes, models)
        if decision == before:
            return
        before = decision
        models = [
            replace(
                model,
                target=decision.targets[model.name].replicas,
                running=tuple(Replica(n or None) for n in decision.targets[model.name].placement),
            )
            for model in models
        ]
    raise AssertionError("still changing")
