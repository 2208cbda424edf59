"""What Ray is told, from what gateways report: with made-up contexts and a clock that is moved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
from serving_helpers import Clock

from flexinfer.scheduling import Demand, Node, Replica
from flexinfer.serving import registry
from flexinfer.serving.args import ENTRY_DEPLOYMENT, GATEWAY_DEPLOYMENT, MODEL_DEPLOYMENT
from flexinfer.serving.policies import GatewayPolicy, ModelPolicy
from flexinfer.serving.registry import STALE_AFTER_S, Registry
from flexinfer.serving.reports import Bounds, Report, encode

ONE_GPU = (Node("n", 1),)
ASKED = Demand(queued=1)
IDLE = Demand(idle_s=1e6)


@dataclass
class Context:
    """The attributes of Ray's autoscaling context that the policies read."""

    deployment_name: str
    target_num_replicas: int = 0
    current_num_replicas: int = 0
    total_num_requests: float = 0
    capacity_adjusted_min_replicas: int = 1
    raw_metrics: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    value: float


def raw(*reports: Report) -> dict[str, Any]:
    """Reports as Ray brings them: metric -> replica -> series, the last being the newest."""
    metrics: dict[str, Any] = {"running_requests": {"g0": [Sample(1.0)]}}
    for number, report in enumerate(reports):
        for name, value in encode(report).items():
            series = [Sample(-1.0), Sample(value)]
            metrics.setdefault(name, {})[f"g{number}"] = series
    return metrics


class Controller:
    """The Serve controller's loop: every tick it calls each application's policy once."""

    def __init__(self, *models: dict[str, Any]) -> None:
        self.gateway = GatewayPolicy()
        self.bounds = {
            args["model"]: Bounds(**{k: v for k, v in args.items() if k != "model"})
            for args in models
        }
        self.policies = {name: ModelPolicy(name) for name in self.bounds}
        self.contexts = {name: Context(MODEL_DEPLOYMENT) for name in self.policies}

    def bounded(self, report: Report) -> Report:
        return dataclasses.replace(report, bounds=self.bounds)

    def tick(self, *reports: Report, order: tuple[str, ...] | None = None) -> dict[str, int]:
        """Returns the targets; Ray is as fast here as to have them in the next tick."""
        targets: dict[str, int] = {}
        for name in order or ("gateway", *self.policies):
            if name == "gateway":
                context = Context(GATEWAY_DEPLOYMENT, raw_metrics=raw(*map(self.bounded, reports)))
                assert self.gateway({"id": context}) == ({"id": 1}, {})
                continue
            context = self.contexts[name]
            entry = Context(ENTRY_DEPLOYMENT)
            found, _ = self.policies[name]({"server": context, "entry": entry})
            assert found["entry"] == 0
            targets[name] = found["server"]
        for name, target in targets.items():
            context = self.contexts[name]
            context.target_num_replicas = context.current_num_replicas = target
        return targets


def said(**demands: Demand) -> Report:
    return Report(nodes=ONE_GPU, demands=demands)


def on_demand(name: str, **changes: Any) -> dict[str, Any]:
    return {"model": name, "min_replicas": 0, "idle_timeout_s": 60, **changes}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(registry, "REGISTRY", Registry(clock))
    return clock


def test_a_waiting_request_brings_its_model_up() -> None:
    controller = Controller(on_demand("a"))
    assert controller.tick(said(a=IDLE)) == {"a": 0}
    assert controller.tick(said(a=ASKED)) == {"a": 1}


def test_one_goes_in_the_tick_in_which_the_other_comes() -> None:
    controller = Controller(on_demand("a"), on_demand("b"))
    controller.tick(said(a=ASKED, b=IDLE))
    assert controller.tick(said(a=ASKED, b=IDLE)) == {"a": 1, "b": 0}
    assert controller.tick(said(a=Demand(idle_s=1), b=ASKED)) == {"a": 0, "b": 1}


@pytest.mark.parametrize(
    "order", [("gateway", "a", "b"), ("a", "gateway", "b"), ("b", "a", "gateway")]
)
def test_whatever_order_ray_calls_in_two_ticks_are_enough(order: tuple[str, ...]) -> None:
    controller = Controller(on_demand("a"), on_demand("b"))
    for _ in range(3):
        controller.tick(said(a=ASKED, b=IDLE), order=order)
    assert controller.contexts["a"].target_num_replicas == 1
    report = Report(
        nodes=ONE_GPU,
        demands={"a": Demand(idle_s=1), "b": ASKED},
        replicas={"a": (Replica("n"),)},
    )
    controller.tick(report, order=order)
    assert controller.tick(said(a=Demand(idle_s=1), b=ASKED), order=order) == {"a": 0, "b": 1}


def test_the_reports_of_several_gateways_count_together() -> None:
    controller = Controller(on_demand("a"))
    controller.tick(said(a=ASKED))
    assert controller.tick(said(a=IDLE), said(a=ASKED)) == {"a": 1}


def test_a_failed_model_is_down_until_its_pause_has_passed() -> None:
    controller = Controller(on_demand("a"))
    controller.tick(said(a=ASKED))
    assert controller.tick(said(a=Demand(queued=1, retry_in_s=5))) == {"a": 0}
    assert controller.tick(said(a=ASKED)) == {"a": 1}


def test_a_parked_model_is_down_whoever_asks() -> None:
    controller = Controller(on_demand("a", replicas=0))
    assert controller.tick(said(a=Demand(queued=5, load=True))) == {"a": 0}


# -- while no gateway is heard


def test_before_the_first_word_what_is_up_stays_up() -> None:
    controller = Controller(on_demand("a", replicas=2), on_demand("b"))
    controller.contexts["a"].target_num_replicas = 2
    assert controller.tick() == {"a": 2, "b": 0}


def test_when_the_word_is_old_what_is_up_stays_up(clock: Clock) -> None:
    controller = Controller(on_demand("a"))
    controller.tick(said(a=ASKED))  # the first tick makes the model known
    controller.tick(said(a=ASKED))
    clock.now += STALE_AFTER_S
    assert controller.tick() == {"a": 1}
    clock.now += 10 * STALE_AFTER_S
    assert controller.tick() == {"a": 1}
    assert controller.tick(said(a=IDLE)) == {"a": 0}


def test_when_the_word_is_old_requests_that_ray_counts_wake(clock: Clock) -> None:
    controller = Controller(on_demand("a"), on_demand("parked", replicas=0))
    controller.tick(said(a=IDLE))
    clock.now += STALE_AFTER_S
    for context in controller.contexts.values():
        context.total_num_requests = 1
    assert controller.tick() == {"a": 1, "parked": 0}


def test_while_the_gateway_is_heard_rays_counts_wake_nobody() -> None:
    controller = Controller(on_demand("a"))
    controller.contexts["a"].total_num_requests = 1
    assert controller.tick(said(a=IDLE)) == {"a": 0}


def test_when_the_word_is_old_minimums_hold(clock: Clock) -> None:
    controller = Controller(on_demand("a", min_replicas=1))
    controller.tick(said(a=IDLE))
    clock.now += STALE_AFTER_S
    controller.contexts["a"].target_num_replicas = 0
    assert controller.tick() == {"a": 1}


def test_rays_own_numbers_are_not_the_gateways_word() -> None:
    controller = Controller(on_demand("a"))
    controller.contexts["a"].target_num_replicas = 1
    context = Context(GATEWAY_DEPLOYMENT, raw_metrics={"running_requests": {"g": [Sample(1.0)]}})
    controller.gateway({"id": context})
    assert controller.tick() == {"a": 1}


# -- models come and go


def test_a_model_of_which_the_gateway_knows_nothing_yet_keeps_what_it_has() -> None:
    controller = Controller(on_demand("a"))
    controller.contexts["a"].target_num_replicas = 1
    assert controller.tick(Report(nodes=ONE_GPU)) == {"a": 1}


def test_a_removed_models_gpu_is_free_after_a_while(clock: Clock) -> None:
    controller = Controller(on_demand("a", min_replicas=1), on_demand("b"))
    controller.tick(said(a=ASKED, b=IDLE))
    controller.tick(said(a=Demand(running=1), b=ASKED))
    assert controller.contexts["b"].target_num_replicas == 0
    del controller.policies["a"]
    clock.now += STALE_AFTER_S / 2
    controller.tick(said(b=ASKED))
    clock.now += STALE_AFTER_S
    assert controller.tick(said(b=ASKED)) == {"b": 1}


def test_the_gateway_keeps_the_size_that_ray_was_told() -> None:
    context = Context(GATEWAY_DEPLOYMENT, capacity_adjusted_min_replicas=2)
    assert GatewayPolicy()({"id": context}) == ({"id": 2}, {})
    context.capacity_adjusted_min_replicas = 0
    assert GatewayPolicy()({"id": context}) == ({"id": 1}, {})
