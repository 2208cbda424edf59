"""What the tests of MLC share: specs, plans, and where the fake and its model writer are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mlc_model import FAKE, write_model, write_program

from flexinfer.api.modeldeployment import ModelDeploymentSpec
from flexinfer.engines.gpus import Devices, Gpu
from flexinfer.engines.mlc import VARIABLE, MlcLlm
from flexinfer.engines.spec import EngineSpec, LaunchPlan

__all__ = ["FAKE", "XTX_BYTES", "gpus", "mlc_spec", "plan", "write_model", "write_program"]

#: The memory of a 7900 XTX as sysfs and HIP report it.
XTX_BYTES = 25753026560


def gpus(count: int, vram: int | None = XTX_BYTES) -> Devices:
    """The first `count` cards of a machine full of 7900 XTX."""
    cards = tuple(Gpu(i, i + 1, "gfx1100", 128 + i, vram, False) for i in range(count))
    ids = tuple(range(count))
    return Devices(ids, hip_ids=ids, gpus=cards)


def mlc_spec(
    gpus: int = 0, *, name: str = "qwen", env: dict[str, str] | None = None, **block: Any
) -> EngineSpec:
    """An mlc-llm model with these settings, by their YAML names."""
    spec = ModelDeploymentSpec.model_validate(
        {
            "backend": "mlc-llm",
            "model": "weights",
            "resources": {"limits": {"amd.com/gpu": str(gpus)}},
            "mlcllm": {**block, "env": env or {}},
        }
    )
    return EngineSpec.from_spec(name, "default", spec)


def plan(
    program: Path,
    weights: Path,
    *,
    devices: Devices | None = None,
    spec: EngineSpec | None = None,
    environ: dict[str, str] | None = None,
    port: int = 20001,
    **block: Any,
) -> LaunchPlan:
    """The plan of a start; compiled code goes beside the program."""
    devices = devices or Devices()
    spec = spec or mlc_spec(len(devices.ids), **block)
    environ = {
        "PATH": os.environ["PATH"],
        VARIABLE: str(program),
        "FLEXINFER_COMPILE_CACHE": str(program.parent / "compile"),
        **(environ or {}),
    }
    backend = MlcLlm()
    executable = backend.find_executable(environ)
    return backend.plan(spec, weights, devices, port, executable, environ)
