"""The scheduler's rules, one by one, as examples. `decide` has them in words."""

from __future__ import annotations

from typing import Any

import pytest

from flexinfer.scheduling import Decision, Demand, Model, Node, Reason, Replica, decide
from flexinfer.scheduling import unschedulable as why_never

ONE_GPU = [Node("a", 1)]
TWO_NODES = [Node("a", 1), Node("b", 1)]
QUEUED = Demand(queued=1)
BUSY = Demand(running=1)


def up(name: str, *nodes: str, **fields: Any) -> Model:
    """A model that is up on these nodes, and idle unless its demand says something else."""
    fields.setdefault("demand", Demand(idle_s=60))
    return Model(name, running=tuple(Replica(n) for n in nodes), target=len(nodes), **fields)


def targets(decision: Decision) -> dict[str, int]:
    return {name: target.replicas for name, target in decision.targets.items()}


def reasons(decision: Decision) -> dict[str, Reason]:
    return {name: target.reason for name, target in decision.targets.items()}


class TestParked:
    """1. A parked model is down, and its GPUs count as free."""

    def test_no_request_wakes_it(self) -> None:
        decision = decide(ONE_GPU, [Model("m", replicas=0, demand=QUEUED)])
        assert reasons(decision) == {"m": Reason.PARKED}
        assert targets(decision) == {"m": 0}

    def test_it_leaves_and_another_comes_at_once(self) -> None:
        parked = up("parked", "a", replicas=0, min_replicas=1, demand=BUSY)
        assert targets(decide(ONE_GPU, [parked, Model("m", demand=QUEUED)])) == {
            "parked": 0,
            "m": 1,
        }


class TestWishes:
    """2. Who should be up."""

    @pytest.mark.parametrize(
        ("demand", "reason"),
        [
            (QUEUED, Reason.DEMAND),
            (Demand(load=True), Reason.WISHED),
            (Demand(), Reason.NO_DEMAND),
            (Demand(unload=True), Reason.UNLOADED),
        ],
    )
    def test_a_model_that_scales_to_zero_is_up_when_asked_for(
        self, demand: Demand, reason: Reason
    ) -> None:
        decision = decide(ONE_GPU, [Model("m", min_replicas=0, demand=demand)])
        assert reasons(decision) == {"m": reason}
        assert targets(decision) == {"m": int(demand.wanted)}

    def test_a_minimum_is_up_without_being_asked_for(self) -> None:
        decision = decide(ONE_GPU, [Model("m", min_replicas=1)])
        assert (targets(decision), reasons(decision)) == ({"m": 1}, {"m": Reason.MINIMUM})

    def test_a_minimum_is_never_more_than_replicas(self) -> None:
        assert targets(decide([Node("a", 8)], [Model("m", min_replicas=3, replicas=2)])) == {"m": 2}

    def test_without_a_minimum_a_model_is_up_while_there_is_room(self) -> None:
        decision = decide(ONE_GPU, [Model("m"), Model("n")])
        assert targets(decision) == {"m": 1, "n": 0}
        assert reasons(decision)["m"] is Reason.CAPACITY_FREE
        assert reasons(decision)["n"] is Reason.WAITING_FOR_GPU

    def test_a_user_can_have_it_unloaded(self) -> None:
        decision = decide(ONE_GPU, [up("m", "a", demand=Demand(unload=True))])
        assert targets(decision) == {"m": 0}

    @pytest.mark.parametrize("demand", [Demand(running=1, unload=True), Demand(1, unload=True)])
    def test_but_not_while_it_has_requests(self, demand: Demand) -> None:
        assert targets(decide(ONE_GPU, [up("m", "a", demand=demand)])) == {"m": 1}

    def test_and_its_minimum_stays(self) -> None:
        model = up("m", "a", min_replicas=1, demand=Demand(unload=True))
        assert targets(decide(ONE_GPU, [model])) == {"m": 1}


class TestOrder:
    """3. Who is up stays; then minimums, then priority, then who has waited longest."""

    def test_minimums_go_before_demand(self) -> None:
        models = [Model("asked", priority=900, demand=QUEUED), Model("minimum", min_replicas=1)]
        assert targets(decide(ONE_GPU, models)) == {"minimum": 1, "asked": 0}

    def test_then_priority(self) -> None:
        models = [
            Model("low", priority=1, demand=Demand(1, oldest_wait_s=100)),
            Model("high", priority=2, demand=QUEUED),
        ]
        assert targets(decide(ONE_GPU, models)) == {"low": 0, "high": 1}

    def test_then_the_longest_wait(self) -> None:
        models = [
            Model("early", demand=Demand(1, oldest_wait_s=2)),
            Model("late", demand=Demand(1, oldest_wait_s=1)),
        ]
        assert targets(decide(ONE_GPU, models)) == {"early": 1, "late": 0}

    def test_who_is_asked_for_goes_before_who_only_would_be_up(self) -> None:
        models = [Model("would", priority=900), Model("asked", demand=QUEUED)]
        assert targets(decide(ONE_GPU, models)) == {"would": 0, "asked": 1}

    def test_a_free_gpu_is_used_before_anybody_gives_way(self) -> None:
        decision = decide(TWO_NODES, [up("idle", "a"), Model("asked", demand=QUEUED)])
        assert targets(decision) == {"idle": 1, "asked": 1}
        assert decision.targets["asked"].placement == ("b",)

    def test_the_fullest_node_is_filled_so_that_large_models_find_room(self) -> None:
        nodes = [Node("empty", 2), Node("half", 2)]
        models = [
            up("there", "half"),
            Model("large", gpus=2, priority=1, demand=QUEUED),
            Model("small", priority=2, demand=QUEUED),
        ]
        decision = decide(nodes, models)
        assert decision.targets["small"].placement == ("half",)
        assert decision.targets["large"].placement == ("empty",)

    def test_a_draining_model_has_given_its_gpus_away(self) -> None:
        draining = Model("draining", min_replicas=0, running=(Replica("a"),), target=0)
        decision = decide(ONE_GPU, [draining, Model("asked", demand=QUEUED)])
        assert targets(decision) == {"draining": 0, "asked": 1}

    def test_a_replica_without_a_node_takes_no_gpu_that_is_in_use(self) -> None:
        # The second replica of `a-new` is starting on b; it must not be counted on the GPU of
        # `b-old`, whose only node is a.
        starting = Model("a-new", target=1, running=(Replica(None),), demand=BUSY)
        serving = up("b-old", "a", nodes=frozenset({"a"}), demand=BUSY)
        decision = decide(TWO_NODES, [starting, serving])
        assert targets(decision) == {"a-new": 1, "b-old": 1}
        assert decision.targets["a-new"].placement == ("b",)


class TestGivingWay:
    """4. Idle models give way to a waiter, and only as many as are needed."""

    def test_an_idle_model_gives_way(self) -> None:
        decision = decide(ONE_GPU, [up("idle", "a"), Model("asked", demand=QUEUED)])
        assert targets(decision) == {"idle": 0, "asked": 1}
        assert decision.targets["idle"].message == "gives way to asked"

    @pytest.mark.parametrize("demand", [BUSY, QUEUED, Demand(load=True)])
    def test_one_that_somebody_wants_does_not(self, demand: Demand) -> None:
        models = [up("wanted", "a", priority=1, demand=demand), Model("asked", demand=QUEUED)]
        decision = decide(ONE_GPU, models)
        assert targets(decision) == {"wanted": 1, "asked": 0}
        assert reasons(decision)["asked"] is Reason.WAITING_FOR_GPU
        assert "wanted" in decision.targets["asked"].message

    @pytest.mark.parametrize(("priority", "stays"), [(99, True), (100, True), (101, False)])
    def test_a_minimum_holds_against_equal_or_lower_priority(
        self, priority: int, stays: bool
    ) -> None:
        models = [
            up("minimum", "a", min_replicas=1),
            Model("asked", priority=priority, demand=QUEUED),
        ]
        assert targets(decide(ONE_GPU, models))["minimum"] == int(stays)

    def test_nobody_gives_way_to_a_model_that_nobody_asks_for(self) -> None:
        models = [up("idle", "a", priority=1), Model("would", priority=900)]
        assert targets(decide(ONE_GPU, models)) == {"idle": 1, "would": 0}

    def test_nor_to_one_that_lost_its_node_and_is_idle(self) -> None:
        lost = up("lost", "gone", min_replicas=0, priority=900)
        assert targets(decide(ONE_GPU, [up("idle", "a"), lost])) == {"idle": 1, "lost": 0}

    def test_the_lowest_priority_goes_first(self) -> None:
        models = [
            up("low", "a", priority=1, demand=Demand(idle_s=1)),
            up("high", "b", priority=2, demand=Demand(idle_s=100)),
            Model("asked", demand=QUEUED),
        ]
        assert targets(decide(TWO_NODES, models)) == {"low": 0, "high": 1, "asked": 1}

    def test_then_the_longest_idle(self) -> None:
        models = [
            up("fresh", "a", demand=Demand(idle_s=1)),
            up("stale", "b", demand=Demand(idle_s=2)),
            Model("asked", demand=QUEUED),
        ]
        assert targets(decide(TWO_NODES, models)) == {"fresh": 1, "stale": 0, "asked": 1}

    def test_nobody_goes_where_the_waiter_cannot_run(self) -> None:
        models = [
            up("elsewhere", "a", priority=1),
            up("there", "b", priority=900),
            Model("asked", nodes=frozenset({"b"}), demand=QUEUED),
        ]
        assert targets(decide(TWO_NODES, models)) == {"elsewhere": 1, "there": 0, "asked": 1}

    def test_nobody_goes_for_a_model_that_would_not_fit_even_then(self) -> None:
        models = [
            up("idle", "a"),
            up("busy", "a", demand=BUSY),
            Model("asked", gpus=2, demand=QUEUED),
        ]
        assert targets(decide([Node("a", 2)], models)) == {"idle": 1, "busy": 1, "asked": 0}

    def test_a_cpu_model_never_gives_way_and_makes_nobody_do_so(self) -> None:
        models = [up("cpu", "a", gpus=0), up("gpu", "a"), Model("asked", gpus=0, demand=QUEUED)]
        assert targets(decide(ONE_GPU, models)) == {"cpu": 1, "gpu": 1, "asked": 1}

    def test_only_as_many_go_as_are_needed(self) -> None:
        models = [
            up("small", "a", priority=1),
            up("large", "a", gpus=2, priority=2),
            Model("asked", gpus=2, demand=QUEUED),
        ]
        assert targets(decide([Node("a", 3)], models)) == {"small": 1, "large": 0, "asked": 1}

    def test_who_gives_way_does_not_come_back_in_the_same_decision(self) -> None:
        # One of its two GPUs would be free, but which of its replicas Ray stops is not ours to say.
        models = [
            up("wide", "a", "b", replicas=3),
            Model("asked", nodes=frozenset({"a"}), demand=QUEUED),
        ]
        assert targets(decide(TWO_NODES, models)) == {"wide": 0, "asked": 1}

    def test_two_that_are_being_loaded_do_not_push_each_other_out(self) -> None:
        loading = up("first", "a", demand=Demand(load=True))
        models = [loading, Model("second", demand=Demand(load=True))]
        assert targets(decide(ONE_GPU, models)) == {"first": 1, "second": 0}


class TestIdleTimeout:
    """5. An idle model with minReplicas: 0 goes after its idle timeout."""

    @pytest.mark.parametrize(("idle_s", "replicas"), [(299, 1), (300, 0)])
    def test_at_the_timeout(self, idle_s: float, replicas: int) -> None:
        model = up("m", "a", min_replicas=0, demand=Demand(idle_s=idle_s))
        assert targets(decide(ONE_GPU, [model])) == {"m": replicas}

    def test_without_minreplicas_there_is_none(self) -> None:
        assert targets(decide(ONE_GPU, [up("m", "a", demand=Demand(idle_s=1e9))])) == {"m": 1}

    def test_it_goes_down_to_the_minimum(self) -> None:
        model = up("m", "a", "a", replicas=2, min_replicas=1, demand=Demand(idle_s=1e9))
        decision = decide([Node("a", 2)], [model])
        assert (targets(decision), reasons(decision)) == ({"m": 1}, {"m": Reason.IDLE_TIMEOUT})

    def test_a_request_stops_it(self) -> None:
        model = up("m", "a", min_replicas=0, demand=Demand(running=1, idle_s=1e9))
        assert targets(decide(ONE_GPU, [model])) == {"m": 1}


class TestBackOff:
    """6. A model whose activation failed is not tried again before its back-off has passed."""

    def test_it_waits_although_it_is_asked_for(self) -> None:
        decision = decide(ONE_GPU, [Model("m", demand=Demand(1, retry_in_s=5))])
        assert (targets(decision), reasons(decision)) == ({"m": 0}, {"m": Reason.BACKING_OFF})

    def test_others_have_its_gpu_meanwhile(self) -> None:
        models = [Model("failed", priority=900, demand=Demand(1, retry_in_s=5)), Model("m")]
        assert targets(decide(ONE_GPU, models)) == {"failed": 0, "m": 1}

    def test_what_serves_stays_when_one_more_failed(self) -> None:
        model = up("m", "a", replicas=2, min_replicas=2, demand=Demand(running=1, retry_in_s=5))
        assert targets(decide(TWO_NODES, [model])) == {"m": 1}


class TestNever:
    """Why a model can never run, whoever else is up."""

    def test_more_gpus_than_any_node_has(self) -> None:
        decision = decide(TWO_NODES, [Model("m", gpus=2, demand=QUEUED)])
        assert reasons(decision) == {"m": Reason.UNSCHEDULABLE}
        assert "needs 2 GPU(s) on one node" in decision.targets["m"].message
        assert "has 1" in decision.targets["m"].message

    def test_only_eligible_nodes_count(self) -> None:
        nodes = [Node("small", 1), Node("large", 4)]
        never = why_never(Model("m", gpus=2, nodes=frozenset({"small"})), nodes)
        assert never is not None
        assert "largest eligible node has 1" in never

    def test_no_node_is_eligible(self) -> None:
        assert why_never(Model("m", nodes=frozenset({"x", "y"})), TWO_NODES) == (
            "no node is eligible (wanted: x, y)"
        )
        assert why_never(Model("m", nodes=frozenset()), TWO_NODES) is not None
        assert why_never(Model("m"), []) is not None

    def test_a_cpu_model_runs_anywhere_even_where_no_node_is_known(self) -> None:
        assert why_never(Model("m", gpus=0), []) is None
        assert targets(decide([], [Model("m", gpus=0, demand=QUEUED)])) == {"m": 1}

    def test_a_cpu_model_with_a_choice_of_nodes_needs_one(self) -> None:
        assert why_never(Model("m", gpus=0, nodes=frozenset({"x"})), TWO_NODES) is not None

    def test_a_parked_model_is_only_parked(self) -> None:
        assert why_never(Model("m", gpus=99, replicas=0), ONE_GPU) is None

    def test_what_can_run_is_not_unschedulable_while_it_waits(self) -> None:
        assert why_never(Model("m"), ONE_GPU) is None


def test_when_a_node_is_lost_the_busy_keep_what_is_left() -> None:
    idle = up("idle", "gone", priority=900)
    busy = up("busy", "gone", demand=BUSY)
    assert targets(decide(ONE_GPU, [idle, busy])) == {"idle": 0, "busy": 1}
