from __future__ import annotations

import json

import pytest
import yaml
from cli_fakes import FAILED, MODEL, Run, instance

from flexinfer.cli.get import age

TABLE = """\
NAME     BACKEND     STATE     REPLICAS   RUNNING   QUEUED   LAST-ACTIVITY   REASON
broken   llama-cpp   failed    0          0         0        -               ModelNotFound
qwen     llama-cpp   serving   1          2         0        75s             -
"""


def test_a_table(run: Run) -> None:
    with instance(FAILED, MODEL):
        result = run("get", "models")
    assert result.exit_code == 0
    assert result.stdout == TABLE


def test_a_wide_table_has_node_process_and_message(run: Run) -> None:
    with instance(FAILED, MODEL):
        result = run("get", "models", "-o", "wide")
    head, broken, qwen = result.stdout.splitlines()
    assert qwen[head.index("NODE") :].startswith("workstation   11 ")
    assert qwen[head.index("ENGINE-PID") :].startswith("12 ")
    assert qwen[head.index("OTHER-NAMES") :].startswith("Qwen/Qwen3-8B ")
    assert broken[head.index("MESSAGE") :] == "no weights for model 'broken'"


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_all_data(run: Run, form: str, read: object) -> None:
    with instance(MODEL):
        result = run("get", "models", "-o", form)
    assert callable(read)
    assert read(result.stdout) == {"models": [MODEL]}


def test_no_models(run: Run) -> None:
    with instance():
        result = run("get", "models")
        assert result.exit_code == 0
        assert result.stdout == ""
        assert result.stderr == "No models are served.\n"
        assert json.loads(run("get", "models", "-o", "json").stdout) == {"models": []}


def test_a_url_of_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with instance(MODEL) as url:
        monkeypatch.setenv("FLEXINFER_URL", "http://127.0.0.1:9")
        assert run("get", "models").exit_code == 1
        monkeypatch.setenv("FLEXINFER_URL", f"{url}/")
        assert run("get", "models").exit_code == 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, None),
        (0.4, "0s"),
        (119, "119s"),
        (120, "2m"),
        (185, "3m5s"),
        (3000, "50m"),
        (7200, "2h"),
        (7500, "2h5m"),
        (50_000, "13h"),
        (200_000, "2d"),
    ],
)
def test_ages(seconds: float | None, words: str | None) -> None:
    assert age(seconds) == words
