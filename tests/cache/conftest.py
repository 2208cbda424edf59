from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexinfer.api import ModelCache
from flexinfer.cache import Stores, Weights, locate


def make_cache(name: str = "weights", namespace: str = "default", **spec: Any) -> ModelCache:
    """A ModelCache; of the hub unless it is told something else."""
    if not spec.keys() & {"source", "existingClaimName"}:
        spec["source"] = "HF://org/repo"
    return ModelCache.model_validate(
        {"metadata": {"name": name, "namespace": namespace}, "spec": spec}
    )


def write(path: Path, text: str = "x") -> Path:
    """A file, with the directories that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def hub_snapshot(hub: Path, repo: str, *names: str, revision: str = "0" * 40) -> Path:
    """A repository in a hub's cache, laid out as huggingface_hub does: links to blobs."""
    folder = hub / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    write(folder / "refs" / "main", revision)
    for number, name in enumerate(names):
        blob = write(folder / "blobs" / f"blob{number}", name)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    return snapshot


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    """Stores that nobody else has, instead of those of the machine that runs the tests."""
    return Stores(
        node_local=[tmp_path / "node-a", tmp_path / "node-b"],
        memory=tmp_path / "shm",
        claims=tmp_path / "mnt-claims",
    )


@pytest.fixture
def find(tmp_path: Path, stores: Stores) -> Callable[..., Weights]:
    """`locate` for llama-cpp, away from the stores and the hub's cache of this machine."""

    def find(model: str, **kwargs: Any) -> Weights:
        defaults = {"backend": "llama-cpp", "stores": stores, "hub_cache": tmp_path / "hub"}
        return locate(model, **(defaults | kwargs))

    return find
