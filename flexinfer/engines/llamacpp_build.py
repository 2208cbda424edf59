"""What one build of llama-server can do: its flags and the devices that it lists."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flexinfer.engines.errors import EngineConfigError

_HELP_TIMEOUT_S = 20.0
_DEVICES_TIMEOUT_S = 60.0  # initialises every GPU of the machine

_FLAG = re.compile(r"(--?[A-Za-z][\w-]*)(,?)\s*")
_DEVICE = re.compile(r"^\s+([A-Za-z]+)(\d+):\s+(.*)$")
_REMOVED = "argument has been removed"


@dataclass(frozen=True)
class Build:
    """`flags` maps each flag to what the help prints behind it on the same line."""

    flags: Mapping[str, str] = field(default_factory=dict)

    def first(self, *candidates: str) -> str | None:
        """Return the first of several spellings that this build knows, or None."""
        return next((flag for flag in candidates if flag in self.flags), None)


@dataclass(frozen=True)
class Listed:
    """One device as the build names it: `Vulkan0` is kind `Vulkan`, number 0."""

    kind: str
    number: int
    description: str

    @property
    def name(self) -> str:
        """The name that `--device` takes."""
        return f"{self.kind}{self.number}"


_builds: dict[tuple[str, int, int], Build] = {}


def build_of(path: Path, env: Mapping[str, str]) -> Build:
    """Ask a build for its flags, once as long as the file stays the same.

    Raises `EngineConfigError` if it does not run or its help names no flag.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise EngineConfigError(f"{path}: {error.strerror}") from error
    key = (str(path), stat.st_mtime_ns, stat.st_size)
    if key not in _builds:
        build = Build(parse_help(_run(path, "--help", env, _HELP_TIMEOUT_S)))
        if not build.flags:
            raise EngineConfigError(f"{path} --help names no flag: it is no llama-server")
        _builds[key] = build
    return _builds[key]


def devices_of(path: Path, env: Mapping[str, str]) -> list[Listed]:
    """Ask a build which devices it sees under `env`, in its own order."""
    return parse_devices(_run(path, "--list-devices", env, _DEVICES_TIMEOUT_S))


def parse_help(text: str) -> dict[str, str]:
    """Return `{flag: rest of its line}` of the text that `--help` prints."""
    flags: dict[str, str] = {}
    for line in text.splitlines():
        names: list[str] = []
        rest = line
        # `-c,    --ctx-size N      size of ..`: names up to the first without a comma behind it.
        while match := _FLAG.match(rest):
            names.append(match[1])
            rest = rest[match.end() :]
            if not match[2]:
                break
        if _REMOVED not in rest:
            flags.update(dict.fromkeys(names, rest))
    return flags


def parse_devices(text: str) -> list[Listed]:
    """Return the devices in the text that `--list-devices` prints."""
    matches = (_DEVICE.match(line) for line in text.splitlines())
    return [Listed(match[1], int(match[2]), match[3]) for match in matches if match]


def _run(path: Path, flag: str, env: Mapping[str, str], timeout_s: float) -> str:
    try:
        done = subprocess.run(
            [path, flag],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise EngineConfigError(f"cannot run {path}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise EngineConfigError(f"{path} {flag} does not end within {timeout_s:g} s") from error
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        last = text.strip().splitlines()[-1:] or ["no output"]
        raise EngineConfigError(f"{path} {flag} failed ({done.returncode}): {last[0]}")
    return text
