"""ModelDeployment: a model to serve, with what, where and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from flexinfer.api.base import API_VERSION, ApiModel, Count, Finding, PositiveCount
from flexinfer.api.blocks import (
    BLOCK_NAMES,
    BLOCK_TYPES,
    Backend,
    Block,
    LlamaCppBlock,
    MlcLlmBlock,
    OllamaBlock,
    VllmBlock,
)
from flexinfer.api.meta import Labels, ObjectMeta
from flexinfer.api.names import MODEL_NAME_RULE, RESERVED, is_model_name, legal_name
from flexinfer.api.resources import Resources
from flexinfer.api.values import InnerPath, Line

VramCheck = Literal["error", "warn", "off"]


class HealthCheck(ApiModel):
    """`spec.healthCheck`: liveness of an engine that has become ready. Readiness itself is noticed
    at once and bounded by `coldStartTimeoutSeconds`."""

    initial_delay_seconds: Count = Field(
        default=0, description="Grace after the engine was started before checks count."
    )
    period_seconds: PositiveCount = Field(default=10, description="Time between two checks.")
    timeout_seconds: PositiveCount = Field(default=5, description="Time that one check may take.")
    failure_threshold: PositiveCount = Field(
        default=3, description="Checks in a row that must fail before the engine is replaced."
    )


class Toleration(ApiModel):
    """One of `spec.tolerations`, as in a pod."""

    key: str | None = Field(default=None, description="The taint's key. Absent: every taint.")
    operator: Literal["Exists", "Equal"] = Field(
        default="Equal", description="Whether the taint's value must be equal."
    )
    value: str | None = Field(default=None, description="The taint's value. Absent: empty.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="The taint's effect. Absent: every effect."
    )
    toleration_seconds: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="How long a NoExecute taint is tolerated. Absent: for ever."
    )

    @classmethod
    def cross_checks(cls, given: Mapping[str, Any]) -> Iterator[Finding]:
        """Yields findings for what a Kubernetes API server refuses in a pod's tolerations."""
        operator = given.get("operator", "Equal")
        if operator == "Equal" and not given.get("key"):
            yield Finding(("operator",), operator, "Exists, because no key is given")
        if operator == "Exists" and given.get("value"):
            yield Finding(("value",), given["value"], "no value, because operator is Exists")
        if "tolerationSeconds" in given and given.get("effect") != "NoExecute":
            found = given["tolerationSeconds"]
            yield Finding(("tolerationSeconds",), found, "only with effect: NoExecute")


class ModelDeploymentSpec(ApiModel):
    """`spec` of a ModelDeployment."""

    backend: Backend = Field(description="The engine that serves the model.")
    model: InnerPath = Field(
        description="What to serve: a model's name or path below the models directory, the name or "
        "modelPath of a ModelCache, an absolute path, a hub id or an Ollama tag."
    )
    model_cache_ref: Line | None = Field(
        default=None,
        description="Name of the ModelCache that holds the weights. Absent: found by `model`.",
    )
    replicas: Count = Field(
        default=1, description="Most engines of this model at once. 0 parks it: nothing wakes it."
    )
    min_replicas: Count | None = Field(
        default=None,
        description="Fewest engines. 0: none after idleTimeoutSeconds without a request. 1 or "
        "more: never evicted by equal or lower priority. Absent: stays up while nobody else needs "
        "its GPUs, with no idle timeout.",
    )
    idle_timeout_seconds: Count = Field(
        default=300, description="Time without a request before minReplicas: 0 takes effect."
    )
    cold_start_timeout_seconds: PositiveCount = Field(
        default=600,
        description="Time that the engine may take to become ready once its weights are there.",
    )
    drain_timeout_seconds: Count = Field(
        default=600,
        description="How long running requests may go on when the model must leave; then their "
        "streams end with an error.",
    )
    priority: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=100, description="Who keeps or gets GPUs when they are short; higher goes first."
    )
    served_model_name: Line | None = Field(
        default=None,
        description="The name in the API, which may hold dots and slashes. Absent: metadata.name.",
    )
    aliases: list[Line] = Field(
        default_factory=list, description="More names under which requests find the model."
    )
    max_ongoing_requests: PositiveCount | None = Field(
        default=None,
        description="Requests that one engine works on at once. Absent: what it runs in parallel.",
    )
    max_queued_requests: Count = Field(
        default=200, description="Requests that may wait for the model; more get an error at once."
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="GPUs, cpu and memory. Without a GPU key the model gets one GPU; "
        '`amd.com/gpu: "0"` means CPU.',
    )
    node_selector: Labels = Field(
        default_factory=dict, description="Labels of the nodes that may serve it. Absent: all."
    )
    tolerations: list[Toleration] = Field(
        default_factory=list, description="Taints of nodes that the model's pods tolerate."
    )
    image: Line | None = Field(
        default=None,
        description="Container image with the engine. Absent: the pool's. One machine ignores it.",
    )
    health_check: HealthCheck = Field(
        default_factory=HealthCheck, description="When a running engine counts as broken."
    )
    vram_check: VramCheck | None = Field(
        default=None,
        description="What to do when the model will not fit into GPU memory. Absent: error for "
        "mlc-llm and vllm, warn for llama-cpp and ollama, which can use RAM.",
    )
    mlcllm: MlcLlmBlock | None = Field(
        default=None, description="Settings of backend mlc-llm. Absent: all defaults."
    )
    vllm: VllmBlock | None = Field(
        default=None, description="Settings of backend vllm. Absent: all defaults."
    )
    llamacpp: LlamaCppBlock | None = Field(
        default=None, description="Settings of backend llama-cpp. Absent: all defaults."
    )
    ollama: OllamaBlock | None = Field(
        default=None, description="Settings of backend ollama. Absent: all defaults."
    )

    @classmethod
    def cross_checks(cls, given: Mapping[str, Any]) -> Iterator[Finding]:
        """Yields findings for bounds, blocks of other backends, and more shards than GPUs."""
        least, most = given.get("minReplicas"), given.get("replicas", 1)
        if _is_int(least) and _is_int(most) and 0 < most < least:
            yield Finding(("minReplicas",), least, f"at most replicas, which is {most}")
        backend = given.get("backend")
        own = _block_name(backend)
        if own is not None:
            for block in BLOCK_NAMES.values():
                if block != own and block in given:
                    allowed = f"only {own}, because backend is {backend}"
                    yield Finding((block,), given[block], allowed, f"use {own}, or change backend")
        yield from _too_many_shards(given)

    @property
    def block(self) -> Block:
        """The settings of the backend in use: its block, or that block's defaults."""
        block: Block | None = getattr(self, BLOCK_NAMES[self.backend])
        return block if block is not None else BLOCK_TYPES[self.backend]()

    @property
    def engine_env(self) -> dict[str, str]:
        """Environment variables that the manifest sets for the engine."""
        return dict(self.block.env)

    @property
    def gpus(self) -> int:
        """GPUs of one replica, all on one node; 0 for a CPU model."""
        return self.resources.gpus

    @property
    def parked(self) -> bool:
        """Whether no request may wake the model."""
        return self.replicas == 0

    @property
    def effective_min_replicas(self) -> int | None:
        """The fewest engines, never more than `replicas`; None where minReplicas is absent."""
        return None if self.min_replicas is None else min(self.min_replicas, self.replicas)

    @property
    def effective_vram_check(self) -> VramCheck:
        """`vramCheck`, or the backend's default where it is absent."""
        if self.vram_check is not None:
            return self.vram_check
        return "error" if self.backend in ("mlc-llm", "vllm") else "warn"


def _block_name(backend: Any) -> str | None:
    return next((block for known, block in BLOCK_NAMES.items() if known == backend), None)


def _is_int(value: Any) -> bool:
    return type(value) is int


def _too_many_shards(given: Mapping[str, Any]) -> Iterator[Finding]:
    block, resources = given.get("vllm"), given.get("resources", {})
    if not isinstance(block, Mapping) or given.get("backend") != "vllm":
        return
    sizes = {name: block.get(name, 1) for name in ("tensorParallelSize", "pipelineParallelSize")}
    try:
        gpus = Resources.model_validate(resources).gpus
    except ValueError:
        return
    # On CPU the shards are processes on sockets, and no number is too large.
    if gpus and all(_is_int(size) for size in sizes.values()):
        tensor, pipeline = sizes.values()
        if tensor * pipeline > gpus:
            name = "tensorParallelSize" if tensor > 1 else "pipelineParallelSize"
            rule = f"tensorParallelSize x pipelineParallelSize at most the GPUs, which are {gpus}"
            yield Finding(("vllm", name), block.get(name, sizes[name]), rule)


class ModelDeployment(ApiModel):
    """A model to serve."""

    api_version: Literal["ai.flexinfer/v1alpha1"] = Field(
        default=API_VERSION, description="Group and version of the resource."
    )
    kind: Literal["ModelDeployment"] = Field(
        default="ModelDeployment", description="Kind of the resource."
    )
    metadata: ObjectMeta = Field(description="Name, namespace, labels.")
    spec: ModelDeploymentSpec = Field(description="What to serve.")
    status: dict[str, Any] | None = Field(
        default=None, description="Written by the operator; ignored when read."
    )

    @classmethod
    def cross_checks(cls, given: Mapping[str, Any]) -> Iterator[Finding]:
        """Yields a finding for a name that is illegal or reserved, with one to use instead."""
        metadata = given.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        if not isinstance(name, str):
            return
        if not is_model_name(name):
            hint = f"use name: {legal_name(name)}"
            if name:
                hint += f" and spec.servedModelName: {name}"
            yield Finding(("metadata", "name"), name, MODEL_NAME_RULE, hint)
        elif name in RESERVED:
            allowed = f"any name but {', '.join(sorted(RESERVED))}"
            hint = f"use name: {legal_name(name)}"
            yield Finding(("metadata", "name"), name, allowed, hint)

    @property
    def name(self) -> str:
        """`metadata.name`, which is also the name of the Serve application."""
        return self.metadata.name

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which requests find the model, without repetition, its own first."""
        spec = self.spec
        served = [spec.served_model_name] if spec.served_model_name else []
        return tuple(dict.fromkeys([self.name, *served, *spec.aliases]))
