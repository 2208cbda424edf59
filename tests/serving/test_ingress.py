"""What a request is, whose it is, and who may make it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio
from serving_stack import CHAT, OddEngine, Stack, chat, http, odd_engine, running

from flexinfer.serving.ingress import Ingress


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[OddEngine]:
    async with odd_engine() as engine:
        yield engine


@pytest_asyncio.fixture
async def stack(engine: OddEngine) -> AsyncIterator[Stack]:
    stack = Stack(cors_origins=["https://ui.example"], max_body_bytes=16 << 20)
    stack.served(engine.port, "m", aliases=("org/Model-1.5", "größe"))
    stack.served(engine.port, "other")
    async with running(stack) as stack:
        yield stack


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with http(stack) as client:
        yield client


def error_of(response: httpx.Response) -> tuple[int, str | None]:
    """Status and code; the error must be an OpenAI error object."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return response.status_code, error["code"]


# -- the model


@pytest.mark.parametrize("name", ["m", "org/Model-1.5", "größe"])
async def test_the_body_names_the_model(engine: OddEngine, client: Any, name: str) -> None:
    answer = (await client.post(CHAT, json=chat(name))).json()
    assert json.loads(engine.bodies[0])["model"] == "engine"
    assert answer["model"] == name


@pytest.mark.parametrize("name", ["other", "org/Model-1.5"])
async def test_the_path_goes_before_the_body(stack: Stack, client: Any, name: str) -> None:
    answer = (await client.post(f"/models/{name}{CHAT}", json=chat("m"))).json()
    assert answer["path"] == CHAT
    assert answer["model"] == "m"
    served = "m" if name == "org/Model-1.5" else "other"
    await stack.until_ended(served, success=1)


async def test_a_path_needs_no_model_in_the_body(client: Any) -> None:
    answer = (await client.post(f"/models/m{CHAT}", json={"messages": []})).json()
    assert answer["model"] == "m"


async def test_the_body_goes_before_the_host(stack: Stack, client: Any) -> None:
    await client.post(CHAT, json=chat("m"), headers={"host": "other.default.svc:8000"})
    await stack.until_ended("m", success=1)


@pytest.mark.parametrize("host", ["other", "OTHER:80", "other.default.svc.cluster.local:8000"])
async def test_the_host_of_a_models_service_names_it_whatever_the_body_says(
    stack: Stack, client: Any, host: str
) -> None:
    answer = (await client.post(CHAT, json=chat("/models"), headers={"host": host})).json()
    assert answer["model"] == "/models"
    await stack.until_ended("other", success=1)


async def test_the_model_of_a_form_is_found_and_renamed(engine: OddEngine, client: Any) -> None:
    response = await client.post(
        "/v1/audio/transcriptions", data={"model": "m"}, files={"file": ("a.wav", bytes(100))}
    )
    assert response.status_code == 200
    assert b'name="model"\r\n\r\nengine\r\n' in engine.bodies[0]
    assert bytes(100) in engine.bodies[0]


async def test_models_are_listed_under_all_their_names(client: Any) -> None:
    listed = (await client.get("/v1/models")).json()
    assert {card["id"] for card in listed["data"]} == {"größe", "m", "org/Model-1.5", "other"}
    one = (await client.get("/models/m/v1/models")).json()
    assert [card["id"] for card in one["data"]] == ["m"]


@pytest.mark.parametrize("path", ["org/Model-1.5", "org%2FModel-1.5"])
async def test_a_models_card_is_found_by_its_name(client: Any, path: str) -> None:
    assert (await client.get(f"/v1/models/{path}")).json()["id"] == "org/Model-1.5"


# -- refusals


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"not json", "invalid_json"),
        (b"\xff\xfe{", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"n": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"", "model_missing"),
        (b"{}", "model_missing"),
        (b'{"model": ""}', "model_missing"),
        (b'{"model": 7}', "invalid_type"),
    ],
)
async def test_a_body_that_cannot_be_understood_is_400(client: Any, body: bytes, code: str) -> None:
    response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert error_of(response) == (400, code)


async def test_no_depth_of_a_body_is_a_fault_of_ours(client: Any) -> None:
    for depth in range(900, 1010, 2):
        body = b'{"model": "m", "x": ' + b"[" * depth + b"]" * depth + b"}"
        assert (await client.post(CHAT, content=body)).status_code in (200, 400)


async def test_an_unknown_model_is_404_and_tells_the_known_ones(client: Any) -> None:
    response = await client.post(CHAT, json=chat("nope"))
    assert error_of(response) == (404, "model_not_found")
    assert "'nope'; there are: m, other" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", [f"/models/nope{CHAT}", "/v1/models/nope", "/models/nope/v1/models"]
)
async def test_an_unknown_model_in_the_path_is_404(client: Any, path: str) -> None:
    method = "POST" if path.endswith("completions") else "GET"
    response = await client.request(method, path, json=chat("m") if method == "POST" else None)
    assert error_of(response) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/", "/v2/x", "/v1x", "/models/m/healthz", "/-/nothing"])
async def test_nothing_else_is_there(client: Any, path: str) -> None:
    assert error_of(await client.get(path)) == (404, "not_found")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "image/png"])
async def test_another_content_type_is_415(client: Any, kind: str) -> None:
    response = await client.post(CHAT, content=b"{}", headers={"content-type": kind})
    assert error_of(response) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", [None, "application/json; charset=utf-8", "Application/JSON"])
async def test_json_may_be_called_what_it_is_called(
    engine: OddEngine, client: Any, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = await client.post(CHAT, content=json.dumps(chat()).encode(), headers=headers)
    assert response.status_code == 200
    assert engine.requests[0].content_type == "application/json"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413(stack: Stack, chunked: bool) -> None:
    body = json.dumps(chat(x="y" * (17 << 20))).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    async with http(stack) as client:
        response = await client.post(CHAT, content=pieces() if chunked else body)
        assert error_of(response) == (413, "body_too_large")


async def test_a_body_of_10_mb_passes(engine: OddEngine, client: Any) -> None:
    text = 'ä\\"' * (10 << 18)
    assert (await client.post(CHAT, json=chat(x=text))).status_code == 200
    assert json.loads(engine.bodies[0]) == chat("engine", x=text)


@pytest.mark.parametrize("length", ["abc", "-1", "1, 2", "9" * 40])
async def test_a_malformed_length_is_a_refusal(stack: Stack, length: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.readline(), 10)
    assert answer.split()[1] in (b"400", b"413")
    writer.close()


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/-/models"])
async def test_pages_about_the_gateway_are_read_only(client: Any, path: str) -> None:
    assert error_of(await client.post(path)) == (405, "method_not_allowed")
    assert (await client.get(path)).status_code == 200
    head = await client.head(path)
    assert (head.status_code, head.content) == (200, b"")


async def test_health_metrics_and_models_are_shown(stack: Stack, client: Any) -> None:
    assert (await client.get("/healthz")).text == "ok\n"
    await client.post(CHAT, json=chat())
    await stack.until_ended(success=1)
    assert (
        'flexinfer_requests_total{model="m",status="success"} 1.0'
        in (await client.get("/metrics")).text
    )
    models = (await client.get("/-/models")).json()["models"]
    assert [(model["name"], model["state"]) for model in models] == [
        ("m", "serving"),
        ("other", "serving"),
    ]


async def test_a_websocket_is_refused(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(
        b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] in (b"400", b"403", b"404")
    writer.close()


async def test_the_server_may_ask_for_start_and_end() -> None:
    asked = iter(("lifespan.startup", "lifespan.shutdown"))
    answered: list[Any] = []

    async def receive() -> Any:
        return {"type": next(asked)}

    async def send(message: Any) -> None:
        answered.append(message["type"])

    await Ingress(cast(Any, Stack()), None)({"type": "lifespan"}, receive, send)
    assert answered == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_a_fault_of_the_gateway_is_an_error_object_too(stack: Stack, client: Any) -> None:
    def broken() -> list[dict[str, Any]]:
        raise ZeroDivisionError

    stack.describe = broken  # type: ignore[method-assign]
    assert error_of(await client.get("/-/models")) == (500, "internal_error")


# -- paths


async def test_the_query_passes_as_it_was_written(client: Any) -> None:
    answer = (await client.post("/v1/rerank?a=b%20c+d&e=%2F", json=chat())).json()
    assert answer["path"] == "/v1/rerank?a=b%20c+d&e=%2F"


@pytest.mark.parametrize("sent", ["/v1/a%3Fb", "/v1/a%23b", "/v1/a%20b", "/v1/a%25b", "/v1//a"])
async def test_a_path_stays_a_path(client: Any, sent: str) -> None:
    assert (await client.post(sent, json=chat())).json()["path"] == sent


@pytest.mark.parametrize("sent", ["/v1/%2e%2e/slots", "/v1/../slots", "/models/m/v1/x/../../slots"])
async def test_no_path_leads_out_of_v1(stack: Stack, engine: OddEngine, sent: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    body = json.dumps(chat()).encode()
    writer.write(f"POST {sent} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode())
    writer.write(body)
    assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] == b"404"
    assert engine.requests == []
    writer.close()


async def test_other_verbs_pass_through(engine: OddEngine, client: Any) -> None:
    await client.get("/models/m/v1/responses/1")
    await client.delete("/models/m/v1/responses/1")
    await client.post("/models/m/v1/responses/1/cancel")
    head = await client.head("/models/m/v1/responses/1")
    assert head.content == b""
    assert [r.method for r in engine.requests] == ["GET", "DELETE", "POST", "HEAD"]


# -- keys and browsers


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}, {"x-api-key": "no"}],
)
async def test_v1_wants_the_key(engine: OddEngine, headers: dict[str, str]) -> None:
    stack = Stack()
    stack.served(engine.port)
    async with running(stack, key="secret"), http(stack, headers=headers) as client:
        for answer in (
            await client.post(CHAT, json=chat()),
            await client.get("/v1/models"),
            await client.post(f"/models/m{CHAT}", json=chat()),
            await client.post("/-/models"),
        ):
            assert error_of(answer) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/-/models")).status_code == 200
    assert engine.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer secret"},
        {"authorization": "bearer  secret"},
        {"x-api-key": "secret"},
    ],
)
async def test_the_key_opens_and_does_not_reach_the_engine(
    engine: OddEngine, headers: dict[str, str]
) -> None:
    stack = Stack()
    stack.served(engine.port)
    async with running(stack, key="secret"), http(stack, headers=headers) as client:
        assert (await client.post(CHAT, json=chat())).status_code == 200
    assert "secret" not in str(engine.requests[0].headers)


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080", "https://ui.example"],
)
async def test_browsers_may_call_from_here_and_from_named_origins(client: Any, origin: str) -> None:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    preflight = await client.options(CHAT, headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == origin
    assert preflight.headers["access-control-allow-headers"].endswith("x-stainless-os")
    assert "POST" in preflight.headers["access-control-allow-methods"]
    for answer in (
        await client.post(CHAT, json=chat(), headers={"origin": origin}),
        await client.post(CHAT, json=chat("nope"), headers={"origin": origin}),
    ):
        assert answer.headers["access-control-allow-origin"] == origin
        assert answer.headers["vary"] == "origin"


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost.evil.example", "http://localhost:3000.evil", "null"],
)
async def test_browsers_may_not_call_from_elsewhere(client: Any, origin: str) -> None:
    preflight = await client.options(CHAT, headers={"origin": origin})
    assert not [name for name in preflight.headers if name.startswith("access-control")]
    answer = await client.post(CHAT, json=chat(), headers={"origin": origin})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    # Not being able to read the answer would not keep a page from waking models.
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "origin_not_allowed"


async def test_a_page_of_this_host_may_call(client: Any) -> None:
    headers = {"origin": "https://llm.example:8000", "host": "llm.example:8000"}
    assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 200


async def test_a_preflight_needs_no_key(engine: OddEngine) -> None:
    stack = Stack()
    async with running(stack, key="secret"), http(stack) as client:
        answer = await client.options(CHAT, headers={"origin": "http://localhost"})
        assert answer.headers["access-control-allow-origin"] == "http://localhost"
