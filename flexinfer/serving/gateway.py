"""`Gateway`: the Serve deployment that owns `/`: it knows all models and lets nothing get lost.

It holds one `Backlog` a model and one lease a replica, tells the policies ten times a second what
is wanted, and hands each request to `ingress`, which finds its model and forwards it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from functools import partial
from typing import Any

import aiohttp
import ray

from flexinfer.scheduling import Model, Node, unschedulable
from flexinfer.scheduling import Replica as PlacedReplica
from flexinfer.serving import replicas
from flexinfer.serving.args import GatewayArgs, GatewayModel, GatewaySettings, NoticeData
from flexinfer.serving.backlog import Backlog
from flexinfer.serving.errors import NotFound
from flexinfer.serving.ingress import Ingress
from flexinfer.serving.link import Link
from flexinfer.serving.metrics import GatewayMetrics
from flexinfer.serving.replicas import SeenReplica
from flexinfer.serving.reports import Bounds, Report, encode
from flexinfer.serving.slots import Replica
from flexinfer.serving.status import ReplicaState, ReplicaStatus

NODE_LABEL = "flexinfer.ai/node"
_NODES_EVERY_S = 5.0
_WATCH_RETRY_S = (0.1, 1.0)
_RELINK_S = 1.0

# Seen from here, because they are Ray's to read when it starts; translate.environment sets them.
_FAST_PATH = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED")

_log = logging.getLogger("ray.serve")


class Gateway:
    """`args` are `GatewayArgs` as plain data; `user_config` is `GatewaySettings`."""

    # Serve awaits constructors and destructors that are coroutines; Python's typing knows none.
    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]
        self.args = GatewayArgs.model_validate(args)
        self.metrics = GatewayMetrics()
        self.backlogs: dict[str, Backlog] = {}
        self.names: dict[str, Backlog] = {}
        self._leaving: set[Backlog] = set()
        self._seen: dict[str, dict[str, SeenReplica]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._handles: dict[str, Any] = {}
        self._node_id = ray.get_runtime_context().get_node_id()
        self._nodes: tuple[Node, ...] = ()
        self._node_names: dict[str, str] = {}
        # A connection a request: an engine that has closed a kept one is found out too late.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.client = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            auto_decompress=False,
            trust_env=False,
            # An engine's cookies are the client's affair; here they would reach other clients.
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 18,
        )
        self._ingress = Ingress(self, _api_key(self.args))
        self.notices = _notices()
        for notice in self.notices:
            _log.warning("flexinfer: %s", notice.message)
        await self._look_at_nodes()
        self._node_task = asyncio.get_running_loop().create_task(self._watch_nodes())

    # -- what Serve asks

    def __serve_build_asgi_app__(self) -> Ingress:
        return self._ingress

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take over the models that there are now."""
        wanted = {m.name: m for m in GatewaySettings.model_validate(user_config).models}
        for name in [name for name in self.backlogs if name not in wanted]:
            self._remove_model(name)
        for name, config in wanted.items():
            if name in self.backlogs:
                self.backlogs[name].reconfigure(config)
            else:
                self._add_model(config)
        self.names = {
            alias: backlog for backlog in self.backlogs.values() for alias in backlog.config.names
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The report to the policies; see `reports`."""
        self._show_gauges()
        placed = {
            name: tuple(
                PlacedReplica(self._node_names.get(r.node, r.node))
                for r in backlog.replicas.values()
            )
            for name, backlog in self.backlogs.items()
        }
        demands = {name: backlog.demand() for name, backlog in self.backlogs.items()}
        bounds = {name: _bounds(backlog.config) for name, backlog in self.backlogs.items()}
        return encode(Report(self._nodes, bounds, demands, placed))

    async def check_health(self) -> None:
        """Raise if the task that watches the nodes has ended: what it reports would be old."""
        if self._node_task.done():
            raise RuntimeError("the gateway no longer watches the nodes")

    async def __del__(self) -> None:
        """Serve's last call, when requests have ended: give all leases back."""
        if not hasattr(self, "_node_task"):
            return
        tasks = [self._node_task, *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for backlog in (*self.backlogs.values(), *self._leaving):
            for replica in list(backlog.replicas.values()):
                await replica.link.close()
        await self.client.close()

    # -- models

    def never(self, backlog: Backlog) -> str | None:
        """Why a model can never run on the nodes that there are; None if it can."""
        config = backlog.config
        model = Model(
            name=config.name,
            gpus=config.gpus,
            replicas=config.replicas,
            nodes=None if config.nodes is None else frozenset(config.nodes),
        )
        return unschedulable(model, self._nodes)

    def describe(self) -> list[dict[str, Any]]:
        """All models in the shape of `GET /-/models`."""
        found = [*self.backlogs.values(), *self._leaving]
        return [self._describe(b) for b in sorted(found, key=lambda b: b.config.name)]

    def _describe(self, backlog: Backlog) -> dict[str, Any]:
        config = backlog.config
        state, reason = backlog.describe()
        never = self.never(backlog)
        if never is not None and state in ("zero", "queued"):
            state, reason = "failed", f"it cannot run here: {never}"
        if backlog in self._leaving:
            state, reason = "draining", "it was removed"
        failure = backlog.current_failure()
        statuses = [r.status for r in backlog.replicas.values() if r.status is not None]
        warnings = [*config.warnings, *(w for s in statuses[:1] for w in s.warnings)]
        return {
            "name": config.name,
            "namespace": config.namespace,
            "names": config.names,
            "backend": config.backend,
            "model": config.model,
            "state": state,
            "reason": reason,
            "message": "\n".join(failure.log_tail) if failure is not None else "",
            "progress": reason if state == "starting" else None,
            "replicas": [self._describe_replica(r) for r in backlog.replicas.values()],
            "lastActivitySecondsAgo": backlog.last_activity_s,
            "queued": backlog.queued,
            "running": backlog.running,
            "priority": config.priority,
            "gpus": config.gpus,
            "activationSeconds": backlog.activation_s,
            "retryInSeconds": max(0.0, failure.retry_at - time.monotonic()) if failure else None,
            "warnings": [w.model_dump() for w in warnings],
            "logFile": next((s.log_file for s in statuses if s.log_file), None),
        }

    def _describe_replica(self, replica: Replica) -> dict[str, Any]:
        status = replica.status
        return {
            "id": replica.id,
            "node": self._node_names.get(replica.node, replica.node),
            "pid": status.pid if status is not None else None,
            "enginePid": status.engine_pid if status is not None else None,
            "state": replica.state.value,
            "sinceSeconds": time.monotonic() - replica.since,
            "startSeconds": status.start_s if status is not None else None,
            "running": len(replica.running),
        }

    def _add_model(self, config: GatewayModel) -> None:
        backlog = self.backlogs[config.name] = Backlog(config)
        self._watches[config.name] = asyncio.get_running_loop().create_task(
            self._watch(config.name, backlog)
        )

    def _remove_model(self, name: str) -> None:
        backlog = self.backlogs.pop(name)
        backlog.refuse_all(partial(NotFound, f"model {name} was removed", code="model_not_found"))
        # Its leases stay until its replicas have drained; nothing new gets in by its names.
        if backlog.replicas:
            self._leaving.add(backlog)
        self._watches.pop(name).cancel()
        self._handles.pop(name, None)
        replicas.unwatch(name)
        self.metrics.forget(name)

    async def _watch(self, name: str, backlog: Backlog) -> None:
        """Learn of the model's replicas as soon as its application is there."""
        pause, longest = _WATCH_RETRY_S
        while True:
            try:
                self._handles[name] = await replicas.watch(name, partial(self._saw, backlog))
                return
            except KeyError:
                pass  # the gateway hears of a model before Serve has built its application
            except Exception:
                _log.exception("flexinfer: cannot learn of the replicas of %s; trying again", name)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, longest)

    # -- replicas

    def _saw(self, backlog: Backlog, seen: tuple[SeenReplica, ...]) -> None:
        if self.backlogs.get(backlog.config.name) is not backlog:
            return
        self._seen[backlog.config.name] = {replica.id: replica for replica in seen}
        for replica in seen:
            if replica.id not in backlog.replicas:
                self._link(backlog, replica)

    def _link(self, backlog: Backlog, seen: SeenReplica) -> None:
        def on_status(status: ReplicaStatus) -> None:
            before = replica.state
            activation = backlog.activation_s
            backlog.update(replica, status)
            if status.state is ReplicaState.FAILED and before is not ReplicaState.FAILED:
                self.metrics.failures.labels(backlog.config.name).inc()
            if backlog.activation_s != activation and backlog.activation_s is not None:
                self.metrics.activation.labels(backlog.config.name).observe(backlog.activation_s)

        def on_lost() -> None:
            draining = replica.state is ReplicaState.DRAINING
            backlog.remove(replica)
            if not backlog.replicas:
                self._leaving.discard(backlog)
            if not draining:
                asyncio.get_running_loop().call_later(_RELINK_S, self._relink, backlog, seen)

        link = Link((seen.host, seen.port), seen.key, on_status, on_lost)
        replica = Replica(seen.id, seen.node, link, local=seen.node == self._node_id)
        backlog.add(replica)
        link.start()

    def _relink(self, backlog: Backlog, seen: SeenReplica) -> None:
        """The lease was lost but Serve still lists the replica: the connection broke, not it."""
        name = backlog.config.name
        listed = self._seen.get(name, {}).get(seen.id) == seen
        if self.backlogs.get(name) is backlog and listed and seen.id not in backlog.replicas:
            self._link(backlog, seen)

    # -- nodes

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(_NODES_EVERY_S)
            try:
                await self._look_at_nodes()
            except Exception:
                # The head may be restarting. The last answer stands; health is not at stake.
                _log.exception("cannot list the Ray nodes; trying again")

    async def _look_at_nodes(self) -> None:
        listed = await asyncio.to_thread(ray.nodes)
        alive = [node for node in listed if node["Alive"]]
        self._node_names = {
            node["NodeID"]: node.get("Labels", {}).get(NODE_LABEL) or node["NodeID"]
            for node in alive
        }
        self._nodes = tuple(
            Node(self._node_names[n["NodeID"]], int(n.get("Resources", {}).get("GPU", 0)))
            for n in alive
        )

    def _show_gauges(self) -> None:
        for name, backlog in self.backlogs.items():
            self.metrics.queued.labels(name).set(backlog.queued)
            self.metrics.running.labels(name).set(backlog.running)
            serving = sum(r.state is ReplicaState.SERVING for r in backlog.replicas.values())
            self.metrics.replicas.labels(name).set(serving)


def _bounds(config: GatewayModel) -> Bounds:
    return Bounds(
        gpus=config.gpus,
        replicas=config.replicas,
        min_replicas=config.min_replicas,
        priority=config.priority,
        idle_timeout_s=config.idle_timeout_s,
        nodes=None if config.nodes is None else frozenset(config.nodes),
    )


def _notices() -> list[NoticeData]:
    """What whoever runs this cluster should know."""
    missing = [name for name in _FAST_PATH if os.environ.get(name) != "1"]
    if not missing:
        return []
    return [
        NoticeData(
            reason="SlowIngress",
            message=f"Ray was started without {' and '.join(f'{name}=1' for name in missing)}: "
            "requests take Ray's slower way to the gateway",
        )
    ]


def _api_key(args: GatewayArgs) -> str | None:
    if args.api_key_file is not None:
        key = args.api_key_file.read_text().strip()
        if not key:
            raise ValueError(f"{args.api_key_file} is empty: it must hold the API key")
        return key
    return os.environ.get("FLEXINFER_API_KEY") or None
