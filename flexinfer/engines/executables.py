"""Where an engine's program is: named by a variable, on PATH, or inside an installed package."""

from __future__ import annotations

import importlib.util
import os
import re
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


def interpreter_of(script: Path) -> Path | None:
    """Return the Python that a console script runs in, None if it is not such a script.

    Installers write the interpreter into the first line; where that line would be too long for the
    kernel, they write a shell line that runs it, as the second.
    """
    try:
        with script.open("rb") as file:
            first, second = file.readline(4096), file.readline(4096)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = first[2:].split()
    if words and words[0] == b"/bin/sh":
        quoted = re.search(rb"exec['\" ]+(/[^'\"]+?)['\" ]", second)
        words = [quoted[1]] if quoted else []
    elif words and words[0].endswith(b"/env"):
        found = shutil.which(os.fsdecode(words[1])) if len(words) > 1 else None
        words = [os.fsencode(found)] if found else []
    if not words or not Path(os.fsdecode(words[0])).name.startswith("python"):
        return None
    python = Path(os.fsdecode(words[0]))
    return python if os.access(python, os.X_OK) else None


def in_package(package: str, inside: str) -> Executable | None:
    """Return a program that a package carries in its directory, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / inside
    if not os.access(path, os.X_OK):
        return None
    return Executable(path, libraries=path.parent, found_by=package)
