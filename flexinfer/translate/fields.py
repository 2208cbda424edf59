"""What a change of each field costs: the engine's process (*restart*), or nothing (*live*).

The table is data, for the documentation and for the test that holds `serve_config` to it. It is
about one machine; `note` says where a cluster differs.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from flexinfer.api import ModelCacheSpec, ModelDeploymentSpec
from flexinfer.api.base import wire_name
from flexinfer.api.blocks import BLOCK_NAMES
from flexinfer.api.resources import GPU_KEYS, RESOURCE_KEYS

Cost = Literal["live", "restart"]

_ARGS = "the application's `args`"
_GATEWAY = "the gateway"
_POLICY = "the gateway, which tells the scaling policies"
_NOWHERE = "nowhere: one machine does not use it"


@dataclass(frozen=True)
class FieldEffect:
    """One field of a `spec`, by its path there such as `healthCheck.periodSeconds`."""

    path: str
    cost: Cost
    goes_to: str
    note: str = ""


_MODEL: dict[str, tuple[Cost, str, str]] = {
    "backend": ("restart", _ARGS, ""),
    "model": ("restart", _ARGS, ""),
    "modelCacheRef": ("restart", _ARGS, "Also other weights at the same place restart."),
    "replicas": ("live", _POLICY, "0 lets the model drain; more start beside the one that runs."),
    "minReplicas": ("live", _POLICY, ""),
    "idleTimeoutSeconds": ("live", _POLICY, ""),
    "coldStartTimeoutSeconds": ("live", "the model's replica and the gateway", ""),
    "drainTimeoutSeconds": ("live", "the model's replica, Ray's grace period, the gateway", ""),
    "priority": ("live", _POLICY, ""),
    "servedModelName": ("live", _GATEWAY, ""),
    "aliases": ("live", _GATEWAY, ""),
    "maxOngoingRequests": ("live", _GATEWAY, "The engine keeps as many slots as it has."),
    "maxQueuedRequests": ("live", _GATEWAY, ""),
    "nodeSelector": (
        "live",
        _NOWHERE,
        "In a cluster a change of the eligible nodes restarts.",
    ),
    "tolerations": ("live", _NOWHERE, "In a cluster it decides which pods there are."),
    "image": ("live", _NOWHERE, "In a cluster it decides which pods there are."),
    "healthCheck": ("live", "the model's replica", ""),
    "vramCheck": ("live", "the model's replica", "It counts at the next start."),
}

_GPUS: tuple[Cost, str, str] = ("restart", _ARGS, "Only another number of GPUs restarts.")
_ADVICE: tuple[Cost, str, str] = ("live", _NOWHERE, "In a cluster it advises where to place it.")
_BLOCK: tuple[Cost, str, str] = ("restart", _ARGS, "")

_CACHE: dict[str, tuple[Cost, str, str]] = {
    "source": ("restart", _ARGS, ""),
    "storageStrategy": ("restart", _ARGS, ""),
    "existingClaimName": ("restart", _ARGS, ""),
    "modelPath": ("restart", _ARGS, ""),
    "revision": ("restart", _ARGS, ""),
    "files": ("restart", _ARGS, ""),
    "storageSize": ("live", _NOWHERE, ""),
    "nodeSelector": ("live", _NOWHERE, ""),
    "secretRef": ("live", _NOWHERE, ""),
    "storageClassName": ("live", _NOWHERE, ""),
    "accessModes": ("live", _NOWHERE, ""),
    "retentionPriority": ("live", _NOWHERE, ""),
}


def model_fields() -> tuple[FieldEffect, ...]:
    """Every field of a ModelDeployment's `spec`, down to single values, in the order of the type.

    Raises:
        KeyError: a field has no entry in the table above.
    """
    return tuple(_model_effect(path) for path in _leaves(ModelDeploymentSpec))


def cache_fields() -> tuple[FieldEffect, ...]:
    """Every field of a ModelCache's `spec`: what a change costs the models that use the cache.

    Raises:
        KeyError: a field has no entry in the table above.
    """
    names = [wire_name(name) for name in ModelCacheSpec.model_fields]
    return tuple(FieldEffect(name, *_CACHE[name]) for name in names)


def fields_page() -> str:
    """The page for `docs/fields.md`, in Markdown."""
    blocks = set(BLOCK_NAMES.values())
    effects = model_fields()
    lines = [
        "# What a change of a field costs",
        "",
        "Made by `python -m flexinfer.translate.fields`; do not edit.",
        "",
        "*live*: the engine keeps running. *restart*: requests that run are let finish, up to",
        "`drainTimeoutSeconds`, and a new engine starts with the new settings. Only the engine of",
        "the model that was changed ever restarts. What means the same is the same: writing a",
        "default out, another order of keys or a comment costs nothing.",
        "",
        "A change of `metadata.name` is another model: the old one drains, the new one starts.",
        "`metadata.namespace` restarts; labels and annotations are live.",
        "",
        "## ModelDeployment",
        "",
        *_table(effect for effect in effects if effect.path.split(".")[0] not in blocks),
        "",
        "Every field of the backend's own block goes to the engine and so restarts it:",
        "",
    ]
    for backend, block in BLOCK_NAMES.items():
        inside = [e.path.removeprefix(f"{block}.") for e in effects if e.path.startswith(block)]
        lines.append(f"- `{block}` ({backend}): {', '.join(f'`{name}`' for name in inside)}")
    lines += [
        "",
        "## ModelCache",
        "",
        "For the models that use the cache:",
        "",
        *_table(cache_fields()),
    ]
    return "\n".join(lines) + "\n"


def _table(effects: typing.Iterable[FieldEffect]) -> Iterator[str]:
    yield "| field | change | goes to | |"
    yield "|---|---|---|---|"
    for effect in effects:
        yield f"| `{effect.path}` | {effect.cost} | {effect.goes_to} | {effect.note} |"


def _model_effect(path: str) -> FieldEffect:
    top = path.split(".")[0].split("[")[0]
    if top in BLOCK_NAMES.values():
        return FieldEffect(path, *_BLOCK)
    if top == "resources":
        is_gpu = any(f"[{key}]" in path for key in GPU_KEYS)
        return FieldEffect(path, *(_GPUS if is_gpu else _ADVICE))
    return FieldEffect(path, *_MODEL[top])


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{wire_name(name)}"
        inner = _model_in(field.annotation)
        if path in ("resources.requests", "resources.limits"):
            yield from (f"{path}[{key}]" for key in RESOURCE_KEYS)
        elif inner is None:
            yield path
        else:
            yield from _leaves(inner, f"{path}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The resource model that a field holds, also where it may be None; lists are one value."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(annotation) is list:
            return None
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


if __name__ == "__main__":
    print(fields_page(), end="")
