"""What is to be started, and how: plain data between the resources and a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flexinfer.api.blocks import Block
from flexinfer.api.modeldeployment import ModelDeploymentSpec
from flexinfer.api.notices import Notice


@dataclass(frozen=True)
class EngineSpec:
    """All of a ModelDeployment that makes a different engine process.

    `block` is the backend's typed settings, `env` the user's variables, `gpus` 0 for a CPU model.
    """

    name: str
    namespace: str
    backend: str
    block: Block
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1

    @classmethod
    def from_spec(cls, name: str, namespace: str, spec: ModelDeploymentSpec) -> EngineSpec:
        """Take from a resource's spec what concerns its engine."""
        return cls(
            name=name,
            namespace=namespace,
            backend=spec.backend,
            block=spec.block,
            env=spec.engine_env,
            gpus=spec.gpus,
        )

    def notice(self, reason: str, message: str, field: str | None = None) -> Notice:
        """Return a notice about this model; `field` is a path such as `spec.llamacpp.jinja`."""
        resource = f"ModelDeployment/{self.namespace}/{self.name}"
        return Notice(reason=reason, message=message, resource=resource, field=field)


@dataclass(frozen=True)
class RequestRules:
    """What has to be changed of a client's request before the engine sees it.

    `drop_headers` are header names in lower case; `drop_fields` and `rename_fields` (old name to
    new) concern the top level of a JSON body. A field is not renamed over one that is there.
    """

    drop_headers: frozenset[str] = frozenset()
    drop_fields: frozenset[str] = frozenset()
    rename_fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Executable:
    """An engine's program, and where it was found.

    `python` is the interpreter of an engine written in Python, None for a native one. `libraries`
    is a directory that has to go before the system's when the loader looks for shared libraries.
    """

    path: Path
    python: Path | None = None
    libraries: Path | None = None
    found_by: str = ""


@dataclass(frozen=True)
class LaunchPlan:
    """One start, decided: nothing is looked up after this.

    `argv[0]` is absolute, `env` the complete environment, `model` the file or directory to load.
    `warnings` are settings that could not be passed on as written. `secrets` names the variables in
    `env` whose values must not be shown.
    `busy_limit_s` is how long an engine that works but does not answer still counts as alive.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    cwd: Path
    model: Path
    port: int
    host: str = "127.0.0.1"
    warnings: tuple[Notice, ...] = ()
    secrets: tuple[str, ...] = ()
    busy_limit_s: float = 60.0
    python: Path | None = None

    @property
    def url(self) -> str:
        """Where the engine listens, without a slash at the end."""
        return f"http://{self.host}:{self.port}"
