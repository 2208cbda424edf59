"""What a Serve config tells the builders, the deployments and the policies.

Two kinds of data, by what a change of them costs:

* *restart*: `ModelArgs` and `GatewayArgs` are the applications' `args`. Ray hashes them into the
  code version of the application: a change replaces its replicas, and so the engine.
* *live*: `ModelSettings` and `GatewaySettings` are the deployments' `user_config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

GATEWAY_APP = "flexinfer-gateway"
GATEWAY_DEPLOYMENT = "Gateway"
MODEL_DEPLOYMENT = "ModelServer"
ENTRY_DEPLOYMENT = "Entry"


class _Data(BaseModel):
    # `model_` begins field names of ours; pydantic would reserve it.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class CacheArgs(_Data):
    """The ModelCache that a model uses, as far as finding its weights needs it."""

    name: str
    spec: dict[str, Any]
    """`spec` of the ModelCache, as written."""


class ModelArgs(_Data):
    """All that makes a different engine process."""

    name: str
    namespace: str = "default"
    backend: Literal["mlc-llm", "vllm", "llama-cpp", "ollama"]
    model: str
    block: dict[str, Any] = Field(default_factory=dict)
    """The backend's block, as written (camelCase)."""
    gpus: int = Field(default=1, ge=0)
    nodes: list[str] | None = None
    """Values of the Ray label `flexinfer.ai/node` that the replica may run on; None: any."""
    caches: list[CacheArgs] = Field(default_factory=list)
    cache: str | None = None
    """`modelCacheRef`."""
    claims: dict[str, str] = Field(default_factory=dict)
    """What a claim of the manifests is on the node: name -> directory."""
    roots: list[str] = Field(default_factory=list)
    """Directories in which `model` is looked for, in order."""
    weights_version: str | None = None
    """Fingerprint of the weights where they could be seen: other weights are another engine."""


class HealthSettings(_Data):
    """Liveness of an engine that was ready; seconds."""

    initial_delay_s: float = Field(default=0, ge=0)
    period_s: float = Field(default=10, gt=0)
    timeout_s: float = Field(default=5, gt=0)
    failure_threshold: int = Field(default=3, ge=1)


class ModelSettings(_Data):
    """`user_config` of a ModelServer: changes while the engine runs."""

    health: HealthSettings = Field(default_factory=HealthSettings)
    cold_start_timeout_s: float = Field(default=600, gt=0)
    drain_timeout_s: float = Field(default=600, ge=0)
    vram_check: Literal["error", "warn", "off"] = "warn"
    """What a start does that will not fit into the free memory of its GPUs."""


class NoticeData(_Data):
    """A warning about a resource, as the gateway shows it."""

    reason: str
    message: str
    field: str | None = None


class GatewayModel(_Data):
    """What the gateway knows of one ModelDeployment."""

    name: str
    namespace: str = "default"
    names: list[str]
    """All names in the API, `name` first."""
    backend: str
    model: str
    gpus: int = 1
    nodes: list[str] | None = None
    replicas: int = Field(default=1, ge=0)
    min_replicas: int | None = None
    priority: int = 100
    idle_timeout_s: float = 300
    cold_start_timeout_s: float = 600
    drain_timeout_s: float = 600
    max_ongoing_requests: int | None = None
    max_queued_requests: int = 200
    warnings: list[NoticeData] = Field(default_factory=list)

    @property
    def parked(self) -> bool:
        return self.replicas == 0


class GatewaySettings(_Data):
    """`user_config` of the gateway: the models that it serves now."""

    models: list[GatewayModel] = Field(default_factory=list)


class GatewayArgs(_Data):
    """Arguments of the gateway's builder."""

    api_key_file: Path | None = None
    """A file whose content clients must send as bearer token; else FLEXINFER_API_KEY, else none."""
    cors_origins: list[str] = Field(default_factory=list)
    """Origins that a browser may call from, beside those on loopback; `*` for all."""
    header_grace_s: float = Field(default=10, ge=0)
    """How long a cold start may hold back the response's header, so that a failure can be a 503."""
    max_body_bytes: int = Field(default=64 << 20, gt=0)
