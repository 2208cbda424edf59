from __future__ import annotations

from pathlib import Path

import pytest
from cli_fakes import Run

SAMPLES = Path(__file__).parents[2] / "crds/samples"

MODEL = """\
apiVersion: ai.flexinfer/v1alpha1
kind: ModelDeployment
metadata: {name: a}
spec: {backend: llama-cpp, model: a.gguf}
"""


def test_the_samples_are_valid(run: Run) -> None:
    result = run("validate", SAMPLES)
    assert result.exit_code == 0
    assert result.stdout == "valid: 6 ModelDeployments, 2 ModelCaches\n"
    assert "warning: " in result.stderr


def test_all_problems_are_printed_a_line_each(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(MODEL.replace("llama-cpp", "llama").replace("model:", "modell:"))
    result = run("validate", path, tmp_path / "nothing.yaml")
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert all(line.startswith(f"error: {tmp_path}/") for line in lines)
    assert sum(":4: spec.backend: found llama;" in line for line in lines) == 1
    assert sum("spec.modell: found an unknown field;" in line for line in lines) == 1
    assert sum("nothing.yaml: found nothing there;" in line for line in lines) == 1


def test_what_a_user_wrote_is_no_markup(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "[bold]a.yaml"
    path.write_text(MODEL.replace("spec:", "'[red]x[/red]': 1\nspec:"))
    result = run("validate", path)
    assert "[bold]a.yaml" in result.stderr
    assert "[red]x[/red]" in result.stderr


def test_long_lines_are_not_broken(run: Run, tmp_path: Path) -> None:
    path = tmp_path / ("long" * 30 + ".yaml")
    path.write_text(MODEL + "x: 1\n")
    assert run("validate", path).stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["up"], ["render", "serve"]])
def test_other_commands_print_problems_in_the_same_way(
    run: Run, tmp_path: Path, command: list[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(MODEL + "x: 1\n")
    problems = run("validate", path).stderr
    result = run(*command, path)
    assert result.exit_code == 2
    assert problems in result.stderr
