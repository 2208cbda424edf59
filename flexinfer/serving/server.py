"""`ModelServer`: the Serve deployment that owns one engine a replica.

The constructor returns at once and the engine starts in the background, so that a failed start is
a state of ours with a reason, and not an application that Ray calls unhealthy. No request passes
through Ray: gateways take a lease (see `lease`) and speak to the engine themselves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import platformdirs
import ray

from flexinfer.api.blocks import BLOCK_TYPES
from flexinfer.api.modelcache import ModelCache
from flexinfer.api.notices import Notice
from flexinfer.cache.errors import CacheError
from flexinfer.cache.locate import locate
from flexinfer.cache.userpaths import resolve_block
from flexinfer.engines.backend import Backend, backend_for
from flexinfer.engines.errors import (
    EngineError,
    EngineExited,
    EnginePortTaken,
    EngineStartError,
    EngineStartTimeout,
)
from flexinfer.engines.gpus import assign, count_gpus
from flexinfer.engines.logs import EngineLog, log_path
from flexinfer.engines.ports import free_port
from flexinfer.engines.process import Engine
from flexinfer.engines.spec import EngineSpec, Executable
from flexinfer.engines.vram import VramWatch, state_directory
from flexinfer.serving.args import ModelArgs, ModelSettings, NoticeData
from flexinfer.serving.fit import check_memory
from flexinfer.serving.lease import LeaseListener
from flexinfer.serving.status import EngineAddress, ReplicaState, ReplicaStatus

LOG_DIR_VARIABLE = "FLEXINFER_LOG_DIR"
_PORT_ATTEMPTS = 5
# An engine that dies within a minute of becoming ready, three times running, is not started again.
_QUICK_DEATH_S = 60.0
_QUICK_DEATHS = 3
_RELEASE_SLACK_S = 5.0

_log = logging.getLogger(__name__)


class ModelServer:
    """One engine, from its start to its end. `args` are `ModelArgs` as plain data."""

    # Serve awaits constructors and destructors that are coroutines; Python's typing knows none.
    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]
        self._args = ModelArgs.model_validate(args)
        self._settings = ModelSettings()
        self._configured = asyncio.Event()
        self._spec = _engine_spec(self._args)
        self._devices = assign(_assigned_gpus(), count_gpus())
        self._log_file = log_path(log_directory(), self._args.namespace, self._args.name)
        # Serve turns sys.stdout into a log that it writes in lots of a thousand lines.
        self._engine_log = EngineLog(self._args.name, self._log_file, stream=sys.__stdout__)
        self._engine: Engine | None = None
        self._status = ReplicaStatus(
            state=ReplicaState.STARTING, pid=os.getpid(), log_file=str(self._log_file)
        )
        self._draining = False
        self._stopped: asyncio.Task[None] | None = None
        self._listener = LeaseListener(ray.util.get_node_ip_address(), self._status)
        self._address = await self._listener.start()
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

    # -- what Serve asks

    def record_replica_metadata(self) -> dict[str, Any]:
        """What gateways need in order to take a lease; Serve hands it to their request routers."""
        host, port = self._address
        return {
            "host": host,
            "port": port,
            "key": self._listener.key,
            "node": ray.get_runtime_context().get_node_id(),
        }

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take over live settings: `ModelSettings` as plain data."""
        self._settings = ModelSettings.model_validate(user_config)
        self._configured.set()

    async def check_health(self) -> None:
        """Raise if this replica cannot look after its engine any more.

        A failed engine is not a sick replica: it is reported to the gateways, which decide when to
        try again; Ray would try at once and for ever.
        """
        if self._supervisor.done() and not self._draining:
            error = None if self._supervisor.cancelled() else self._supervisor.exception()
            if error is not None:
                raise RuntimeError(f"the engine's supervisor ended: {error!r}")

    async def ping(self) -> int:
        """This process's id: a call that proves the replica reachable."""
        return os.getpid()

    async def __del__(self) -> None:
        """Serve's last call: let running requests end, then stop the engine."""
        if not hasattr(self, "_supervisor"):
            return
        if self._stopped is None:
            self._stopped = asyncio.get_running_loop().create_task(self._shut_down())
        await asyncio.shield(self._stopped)

    # -- the engine's life

    async def _supervise(self) -> None:
        # Serve hands over the settings after the constructor; the first start is bound by them too.
        await self._configured.wait()
        quick_deaths = 0
        while not self._draining:
            self._publish(ReplicaState.STARTING)
            try:
                engine = await self._start()
            except (EngineError, CacheError) as error:
                self._fail(error)
                return
            except Exception as error:
                # A fault of ours, but the user's model does not start: both have to be seen.
                _log.exception("%s: the start failed unexpectedly", self._args.name)
                self._fail(EngineStartError(f"a fault in FlexInfer: {error!r}"))
                return
            ready_at = time.monotonic()
            reason = await self._watch(engine)
            self._publish(ReplicaState.STARTING, f"the engine is started again: {reason}")
            _log.warning("%s: %s; starting it again", self._args.name, reason)
            await engine.stop()
            quick = time.monotonic() - ready_at < _QUICK_DEATH_S
            quick_deaths = quick_deaths + 1 if quick else 0
            if quick_deaths >= _QUICK_DEATHS:
                self._fail(EngineStartError(f"it ended {quick_deaths} times in a row: {reason}"))
                return

    async def _start(self) -> Engine:
        """Start an engine and publish it. Raises `EngineError` or `CacheError`."""
        backend = backend_for(self._args.backend)
        weights, spec = await asyncio.to_thread(_resolve, self._args, self._spec)
        executable = await asyncio.to_thread(backend.find_executable, os.environ)
        weights = await backend.prepare(
            spec, weights, executable, os.environ, self._report_progress
        )
        self._publish(ReplicaState.STARTING)
        limit = self._settings.cold_start_timeout_s
        deadline = time.monotonic() + limit
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            try:
                return await self._start_once(backend, spec, weights, executable, deadline)
            except EnginePortTaken:
                if attempt == _PORT_ATTEMPTS:
                    raise
            except EngineStartTimeout as error:
                reason = f"not ready within {limit:g} s (coldStartTimeoutSeconds)"
                raise EngineStartTimeout(reason, log_tail=error.log_tail) from None
        raise AssertionError("the loop above returns or raises")

    async def _start_once(
        self,
        backend: Backend,
        spec: EngineSpec,
        weights: Path,
        executable: Executable,
        deadline: float,
    ) -> Engine:
        """Start an engine on some port. Raises `EngineError`."""
        plan = await asyncio.to_thread(
            backend.plan, spec, weights, self._devices, free_port(), executable, os.environ
        )
        notices = list(plan.warnings)

        def admit() -> None:
            notices.extend(check_memory(spec, weights, self._devices, self._settings.vram_check))

        engine = self._engine = Engine(
            backend,
            spec,
            plan,
            self._engine_log,
            vram=VramWatch(self._devices.gpus, state=state_directory(os.environ)),
            admit=admit,
        )
        await engine.start(max(0.1, deadline - time.monotonic()))
        if engine.vram_missing is not None:
            message = f"memory of the last engine is missing: {engine.vram_missing}"
            notices.append(spec.notice("MemoryMissing", message))
        self._publish_ready(backend, weights, engine, notices)
        return engine

    async def _watch(self, engine: Engine) -> str:
        """Return why the engine, which was ready, has to be replaced."""
        health = self._settings.health
        await asyncio.wait([engine.exited], timeout=health.initial_delay_s)
        failures = 0
        while True:
            health = self._settings.health
            try:
                await engine.check(health.timeout_s)
                failures = 0
            except EngineExited as error:
                return str(error)
            except EngineError as error:
                failures += 1
                if failures >= health.failure_threshold:
                    return f"{failures} health checks failed: {error}"
            await asyncio.wait([engine.exited], timeout=health.period_s)

    async def _shut_down(self) -> None:
        self._draining = True
        self._publish(ReplicaState.DRAINING, engine=self._status.engine)
        patience = self._settings.drain_timeout_s + _RELEASE_SLACK_S
        try:
            if not await self._listener.wait_released(patience):
                _log.warning(
                    "%s: gateways still hold %d leases", self._args.name, self._listener.leases
                )
        finally:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            try:
                if self._engine is not None:
                    await self._engine.stop()
            finally:
                await self._listener.close()
                self._engine_log.close()

    # -- what gateways see

    def _publish(
        self,
        state: ReplicaState,
        message: str = "",
        *,
        engine: EngineAddress | None = None,
        log_tail: list[str] | None = None,
        **changes: Any,
    ) -> None:
        if self._draining and state is not ReplicaState.DRAINING:
            return
        changes = {
            "fetching": False,
            **changes,
            "state": state,
            "message": message,
            "engine": engine,
            "log_tail": log_tail or [],
            "engine_pid": self._engine.pid if self._engine is not None else None,
        }
        self._status = self._status.model_copy(update=changes)
        self._listener.publish(self._status)

    def _report_progress(self, message: str) -> None:
        self._publish(ReplicaState.STARTING, message, fetching=True)

    def _publish_ready(
        self, backend: Backend, weights: Path, engine: Engine, notices: Sequence[Notice]
    ) -> None:
        address = EngineAddress(
            host=engine.plan.host,
            port=engine.plan.port,
            request_model=backend.request_model(self._spec, weights),
            drop_headers=sorted(backend.requests.drop_headers),
            drop_fields=sorted(backend.requests.drop_fields),
            rename_fields=dict(backend.requests.rename_fields),
            parallel=backend.parallel(self._spec),
        )
        for notice in notices:
            self._engine_log.note(f"warning: {notice.message}")
        self._publish(
            ReplicaState.SERVING,
            engine=address,
            warnings=[_notice_data(notice) for notice in notices],
            start_s=engine.started_in_s,
        )

    def _fail(self, error: EngineError | CacheError) -> None:
        tail = error.log_tail if isinstance(error, EngineStartError) else []
        self._engine_log.note(f"failed: {error}")
        _log.error("%s failed: %s", self._args.name, error)
        self._publish(ReplicaState.FAILED, str(error), log_tail=list(tail))


def log_directory() -> Path:
    """Where engines' logs go: FLEXINFER_LOG_DIR, else the user's own log directory."""
    named = os.environ.get(LOG_DIR_VARIABLE)
    return Path(named) if named else platformdirs.user_log_path("flexinfer")


def _assigned_gpus() -> tuple[int, ...]:
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return tuple(int(index) for index in ids)


def _engine_spec(args: ModelArgs) -> EngineSpec:
    block = BLOCK_TYPES[args.backend].model_validate(args.block)
    return EngineSpec(
        name=args.name,
        namespace=args.namespace,
        backend=args.backend,
        block=block,
        env=dict(block.env),
        gpus=args.gpus,
    )


def _resolve(args: ModelArgs, spec: EngineSpec) -> tuple[Path, EngineSpec]:
    """Where the weights are, and the engine's settings with their paths as they are here.

    Raises `CacheError`.
    """
    caches = [
        ModelCache.model_validate(
            {"metadata": {"name": cache.name, "namespace": args.namespace}, "spec": cache.spec}
        )
        for cache in args.caches
    ]
    found = locate(
        args.model,
        namespace=args.namespace,
        cache_ref=args.cache,
        caches=caches,
        claims={name: Path(path) for name, path in args.claims.items()},
        roots=[Path(root) for root in args.roots],
        backend=args.backend,
        engine_env=spec.env,
    )
    block = resolve_block(spec.block, found, found.claim)
    return found.path, dataclasses.replace(spec, block=block)


def _notice_data(notice: Notice) -> NoticeData:
    return NoticeData(reason=notice.reason, message=notice.message, field=notice.field)
