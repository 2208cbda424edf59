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
from flexinfer.api.errors import ApiError, ManifestErrors, ManifestProblem
from flexinfer.api.manifest import Manifests, manifest_files, read_manifests
from flexinfer.api.meta import ObjectMeta
from flexinfer.api.modelcache import ModelCache, ModelCacheSpec, SecretRef, StorageStrategy
from flexinfer.api.modeldeployment import (
    HealthCheck,
    ModelDeployment,
    ModelDeploymentSpec,
    Toleration,
    VramCheck,
)
from flexinfer.api.notices import Notice, notices_for, resource_id
from flexinfer.api.quantity import Quantity, parse_quantity
from flexinfer.api.resources import Resources
from flexinfer.api.source import Source, parse_source

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "ApiError",
    "Backend",
    "Block",
    "HealthCheck",
    "LlamaCppBlock",
    "ManifestErrors",
    "ManifestProblem",
    "Manifests",
    "MlcLlmBlock",
    "MlcOverrides",
    "ModelCache",
    "ModelCacheSpec",
    "ModelDeployment",
    "ModelDeploymentSpec",
    "Notice",
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
    "manifest_files",
    "notices_for",
    "parse_quantity",
    "parse_source",
    "read_manifests",
    "resource_id",
]
