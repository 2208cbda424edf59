"""The table of fields against the translation: a change restarts exactly what the table says."""

from __future__ import annotations

import copy
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from flexinfer.api import ModelCache, ModelDeployment
from flexinfer.api.base import wire_name
from flexinfer.api.blocks import BLOCK_NAMES, BLOCK_TYPES
from flexinfer.translate import serve_config
from flexinfer.translate.fields import cache_fields, fields_page, model_fields

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"

# Settings without which some fields of the block would be refused.
BLOCKS: dict[str, dict[str, Any]] = {
    "mlcllm": {"embeddingModel": "/models/e", "embeddingModelLib": "/models/e.so"},
    "vllm": {"toolCallParser": "hermes", "enableLora": True, "tensorParallelSize": 1},
    "llamacpp": {"draftModel": "/models/d.gguf", "draftMax": 9},
    "ollama": {},
}
GPUS = {"requests": {"amd.com/gpu": 2}, "limits": {"amd.com/gpu": 2}}

# Another value for each field outside of the blocks.
CHANGES: dict[str, Any] = {
    "model": "another.gguf",
    "modelCacheRef": "weights",
    "replicas": 4,
    "minReplicas": 1,
    "idleTimeoutSeconds": 7,
    "coldStartTimeoutSeconds": 7,
    "drainTimeoutSeconds": 7,
    "priority": 7,
    "servedModelName": "Another",
    "aliases": ["another"],
    "maxOngoingRequests": 7,
    "maxQueuedRequests": 7,
    "resources.requests[cpu]": "3",
    "resources.requests[memory]": "3Gi",
    "resources.requests[ephemeral-storage]": "3Gi",
    "resources.limits[cpu]": "3",
    "resources.limits[memory]": "3Gi",
    "resources.limits[ephemeral-storage]": "3Gi",
    "nodeSelector": {"a": "b"},
    "tolerations": [{"operator": "Exists"}],
    "image": "registry/image:1",
    "healthCheck.initialDelaySeconds": 7,
    "healthCheck.periodSeconds": 7,
    "healthCheck.timeoutSeconds": 7,
    "healthCheck.failureThreshold": 7,
    "vramCheck": "off",
}
# These need more than one value to change at once.
TOGETHER: dict[str, dict[str, Any]] = {
    "backend": {"backend": "vllm", "llamacpp": None},
    "resources.requests[amd.com/gpu]": {"resources": {"requests": {"amd.com/gpu": 1}}},
    "resources.requests[nvidia.com/gpu]": {"resources": {"requests": {"nvidia.com/gpu": 1}}},
    "resources.limits[amd.com/gpu]": {"resources": {"limits": {"amd.com/gpu": 1}}},
    "resources.limits[nvidia.com/gpu]": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
}
CACHE_CHANGES: dict[str, Any] = {
    "source": "HF://org/another",
    "storageStrategy": "Memory",
    "existingClaimName": "another",
    "modelPath": "another",
    "revision": "another",
    "files": ["*.gguf"],
    "storageSize": "3Gi",
    "nodeSelector": {"a": "b"},
    "secretRef": {"name": "another"},
    "storageClassName": "another",
    "accessModes": ["ReadOnlyMany"],
    "retentionPriority": 7,
}


def base_spec(block: str = "llamacpp") -> dict[str, Any]:
    backend = next(backend for backend, known in BLOCK_NAMES.items() if known == block)
    return {
        "backend": backend,
        "model": "one.gguf",
        "modelCacheRef": "cache",
        "replicas": 2,
        "minReplicas": 0,
        "resources": copy.deepcopy(GPUS),
        block: copy.deepcopy(BLOCKS[block]),
    }


def manifest(name: str, spec: dict[str, Any]) -> ModelDeployment:
    return ModelDeployment.model_validate({"metadata": {"name": name}, "spec": spec})


def cache_manifest(name: str, **spec: Any) -> ModelCache:
    full = {"source": "HF://org/repo", **spec}
    return ModelCache.model_validate({"metadata": {"name": name}, "spec": full})


def args_by_application(
    spec: dict[str, Any], cache: dict[str, Any] | None = None
) -> dict[str, str]:
    """What Ray compares to decide on a restart, for the changed model and for its neighbours."""
    neighbour = {"backend": "llama-cpp", "model": "other.gguf", "modelCacheRef": "others"}
    config = serve_config(
        [manifest("changed", spec), manifest("neighbour", neighbour)],
        [cache_manifest("cache", **(cache or {})), cache_manifest("others")],
    )
    kept = ("args", "autoscaling_policy", "import_path", "runtime_env", "route_prefix")
    return {
        app["name"]: json.dumps({key: app.get(key) for key in kept})
        for app in config["applications"]
    }


def restarted(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def put(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `spec` with the value at a path such as `resources.limits[cpu]` replaced."""
    changed = copy.deepcopy(spec)
    dotted, _, bracketed = path.rstrip("]").partition("[")
    keys = [*dotted.split("."), *([bracketed] if bracketed else [])]
    target = changed
    for key in keys[:-1]:
        target = target.setdefault(key, {})
    target[keys[-1]] = value
    return changed


def candidates(annotation: Any) -> Iterator[Any]:
    """Values that a field of a block may take, by its type; most will be refused."""
    for inner in typing.get_args(annotation):
        yield from candidates(inner)
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    yield from (True, False, 2, 0.25, "0.25", "16Gi", "/models/x", "word")
    yield from (["/models/x"], ["name=/models/x"], {"KEY": "value"})


def changed_block(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A valid spec, and the same with another value for a field of its block."""
    block, *inner = path.split(".")
    before = base_spec(block)
    backend: Any = before["backend"]
    model: type[BaseModel] = BLOCK_TYPES[backend]
    for part in inner[:-1]:
        field = next(f for name, f in model.model_fields.items() if wire_name(name) == part)
        assert isinstance(field.annotation, type)
        model = field.annotation
    leaf = next(f for name, f in model.model_fields.items() if wire_name(name) == inner[-1])
    old = manifest("m", before)
    for value in candidates(leaf.annotation):
        after = put(before, path, value)
        try:
            if manifest("m", after).spec != old.spec:
                return before, after
        except ValidationError:
            continue
    raise AssertionError(f"no other value for {path} was accepted")


@pytest.mark.parametrize("effect", model_fields(), ids=lambda effect: effect.path)
def test_a_change_restarts_what_the_table_says(effect: Any) -> None:
    if effect.path.split(".")[0] in BLOCKS:
        before, after = changed_block(effect.path)
    elif effect.path in TOGETHER:
        before = base_spec()
        after = before | TOGETHER[effect.path]
    else:
        before = base_spec()
        after = put(before, effect.path, CHANGES[effect.path])
    assert manifest("m", before).spec != manifest("m", after).spec
    expected = {"changed"} if effect.cost == "restart" else set()
    assert restarted(args_by_application(before), args_by_application(after)) == expected


@pytest.mark.parametrize("effect", cache_fields(), ids=lambda effect: effect.path)
def test_a_change_of_a_cache_restarts_what_the_table_says(effect: Any) -> None:
    spec = base_spec()
    after = args_by_application(spec, {effect.path: CACHE_CHANGES[effect.path]})
    expected = {"changed"} if effect.cost == "restart" else set()
    assert restarted(args_by_application(spec), after) == expected


def test_labels_and_annotations_are_live() -> None:
    spec = base_spec()
    plain = manifest("m", spec)
    metadata = {"name": "m", "labels": {"a": "b"}, "annotations": {"c": "d"}}
    labelled = ModelDeployment.model_validate({"metadata": metadata, "spec": spec})
    assert serve_config([plain]) == serve_config([labelled])


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == fields_page(), (
        "python -m flexinfer.translate.fields > docs/fields.md"
    )


def test_the_page_names_every_field() -> None:
    page = fields_page()
    for effect in (*model_fields(), *cache_fields()):
        block = effect.path.split(".")[0]
        shown = effect.path.removeprefix(f"{block}.") if block in BLOCKS else effect.path
        assert f"`{shown}`" in page
