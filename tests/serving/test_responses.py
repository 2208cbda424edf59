"""Engines' errors in one form, and the ends of event streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.serving.errors import Busy, Unauthorized
from flexinfer.serving.responses import engine_error, error_event, proper_end, send_error

LLAMA_CPP = {"error": {"code": 400, "message": "too long", "type": "exceed_context_size_error"}}
VLLM = {"error": {"message": "too long", "type": "BadRequestError", "param": "p", "code": 400}}
OLD_VLLM = {"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}
MLC = json.dumps({"object": "error", "message": "too long", "code": None})
OLLAMA = {"error": "too long"}
FASTAPI = {"detail": "too long"}
VALIDATION = {"detail": [{"loc": ["body"], "msg": "too long"}]}


@pytest.mark.parametrize("said", [LLAMA_CPP, VLLM, OLD_VLLM, MLC, OLLAMA, FASTAPI, "too long"])
def test_every_engines_error_becomes_an_openai_error(said: Any) -> None:
    error = engine_error(400, json.dumps(said).encode())["error"]
    assert error["message"] == "too long"
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["type"], str)


def test_what_the_engine_names_is_kept() -> None:
    assert engine_error(400, json.dumps(VLLM).encode()) == VLLM
    assert engine_error(400, json.dumps(LLAMA_CPP).encode())["error"]["code"] == 400


def test_a_list_of_faults_is_told_whole() -> None:
    message = engine_error(422, json.dumps(VALIDATION).encode())["error"]["message"]
    assert json.loads(message) == VALIDATION["detail"]


@pytest.mark.parametrize("body", [b"Bad Gateway", b"\xff\xfe", b"<html>", b"{cut of", b"[1, 2]"])
def test_what_is_no_json_is_the_message(body: bytes) -> None:
    assert engine_error(502, body)["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b'""', b'{"error": null}'])
def test_an_error_without_a_word_names_the_status(body: bytes) -> None:
    assert "502" in engine_error(502, body)["error"]["message"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(("error", "message", "detail", "type", "code", "param")), inner
            )
        ),
        max_leaves=8,
    ),
    st.sampled_from((400, 429, 500, 503)),
)
def test_no_body_is_too_odd(body: Any, status: int) -> None:
    error = engine_error(status, json.dumps(body).encode())["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    json.dumps(error)


# -- our own


async def sent(error: Any) -> tuple[int, dict[bytes, bytes], Any]:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    await send_error(send, error)
    start, body = messages
    return start["status"], dict(start["headers"]), json.loads(body["body"])


async def test_when_asking_again_may_help_is_said_in_whole_seconds() -> None:
    status, headers, body = await sent(Busy("full", code="queue_full", retry_after_s=0.2))
    assert (status, headers[b"retry-after"]) == (429, b"1")
    assert body["error"]["type"] == "rate_limit_error"


async def test_a_missing_key_names_the_scheme() -> None:
    status, headers, _ = await sent(Unauthorized("no key"))
    assert (status, headers[b"www-authenticate"]) == (401, b"Bearer")
    assert b"retry-after" not in headers


# -- streams


@pytest.mark.parametrize(
    ("path", "start", "where"),
    [
        ("/v1/chat/completions", b"data: ", ("error", "message")),
        ("/v1/anything", b"data: ", ("error", "message")),
        ("/v1/messages", b"event: error\ndata: ", ("error", "message")),
        ("/v1/responses", b"event: error\ndata: ", ("message",)),
    ],
)
def test_a_failure_in_a_stream_speaks_the_dialect_of_its_path(
    path: str, start: bytes, where: tuple[str, ...]
) -> None:
    event = error_event(Busy("why", code="c").body(), path)
    assert event.startswith(start)
    assert event.endswith(b"\n\n")
    found = json.loads(event.split(b"data: ")[1])
    if path in ("/v1/messages", "/v1/responses"):
        assert found["type"] == "error"
    for key in where:
        found = found[key]
    assert found == "why"


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/completions", b'data: {"error": {"message": "x"}}\n\n'),
        ("/v1/responses", b'event: response.completed\ndata: {"long": 1}\n\n'),
        ("/v1/responses", b"event: response.incomplete\n"),
        ("/v1/messages", b"event: message_stop\ndata: {}\n\n"),
        ("/v1/messages", b"event: error\ndata: {}\n\n"),
    ],
)
def test_a_stream_says_that_it_is_complete(path: str, lines: bytes) -> None:
    pattern = proper_end(path)
    assert pattern is not None
    assert pattern.search(b"data: {}\n\n" + lines)
    generated = b"data: " + json.dumps({"content": lines.decode()}).encode() + b"\n\n"
    assert not pattern.search(generated)


def test_our_own_error_is_an_end_as_well() -> None:
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        pattern = proper_end(path)
        assert pattern is not None
        assert pattern.search(error_event(Busy("x").body(), path))
