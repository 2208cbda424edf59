"""What the tests of vLLM share: installations that are none, and plans for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from flexinfer.api.modeldeployment import ModelDeploymentSpec
from flexinfer.engines.gpus import Devices
from flexinfer.engines.spec import EngineSpec, Executable, LaunchPlan
from flexinfer.engines.vllm import Vllm

CPU = Devices()


def vllm_spec(
    gpus: int = 0, env: dict[str, str] | None = None, name: str = "tiny", **block: Any
) -> EngineSpec:
    """Return a vllm model with these settings, by their YAML names."""
    spec = ModelDeploymentSpec.model_validate(
        {
            "backend": "vllm",
            "model": "tiny",
            "resources": {"limits": {"amd.com/gpu": str(gpus)}},
            "vllm": {**block, "env": env or {}},
        }
    )
    return EngineSpec.from_spec(name, "default", spec)


def install(folder: Path, version: str, engine_flags: list[str], frontend: list[str]) -> Executable:
    """Make what looks like an installation of vLLM: a Python, a package and its metadata.

    `engine_flags` are literals in arg_utils.py, `frontend` fields of the dataclass in cli_args.py.
    """
    site = folder / "site"
    package = site / "vllm"
    for inner in ("engine", "entrypoints/launchers"):
        (package / inner).mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('must not be imported')\n")
    literals = "".join(f'        group.add_argument("{flag}", **kwargs)\n' for flag in engine_flags)
    (package / "engine/arg_utils.py").write_text(f"def add(group):\n{literals}")
    fields = "".join(f"    {name}: str | None = None\n" for name in frontend)
    (package / "entrypoints/launchers/cli_args.py").write_text(f"class FrontendArgs:\n{fields}")
    metadata = site / f"vllm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    bin_directory = folder / "bin"
    bin_directory.mkdir()
    python = bin_directory / "python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    script = bin_directory / "vllm"
    script.write_text(f"#!{python}\nimport vllm\n")
    script.chmod(0o755)
    return Vllm().find_executable({"FLEXINFER_VLLM": str(script), "PATH": ""})


def plan(
    executable: Executable,
    weights: Path,
    *,
    devices: Devices = CPU,
    environ: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
    name: str = "tiny",
    **block: Any,
) -> LaunchPlan:
    """Plan a start on port 4000. Compiled code goes beside the weights."""
    spec = vllm_spec(len(devices.ids), env, name, **block)
    around = {"FLEXINFER_COMPILE_CACHE": str(weights.parent / "compiled"), **(environ or {})}
    return Vllm().plan(spec, weights, devices, 4000, executable, around)


def value(made: LaunchPlan, flag: str) -> str | None:
    """Return the word behind the last `flag`, None if it is not there."""
    words = made.argv
    where = [index for index, word in enumerate(words) if word == flag]
    return words[where[-1] + 1] if where else None
