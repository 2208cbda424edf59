from __future__ import annotations

from pathlib import Path

import pytest
from cli_fakes import MODEL, Run, instance

from flexinfer.engines.logs import EngineLog, log_path
from flexinfer.local import state


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A log directory in which the engine of `qwen` has written 40 lines, across rotations."""
    directory = tmp_path / "logs"
    path = log_path(directory, "team", "qwen")
    log = EngineLog("qwen", path, echo=False, max_bytes=100, keep=20)
    for number in range(40):
        log.feed(b"line %d\n" % number)
    log.close()
    return directory


LINES = "".join(f"line {number}\n" for number in range(40))


@pytest.mark.parametrize("name", ["qwen", "Qwen/Qwen3-8B"])
def test_the_log_of_a_model_by_any_of_its_names(run: Run, written: Path, name: str) -> None:
    with instance(MODEL, log_dir=written):
        result = run("logs", name)
    assert result.exit_code == 0
    assert result.stdout == LINES


def test_the_last_lines(run: Run, written: Path) -> None:
    with instance(MODEL, log_dir=written):
        assert run("logs", "qwen", "--tail", "2").stdout == "line 38\nline 39\n"


def test_following_ends_with_the_users_interrupt(
    run: Run, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flexinfer.cli.logs.time.sleep", interrupt)
    with instance(MODEL, log_dir=written):
        result = run("logs", "qwen", "-f")
    assert result.exit_code == 130
    assert result.stdout == LINES


def test_a_model_that_was_removed_still_has_its_log(run: Run, written: Path) -> None:
    with instance(log_dir=written):
        assert run("logs", "qwen").stdout == LINES


def test_an_unknown_model_lists_the_known_ones(run: Run, written: Path) -> None:
    with instance(MODEL, log_dir=written):
        result = run("logs", "../team/qwen")
    assert result.exit_code == 1
    assert result.stderr == "error: there is no model ../team/qwen; the models are: qwen\n"


def test_no_log_yet(run: Run, tmp_path: Path) -> None:
    with instance(MODEL, log_dir=tmp_path):
        result = run("logs", "qwen")
    assert result.exit_code == 1
    assert "no engine of qwen has been started" in result.stderr


def test_a_gateway_that_does_not_answer_keeps_nobody_from_the_logs(run: Run, written: Path) -> None:
    with instance(log_dir=written):
        (known,) = state.running(state.runtime_dir())
        dead = state.State(known.pid, known.start_time, "http://127.0.0.1:9", log_dir=str(written))
        state.save(dead, state.runtime_dir())
        assert run("logs", "qwen").stdout == LINES
        assert run("logs", "other").exit_code == 1


def test_logs_of_a_cluster_are_elsewhere(run: Run) -> None:
    with instance(MODEL):
        result = run("logs", "qwen")
    assert result.exit_code == 1
    assert "on the cluster's nodes" in result.stderr
