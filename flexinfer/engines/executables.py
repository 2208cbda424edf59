"""Where an engine's program is: named by a variable, on PATH, or inside an installed package."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from flexinfer.engines.errors import EngineNotFound
from flexinfer.engines.spec import Executable


def named_or_on_path(variable: str, program: str, environ: Mapping[str, str]) -> Executable | None:
    """Return the program that `variable` names (a file, or a directory with it), else PATH's.

    None if neither has it. Raises `EngineNotFound` if the variable names something else: a user who
    set it does not want another one.
    """
    if named := environ.get(variable):
        path = Path(named).expanduser()
        candidate = path / program if path.is_dir() else path
        if not candidate.is_file():
            raise EngineNotFound(f"{variable}={named}: there is no such program")
        if not os.access(candidate, os.X_OK):
            raise EngineNotFound(f"{variable}={named}: the file is not executable")
        return Executable(candidate.absolute(), found_by=variable)
    if on_path := shutil.which(program, path=environ.get("PATH", os.defpath)):
        return Executable(Path(on_path).absolute(), found_by="PATH")
    return None


def in_package(package: str, inside: str) -> Executable | None:
    """Return a program that a package carries in its directory, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / inside
    if not os.access(path, os.X_OK):
        return None
    return Executable(path, libraries=path.parent, found_by=package)
