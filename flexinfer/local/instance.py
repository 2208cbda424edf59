"""`flexinfer up`: bring a cluster to what the manifests say, and keep it there."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flexinfer.api import ManifestErrors, Notice
from flexinfer.local.activity import Activities
from flexinfer.local.cluster import Cluster, JoinedCluster, OwnCluster, check_key_file
from flexinfer.local.dashboard import dashboard_url
from flexinfer.local.desired import Desired, Site, desire
from flexinfer.local.errors import (
    ConfigRefused,
    DashboardError,
    GatewayError,
    LocalError,
    StartTimeout,
)
from flexinfer.local.events import (
    Activity,
    Machine,
    Noticed,
    Phase,
    Ready,
    Refused,
    Rejected,
    Stopping,
    Tell,
    Unreachable,
)
from flexinfer.local.follow import Follower
from flexinfer.local.gateway import Gateway
from flexinfer.local.machine import Computer, this_computer
from flexinfer.local.ports import is_loopback, resolve_host
from flexinfer.local.ray_settings import GPU_MASKS
from flexinfer.translate.serveconfig import GATEWAY_APP

API_KEY_VARIABLE = "FLEXINFER_API_KEY"

_GATEWAY_S = 180.0
_GATEWAY_POLL_S = 0.2
_APPLICATIONS_POLL_S = 1.0
_LOOK_S = 0.3
_RETRY_S = 5.0
_DEPLOYING = frozenset({"NOT_STARTED", "DEPLOYING", "DELETING"})
_FAILED = "DEPLOY_FAILED"


@dataclass(frozen=True)
class Options:
    """What the command line says. `num_gpus` None: as counted. `address`: the dashboard of a
    cluster to join, None to start one. `roots`: directories in which models are looked for."""

    paths: Sequence[Path]
    host: str = "127.0.0.1"
    port: int = 8000
    num_gpus: int | None = None
    roots: Sequence[Path] = ()
    claims: Mapping[str, Path] = field(default_factory=dict)
    cors_origins: Sequence[str] = ()
    api_key_file: Path | None = None
    address: str | None = None


class Instance:
    """One `flexinfer up`. `run` once; `stop` at any time, from the same event loop."""

    def __init__(self, options: Options, tell: Tell) -> None:
        self._options = options
        self._tell = tell
        self._began = time.monotonic()
        self._stop_asked = asyncio.Event()
        self._forced = asyncio.Event()
        self._told: set[Notice] = set()
        self._told_failures: dict[str, str] = {}
        self._deployed: Desired | None = None
        self._settled = asyncio.Event()  # cleared by a deployment, set when it has come to its end

    def stop(self) -> None:
        """Ask for the end; a second time: at once, whatever is still going on."""
        if self._stop_asked.is_set():
            self._forced.set()
        self._stop_asked.set()

    async def run(self) -> None:
        """Serve until `stop`, then leave nothing behind.

        Raises `ManifestErrors` if the first reading fails, before anything is started; `LocalError`
        if something fails without which nothing works.
        """
        options = self._options
        address = await asyncio.to_thread(resolve_host, options.host)
        if options.api_key_file is not None:
            check_key_file(options.api_key_file)
        computer = this_computer(options.num_gpus)
        if options.address is not None and options.num_gpus is None:
            computer = replace(computer, gpus=None)
        else:
            self._tell(Machine(str(computer)))
        follower = Follower(options.paths)
        await asyncio.to_thread(desire, options.paths, self._site(computer))
        cluster = self._cluster(address, computer)
        try:
            serving = self._serve(cluster, computer, follower, address)
            await self._until_end(serving, cluster)
        finally:
            self._tell(Stopping())
            await self._close(cluster)

    # -- what is needed

    def _cluster(self, address: str, computer: Computer) -> Cluster:
        options = self._options
        if options.address is None:
            return OwnCluster(address=address, port=options.port, gpus=computer.gpus or 0)
        try:
            url = dashboard_url(options.address)
        except ValueError as error:
            raise LocalError(f"--address: {error}") from error
        return JoinedCluster(url, address=address, port=options.port)

    def _site(self, computer: Computer, cluster: Cluster | None = None) -> Site:
        options = self._options
        key_file = options.api_key_file
        return Site(
            computer=computer,
            http_host=cluster.http_host if cluster else options.host,
            http_port=cluster.http_port if cluster else options.port,
            roots=[path.absolute() for path in options.roots],
            claims={name: path.absolute() for name, path in options.claims.items()},
            cors_origins=options.cors_origins,
            api_key_file=key_file.absolute() if key_file is not None else None,
        )

    # -- from the start to the end

    async def _until_end(self, serving: Coroutine[Any, Any, None], cluster: Cluster) -> None:
        """Run `serving` until `stop` is called, or it or the cluster fails."""
        work = asyncio.create_task(serving)
        asked = asyncio.create_task(self._stop_asked.wait())
        ended = asyncio.create_task(cluster.ended())
        try:
            await asyncio.wait([work, asked, ended], return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return
            if ended.done() and not work.done():
                raise ended.result()
            await work
        finally:
            for task in (work, asked, ended):
                await _cancel(task)

    async def _close(self, cluster: Cluster) -> None:
        closing = asyncio.create_task(cluster.close())
        forced = asyncio.create_task(self._forced.wait())
        try:
            await asyncio.wait([closing, forced], return_when=asyncio.FIRST_COMPLETED)
            if not closing.done():
                await cluster.close(force=True)
                return
            await closing
        finally:
            await _cancel(closing)
            await _cancel(forced)

    async def _serve(
        self, cluster: Cluster, computer: Computer, follower: Follower, address: str
    ) -> None:
        await cluster.open(self._tell)
        site = self._site(computer, cluster)
        self._tell(Phase("deploying to Ray Serve"))
        # Again, because minutes may have passed, and because the cluster has its say in the site.
        desired = await asyncio.to_thread(desire, self._options.paths, site)
        await self._deploy(cluster, desired)
        async with Gateway(cluster.url) as gateway:
            self._tell(Phase("waiting for the gateway"))
            await self._until_gateway(cluster, gateway)
            names = [model.name for model in desired.models]
            took = time.monotonic() - self._began
            self._tell(Ready(cluster.url, names, took, cluster.log_dir))
            self._notice(*self._own_notices(address), *desired.notices)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._follow(cluster, site, follower))
                    group.create_task(self._watch_models(gateway))
                    group.create_task(self._watch_applications(cluster))
            except* LocalError as errors:
                raise errors.exceptions[0] from None

    async def _until_gateway(self, cluster: Cluster, gateway: Gateway) -> None:
        """Wait until the API answers. Raises `LocalError` if the gateway will not come up."""
        end = time.monotonic() + _GATEWAY_S
        look_at_applications = 0.0
        while not await gateway.is_up():
            now = time.monotonic()
            if now > end:
                raise StartTimeout(
                    f"no answer from the gateway at {gateway.url} in {_GATEWAY_S:g} s"
                )
            if now > look_at_applications:
                look_at_applications = now + _APPLICATIONS_POLL_S
                application = (await cluster.dashboard.get()).applications.get(GATEWAY_APP)
                if application is not None and application.status == _FAILED:
                    raise LocalError(f"the gateway cannot be started: {application.message}")
            await asyncio.sleep(_GATEWAY_POLL_S)

    # -- deploying

    async def _deploy(self, cluster: Cluster, desired: Desired) -> None:
        await cluster.dashboard.put(desired.config)
        self._deployed = desired
        self._told_failures.clear()
        self._settled.clear()

    async def _follow(self, cluster: Cluster, site: Site, follower: Follower) -> None:
        async for _ in follower.changes():
            await self._apply_files(cluster, site)

    async def _apply_files(self, cluster: Cluster, site: Site) -> None:
        """Bring the cluster to what the files say now. Fails for nothing: what runs, runs on."""
        while True:
            try:
                desired = await asyncio.to_thread(desire, self._options.paths, site)
            except ManifestErrors as errors:
                self._tell(Rejected(errors.errors))
                return
            before = self._deployed
            assert before is not None
            if desired.config == before.config:
                self._notice(*desired.notices)
                return
            try:
                await self._deploy(cluster, desired)
            except ConfigRefused as error:
                self._tell(Refused(str(error)))
                return
            except DashboardError as error:
                self._tell(Refused(str(error), _RETRY_S))
                await asyncio.sleep(_RETRY_S)
                continue
            self._tell(desired.difference(before))
            self._notice(*desired.notices)
            return

    # -- watching

    async def _watch_models(self, gateway: Gateway) -> None:
        activities = Activities()
        reachable = True
        while True:
            try:
                for news in activities.update(await gateway.models(), time.monotonic()):
                    self._tell(news)
                if not reachable:
                    reachable = True
                    self._tell(Unreachable("the gateway answers again", back=True))
            except GatewayError as error:
                if reachable:
                    reachable = False
                    self._tell(Unreachable(str(error)))
            await asyncio.sleep(_LOOK_S)

    async def _watch_applications(self, cluster: Cluster) -> None:
        """After each deployment, until Ray is through with it: what could not be deployed at all
        has no replica that could say so."""
        while True:
            if not self._settled.is_set():
                try:
                    serve = await cluster.dashboard.get()
                except DashboardError:
                    pass  # a moment of silence says nothing; the gateway is watched as well
                else:
                    for known in serve.applications.values():
                        if known.status == _FAILED:
                            self._application_failed(known.name, known.message)
                    if all(a.status not in _DEPLOYING for a in serve.applications.values()):
                        self._settled.set()
            await asyncio.sleep(_APPLICATIONS_POLL_S)

    def _application_failed(self, name: str, message: str) -> None:
        if self._told_failures.get(name) == message:
            return
        self._told_failures[name] = message
        reason = "DeployFailed"
        self._tell(Activity(name, "failed", reason=reason, message=message.strip()))

    # -- notices

    def _notice(self, *notices: Notice) -> None:
        for notice in notices:
            if notice not in self._told:
                self._told.add(notice)
                self._tell(Noticed(notice))

    def _own_notices(self, address: str) -> list[Notice]:
        notices = []
        has_key = self._options.api_key_file is not None or os.environ.get(API_KEY_VARIABLE)
        if not is_loopback(address) and not has_key:
            message = (
                f"whoever reaches {self._options.host} may use the models: set {API_KEY_VARIABLE} "
                "or --api-key-file"
            )
            notices.append(Notice("NoAPIKey", message, "flexinfer up", "--host"))
        masks = [name for name in GPU_MASKS if os.environ.get(name)]
        if masks and self._options.address is None:
            message = "ignored: each engine gets a mask of its own; see --num-gpus"
            notices.append(Notice("MaskIgnored", message, "flexinfer up", ", ".join(masks)))
        return notices


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait for its end. What it raises is no news any more."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
