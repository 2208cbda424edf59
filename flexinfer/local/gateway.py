"""Speak to the gateway: is it there, and how are its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx

from flexinfer.local.errors import GatewayError

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica, as `GET /-/models` has it."""

    id: str
    state: str
    node: str | None = None
    pid: int | None = None
    engine_pid: int | None = None
    since_s: float | None = None


@dataclass(frozen=True)
class ModelStatus:
    """One model, as `GET /-/models` has it; `raw` is all of it."""

    name: str
    state: str
    raw: Mapping[str, Any]
    reason: str | None = None
    message: str | None = None
    progress: str | None = None
    replicas: tuple[ReplicaStatus, ...] = ()

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> ModelStatus:
        """Reads one entry. Raises KeyError, AttributeError or TypeError for anything else."""
        replicas = tuple(
            ReplicaStatus(
                id=str(replica["id"]),
                state=str(replica["state"]),
                node=replica.get("node"),
                pid=replica.get("pid"),
                engine_pid=replica.get("enginePid"),
                since_s=replica.get("sinceSeconds"),
            )
            for replica in raw.get("replicas") or ()
        )
        return cls(
            name=raw["name"],
            state=raw["state"],
            raw=raw,
            reason=raw.get("reason"),
            message=raw.get("message"),
            progress=raw.get("progress"),
            replicas=replicas,
        )


class Gateway:
    """A client of the gateway at `url`."""

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url, timeout=_TIMEOUT_S, trust_env=False, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def is_up(self) -> bool:
        """Whether `/healthz` answers 200; never raises."""
        try:
            return (await self._client.get("/healthz")).status_code == 200
        except httpx.HTTPError:
            return False

    async def models(self) -> list[ModelStatus]:
        """All models. Raises `GatewayError`."""
        try:
            answer = await self._client.get("/-/models")
        except httpx.HTTPError as error:
            raise GatewayError(f"no answer from {self.url}: {_words(error)}") from error
        if answer.is_error:
            raise GatewayError(f"{self.url}/-/models answers {answer.status_code}")
        try:
            return [ModelStatus.read(entry) for entry in answer.json()["models"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GatewayError(f"what answers at {self.url} is not FlexInfer") from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
