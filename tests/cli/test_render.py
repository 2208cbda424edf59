from __future__ import annotations

from pathlib import Path

import yaml
from cli_fakes import Run

SAMPLES = Path(__file__).parents[2] / "crds/samples"


def test_the_output_is_the_config_and_says_how_it_was_made(run: Run) -> None:
    path = SAMPLES / "smollm2.yaml"
    result = run("render", "serve", path)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"# Made by: flexinfer render serve {path}\n")
    config = yaml.safe_load(result.stdout)
    assert [app["name"] for app in config["applications"]] == ["flexinfer-gateway", "smollm2"]
    # Nothing of this machine is in it.
    assert "weights_version" not in result.stdout
    assert "roots" not in config["applications"][1]["args"]


def test_options_reach_the_config_and_the_command(run: Run, tmp_path: Path) -> None:
    path = SAMPLES / "smollm2.yaml"
    words = ["--port", "9000", "--host", "0.0.0.0", "--models-dir", tmp_path, "--cors-origin", "*"]
    result = run("render", "serve", path, *words)
    config = yaml.safe_load(result.stdout)
    assert config["http_options"] == {"host": "0.0.0.0", "port": 9000}
    assert config["applications"][0]["args"]["cors_origins"] == ["*"]
    assert config["applications"][1]["args"]["roots"] == [str(tmp_path)]
    first = result.stdout.splitlines()[0]
    assert f"--port 9000 --host 0.0.0.0 --models-dir {tmp_path} --cors-origin '*'" in first


def test_warnings_are_not_part_of_the_output(run: Run) -> None:
    result = run("render", "serve", SAMPLES)
    assert "warning: " in result.stderr
    assert "warning: " not in result.stdout
