"""The resources as a user writes them: typed models and the manifest reader."""

from __future__ import annotations

from flexinfer.api.base import API_VERSION, GROUP, VERSION
from flexinfer.api.blocks import (
    Backend,
    Block,
    LlamaCppBlock,
    MlcLlmBlock,
    MlcOverrides,
    OllamaBlock,
    VllmBlock,
)
from flexinfer.api.meta import ObjectMeta
from flexinfer.api.modelcache import ModelCache, ModelCacheSpec, SecretRef, StorageStrategy
from flexinfer.api.modeldeployment import (
    HealthCheck,
    ModelDeployment,
    ModelDeploymentSpec,
    Toleration,
    VramCheck,
)
from flexinfer.api.quantity import Quantity, parse_quantity
from flexinfer.api.resources import Resources
from flexinfer.api.source import Source, parse_source

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "Backend",
    "Block",
    "HealthCheck",
    "LlamaCppBlock",
    "MlcLlmBlock",
    "MlcOverrides",
    "ModelCache",
    "ModelCacheSpec",
    "ModelDeployment",
    "ModelDeploymentSpec",
    "ObjectMeta",
    "OllamaBlock",
    "Quantity",
    "Resources",
    "SecretRef",
    "Source",
    "StorageStrategy",
    "Toleration",
    "VllmBlock",
    "VramCheck",
    "parse_quantity",
    "parse_source",
]
