"""The desired state: what the files say now, as the Serve config that makes it so."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexinfer.api import (
    ModelCache,
    ModelDeployment,
    Notice,
    notices_for,
    read_manifests,
)
from flexinfer.cache import CacheError, locate
from flexinfer.local.events import Applied
from flexinfer.local.machine import Computer, local_notices
from flexinfer.translate import ServeSettings, serve_config


@dataclass(frozen=True)
class Site:
    """Where manifests are served, for all that they leave open."""

    computer: Computer
    http_host: str = "127.0.0.1"
    http_port: int = 8000
    roots: Sequence[Path] = ()
    claims: Mapping[str, Path] = field(default_factory=dict)
    cors_origins: Sequence[str] = ()
    api_key_file: Path | None = None


@dataclass(frozen=True)
class Desired:
    """What should run. Two with equal `config` are the same to Ray."""

    config: dict[str, Any]
    models: tuple[ModelDeployment, ...] = ()
    caches: tuple[ModelCache, ...] = ()
    notices: tuple[Notice, ...] = ()

    def difference(self, before: Desired) -> Applied:
        """What a step from `before` to this one does to models."""
        new, old = _parts(self.config), _parts(before.config)
        both = new.keys() & old.keys()
        return Applied(
            added=tuple(sorted(new.keys() - old.keys())),
            changed=tuple(sorted(name for name in both if new[name] != old[name])),
            removed=tuple(sorted(old.keys() - new.keys())),
        )


def desire(paths: Sequence[Path], site: Site) -> Desired:
    """Read the manifests and work out what should run. Reads files, and looks at weights.

    Raises `ManifestErrors`.
    """
    manifests = read_manifests(paths)
    models, caches = manifests.models, manifests.caches
    notices = [
        *manifests.notices,
        *notices_for(models, caches, gpus=site.computer.gpus),
        *local_notices(models, caches, site.computer, site.claims),
    ]
    if not models:
        where = ", ".join(map(str, paths))
        notices.append(Notice("NoModels", "there is no ModelDeployment to serve", where))
    notices = list(dict.fromkeys(notices))
    settings = ServeSettings(
        http_host=site.http_host,
        http_port=site.http_port,
        claims=site.claims,
        roots=site.roots,
        weights_versions=_versions(models, caches, site),
        cors_origins=site.cors_origins,
        api_key_file=site.api_key_file,
    )
    config = serve_config(models, caches, settings=settings, notices=notices)
    return Desired(config, models, caches, tuple(notices))


def _versions(
    models: Sequence[ModelDeployment], caches: Sequence[ModelCache], site: Site
) -> dict[str, str]:
    """Fingerprints of the weights that can be seen. What cannot be found is left to the replica,
    whose error every request and every status then shows."""
    versions: dict[str, str] = {}
    for model in models:
        with contextlib.suppress(CacheError, OSError):
            versions[model.name] = locate(
                model.spec.model,
                namespace=model.metadata.namespace,
                cache_ref=model.spec.model_cache_ref,
                caches=caches,
                claims=site.claims,
                roots=site.roots,
                backend=model.spec.backend,
                engine_env=model.spec.engine_env,
            ).version
    return versions


def _parts(config: Mapping[str, Any]) -> dict[str, Any]:
    """By model, everything in `config` that is about it."""
    parts: dict[str, list[Any]] = {}
    for application in config["applications"]:
        about = [
            known
            for deployment in application["deployments"]
            for known in (deployment.get("user_config") or {}).get("models", ())
        ]
        for known in about:
            parts.setdefault(known["name"], []).append(known)
        if not about and application["route_prefix"] is None:
            parts.setdefault(application["name"], []).append(application)
    return dict(parts)
