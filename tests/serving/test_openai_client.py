"""The official client, unchanged: its answers and its error classes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from serving_helpers import until
from serving_stack import (
    FixedRateEngine,
    Stack,
    answering,
    comes_up,
    fails,
    fixed_rate,
    odd_engine,
    running,
    starting,
)

KEY = "secret"
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[FixedRateEngine]:
    async with fixed_rate(FAKE_TOKENS_PER_S="0") as engine:
        yield engine


@contextlib.asynccontextmanager
async def client_of(stack: Stack, key: str = KEY) -> AsyncIterator[openai.AsyncOpenAI]:
    web = httpx.AsyncClient(verify=False, trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key=key, max_retries=0, http_client=web
    ) as client:
        yield client


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running(Stack(header_grace_s=600), key=KEY) as stack:
        yield stack


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(stack) as client:
        yield client


def ask(client: openai.AsyncOpenAI, model: str = "m", **options: Any) -> Any:
    return client.chat.completions.create(model=model, messages=HI, max_tokens=3, **options)


async def test_chat_completions_embeddings_and_models(
    stack: Stack, client: openai.AsyncOpenAI, engine: FixedRateEngine
) -> None:
    stack.served(engine.port)
    whole = await ask(client)
    assert (whole.model, whole.choices[0].message.content) == ("m", "t0 t1 t2 ")
    chunks = [chunk async for chunk in await ask(client, stream=True)]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "t0 t1 t2 "
    assert {chunk.model for chunk in chunks} == {"m"}
    text = await client.completions.create(model="m", prompt="hi", max_tokens=2)
    assert text.choices[0].text == "t0 t1 "
    vector = await client.embeddings.create(model="m", input="hi", encoding_format="float")
    assert vector.data[0].embedding == [0.0, 1.0]
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).id == "m"


async def test_an_engine_that_embeds_nothing_says_so(
    stack: Stack, client: openai.AsyncOpenAI
) -> None:
    said = b'{"error":{"code":501,"message":"start it with --embeddings","type":"not_supported"}}'
    async with odd_engine(answering(said, status=501, content_type="application/json")) as odd:
        stack.served(odd.port)
        with pytest.raises(openai.InternalServerError, match="--embeddings") as caught:
            await client.embeddings.create(model="m", input="hi")
    assert caught.value.status_code == 501


async def test_a_wrong_key(stack: Stack) -> None:
    async with client_of(stack, "wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="API key is wrong") as caught:
            await ask(client)
    assert caught.value.code == "invalid_api_key"


async def test_an_unknown_model(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await ask(client, "nope")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_full_queue(
    stack: Stack, client: openai.AsyncOpenAI, engine: FixedRateEngine
) -> None:
    backlog = stack.served(engine.port, max_ongoing_requests=1, max_queued_requests=0)
    slot = await backlog.acquire()
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(client)
    assert caught.value.code == "queue_full"
    assert caught.value.response.headers["retry-after"] == "1"
    slot.release()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cold_start_that_fails_before_the_first_header(
    stack: Stack, client: openai.AsyncOpenAI, stream: bool
) -> None:
    backlog = stack.model()
    asking = asyncio.create_task(ask(client, stream=stream))
    await until(lambda: backlog.queued)
    fails(backlog, starting(backlog))
    with pytest.raises(openai.InternalServerError, match="no such file") as caught:
        await asking
    assert (caught.value.status_code, caught.value.code) == (503, "model_failed")


async def test_a_cold_start_that_fails_after_the_first_header() -> None:
    """The client has its answer by then: its stream raises, with all that the error says."""
    async with running(Stack(header_grace_s=0), key=KEY) as stack, client_of(stack) as client:
        backlog = stack.model()
        answer = await ask(client, stream=True)
        fails(backlog, starting(backlog))
        with pytest.raises(openai.APIError, match="no such file") as caught:
            async for _ in answer:
                pass
        assert caught.value.code == "model_failed"


async def test_a_cold_start_that_succeeds_after_the_first_header(engine: FixedRateEngine) -> None:
    async with running(Stack(header_grace_s=0), key=KEY) as stack, client_of(stack) as client:
        backlog = stack.model()
        answer = await ask(client, stream=True)
        comes_up(backlog, starting(backlog), engine.port)
        texts = [chunk.choices[0].delta.content or "" async for chunk in answer]
        assert "".join(texts) == "t0 t1 t2 "


async def test_an_engine_that_dies_in_a_stream(stack: Stack, client: openai.AsyncOpenAI) -> None:
    async with fixed_rate(FAKE_TOKENS_PER_S="20") as engine:
        stack.served(engine.port)
        answer = await client.chat.completions.create(model="m", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="ended under the request") as caught:
            async for _ in answer:
                engine.kill()
        assert caught.value.code == "engine_lost"
