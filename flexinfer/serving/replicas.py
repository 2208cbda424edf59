"""Which replicas a model has: learnt from Serve's own request router, without asking anybody.

Serve tells every holder of a deployment's handle about its replicas by long poll, and hands them
to the deployment's request router, whose class is ours to choose: `router.LeaseRouter`, which
passes them on to here, where whoever watches in this process is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from flexinfer.serving.args import MODEL_DEPLOYMENT


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


def tell(app: str, seen: tuple[SeenReplica, ...]) -> None:
    """Called from the router's own thread, whichever that is, with all running replicas."""
    _last[app] = seen
    if app in _watchers:
        loop, watcher = _watchers[app]
        loop.call_soon_threadsafe(watcher, seen)


async def watch(app: str, watcher: _Watcher) -> DeploymentHandle:
    """Call `watcher(replicas)` in this event loop, now and at every change, until `unwatch`.

    Returns the handle, which must be kept for as long. Raises `KeyError` while there is no such
    application.
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
        watcher(_last[app])
    return handle


def unwatch(app: str) -> None:
    """Tell no more. What was told last is kept: the router lives on, and tells changes only."""
    _watchers.pop(app, None)
