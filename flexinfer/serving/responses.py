"""ASGI answers: JSON, text, errors, and the error events of a stream that has begun."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from flexinfer.serving.errors import RequestError
from flexinfer.serving.headers import Headers

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer by default leave a stream alone that says so.
    (b"x-accel-buffering", b"no"),
]


async def send_bytes(
    send: Send, status: int, body: bytes, content_type: str, headers: Iterable[Any] = ()
) -> None:
    """Send a whole answer."""
    head: Headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: Any, headers: Iterable[Any] = ()) -> None:
    """Send a value as JSON."""
    await send_bytes(send, status, json.dumps(value).encode(), "application/json", headers)


async def send_error(send: Send, error: RequestError) -> None:
    """Send a refusal as OpenAI's error object, with Retry-After where asking again may help."""
    headers: Headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send_json(send, error.status, error.body(), headers)


def error_event(error: dict[str, Any], path: str) -> bytes:
    """The last event of a stream that failed, in the dialect of the path.

    `error` is an OpenAI error object: `{"error": {message, type, param, code}}`.
    """
    said = error["error"]
    if path == "/v1/messages":
        body = {"type": "error", "error": {"type": "api_error", "message": said["message"]}}
        return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"
    if path == "/v1/responses":
        fields = {name: said[name] for name in ("code", "message", "param")}
        return b"event: error\ndata: " + json.dumps({"type": "error", **fields}).encode() + b"\n\n"
    return b"data: " + json.dumps(error).encode() + b"\n\n"


_DONE = re.compile(rb'^data: ?(\[DONE\]|\{ ?"error")', re.MULTILINE)
_PROPER_ENDS = {
    "/v1/chat/completions": _DONE,
    "/v1/completions": _DONE,
    "/v1/responses": re.compile(
        rb"^event: ?(response\.(completed|failed|incomplete)|error)\b", re.MULTILINE
    ),
    "/v1/messages": re.compile(rb"^event: ?(message_stop|error)\b", re.MULTILINE),
}


def proper_end(path: str) -> re.Pattern[bytes] | None:
    """What the lines of a path's event stream hold at its end, or when it says that it failed.

    A stream that ends without it was cut off. None where nothing is known about the path's streams.
    """
    return _PROPER_ENDS.get(path)


def engine_error(status: int, body: bytes) -> dict[str, Any]:
    """Any engine's error body as an OpenAI error object.

    Engines say `{"error": {...}}`, `{"error": "text"}`, `{"detail": ...}`, `{"message": ...}`,
    plain text, or JSON inside a JSON string.
    """
    found = _said(body)
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        found = found["error"]
    fields = found if isinstance(found, dict) else {}
    message = next(
        (said for key in ("message", "error", "detail") if (said := fields.get(key))), ""
    )
    if not message and not any(key in fields for key in ("message", "error", "detail")):
        message = found
    if not message:
        message = f"the engine answered {status} and said no reason"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": message if isinstance(message, str) else json.dumps(message),
            "type": fields.get("type") if isinstance(fields.get("type"), str) else kind,
            "param": fields.get("param"),
            "code": fields.get("code", status),
        }
    }


def is_unknown_path(status: int, body: bytes) -> bool:
    """Whether an engine's answer only says that its web framework has no such path."""
    found = _said(body)
    return status == 404 and not (isinstance(found, dict) and {"error", "message"} & found.keys())


def _said(body: bytes) -> Any:
    """A body's JSON, unpacked twice if it is JSON inside a JSON string, else its text."""
    found: Any = body.decode("utf-8", "replace")
    for _ in range(2):
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except ValueError:
                break
    return found
