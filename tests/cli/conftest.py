from __future__ import annotations

from pathlib import Path

import pytest
from cli_fakes import Run
from typer.testing import CliRunner, Result

from flexinfer.cli.main import app


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees, or is seen by, an instance that runs on this machine."""
    path = tmp_path / "runtime"
    monkeypatch.setenv("FLEXINFER_RUNTIME_DIR", str(path))
    for name in ("FLEXINFER_URL", "FLEXINFER_API_KEY", "FLEXINFER_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    return path


@pytest.fixture
def run() -> Run:
    """Runs the command with these words."""
    runner = CliRunner()

    def run(*words: object) -> Result:
        result = runner.invoke(app, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
