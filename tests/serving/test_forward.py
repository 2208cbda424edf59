"""What reaches an engine, what comes back, and what happens when either side leaves."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import aiohttp
import httpx
import pytest
import pytest_asyncio
from aiohttp import web
from serving_helpers import add_replica, replica_status, settle, until
from serving_stack import (
    CHAT,
    FixedRateEngine,
    Stack,
    answering,
    chat,
    events,
    fixed_rate,
    http,
    odd_engine,
    running,
    streaming,
)

from flexinfer.engines.ports import free_port
from flexinfer.serving.lease import KEY_HEADER, LeaseListener
from flexinfer.serving.link import Link
from flexinfer.serving.slots import Replica
from flexinfer.serving.status import ReplicaState

CHUNK = b'data: {"model":"engine","choices":[{"delta":{"content":"\\"model\\":\\"engine\\""}}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running(Stack()) as stack:
        yield stack


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with http(stack) as client:
        yield client


@pytest_asyncio.fixture
async def fast() -> AsyncIterator[FixedRateEngine]:
    async with fixed_rate(FAKE_TOKENS_PER_S="0") as engine:
        yield engine


@pytest_asyncio.fixture
async def slow() -> AsyncIterator[FixedRateEngine]:
    """An engine whose streams take a minute."""
    async with fixed_rate(FAKE_TOKENS_PER_S="20", FAKE_MAX_TOKENS="1200") as engine:
        yield engine


# -- answers


async def test_a_whole_answer(stack: Stack, client: Any, fast: FixedRateEngine) -> None:
    stack.served(fast.port)
    answer = await client.post(CHAT, json=chat(max_tokens=3))
    assert answer.status_code == 200
    assert answer.json()["model"] == "m"
    assert answer.json()["choices"][0]["message"]["content"] == "t0 t1 t2 "
    await stack.until_ended(success=1)


async def test_a_streamed_answer(stack: Stack, client: Any, fast: FixedRateEngine) -> None:
    stack.served(fast.port)
    answer = await client.post(CHAT, json=chat(stream=True, max_tokens=3))
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = list(events(answer.content))
    assert [e["choices"][0]["delta"].get("content") for e in found[:3]] == ["t0 ", "t1 ", "t2 "]
    assert {event["model"] for event in found[:-1]} == {"m"}
    assert found[-1] == "[DONE]"
    await stack.until_ended(success=1)


async def test_a_stream_comes_as_it_is_made(
    stack: Stack, client: Any, slow: FixedRateEngine
) -> None:
    stack.served(slow.port)
    async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
        async for line in answer.aiter_lines():
            if line:
                assert json.loads(line.removeprefix("data: "))["choices"]
                break  # a minute before the end


async def test_generated_text_is_not_renamed(stack: Stack, client: Any) -> None:
    pieces = (CHUNK[:20], CHUNK[20:50], CHUNK[50:] + DONE)
    async with odd_engine(streaming(*pieces)) as engine:
        stack.served(engine.port)
        answer = await client.post(CHAT, json=chat(stream=True))
    assert next(events(answer.content)) == {
        "model": "m",
        "choices": [{"delta": {"content": '"model":"engine"'}}],
    }


async def test_bytes_that_are_no_text_pass_unchanged(stack: Stack, client: Any) -> None:
    audio = bytes(range(256)) * 5000 + b'"model":"engine"'
    async with odd_engine(answering(audio, content_type="audio/wav")) as engine:
        stack.served(engine.port)
        answer = await client.post("/v1/audio/speech", json=chat())
    assert answer.content == audio
    assert answer.headers["content-type"] == "audio/wav"
    assert answer.headers["content-length"] == str(len(audio))


async def test_a_compressed_answer_stays_readable(stack: Stack, client: Any) -> None:
    handler = answering(
        gzip.compress(b'{"x": 1}'),
        content_type="application/json",
        headers={"content-encoding": "gzip"},
    )
    async with odd_engine(handler) as engine:
        stack.served(engine.port)
        assert (await client.post(CHAT, json=chat())).json() == {"x": 1}


async def test_an_answer_without_content_is_one(stack: Stack, client: Any) -> None:
    async with odd_engine(answering(b"", status=204)) as engine:
        stack.served(engine.port)
        assert (await client.delete("/models/m/v1/responses/1")).status_code == 204


async def test_a_body_that_names_the_engines_model_already_is_passed_as_it_is(
    stack: Stack, client: Any
) -> None:
    body = b'{ "model" : "engine", "x": 1.0e2 }'
    async with odd_engine() as engine:
        stack.served(engine.port, "engine")
        await client.post(CHAT, content=body)
    assert engine.bodies == [body]


# -- headers


async def test_headers_of_the_connection_and_of_the_client_stay_behind(
    stack: Stack, client: Any
) -> None:
    sent = {
        "authorization": "Bearer secret",
        "x-api-key": "secret",
        "x-conversation-id": "c1",
        "connection": "keep-alive, x-only-here",
        "x-only-here": "1",
        "keep-alive": "timeout=5",
        "te": "trailers",
        "proxy-authorization": "secret",
        "upgrade": "h2c",
        KEY_HEADER: "stolen",
        "x-request-id": "r1",
        "x-other": "2",
        "accept-encoding": "gzip, br",
    }
    async with odd_engine() as engine:
        stack.served(engine.port)
        assert (await client.post(CHAT, json=chat(), headers=sent)).status_code == 200
    seen = {name.lower(): value for name, value in engine.requests[0].headers.items()}
    assert {name: seen.pop(name) for name in ("x-request-id", "x-other", "accept-encoding")} == {
        "x-request-id": "r1",
        "x-other": "2",
        "accept-encoding": "identity",
    }
    assert seen.pop("host") == f"127.0.0.1:{engine.port}"
    assert not {name.lower() for name in sent} & set(seen) - {"connection"}
    assert "x-only-here" not in seen.get("connection", "")
    assert "secret" not in str(seen)


async def test_an_engine_can_want_headers_dropped(stack: Stack, client: Any) -> None:
    async with odd_engine() as engine:
        backlog = stack.model()
        replica = add_replica(backlog, None)
        status = replica_status(ReplicaState.SERVING, port=engine.port)
        assert status.engine is not None
        address = status.engine.model_copy(update={"drop_headers": ["X-Quirk"]})
        backlog.update(replica, status.model_copy(update={"engine": address}))
        await client.post(CHAT, json=chat(), headers={"x-quirk": "1"})
    assert "x-quirk" not in engine.requests[0].headers


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"detail":"Not Found"}', "model m does not serve /v1/chat/completions"),
        (b"404 page not found", "model m does not serve /v1/chat/completions"),
        (b'{"error":{"message":"no such adapter"}}', "no such adapter"),
        (b'"{\\"object\\":\\"error\\",\\"message\\":\\"no such id\\"}"', "no such id"),
    ],
)
async def test_a_path_that_the_engine_does_not_have_is_named(
    stack: Stack, client: Any, body: bytes, message: str
) -> None:
    async with odd_engine(answering(body, status=404)) as engine:
        stack.served(engine.port)
        answer = await client.post(CHAT, json=chat())
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == message


async def test_a_request_is_not_lost_with_an_engine_that_it_was_not_sent_to(
    stack: Stack, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled, told = asyncio.Event(), asyncio.Event()
    request = aiohttp.ClientSession.request

    class Refused:
        async def __aenter__(self) -> None:
            dialled.set()
            await told.wait()
            raise aiohttp.ClientConnectorError(Mock(), ConnectionRefusedError())

        async def __aexit__(self, *_: object) -> None: ...

    def dial(*args: Any, **options: Any) -> Any:
        return request(*args, **options) if told.is_set() else Refused()

    monkeypatch.setattr(aiohttp.ClientSession, "request", dial)
    async with odd_engine(answering(b"{}", content_type="application/json")) as engine:
        backlog = stack.served(engine.port)
        (replica,) = backlog.replicas.values()
        asking = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await dialled.wait()
        backlog.update(replica, replica_status(ReplicaState.STARTING))
        await settle()
        told.set()
        await settle()
        backlog.update(replica, replica_status(ReplicaState.SERVING, port=engine.port))
        assert (await asking).status_code == 200
        assert len(engine.requests) == 1


async def test_an_engine_can_want_fields_dropped_and_renamed(stack: Stack, client: Any) -> None:
    async with odd_engine() as engine:
        backlog = stack.model()
        replica = add_replica(backlog, None)
        status = replica_status(ReplicaState.SERVING, port=engine.port)
        assert status.engine is not None
        rules = {"drop_fields": ["user"], "rename_fields": {"max_completion_tokens": "max_tokens"}}
        address = status.engine.model_copy(update=rules)
        backlog.update(replica, status.model_copy(update={"engine": address}))
        await client.post(CHAT, json=chat(user="u", max_completion_tokens=7))
        await client.post(CHAT, json=chat(max_completion_tokens=7, max_tokens=8))
        await client.post(CHAT, json=chat(max_completion_tokens=7, max_tokens=None))
    bodies = [json.loads(body) for body in engine.bodies]
    assert [body["max_tokens"] for body in bodies] == [7, 8, 7]
    for body in bodies:
        assert not {"user", "max_completion_tokens"} & body.keys()


async def test_headers_of_an_answer(stack: Stack, client: Any) -> None:
    headers = {
        "x-timing": "7",
        "server": "engine",
        "access-control-allow-origin": "*",
        "x-request-id": "of the engine",
        "keep-alive": "timeout=5",
        "set-cookie": "a=b",
    }
    async with odd_engine(answering(b"{}", content_type="application/json", headers=headers)) as e:
        stack.served(e.port)
        answer = await client.post(CHAT, json=chat())
        await client.post(CHAT, json=chat())
    assert answer.headers["x-timing"] == "7"
    assert answer.headers.get("server") != "engine"
    for name in ("access-control-allow-origin", "x-request-id", "keep-alive"):
        assert name not in answer.headers
    # Another client's request has nothing of it.
    async with odd_engine() as other, http(stack) as stranger:
        stack.served(other.port)
        await stranger.post(CHAT, json=chat())
    assert "cookie" not in other.requests[0].headers


# -- errors of engines


async def test_an_engines_error_is_an_openai_error_with_its_headers(
    stack: Stack, client: Any
) -> None:
    handler = answering(b'{"detail": "busy"}', status=429, headers={"retry-after": "7"})
    async with odd_engine(handler) as engine:
        stack.served(engine.port)
        answer = await client.post(CHAT, json=chat())
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "7"
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["message"] == "busy"
    await stack.until_ended(**{"429": 1})


async def test_an_error_that_comes_in_pieces_is_read_whole(stack: Stack, client: Any) -> None:
    body = json.dumps({"error": {"message": "x" * 300_000}}).encode()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=400)
        await response.prepare(request)
        for start in range(0, len(body), 50_000):
            await response.write(body[start : start + 50_000])
            await asyncio.sleep(0.005)
        return response

    async with odd_engine(handler) as engine:
        stack.served(engine.port)
        answer = await client.post(CHAT, json=chat())
    assert answer.json()["error"]["message"] == "x" * 300_000


# -- engines that end


def last_error(body: bytes) -> dict[str, Any]:
    *_, last = events(body)
    assert isinstance(last, dict)
    error: dict[str, Any] = last["error"]
    return error


async def test_an_engine_killed_in_a_stream_ends_it_with_an_error_event(
    stack: Stack, client: Any, slow: FixedRateEngine
) -> None:
    stack.served(slow.port)
    async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
        received = b""
        async for piece in answer.aiter_bytes():
            received += piece
            if received.count(b"data:") == 3:
                slow.kill()
    assert last_error(received)["code"] == "engine_lost"
    assert len(list(events(received))) >= 4  # each of them can be read
    await stack.until_ended(engine_lost=1)


async def test_an_engine_killed_before_it_answers_is_503(
    stack: Stack, client: Any, slow: FixedRateEngine
) -> None:
    stack.served(slow.port)
    asking = asyncio.create_task(client.post(CHAT, json=chat()))
    await slow.until_stats(running=1)
    slow.kill()
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_lost")
    assert answer.headers["retry-after"] == "1"


async def test_a_replica_that_is_lost_ends_its_streams_with_an_error_event(
    stack: Stack, client: Any, slow: FixedRateEngine
) -> None:
    backlog = stack.served(slow.port)
    async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
        received = b""
        async for piece in answer.aiter_bytes():
            received += piece
            for replica in list(backlog.replicas.values()):
                backlog.remove(replica)
    assert last_error(received)["code"] == "engine_lost"
    await slow.until_stats(cancelled=1, running=0)


async def test_a_preempted_stream_ends_with_an_error_event(
    stack: Stack, client: Any, slow: FixedRateEngine
) -> None:
    backlog = stack.served(slow.port, drain_timeout_s=0)
    (replica,) = backlog.replicas.values()
    async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
        received = b""
        async for piece in answer.aiter_bytes():
            received += piece
            if replica.state is ReplicaState.SERVING:
                backlog.update(replica, replica_status(ReplicaState.DRAINING, port=slow.port))
    assert last_error(received)["code"] == "preempted"
    await until(lambda: replica.link.released)  # type: ignore[attr-defined]


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize(
    ("path", "piece"),
    [
        (CHAT, CHUNK),
        ("/v1/completions", CHUNK),
        ("/v1/responses", b"event: response.created\ndata: {}\n\n"),
        ("/v1/messages", b"event: message_start\ndata: {}\n\n"),
    ],
)
async def test_a_stream_that_is_cut_off_never_ends_silently(
    stack: Stack, client: Any, path: str, piece: bytes, abort: bool
) -> None:
    async with odd_engine(streaming(piece, b'data: {"half', abort=abort)) as engine:
        stack.served(engine.port)
        answer = await client.post(path, json=chat(stream=True))
    *_, last = events(answer.content)  # what was cut in half is not among them
    text = json.dumps(last)
    assert "ended under the request" in text
    if path == "/v1/messages":
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    elif path == "/v1/responses":
        assert (last["type"], last["code"]) == ("error", "engine_lost")
    else:
        assert last["error"]["code"] == "engine_lost"
    await stack.until_ended(engine_lost=1)


@pytest.mark.parametrize(
    ("path", "piece"),
    [
        (CHAT, b"data: [DONE]"),
        (CHAT, b'data: {"error": {"message": "of the engine"}}\n\n'),
        ("/v1/responses", b"event: response.completed\ndata: {" + b" " * 10_000 + b"}\n\n"),
        ("/v1/messages", b"event: message_stop\ndata: {}\n\n"),
        ("/v1/audio/transcriptions", b"data: {}\n\n"),
    ],
)
async def test_a_stream_that_is_complete_has_no_error_added(
    stack: Stack, client: Any, path: str, piece: bytes
) -> None:
    async with odd_engine(streaming(CHUNK, piece)) as engine:
        stack.served(engine.port)
        answer = await client.post(path, json=chat(stream=True))
    assert answer.content.endswith(piece)
    await stack.until_ended(success=1)


async def test_an_engine_that_breaks_off_after_the_end_did_end(stack: Stack, client: Any) -> None:
    async with odd_engine(streaming(CHUNK + DONE, abort=True)) as engine:
        stack.served(engine.port)
        answer = await client.post(CHAT, json=chat(stream=True))
    assert answer.content.endswith(DONE)


async def test_bytes_that_are_cut_off_break_the_connection(stack: Stack, client: Any) -> None:
    """There is no other way to say so; a second header would be a lie."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "audio/wav"})
        response.content_length = 1000
        await response.prepare(request)
        await response.write(bytes(10))
        assert request.transport is not None
        request.transport.abort()
        return response

    async with odd_engine(handler) as engine:
        stack.served(engine.port)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/audio/speech", json=chat())
    await stack.until_ended(engine_lost=1)


async def test_an_engine_that_takes_no_connection_is_dialled_again(
    stack: Stack, client: Any
) -> None:
    port = free_port()
    stack.served(port)
    asking = asyncio.create_task(client.post(CHAT, json=chat()))
    await until(lambda: stack.places() > 1)  # the first try has failed
    async with odd_engine(port=port):
        assert (await asking).status_code == 200


async def test_a_place_lost_in_the_moment_of_its_grant_is_asked_for_again(
    stack: Stack, client: Any
) -> None:
    async with odd_engine() as engine:
        backlog = stack.served(free_port(), max_ongoing_requests=1)
        (replica,) = backlog.replicas.values()
        running = await backlog.acquire()
        asking = asyncio.create_task(client.post(CHAT, json=chat()))
        await until(lambda: backlog.queued)
        running.release()
        backlog.remove(replica)
        add_replica(backlog, name="r2", port=engine.port)
        assert (await asking).status_code == 200


# -- clients that leave


async def test_a_client_that_leaves_a_stream_frees_its_place_and_the_engine(
    stack: Stack, client: Any, slow: FixedRateEngine
) -> None:
    backlog = stack.served(slow.port)
    async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
        async for _ in answer.aiter_bytes():
            break
    await until(lambda: backlog.running == 0)
    await slow.until_stats(cancelled=1, running=0)
    await stack.until_ended(client_gone=1)


async def test_a_client_that_leaves_a_whole_answer_frees_its_place_and_the_engine(
    stack: Stack, client: Any, slow: FixedRateEngine
) -> None:
    backlog = stack.served(slow.port)
    asking = asyncio.create_task(client.post(CHAT, json=chat()))
    await slow.until_stats(running=1)
    asking.cancel()
    await until(lambda: backlog.running == 0)
    await slow.until_stats(cancelled=1, running=0)


async def test_a_client_that_leaves_the_queue_is_out_of_it(
    stack: Stack, client: Any, slow: FixedRateEngine
) -> None:
    backlog = stack.served(slow.port, max_ongoing_requests=1)
    first = asyncio.create_task(client.post(CHAT, json=chat()))
    await until(lambda: backlog.running == 1)
    second = asyncio.create_task(client.post(CHAT, json=chat()))
    await until(lambda: backlog.queued == 1)
    second.cancel()
    await until(lambda: backlog.queued == 0)
    assert backlog.running == 1  # others are unaffected
    assert not first.done()
    first.cancel()


async def test_a_client_that_leaves_in_its_body_asks_for_nothing(stack: Stack) -> None:
    async with odd_engine() as engine:
        stack.served(engine.port)
        _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{{".encode())
        await writer.drain()
        writer.close()
        async with http(stack) as client:
            await client.post(CHAT, json=chat())
    assert len(engine.requests) == 1
    await stack.until_ended(success=1)


async def test_a_server_that_cancels_a_request_frees_its_place(
    stack: Stack, slow: FixedRateEngine
) -> None:
    """Serve tells that a client has left by cancelling the request's task."""
    backlog = stack.served(slow.port)
    body = json.dumps(chat(stream=True)).encode()
    messages = [{"type": "http.request", "body": body}]
    got = asyncio.Event()

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            got.set()

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    task = asyncio.create_task(stack.app(scope, receive, send))
    await asyncio.wait_for(got.wait(), 10)
    task.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backlog.running == 0
    assert stack.ended() == {"client_gone": 1}
    await slow.until_stats(cancelled=1)


# -- engines on other nodes


@pytest_asyncio.fixture
async def listener() -> AsyncIterator[LeaseListener]:
    listener = LeaseListener("127.0.0.1", replica_status(ReplicaState.STARTING))
    yield listener
    await listener.close()


async def far(stack: Stack, listener: LeaseListener) -> Any:
    """A model whose replica is on another node: its engine is reached through the lease's port."""
    backlog = stack.model()
    address = await listener.start()
    link = Link(
        address,
        listener.key,
        lambda status: backlog.update(replica, status),
        lambda: backlog.remove(replica),
    )
    replica = Replica("far", "node", link, local=False)
    backlog.add(replica)
    link.start()
    await until(lambda: listener.leases)
    return link


async def test_an_engine_on_another_node_is_reached_through_its_replica(
    stack: Stack, client: Any, fast: FixedRateEngine, listener: LeaseListener
) -> None:
    link = await far(stack, listener)
    listener.publish(replica_status(ReplicaState.SERVING, port=fast.port, parallel=4))
    whole = await client.post(CHAT, json=chat(max_tokens=2, x="y" * (2 << 20)))
    assert whole.json()["model"] == "m"
    streamed = await client.post(CHAT, json=chat(max_tokens=2, stream=True))
    assert list(events(streamed.content))[-1] == "[DONE]"
    await link.close()


async def test_an_engine_on_another_node_learns_of_clients_that_leave(
    stack: Stack, client: Any, slow: FixedRateEngine, listener: LeaseListener
) -> None:
    link = await far(stack, listener)
    listener.publish(replica_status(ReplicaState.SERVING, port=slow.port, parallel=4))
    async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
        async for _ in answer.aiter_bytes():
            break
    await slow.until_stats(cancelled=1, running=0)
    await link.close()


async def test_an_engine_on_another_node_that_takes_no_connection_is_dialled_again(
    stack: Stack, client: Any, listener: LeaseListener
) -> None:
    link = await far(stack, listener)
    backlog = stack.backlogs["m"]
    port = free_port()
    asking = asyncio.create_task(client.post(CHAT, json=chat()))
    await until(lambda: backlog.queued)
    listener.publish(replica_status(ReplicaState.SERVING, port=port, parallel=4))
    await until(lambda: stack.places() > 1)
    async with odd_engine(port=port) as engine:
        assert (await asking).status_code == 200
    assert KEY_HEADER in engine.requests[0].headers
    await link.close()


async def test_a_replica_on_another_node_that_ends_ends_its_streams(
    stack: Stack, client: Any, slow: FixedRateEngine, listener: LeaseListener
) -> None:
    await far(stack, listener)
    listener.publish(replica_status(ReplicaState.SERVING, port=slow.port, parallel=4))
    async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
        received = b""
        async for piece in answer.aiter_bytes():
            received += piece
            await listener.close()
    assert last_error(received)["code"] == "engine_lost"
    await slow.until_stats(cancelled=1, running=0)
