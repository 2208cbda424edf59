"""A replica's side of a lease: its status to gateways, and bytes from other nodes to its engine.

A gateway connects, sends ``FLEXINFER-LEASE <key>\\n`` and then gets one line of JSON, a
`ReplicaStatus`, at once and at every change. The connection is the lease: while it is open the
gateway may have requests running here. Either side's end is seen by the other at once.

Any other connection has to be HTTP whose first request carries the key in a header; it is then
joined to the engine, unparsed. This is how a gateway on another node reaches an engine, which
listens on loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket

from flexinfer.serving.status import ReplicaStatus

LEASE_WORD = b"FLEXINFER-LEASE "
KEY_HEADER = "X-Flexinfer-Key"
UNREACHED_HEADER = "X-Flexinfer-Unreached"
"""In an answer of the listener itself: no byte of the request has reached an engine."""
_HELLO_S = 10.0
_MAX_HEAD = 64 << 10
_CHUNK = 64 << 10

# A node that vanishes says nothing: its leases end when this many probes were not answered.
_PROBE_AFTER_S = 5
_PROBES = 3

_log = logging.getLogger(__name__)


def notice_vanishing(writer: asyncio.StreamWriter) -> None:
    """Have the kernel find out, within some 20 s, that the other side's node is gone."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


class LeaseListener:
    """Listens for gateways. Lives in one event loop; `close` ends all that it started."""

    def __init__(self, host: str, status: ReplicaStatus) -> None:
        self.key = secrets.token_urlsafe(24)
        self._host = host
        self._status = status
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._leases: set[asyncio.StreamWriter] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    async def start(self) -> tuple[str, int]:
        """Listen on a free port; returns (host, port). Raises OSError."""
        self._server = await asyncio.start_server(self._accept, self._host, 0, limit=_MAX_HEAD)
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    def publish(self, status: ReplicaStatus) -> None:
        """Tell every gateway; new ones get it first."""
        self._status = status
        line = status.model_dump_json().encode() + b"\n"
        for writer in self._leases:
            writer.write(line)

    @property
    def leases(self) -> int:
        return len(self._leases)

    async def wait_released(self, timeout_s: float) -> bool:
        """Wait until no gateway holds a lease; False if some still do after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End all connections and stop listening; safe to call twice."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        notice_vanishing(writer)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            # By `close`, which is the end of this task. What a client has not read yet is given up:
            # it may never read it.
            writer.transport.abort()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _log.debug("a connection ended early", exc_info=True)
        finally:
            self._tasks.discard(task)
            writer.close()
            # It is closed already where the other side went first.
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HELLO_S):
            head = await reader.readuntil(b"\n")
            lease = head.startswith(LEASE_WORD)
            if not lease:
                head += await reader.readuntil(b"\r\n\r\n")
        if lease:
            given = head[len(LEASE_WORD) :].strip()
            if hmac.compare_digest(given, self.key.encode()):
                await self._hold(reader, writer)
        elif self._allowed(head):
            await self._splice(head, reader, writer)
        else:
            await _refuse(writer, b"403 Forbidden")

    def _allowed(self, head: bytes) -> bool:
        name = KEY_HEADER.lower().encode()
        for line in head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name:
                return hmac.compare_digest(value.strip(), self.key.encode())
        return False

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._leases.add(writer)
        self._empty.clear()
        try:
            writer.write(self._status.model_dump_json().encode() + b"\n")
            await writer.drain()
            while await reader.read(_CHUNK):
                pass  # a gateway has nothing to say; its end is the end of the lease
        finally:
            self._leases.discard(writer)
            if not self._leases:
                self._empty.set()

    async def _splice(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        engine = self._status.engine
        try:
            if engine is None:
                raise ConnectionError("there is no engine now")
            engine_reader, engine_writer = await asyncio.open_connection(engine.host, engine.port)
        except OSError as error:
            _log.debug("a request did not reach the engine: %s", error)
            await _refuse(
                writer, b"503 Service Unavailable", UNREACHED_HEADER.encode() + b": 1\r\n"
            )
            return
        try:
            engine_writer.write(head)
            up = asyncio.ensure_future(_pump(reader, engine_writer))
            down = asyncio.ensure_future(_pump(engine_reader, writer))
            try:
                # Either side's end ends both: an engine works on only while somebody listens.
                await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in (up, down):
                    pump.cancel()
                await asyncio.gather(up, down, return_exceptions=True)
        finally:
            # Nobody is left to talk to; a hanging engine would never take what was not sent yet.
            engine_writer.transport.abort()


async def _refuse(writer: asyncio.StreamWriter, status: bytes, headers: bytes = b"") -> None:
    end = b"content-length: 0\r\nconnection: close\r\n\r\n"
    writer.write(b"HTTP/1.1 " + status + b"\r\n" + headers + end)
    await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
