from __future__ import annotations

import pytest
from cli_fakes import Run

import flexinfer


def test_version(run: Run) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"flexinfer {flexinfer.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [["up"], ["validate"], ["get"], ["get", "models"], ["logs"], ["render"], ["render", "serve"]],
)
def test_every_command_has_help(run: Run, words: list[str]) -> None:
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize("words", [["get", "models"], ["logs", "m"]])
def test_no_instance_is_one_line_and_exit_1(run: Run, words: list[str]) -> None:
    result = run(*words)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "flexinfer up" in result.stderr


def test_nobody_at_a_url_is_one_line_and_exit_1(run: Run) -> None:
    result = run("get", "models", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no answer from http://127.0.0.1:9")
    assert result.stderr.count("\n") == 1
