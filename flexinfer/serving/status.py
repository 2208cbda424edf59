"""What a replica says of its engine to the gateways that hold a lease on it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from flexinfer.serving.args import NoticeData


class ReplicaState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    """It will not come up by itself: the gateway asks for a new replica after a while."""
    DRAINING = "draining"
    """It leaves: no new request, and the lease is to be closed when the last one has ended."""


class EngineAddress(BaseModel):
    """Where and how requests reach a ready engine."""

    model_config = ConfigDict(frozen=True)

    host: str
    port: int
    """On the replica's node; from another node, the lease's own address forwards to it."""
    request_model: str
    """What a body's `model` must say."""
    drop_headers: list[str] = Field(default_factory=list)
    drop_fields: list[str] = Field(default_factory=list)
    rename_fields: dict[str, str] = Field(default_factory=dict)
    """Of a JSON body's top level; see `flexinfer.engines.spec.RequestRules`."""
    parallel: int = 1
    """Requests that it works on at once."""


class ReplicaStatus(BaseModel):
    """All that a gateway knows of a replica; sent whole at every change."""

    model_config = ConfigDict(frozen=True)

    state: ReplicaState
    message: str = ""
    """Why it is in this state, where that needs saying."""
    fetching: bool = False
    """Its weights are being brought: the start, and its deadline, have not begun."""
    log_tail: list[str] = Field(default_factory=list)
    engine: EngineAddress | None = None
    pid: int
    """The replica's process."""
    engine_pid: int | None = None
    warnings: list[NoticeData] = Field(default_factory=list)
    log_file: str | None = None
    start_s: float | None = None
    """How long the engine's own start took."""
