from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from local_fakes import FakeServe


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees, or is seen by, an instance that runs on this machine."""
    path = tmp_path / "runtime"
    monkeypatch.setenv("FLEXINFER_RUNTIME_DIR", str(path))
    monkeypatch.setenv("FLEXINFER_LOG_DIR", str(tmp_path / "logs"))
    for name in ("FLEXINFER_URL", "FLEXINFER_API_KEY", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return path


@pytest.fixture
async def serve() -> AsyncIterator[FakeServe]:
    """A Ray dashboard and a gateway, as far as they answer over HTTP."""
    async with FakeServe() as fake:
        yield fake
