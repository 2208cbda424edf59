"""Which replicas a model has: learnt from Serve's own request router, without asking anybody.

Serve tells every holder of a deployment's handle about its replicas by long poll, and hands them
to the deployment's request router, whose class is ours to choose. `LeaseRouter` passes them on to
whoever watches in this process. `ping` calls, the only ones made through the handle, go anywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from flexinfer.serving.args import MODEL_DEPLOYMENT

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SeenReplica:
    """A running replica and where leases on it are to be had."""

    id: str
    node: str
    """Ray's node id."""
    host: str
    port: int
    key: str


_Watcher = Callable[[tuple[SeenReplica, ...]], None]
_watchers: dict[str, tuple[asyncio.AbstractEventLoop, _Watcher]] = {}
_last: dict[str, tuple[SeenReplica, ...]] = {}


class LeaseRouter(RequestRouter):  # type: ignore[misc]  # ray is untyped here
    """Routes like nobody cares, and tells watchers which replicas there are."""

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        super().update_replicas(list(replicas))
        seen = tuple(_seen(replica) for replica in replicas)
        _last[self.app_name] = seen
        _tell(self.app_name, seen)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]


async def watch(app: str, watcher: _Watcher) -> DeploymentHandle:
    """Call `watcher(replicas)` in this event loop, now and at every change, until `unwatch`.

    Returns the handle, which must be kept for as long. Raises `RayServeException` while there is
    no such application.
    """
    _watchers[app] = (asyncio.get_running_loop(), watcher)
    handle: DeploymentHandle = await asyncio.to_thread(
        serve.get_deployment_handle, MODEL_DEPLOYMENT, app
    )
    # A handle makes its router with its first call. That call must not wait in the router for a
    # replica to come: it would count as demand there.
    response: Any = handle.ping.remote()
    response.cancel()
    if app in _last:
        _tell(app, _last[app])
    return handle


def unwatch(app: str) -> None:
    _watchers.pop(app, None)


def _tell(app: str, seen: tuple[SeenReplica, ...]) -> None:
    if app in _watchers:
        loop, watcher = _watchers[app]
        # The router may live in a loop and thread of Serve's own.
        loop.call_soon_threadsafe(watcher, seen)


def _seen(replica: RunningReplica) -> SeenReplica:
    metadata = replica.replica_metadata
    return SeenReplica(
        id=replica.replica_id.unique_id,
        node=metadata["node"],
        host=metadata["host"],
        port=metadata["port"],
        key=metadata["key"],
    )
