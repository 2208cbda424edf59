"""Warnings about resources that are valid: data for the command line, the log and the status."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexinfer.api.blocks import MlcLlmBlock
from flexinfer.api.modelcache import ModelCache
from flexinfer.api.modeldeployment import ModelDeployment


@dataclass(frozen=True)
class Notice:
    """Something a user should know, and that stops nothing.

    `reason` is one CamelCase word as in a Kubernetes condition, `resource` is
    ``Kind/namespace/name``, `field` the path that it is about, where there is one.
    """

    reason: str
    message: str
    resource: str
    field: str | None = None

    def __str__(self) -> str:
        field = f" {self.field}:" if self.field else ""
        return f"{self.resource}:{field} {self.message} ({self.reason})"


def resource_id(resource: ModelDeployment | ModelCache) -> str:
    """``Kind/namespace/name``, as notices name a resource."""
    return f"{resource.kind}/{resource.metadata.namespace}/{resource.metadata.name}"


def notices_for(
    models: Sequence[ModelDeployment], caches: Sequence[ModelCache], *, gpus: int | None = None
) -> list[Notice]:
    """All notices on resources that are served together.

    `gpus` is the number of GPUs of the machine, if all models share one; without it nothing is
    said of models that do not fit beside others.
    """
    notices = [
        notice
        for model in models
        for notice in (*_mlc_notices(model, caches), *_cache_notices(model, caches))
    ]
    if gpus is not None:
        notices += _capacity_notices(models, gpus)
    return notices


def _cache_notices(model: ModelDeployment, caches: Sequence[ModelCache]) -> Iterator[Notice]:
    wanted = model.spec.model_cache_ref
    if wanted is not None and _cache_of(model, caches) is None:
        message = f"no ModelCache {wanted} in namespace {model.metadata.namespace} among the files"
        yield Notice("ModelCacheNotFound", message, resource_id(model), "spec.modelCacheRef")


def _cache_of(model: ModelDeployment, caches: Sequence[ModelCache]) -> ModelCache | None:
    for cache in caches:
        if cache.metadata.namespace != model.metadata.namespace:
            continue
        if model.spec.model_cache_ref is None:
            if model.spec.model in (cache.name, cache.spec.model_path):
                return cache
        elif cache.name == model.spec.model_cache_ref:
            return cache
    return None


def _mlc_notices(model: ModelDeployment, caches: Sequence[ModelCache]) -> Iterator[Notice]:
    block = model.spec.block
    if not isinstance(block, MlcLlmBlock):
        return
    resource = resource_id(model)
    if model.spec.gpus and model.spec.resources.gpu_vendor != "nvidia":
        cache = _cache_of(model, caches)
        names = [model.spec.model, block.model_lib_path, cache.spec.source if cache else None]
        if any(name and re.search(r"qwen3.*q4f16", name, re.IGNORECASE) for name in names):
            message = (
                "Qwen3 with q4f16 weights has crashed in TVM on ROCm; weights in q4f32_1 are the "
                "known way round it"
            )
            yield Notice("Qwen3Q4F16OnROCm", message, resource, "spec.model")
    if block.model_lib_path is None and block.jit_policy in (None, "ON", "REDO"):
        message = (
            "without modelLibPath MLC compiles the model, which takes minutes at a first start; "
            'give the compiled library and jitPolicy: "OFF"'
        )
        yield Notice("JITInUse", message, resource, "spec.mlcllm.modelLibPath")
    elif block.model_lib_path is None and block.jit_policy == "OFF":
        message = 'jitPolicy "OFF" without modelLibPath: MLC has no library and will not start'
        yield Notice("JITOffWithoutLibrary", message, resource, "spec.mlcllm.jitPolicy")
    elif block.model_lib_path is not None and block.jit_policy in ("ON", "REDO"):
        message = "with modelLibPath MLC never compiles: jitPolicy has no effect"
        yield Notice("JITPolicyUnused", message, resource, "spec.mlcllm.jitPolicy")
    if block.gpu_memory_bytes is not None:
        if block.overrides.gpu_memory_utilization is not None:
            message = "overrides.gpuMemoryUtilization is set as well and is used instead"
        else:
            message = (
                "MLC has no setting in bytes any more: it is passed on as a share of the GPU's "
                "memory; overrides.gpuMemoryUtilization says that share directly"
            )
        yield Notice("GPUMemoryBytesTranslated", message, resource, "spec.mlcllm.gpuMemoryBytes")


def _capacity_notices(models: Sequence[ModelDeployment], gpus: int) -> Iterator[Notice]:
    """Models that need more GPUs than there are, or than are ever free of pinned models.

    A model with minReplicas >= 1 is never evicted by equal or lower priority, so what it holds is
    out of reach for these. Pinned models of one priority get their GPUs in reading order.
    """
    wanting = [model for model in models if model.spec.gpus and not model.spec.parked]
    pinned = sorted(
        (model for model in wanting if model.spec.effective_min_replicas),
        key=lambda model: -model.spec.priority,
    )
    for model in wanting:
        need, priority, resource = model.spec.gpus, model.spec.priority, resource_id(model)
        if need > gpus:
            message = f"needs {need} GPUs at once, and there {_are(gpus)}"
            yield Notice("NotEnoughGPUs", message, resource, "spec.resources")
            continue
        ahead = pinned[: pinned.index(model)] if model in pinned else pinned
        holders = [
            other for other in ahead if other.spec.priority >= priority and other.spec.gpus <= gpus
        ]
        held = sum(other.spec.gpus * (other.spec.effective_min_replicas or 0) for other in holders)
        if need > gpus - held:
            names = ", ".join(other.name for other in holders)
            message = (
                f"can never run: it needs {need} of {gpus} GPUs, and {names} with minReplicas >= 1 "
                f"and no lower priority never leave"
            )
            yield Notice("NeverRuns", message, resource, "spec.priority")


def _are(gpus: int) -> str:
    return {0: "is none", 1: "is 1"}.get(gpus, f"are {gpus}")
