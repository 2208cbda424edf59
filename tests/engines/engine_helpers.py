"""What the tests of engines share: waiting, looking for processes, making engines."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexinfer.api.modeldeployment import ModelDeploymentSpec
from flexinfer.engines.gpus import Devices
from flexinfer.engines.launcher import process_table
from flexinfer.engines.llamacpp import VARIABLE, LlamaCpp
from flexinfer.engines.logs import EngineLog
from flexinfer.engines.ports import free_port
from flexinfer.engines.process import Engine
from flexinfer.engines.spec import EngineSpec
from flexinfer.engines.vram import VramWatch

REPOSITORY = Path(__file__).resolve().parents[2]
FAKE = REPOSITORY / "tests/fakes/fixed_rate_engine.py"


def alive(pid: int | None) -> bool:
    """Whether the process runs; a zombie, which only waits to be counted, does not."""
    return pid in process_table()


def wait_until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Return the first true result of `condition`; fail when there is none in time."""
    end = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.01)
    return result


async def eventually(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """As `wait_until`, while the event loop goes on."""
    end = asyncio.get_running_loop().time() + timeout_s
    while not (result := condition()):
        assert asyncio.get_running_loop().time() < end, f"not within {timeout_s} s"
        await asyncio.sleep(0.01)
    return result


def engine_spec(gpus: int = 0, env: dict[str, str] | None = None, **block: Any) -> EngineSpec:
    """Return a llama-cpp model `smol` with these settings, by their YAML names."""
    spec = ModelDeploymentSpec.model_validate(
        {
            "backend": "llama-cpp",
            "model": "smol.gguf",
            "resources": {"limits": {"amd.com/gpu": str(gpus)}},
            "llamacpp": {**block, "env": env or {}},
        }
    )
    return EngineSpec.from_spec("smol", "default", spec)


@dataclass
class Workshop:
    """Makes engines, and knows afterwards whether anything is left of them."""

    weights: Path
    logs: Path
    engines: list[Engine] = field(default_factory=list)

    def engine(
        self,
        *,
        executable: Path | None = FAKE,
        port: int | None = None,
        vram: VramWatch | None = None,
        admit: Callable[[], None] | None = None,
        **options: Any,
    ) -> Engine:
        """Return an engine that was not started. `FAKE_..` options are variables of the fake; the
        rest are settings of the block."""
        fake = {name: str(options.pop(name)) for name in tuple(options) if name.isupper()}
        # The fake says `python3`, which on PATH may be anything.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, **fake}
        if executable is not None:
            environ[VARIABLE] = str(executable)
        backend = LlamaCpp()
        spec = engine_spec(**options)
        found = backend.find_executable(environ)
        devices = Devices(tuple(range(spec.gpus)), pretended=True)
        plan = backend.plan(spec, self.weights, devices, port or free_port(), found, environ)
        log = EngineLog(spec.name, self.logs / "smol.log", echo=False)
        engine = Engine(backend, spec, plan, log, vram=vram, admit=admit)
        self.engines.append(engine)
        return engine
