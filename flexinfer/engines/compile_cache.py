"""Where engines keep what they compile, so that minutes of compiling are paid once a node.

Compiled code fits one build of an engine and one kind of GPU; two engines or two cards must not
find each other's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from flexinfer.engines.errors import EngineConfigError
from flexinfer.engines.gpus import Devices
from flexinfer.engines.spec import Executable

VARIABLE = "FLEXINFER_COMPILE_CACHE"
#: Set in images of ours to the image's own name: there the program's path says nothing.
IMAGE_VARIABLE = "FLEXINFER_IMAGE"
NODE_ROOT = Path("/var/lib/flexinfer/compile")


def compile_cache(
    environ: Mapping[str, str], namespace: str, backend: str, executable: Executable, on: Devices
) -> Path:
    """Return the directory for what an engine compiles, and make it.

    ``<root>/<namespace>/<backend>-<build>-<architecture>``: the root is FLEXINFER_COMPILE_CACHE,
    else `/var/lib/flexinfer/compile` where that is ours to write, else the user's cache directory;
    the build is FLEXINFER_IMAGE or else the program's path and age. Raises `EngineConfigError` if
    it cannot be made.
    """
    if named := environ.get(VARIABLE):
        root = Path(named).expanduser()
    elif os.access(NODE_ROOT, os.W_OK):
        root = NODE_ROOT
    else:
        root = platformdirs.user_cache_path("flexinfer", appauthor=False) / "compile"
    path = root / namespace / f"{backend}-{_build(environ, executable)}-{_architecture(on)}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineConfigError(
            f"cannot make the directory for compiled code {path}: {error.strerror}; {VARIABLE} "
            "names another one"
        ) from error
    return path


def _build(environ: Mapping[str, str], executable: Executable) -> str:
    identity = environ.get(IMAGE_VARIABLE)
    if not identity:
        # Another version is installed over it: the same path with another time.
        identity = f"{executable.path}:{executable.path.stat().st_mtime_ns}"
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def _architecture(on: Devices) -> str:
    return "-".join(sorted({gpu.gfx for gpu in on.gpus})) or "cpu"
