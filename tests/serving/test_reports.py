"""The gateways' word to the policies survives the way through Ray's flat numbers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer.scheduling import Demand, Node, Replica
from flexinfer.serving.reports import Bounds, Report, decode, encode, merge

NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
NODES = st.text(st.characters(blacklist_characters="|", codec="ascii"), min_size=1, max_size=8)
SECONDS = st.floats(0, 1e6)
DEMANDS = st.builds(
    Demand,
    queued=st.integers(0, 1000),
    running=st.integers(0, 1000),
    oldest_wait_s=SECONDS,
    idle_s=SECONDS,
    load=st.booleans(),
    unload=st.booleans(),
    retry_in_s=SECONDS,
)
BOUNDS = st.builds(
    Bounds,
    gpus=st.integers(0, 8),
    replicas=st.integers(0, 8),
    min_replicas=st.none() | st.integers(0, 8),
    priority=st.integers(0, 1000),
    idle_timeout_s=SECONDS,
    nodes=st.none() | st.frozensets(NODES, max_size=3),
)
REPORTS = st.builds(
    Report,
    bounds=st.dictionaries(NAMES, BOUNDS, max_size=4),
    nodes=st.lists(st.builds(Node, NODES, st.integers(0, 8)), unique_by=lambda n: n.id).map(tuple),
    demands=st.dictionaries(NAMES, DEMANDS, max_size=4),
    replicas=st.dictionaries(
        NAMES, st.lists(st.builds(Replica, st.none() | NODES), max_size=4).map(tuple), max_size=4
    ),
)


def placed(report: Report) -> dict[str, Counter[Replica]]:
    """Replicas have no order, and none is as good as no word of the model."""
    return {name: Counter(found) for name, found in report.replicas.items() if found}


@settings(max_examples=40, deadline=None)
@given(REPORTS)
def test_a_report_comes_out_as_it_went_in(report: Report) -> None:
    stats = encode(report)
    assert all(isinstance(value, float | int) for value in stats.values())
    found = decode(stats)
    assert set(found.nodes) == set(report.nodes)
    assert found.bounds == report.bounds
    assert found.demands == report.demands
    assert placed(found) == placed(report)


@settings(max_examples=40, deadline=None)
@given(REPORTS)
def test_rays_own_numbers_are_passed_over(report: Report) -> None:
    stats = encode(report)
    assert decode({**stats, "running_requests": 3.0, "a|b|c|d": 1.0, "x|y": 2.0}) == decode(stats)


def test_several_gateways_demands_add_up() -> None:
    one = Report(
        demands={"m": Demand(queued=1, running=2, oldest_wait_s=3, idle_s=9, retry_in_s=1)},
        nodes=(Node("a", 1),),
        replicas={"m": (Replica("a"),)},
    )
    two = Report(
        demands={"m": Demand(queued=4, oldest_wait_s=5, idle_s=7, load=True), "n": Demand()},
        nodes=(Node("a", 1), Node("b", 2)),
        replicas={"m": (Replica("a"), Replica("b")), "n": (Replica("b"),)},
    )
    assert merge([one, two]) == Report(
        nodes=(Node("a", 1), Node("b", 2)),
        demands={
            "m": Demand(queued=5, running=2, oldest_wait_s=5, idle_s=7, load=True, retry_in_s=1),
            "n": Demand(),
        },
        replicas={"m": (Replica("a"), Replica("b")), "n": (Replica("b"),)},
    )


@settings(max_examples=40, deadline=None)
@given(REPORTS)
def test_one_gateways_word_is_enough(report: Report) -> None:
    assert merge([report]) == report
