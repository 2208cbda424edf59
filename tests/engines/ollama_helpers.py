"""What the tests of Ollama share: one Ollama, the real one or the fake, with a store of its own."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from engine_helpers import REPOSITORY

from flexinfer.api.modeldeployment import ModelDeploymentSpec
from flexinfer.api.ollamatag import parse_ollama_tag
from flexinfer.engines.gpus import Devices
from flexinfer.engines.logs import EngineLog
from flexinfer.engines.ollama import VARIABLE, Ollama
from flexinfer.engines.ollama_server import STORE_VARIABLE
from flexinfer.engines.ollama_store import manifest_path
from flexinfer.engines.ports import free_port
from flexinfer.engines.process import Engine
from flexinfer.engines.spec import EngineSpec, Executable

FAKE_OLLAMA = REPOSITORY / "tests/fakes/fake_ollama.py"
#: A GGUF file without a model in it: whole, as far as its header tells.
EMPTY_GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(8)


def ollama_spec(
    gpus: int = 0, env: dict[str, str] | None = None, name: str = "smol", **block: Any
) -> EngineSpec:
    """Return an Ollama model with these settings, by their YAML names."""
    spec = ModelDeploymentSpec.model_validate(
        {
            "backend": "ollama",
            "model": "smol.gguf",
            "resources": {"limits": {"amd.com/gpu": str(gpus)}},
            "ollama": {**block, "env": env or {}},
        }
    )
    return EngineSpec.from_spec(name, "default", spec)


def wrapper_of_fake(directory: Path) -> Path:
    """Return a program that runs the fake in the Python of the tests."""
    program = directory / "ollama"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE_OLLAMA} "$@"\n')
    program.chmod(0o755)
    return program


@dataclass
class Bench:
    """`weights` is a file that this Ollama makes a model of, `store` ours."""

    program: Path
    weights: Path
    directory: Path
    real: bool
    said: list[str] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    backend: Ollama = field(default_factory=Ollama)

    @property
    def store(self) -> Path:
        return self.directory / "store"

    @property
    def environ(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory / "home"),
            "OLLAMA_HOST": "0.0.0.0:11434",  # of another Ollama: it must not get through
            VARIABLE: str(self.program),
            STORE_VARIABLE: str(self.store),
            "FI_TEST_RUN": str(self.directory),
        }

    @property
    def executable(self) -> Executable:
        return self.backend.find_executable(self.environ)

    async def prepare(
        self, weights: Path | None = None, spec: EngineSpec | None = None, **block: Any
    ) -> Path:
        """Return the manifest of what is made of `weights`; what is said is in `said`."""
        self.said = []
        found = spec or ollama_spec(**block)
        return await self.backend.prepare(
            found, weights or self.weights, self.executable, self.environ, self.said.append
        )

    def tag(self, text: str) -> Path:
        """Return where our store has, or will have, the manifest of a tag."""
        return manifest_path(self.store, parse_ollama_tag(text))

    def engine(self, manifest: Path, *, spec: EngineSpec | None = None, **block: Any) -> Engine:
        """Return an engine for a prepared model that was not started."""
        found = spec or ollama_spec(**block)
        plan = self.backend.plan(
            found, manifest, Devices(), free_port(), self.executable, self.environ
        )
        log = EngineLog(found.name, self.directory / "smol.log", echo=False)
        self.engines.append(Engine(self.backend, found, plan, log))
        return self.engines[-1]

    def processes(self, of: Callable[[list[str]], bool] = lambda words: True) -> list[int]:
        """Return the living processes that came from here, this one never."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get("FI_TEST_RUN") == str(self.directory)
                    and process.status() != psutil.STATUS_ZOMBIE
                    and of(process.cmdline())
                ):
                    found.append(process.pid)
        return found

    def runners(self) -> list[int]:
        """Return the runners: the children of a server that hold a model."""
        return self.processes(lambda words: "runner" in words and "--model" in words)


def tree(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return what is in a directory, by path: size, time and mode of each."""
    return {
        str(path.relative_to(directory)): (
            (state := path.lstat()).st_size,
            state.st_mtime_ns,
            state.st_mode,
        )
        for path in sorted(directory.rglob("*"))
    }
