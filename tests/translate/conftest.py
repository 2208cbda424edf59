"""Resources for the tests of this room, made from plain manifests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from flexinfer.api import ModelCache, ModelDeployment


def make_model(name: str = "one", **spec: Any) -> ModelDeployment:
    """A ModelDeployment of llama-cpp on one GPU, with fields of its spec added or replaced."""
    full = {"backend": "llama-cpp", "model": "one.gguf", **copy.deepcopy(spec)}
    return ModelDeployment.model_validate({"metadata": {"name": name}, "spec": full})


def make_cache(name: str = "weights", namespace: str = "default", **spec: Any) -> ModelCache:
    """A ModelCache of the hub, with fields of its spec added or replaced."""
    full = {"source": "HF://org/repo", **spec}
    return ModelCache.model_validate(
        {"metadata": {"name": name, "namespace": namespace}, "spec": full}
    )


@pytest.fixture
def model() -> Callable[..., ModelDeployment]:
    return make_model


@pytest.fixture
def cache() -> Callable[..., ModelCache]:
    return make_cache
