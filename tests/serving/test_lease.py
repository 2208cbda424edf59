"""Leases over real sockets: who learns what, who gets through, and what ends with what."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from serving_helpers import replica_status, until

from flexinfer.serving.lease import KEY_HEADER, LEASE_WORD, LeaseListener, notice_vanishing
from flexinfer.serving.link import Link
from flexinfer.serving.status import ReplicaState, ReplicaStatus

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

STARTING = replica_status(ReplicaState.STARTING)


@pytest_asyncio.fixture
async def listener() -> AsyncIterator[LeaseListener]:
    listener = LeaseListener("127.0.0.1", STARTING)
    yield listener
    await asyncio.wait_for(listener.close(), 10)


class Holder:
    """A gateway's end of a lease, with all that it was told."""

    def __init__(self, address: tuple[str, int], key: str) -> None:
        self.heard: list[ReplicaStatus] = []
        self.losses = 0
        self.link = Link(address, key, self.heard.append, self._lost)
        self.link.start()

    def _lost(self) -> None:
        self.losses += 1


@contextlib.asynccontextmanager
async def engine(client: Client) -> AsyncIterator[int]:
    """A TCP server on loopback in the place of an engine; yields its port."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await client(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def head(key: str, *, length: int = 0, path: str = "/") -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "host: x",
        f"{KEY_HEADER}: {key}",
        f"content-length: {length}",
    )
    return "\r\n".join((*lines, "", "")).encode()


# -- the lease


async def test_a_holder_learns_the_state_at_once_and_at_every_change(
    listener: LeaseListener,
) -> None:
    holder = Holder(await listener.start(), listener.key)
    await until(lambda: holder.heard == [STARTING])
    serving = replica_status(ReplicaState.SERVING, message="a\nb", warnings=[])
    listener.publish(serving)
    await until(lambda: holder.heard == [STARTING, serving])
    assert listener.leases == 1
    await holder.link.close()
    assert holder.losses == 1


async def test_who_comes_late_learns_the_last_state_first(listener: LeaseListener) -> None:
    address = await listener.start()
    listener.publish(replica_status(ReplicaState.SERVING))
    holder = Holder(address, listener.key)
    await until(lambda: holder.heard)
    assert holder.heard[0].state is ReplicaState.SERVING
    await holder.link.close()


async def test_the_replica_can_wait_until_all_leases_are_given_back(
    listener: LeaseListener,
) -> None:
    address = await listener.start()
    one, two = Holder(address, listener.key), Holder(address, listener.key)
    await until(lambda: listener.leases == 2)
    released = asyncio.create_task(listener.wait_released(30))
    one.link.release()
    await until(lambda: listener.leases == 1)
    assert not released.done()
    two.link.release()
    assert await asyncio.wait_for(released, 10) is True


async def test_a_lease_that_is_not_given_back_is_told(listener: LeaseListener) -> None:
    holder = Holder(await listener.start(), listener.key)
    await until(lambda: listener.leases == 1)
    assert await listener.wait_released(0.01) is False
    await holder.link.close()


async def test_the_end_of_the_replica_is_the_end_of_the_lease(listener: LeaseListener) -> None:
    holder = Holder(await listener.start(), listener.key)
    await until(lambda: holder.heard)
    await listener.close()
    await until(lambda: holder.losses == 1)
    await holder.link.close()
    assert holder.losses == 1


@pytest.mark.parametrize("key", ["wrong", "w\xf6rng", ""])
async def test_a_wrong_key_is_told_nothing(listener: LeaseListener, key: str) -> None:
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    reader, writer = await asyncio.open_connection(*await listener.start())
    writer.write(LEASE_WORD + key.encode() + b"\n")
    assert await asyncio.wait_for(reader.read(), 10) == b""
    assert listener.leases == 0
    assert failures == []
    writer.close()


async def test_a_link_to_nobody_is_lost_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        holder = Holder(unused.getsockname(), "key")
        await until(lambda: holder.losses)
        await holder.link.close()
    assert holder.losses == 1


async def test_a_link_that_is_given_back_before_it_began_is_lost_too(
    listener: LeaseListener,
) -> None:
    holder = Holder(await listener.start(), listener.key)
    holder.link.release()  # its task has not run yet
    await until(lambda: holder.losses == 1)


@pytest.mark.parametrize("line", [b"not json\n", b"{}\n", b"x" * (2 << 20)])
async def test_a_replica_that_talks_nonsense_is_lost(line: bytes) -> None:
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(line)
        await writer.drain()
        await reader.read()

    async with engine(talk) as port:
        holder = Holder(("127.0.0.1", port), "key")
        await until(lambda: holder.losses == 1)
        await holder.link.close()
    assert failures == []


async def test_a_node_that_vanishes_without_a_word_is_found_out_by_the_kernel() -> None:
    async with engine(echo) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        notice_vanishing(writer)
        sock = writer.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 10
        writer.close()


# -- bytes to the engine


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def joined(
    listener: LeaseListener, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the listener of a replica whose engine is at `port`."""
    address = await listener.start()
    listener.publish(replica_status(ReplicaState.SERVING, port=port))
    return await asyncio.open_connection(*address)


async def test_bytes_pass_unchanged_in_both_directions(listener: LeaseListener) -> None:
    body = bytes(range(256)) * 4 * (10 << 10)  # 10 MB, more than all buffers together
    sent = head(listener.key, length=len(body)) + body
    async with engine(echo) as port:
        reader, writer = await joined(listener, port)

        async def send() -> None:
            writer.write(sent)
            await writer.drain()

        sending = asyncio.create_task(send())
        assert await asyncio.wait_for(reader.readexactly(len(sent)), 20) == sent
        await sending
        writer.close()


async def test_a_stream_passes_piece_by_piece(listener: LeaseListener) -> None:
    async with engine(echo) as port:
        reader, writer = await joined(listener, port)
        first = head(listener.key)
        writer.write(first)
        assert await asyncio.wait_for(reader.readexactly(len(first)), 10) == first
        for piece in (b"one", b"two"):
            writer.write(piece)
            assert await asyncio.wait_for(reader.readexactly(3), 10) == piece
        writer.close()


async def test_the_client_leaving_ends_the_engines_connection(listener: LeaseListener) -> None:
    ended = asyncio.Event()

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read()
        ended.set()

    async with engine(watch) as port:
        _, writer = await joined(listener, port)
        writer.write(head(listener.key))
        await writer.drain()
        writer.close()
        await asyncio.wait_for(ended.wait(), 10)


async def test_the_engine_leaving_ends_the_clients_connection(listener: LeaseListener) -> None:
    async def last_words(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"last words")
        await writer.drain()

    async with engine(last_words) as port:
        reader, writer = await joined(listener, port)
        writer.write(head(listener.key))
        assert await asyncio.wait_for(reader.read(), 10) == b"last words"
        writer.close()


@pytest.mark.parametrize("key", ["wrong", "", "w\xf6rng"])
async def test_http_with_a_wrong_key_does_not_reach_the_engine(
    listener: LeaseListener, key: str
) -> None:
    reached = asyncio.Event()

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()

    async with engine(note) as port:
        reader, writer = await joined(listener, port)
        writer.write(head(key))
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 403 ")
        writer.close()
    assert not reached.is_set()


async def test_http_while_there_is_no_engine_is_refused(listener: LeaseListener) -> None:
    reader, writer = await asyncio.open_connection(*await listener.start())
    writer.write(head(listener.key))
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 503 ")
    writer.close()


async def test_a_head_without_end_is_cut_off(listener: LeaseListener) -> None:
    reader, writer = await asyncio.open_connection(*await listener.start())
    writer.write(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * (64 << 10))
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_closing_ends_leases_and_streams_alike(listener: LeaseListener) -> None:
    async with engine(echo) as port:
        reader, writer = await joined(listener, port)
        first = head(listener.key)
        writer.write(first)
        await reader.readexactly(len(first))
        await asyncio.wait_for(listener.close(), 10)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_closing_waits_for_no_client_that_reads_nothing(listener: LeaseListener) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()

    async with engine(flood) as port:
        address = await listener.start()
        listener.publish(replica_status(ReplicaState.SERVING, port=port))
        with socket.create_connection(address) as deaf:
            deaf.sendall(head(listener.key))
            stuck = await _until_stuck(deaf)
            assert stuck > 0
            await asyncio.wait_for(listener.close(), 10)


async def _until_stuck(deaf: socket.socket) -> int:
    """Wait until the bytes that lie unread at a socket become no more; returns how many."""
    import fcntl
    import struct
    import termios

    last, same = -1, 0
    while same < 5:
        await asyncio.sleep(0.02)
        answer = fcntl.ioctl(deaf, termios.FIONREAD, bytes(4))
        waiting = struct.unpack("i", answer)[0]
        same = same + 1 if waiting == last and waiting else 0
        last = waiting
    return last
