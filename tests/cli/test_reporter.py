from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from flexinfer.api import ManifestProblem, Notice
from flexinfer.cli.reporter import Reporter
from flexinfer.local.events import (
    Activity,
    Applied,
    Event,
    Machine,
    Noticed,
    Phase,
    Ready,
    Refused,
    Rejected,
    Stopping,
    Unreachable,
)

SESSION: list[tuple[Event, str]] = [
    (Machine("no GPU: no driver"), "no GPU: no driver\n"),
    (Phase("starting Ray"), "starting Ray\n"),
    (
        Ready("http://127.0.0.1:8000", ["a", "b"], 31.4, Path("/logs")),
        "Ready after 31 s: http://127.0.0.1:8000\nModels: a, b\nEngine logs: /logs\n",
    ),
    (Ready("http://h:1", [], 1, None), "Ready after 1 s: http://h:1\nModels: none\n"),
    (Noticed(Notice("R", "[b]m[/b]", "X/y/z", "f")), "warning: X/y/z: f: [b]m[/b] (R)\n"),
    (Activity("a", "starting", progress="loading"), "a: starting (loading)\n"),
    (Activity("a", "serving", took_s=1.23), "a: serving, ready after 1.2 s\n"),
    (Activity("a", "serving"), "a: serving\n"),
    (Activity("a", "draining"), "a: draining\n"),
    (Activity("a", "zero"), "a: at zero, no engine runs\n"),
    (
        Activity("a", "failed", reason="ModelNotFound", message="no [file]"),
        "error: a has failed: no [file] (ModelNotFound)\n",
    ),
    (
        Rejected([ManifestProblem("f.yaml", 3, "spec.x", "1", "2")]),
        "The files changed and do not validate. What ran before runs on.\n"
        "error: f.yaml:3: spec.x: found 1; allowed: 2\n",
    ),
    (
        Refused("busy", 5),
        "error: busy\nWhat ran before runs on. Trying again in 5 s.\n",
    ),
    (Refused("wrong"), "error: wrong\nWhat ran before runs on.\n"),
    (
        Applied(added=("a",), removed=("b", "c")),
        "The files changed: added a; removed b, c.\n",
    ),
    (Applied(), "The files changed: nothing that concerns a model.\n"),
    (Unreachable("no answer"), "warning: no answer\n"),
    (Unreachable("back", back=True), "back\n"),
    (Stopping(), "stopping\n"),
]


@pytest.mark.parametrize(("event", "text"), SESSION)
def test_without_a_terminal_every_event_is_lines(event: Event, text: str) -> None:
    stream = io.StringIO()
    with Reporter(Console(file=stream, width=40, highlight=False, soft_wrap=True)) as reporter:
        reporter(event)
    assert stream.getvalue() == text


def test_on_a_terminal_what_is_over_is_not_left_behind() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    with Reporter(console) as reporter:
        for event, _ in SESSION:
            reporter(event)
        assert list(reporter._tasks) == ["flexinfer"]
    assert "a: serving, ready after 1.2 s" in stream.getvalue()
