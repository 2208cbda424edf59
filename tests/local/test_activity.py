from __future__ import annotations

from typing import Any

import pytest

from flexinfer.local.activity import Activities
from flexinfer.local.events import Activity
from flexinfer.local.gateway import ModelStatus


def look(state: str, name: str = "m", **more: Any) -> list[ModelStatus]:
    return [ModelStatus.read({"name": name, "state": state, **more})]


def test_models_at_rest_are_no_news() -> None:
    activities = Activities()
    assert activities.update(look("zero"), 0) == []
    assert activities.update(look("zero"), 1) == []
    assert Activities().update(look("parked"), 0) == []


def test_an_activation_has_steps_and_a_duration() -> None:
    activities = Activities()
    activities.update(look("zero"), 0)
    assert activities.update(look("queued"), 1) == [Activity("m", "queued")]
    assert activities.update(look("starting", progress="loading"), 2) == [
        Activity("m", "starting", progress="loading")
    ]
    assert activities.update(look("starting", progress="loading"), 2.5) == []
    assert activities.update(look("starting", progress="warming up"), 3) == [
        Activity("m", "starting", progress="warming up")
    ]
    assert activities.update(look("serving"), 4) == [Activity("m", "serving", took_s=3)]
    assert activities.update(look("serving"), 5) == []
    assert activities.update(look("draining"), 6) == [Activity("m", "draining")]
    assert activities.update(look("zero"), 7) == [Activity("m", "zero")]


def test_an_activation_between_two_looks_has_a_duration_too() -> None:
    activities = Activities()
    activities.update(look("zero"), 10)
    assert activities.update(look("serving"), 10.25) == [Activity("m", "serving", took_s=0.25)]


def test_a_model_that_serves_in_the_first_look_has_none() -> None:
    assert Activities().update(look("serving"), 5) == [Activity("m", "serving")]


def test_a_failure_is_told_once_with_its_reason() -> None:
    activities = Activities()
    activities.update(look("starting"), 0)
    failed = look("failed", reason="ModelNotFound", message="no such file")
    assert activities.update(failed, 1) == [
        Activity("m", "failed", reason="ModelNotFound", message="no such file")
    ]
    assert activities.update(failed, 2) == []
    other = look("failed", reason="EngineExited", message="exit code 1")
    assert activities.update(other, 3)[0].reason == "EngineExited"
    # The next start is timed from its own beginning.
    activities.update(look("starting"), 10)
    assert activities.update(look("serving"), 12) == [Activity("m", "serving", took_s=2)]


def test_a_model_that_was_removed_begins_anew() -> None:
    activities = Activities()
    activities.update(look("starting"), 0)
    assert activities.update([], 1) == []
    assert activities.update(look("zero"), 2) == []


@pytest.mark.parametrize(
    "raw", [{}, {"name": "m"}, {"name": "m", "state": "zero", "replicas": [{}]}]
)
def test_what_is_not_a_model(raw: dict[str, Any]) -> None:
    with pytest.raises(KeyError):
        ModelStatus.read(raw)
