"""The HTTP side of a gateway in this process: ingress, queues and forwarding, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import httpx
import uvicorn
from aiohttp import web
from serving_helpers import add_replica, gateway_model, replica_status, until
from uvicorn.server import ServerState

from flexinfer.engines.ports import free_port
from flexinfer.serving.args import GatewayArgs
from flexinfer.serving.backlog import Backlog
from flexinfer.serving.ingress import Ingress
from flexinfer.serving.metrics import GatewayMetrics
from flexinfer.serving.slots import Replica
from flexinfer.serving.status import ReplicaState

FIXED_RATE_ENGINE = Path(__file__).parents[1] / "fakes" / "fixed_rate_engine.py"
CHAT = "/v1/chat/completions"


class Stack:
    """What `Ingress` needs of a gateway, served by uvicorn on loopback."""

    def __init__(self, **args: Any) -> None:
        self.args = GatewayArgs(**args)
        self.metrics = GatewayMetrics()
        self.backlogs: dict[str, Backlog] = {}
        self.names: dict[str, Backlog] = {}
        self.notices: tuple[Any, ...] = ()
        self.nowhere: str | None = None
        """Why no model can run; None: they can."""
        self.port = 0
        self.app: Any = None

    def never(self, backlog: Backlog) -> str | None:
        return self.nowhere

    def describe(self) -> list[dict[str, Any]]:
        return [{"name": name, "state": b.describe()[0]} for name, b in self.backlogs.items()]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def model(self, name: str = "m", *, aliases: tuple[str, ...] = (), **changes: Any) -> Backlog:
        """A model without a replica."""
        config = gateway_model(name, names=[name, *aliases], **changes)
        backlog = self.backlogs[name] = Backlog(config)
        self.names |= dict.fromkeys(config.names, backlog)
        return backlog

    def served(self, port: int, name: str = "m", **changes: Any) -> Backlog:
        """A model whose engine is at `port`, and calls itself `engine`."""
        backlog = self.model(name, **changes)
        add_replica(backlog, port=port, parallel=4)
        return backlog

    def places(self) -> float:
        """How often a request was given a place at an engine."""
        return sum(
            sample.value
            for metric in self.metrics.waiting.collect()
            for sample in metric.samples
            if sample.name.endswith("_count")
        )

    async def until_ended(self, name: str = "m", **counts: int) -> None:
        """Wait until so many requests for a model have ended so; a client learns of it before."""
        await until(lambda: self.ended(name) == counts, f"{counts}, not {self.ended(name)}")

    def ended(self, name: str = "m") -> dict[str, float]:
        """How many requests for a model ended how."""
        return {
            sample.labels["status"]: sample.value
            for metric in self.metrics.requests.collect()
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.labels["model"] == name
        }


@contextlib.asynccontextmanager
async def running(stack: Stack, key: str | None = None) -> AsyncIterator[Stack]:
    """Serve the stack. At the end no request may be left in any queue or at any engine."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
        auto_decompress=False,
    ) as stack.client:
        stack.app = Ingress(cast(Any, stack), key)
        config = uvicorn.Config(cast(Any, stack.app), log_config=None, lifespan="off")
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        # Not `uvicorn.Server`, which takes over signals and looks only ten times a second whether
        # it is to end.
        listening = await loop.create_server(
            lambda: config.http_protocol_class(config, state, {}),  # type: ignore[call-arg]
            "127.0.0.1",
            0,
        )
        stack.port = listening.sockets[0].getsockname()[1]
        try:
            yield stack
            for name, backlog in stack.backlogs.items():
                await until(lambda b=backlog: not (b.queued or b.running), f"a leak of {name}")
            await until(lambda: not state.tasks, "a request without end")
        finally:
            listening.close()
            for task in state.tasks:
                task.cancel()
            await asyncio.gather(*state.tasks, return_exceptions=True)
            for connection in list(state.connections):
                connection.shutdown()


@contextlib.asynccontextmanager
async def http(stack: Stack, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    # No TLS here: reading the authorities' certificates would take longer than most tests.
    async with httpx.AsyncClient(
        base_url=stack.url, timeout=30, verify=False, trust_env=False, **options
    ) as client:
        yield client


# -- engines


class FixedRateEngine:
    """`tests/fakes/fixed_rate_engine.py` as a process."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.process = process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    async def stats(self) -> dict[str, int]:
        async with httpx.AsyncClient(verify=False, trust_env=False) as client:
            return dict((await client.get(f"{self.url}/fake/stats")).json())

    async def until_stats(self, **wanted: int) -> None:
        """Wait until the engine counts as many requests as that."""
        for _ in range(500):
            stats = await self.stats()
            if wanted.items() <= stats.items():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"the engine counts {stats}, not {wanted}")


@contextlib.asynccontextmanager
async def fixed_rate(**variables: str) -> AsyncIterator[FixedRateEngine]:
    port = free_port()
    command = [sys.executable, str(FIXED_RATE_ENGINE), "--alias", "engine", "--port", str(port)]
    process = subprocess.Popen(  # noqa: ASYNC220 (nothing else runs here yet)
        command, env={**os.environ, **variables}, stderr=subprocess.DEVNULL
    )
    try:
        await until(lambda: _listens(port), "an engine that listens")
        yield FixedRateEngine(port, process)
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OddEngine:
    """An engine that answers as a test wants, and remembers what it was asked."""

    def __init__(self, handler: Handler) -> None:
        self.port = 0
        self.requests: list[web.Request] = []
        self.bodies: list[bytes] = []
        self._handler = handler

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self.bodies.append(await request.read())
        return await self._handler(request)


@contextlib.asynccontextmanager
async def odd_engine(handler: Handler | None = None, port: int = 0) -> AsyncIterator[OddEngine]:
    engine = OddEngine(handler or repeat)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        engine.port = runner.addresses[0][1]
        yield engine
    finally:
        await runner.cleanup()


async def repeat(request: web.Request) -> web.StreamResponse:
    """Answer with what was asked, and with the model's name."""
    return web.json_response({"path": request.raw_path, "model": "engine"})


def answering(body: bytes, **options: Any) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, **options)

    return handler


def streaming(*pieces: bytes, abort: bool = False, **headers: str) -> Handler:
    """Send `pieces` as an event stream; `abort`: then break the connection."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **headers})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if abort:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handler


# -- cold starts


def starting(backlog: Backlog, name: str = "r1") -> Replica:
    return add_replica(backlog, ReplicaState.STARTING, name=name)


def comes_up(backlog: Backlog, replica: Replica, port: int) -> None:
    backlog.update(replica, replica_status(ReplicaState.SERVING, port=port, parallel=4))


def fails(backlog: Backlog, replica: Replica, message: str = "no such file") -> None:
    backlog.update(replica, replica_status(ReplicaState.FAILED, message=message))


# -- event streams


def events(body: bytes) -> Iterator[Any]:
    """The data of an event stream's events, parsed; comments are left out."""
    for block in body.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        data = "\n".join(line.removeprefix("data: ") for line in lines if line.startswith("data"))
        if data:
            yield data if data == "[DONE]" else json.loads(data)


def chat(model: str = "m", **changes: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **changes}
