"""Requests for a model that is down: no word before it is decided, or the grace is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from serving_helpers import add_replica, replica_status, until
from serving_stack import (
    CHAT,
    FixedRateEngine,
    Stack,
    answering,
    chat,
    comes_up,
    events,
    fails,
    fixed_rate,
    http,
    odd_engine,
    running,
    starting,
)

from flexinfer.serving.backlog import Backlog
from flexinfer.serving.errors import NotFound
from flexinfer.serving.status import ReplicaState


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[FixedRateEngine]:
    async with fixed_rate(FAKE_TOKENS_PER_S="0") as engine:
        yield engine


@pytest_asyncio.fixture
async def patient() -> AsyncIterator[Stack]:
    """Its grace never passes in a test."""
    async with running(Stack(header_grace_s=600)) as stack:
        yield stack


@pytest_asyncio.fixture
async def hasty() -> AsyncIterator[Stack]:
    """Its grace has passed at once."""
    async with running(Stack(header_grace_s=0)) as stack:
        yield stack


class Asked:
    """A streaming request under way: what has come of its answer until now."""

    def __init__(self, client: httpx.AsyncClient, path: str = CHAT) -> None:
        self.answer: httpx.Response | None = None
        self.body = b""
        self.task = asyncio.create_task(self._run(client, path))

    async def _run(self, client: httpx.AsyncClient, path: str) -> None:
        body = chat(stream=True, max_tokens=2)
        async with client.stream("POST", path, json=body) as self.answer:
            async for piece in self.answer.aiter_bytes():
                self.body += piece


async def queued(backlog: Backlog, count: int = 1) -> None:
    await until(lambda: backlog.queued == count, f"{count} in the queue")


@pytest.mark.parametrize("stream", [True, False])
async def test_the_request_is_held_and_then_answered(
    patient: Stack, engine: FixedRateEngine, stream: bool
) -> None:
    backlog = patient.model()
    async with http(patient) as client:
        asking = asyncio.create_task(client.post(CHAT, json=chat(stream=stream, max_tokens=2)))
        await queued(backlog)
        comes_up(backlog, starting(backlog), engine.port)
        answer = await asking
    assert answer.status_code == 200
    # Nothing before the engine's own header: not even that of an event stream.
    assert answer.headers["content-type"].startswith(
        "text/event-stream" if stream else "application/json"
    )
    assert not answer.content.startswith(b":")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_within_the_grace_is_a_plain_503(patient: Stack, stream: bool) -> None:
    backlog = patient.model()
    async with http(patient) as client:
        asking = asyncio.create_task(client.post(CHAT, json=chat(stream=stream)))
        await queued(backlog)
        fails(backlog, starting(backlog), "no such file: w.gguf")
        answer = await asking
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "model_failed")
    assert "no such file: w.gguf" in error["message"]
    assert int(answer.headers["retry-after"]) > 0
    await patient.until_ended(model_failed=1)


async def test_an_engines_own_refusal_within_the_grace_keeps_its_status(patient: Stack) -> None:
    backlog = patient.model()
    async with (
        odd_engine(answering(b'{"error": "too long"}', status=400)) as odd,
        http(patient) as c,
    ):
        asking = asyncio.create_task(c.post(CHAT, json=chat(stream=True)))
        await queued(backlog)
        comes_up(backlog, starting(backlog), odd.port)
        answer = await asking
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too long")


async def test_after_the_grace_a_stream_tells_how_the_load_goes(
    hasty: Stack, engine: FixedRateEngine
) -> None:
    backlog = hasty.model()
    async with http(hasty) as client:
        asked = Asked(client)
        await until(lambda: asked.body)
        assert asked.answer is not None
        assert asked.answer.status_code == 200
        assert asked.answer.headers["content-type"].startswith("text/event-stream")
        assert asked.body.startswith(b": model m is queued")
        replica = starting(backlog)
        await until(lambda: b": model m is starting" in asked.body)
        comes_up(backlog, replica, engine.port)
        await asked.task
    found = list(events(asked.body))
    assert [e["choices"][0]["delta"].get("content") for e in found[:2]] == ["t0 ", "t1 "]
    assert found[-1] == "[DONE]"
    assert found[0]["model"] == "m"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_a_failure_after_the_grace_is_an_error_event(hasty: Stack, path: str) -> None:
    backlog = hasty.model()
    async with http(hasty) as client:
        asked = Asked(client, path)
        await until(lambda: asked.body)
        fails(backlog, starting(backlog), "line 1\nline 2")
        await asked.task
    (event,) = events(asked.body)
    if path == CHAT:
        assert event["error"]["code"] == "model_failed"
    else:
        assert event["type"] == "error"
    assert "line 1\\nline 2" in asked.body.decode()
    await hasty.until_ended(model_failed=1)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_an_engines_own_refusal_after_the_grace_is_an_error_event(
    hasty: Stack, path: str
) -> None:
    backlog = hasty.model()
    async with odd_engine(answering(b'{"error": "too long"}', status=400)) as odd, http(hasty) as c:
        asked = Asked(c, path)
        await until(lambda: asked.body)
        comes_up(backlog, starting(backlog), odd.port)
        await asked.task
    (event,) = events(asked.body)
    said = event if path == "/v1/responses" else event["error"]
    assert said["message"] == "too long"
    if path != CHAT:
        assert event["type"] == "error"


async def test_an_answer_that_is_no_stream_after_the_grace_becomes_one(hasty: Stack) -> None:
    body = b'{\n "model": "engine",\n "text": "a  b"\n}'
    backlog = hasty.model()
    handler = answering(body, content_type="application/json")
    async with odd_engine(handler) as odd, http(hasty) as client:
        asked = Asked(client)
        await until(lambda: asked.body)
        comes_up(backlog, starting(backlog), odd.port)
        await asked.task
    assert list(events(asked.body)) == [{"model": "m", "text": "a  b"}, "[DONE]"]


async def test_a_client_that_wants_no_stream_is_held_after_the_grace(
    hasty: Stack, engine: FixedRateEngine
) -> None:
    backlog = hasty.model()
    async with http(hasty) as client:
        asking = asyncio.create_task(client.post(CHAT, json=chat(max_tokens=2)))
        streaming = Asked(client)
        await until(lambda: streaming.body)
        replica = starting(backlog)
        fails(backlog, replica)
        answer = await asking
        await streaming.task
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")


async def test_progress_is_one_line_whatever_a_replica_says(hasty: Stack) -> None:
    backlog = hasty.model()
    replica = add_replica(backlog, None)
    async with http(hasty) as client:
        asked = Asked(client)
        await until(lambda: asked.body)
        status = replica_status(ReplicaState.STARTING, message="loading\r\n\r\ndata: {}")
        backlog.update(replica, status)
        await until(lambda: b"loading" in asked.body)
        asked.task.cancel()
    assert list(events(asked.body.replace(b"\r", b""))) == []


@pytest.mark.parametrize("grace_s", [0, 600])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_place_and_the_load_goes_on(
    engine: FixedRateEngine, grace_s: float, stream: bool
) -> None:
    async with running(Stack(header_grace_s=grace_s)) as stack, http(stack) as client:
        backlog = stack.model()
        replica = starting(backlog)
        leaving = asyncio.create_task(client.post(CHAT, json=chat(stream=stream)))
        staying = asyncio.create_task(client.post(CHAT, json=chat(stream=stream, max_tokens=1)))
        await queued(backlog, 2)
        leaving.cancel()
        await queued(backlog, 1)
        assert backlog.replicas == {"r1": replica}
        assert backlog.demand().idle_s == 0
        comes_up(backlog, replica, engine.port)
        assert (await staying).status_code == 200
        await stack.until_ended(client_gone=1, success=1)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"replicas": 0}, "model_parked"),
        ({"max_queued_requests": 0}, "queue_full"),
        ({"cold_start_timeout_s": 0.01}, "model_start_timeout"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_model_that_cannot_come_up_is_503(
    patient: Stack, changes: dict[str, Any], code: str, stream: bool
) -> None:
    patient.model(**changes)
    async with http(patient) as client:
        answer = await client.post(CHAT, json=chat(stream=stream))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
    assert ("retry-after" in answer.headers) == (code != "model_parked")


async def test_a_model_that_fits_on_no_node_is_503(patient: Stack) -> None:
    patient.model()
    patient.nowhere = "it needs 2 GPUs"
    async with http(patient) as client:
        answer = await client.post(CHAT, json=chat())
    assert answer.json()["error"]["code"] == "model_unschedulable"
    assert "it needs 2 GPUs" in answer.json()["error"]["message"]


async def test_a_full_queue_of_a_model_that_is_up_is_429(
    patient: Stack, engine: FixedRateEngine
) -> None:
    backlog = patient.served(engine.port, max_ongoing_requests=1, max_queued_requests=0)
    slot = await backlog.acquire()
    async with http(patient) as client:
        answer = await client.post(CHAT, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) > 0
        slot.release()
        assert (await client.post(CHAT, json=chat(max_tokens=1))).status_code == 200


async def test_a_model_that_is_removed_while_requests_wait_is_404(patient: Stack) -> None:
    backlog = patient.model()
    async with http(patient) as client:
        asking = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
        await queued(backlog)
        backlog.refuse_all(lambda: NotFound("model m was removed", code="model_not_found"))
        assert (await asking).status_code == 404
