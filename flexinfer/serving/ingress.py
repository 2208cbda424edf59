"""The HTTP surface: finds out what a request wants, and of which model.

A plain ASGI application; there is no framework between the server and the engine's bytes.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
from typing import TYPE_CHECKING, Any

from flexinfer.serving.backlog import Backlog
from flexinfer.serving.errors import BadRequest, NotFound, RequestError, Unauthorized
from flexinfer.serving.forward import Exchange, Request
from flexinfer.serving.headers import Headers
from flexinfer.serving.naming import multipart_model
from flexinfer.serving.responses import (
    Message,
    Receive,
    Send,
    send_bytes,
    send_error,
    send_json,
)

if TYPE_CHECKING:
    from flexinfer.serving.gateway import Gateway

_LOOPBACK_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")
_SAFE = frozenset(("GET", "HEAD", "OPTIONS"))
_MODEL_PREFIX = "/models/"
_DOTS = frozenset((".", ".."))

_log = logging.getLogger("ray.serve")


class _Disconnected(Exception):
    """The client left before its body was complete."""


class _Answer:
    """A server's `send` that adds headers, and knows whether an answer has begun."""

    def __init__(self, send: Send, headers: Headers) -> None:
        self.begun = False
        self._send = send
        self._headers = headers

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            message = {**message, "headers": [*message.get("headers", []), *self._headers]}
        await self._send(message)


class Ingress:
    """The ASGI application. `key` is what `/v1` and changing verbs demand, None for nothing."""

    def __init__(self, gateway: Gateway, key: str | None) -> None:
        self._gateway = gateway
        self._key = key.encode() if key is not None else None
        self._started = int(time.time())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        headers = dict(scope["headers"])
        answer = _Answer(send, self._cors(headers))
        try:
            await self._route(scope, headers, receive, answer)
        except RequestError as error:
            await send_error(answer, error)
        except _Disconnected:
            _log.debug("a client left before its request was complete")
        except Exception:
            if answer.begun:
                raise  # the server breaks the connection
            _log.exception("a fault of the gateway: %s %s", scope["method"], scope["path"])
            await send_error(answer, RequestError("a fault of the gateway", code="internal_error"))

    # -- routes

    async def _route(
        self, scope: Message, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        method, path = scope["method"], scope["path"]
        if method == "OPTIONS":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        if method not in _SAFE:
            self._refuse_foreign_page(headers)
        if not _DOTS.isdisjoint(path.split("/")):
            # An engine might resolve them, to something outside of /v1.
            raise NotFound("a path may not contain . or .. segments", code="not_found")
        named, path = _split_model(path)
        if path == "/v1" or path.startswith("/v1/"):
            self._authorize(headers)
            await self._v1(scope, method, path, named, headers, receive, send)
            return
        if path.startswith("/-/") and method not in _SAFE:
            self._authorize(headers)
        answer = {
            "/healthz": self._healthz,
            "/metrics": self._metrics,
            "/-/models": self._models,
        }.get(path)
        if answer is None or named is not None:
            raise NotFound(f"there is nothing at {scope['path']}", code="not_found")
        if method not in _SAFE:
            raise BadRequest(f"{path} answers GET only", code="method_not_allowed", status=405)
        await answer(send)

    async def _healthz(self, send: Send) -> None:
        await send_bytes(send, 200, b"ok\n", "text/plain; charset=utf-8")

    async def _metrics(self, send: Send) -> None:
        metrics = self._gateway.metrics
        await send_bytes(send, 200, metrics.render(), metrics.content_type)

    async def _models(self, send: Send) -> None:
        gateway = self._gateway
        notices = [notice.model_dump() for notice in gateway.notices]
        await send_json(send, 200, {"models": gateway.describe(), "notices": notices})

    async def _v1(
        self,
        scope: Message,
        method: str,
        path: str,
        named: str | None,
        headers: dict[bytes, bytes],
        receive: Receive,
        send: Send,
    ) -> None:
        if path == "/v1/models" and method in _SAFE:
            await send_json(send, 200, self._list(named))
            return
        if path.startswith("/v1/models/") and method in _SAFE:
            asked = path.removeprefix("/v1/models/")
            await send_json(send, 200, self._card(asked, self._find(asked)))
            return
        body = await self._body(headers, receive)
        value = _json(method, headers, body)
        asked, backlog = self._model_of(named, value, headers, body)
        request = Request(
            method=method,
            path=path,
            query=scope.get("query_string", b""),
            headers=list(scope["headers"]),
            body=body,
            json=value,
            content_type=_text(headers, b"content-type"),
            asked=asked,
            stream=value is not None and value.get("stream") is True,
        )
        gateway = self._gateway
        exchange = Exchange(
            request,
            backlog,
            gateway.client,
            gateway.metrics,
            header_grace_s=gateway.args.header_grace_s,
            never=lambda: gateway.never(backlog),
        )
        await exchange.run(receive, send)

    # -- models

    def _model_of(
        self,
        named: str | None,
        value: dict[str, Any] | None,
        headers: dict[bytes, bytes],
        body: bytes,
    ) -> tuple[str, Backlog]:
        """The name as asked and the model: by path, by the body, by the host."""
        kind = _text(headers, b"content-type")
        asked = value.get("model") if value is not None else multipart_model(body, kind)
        if asked is not None and not isinstance(asked, str):
            raise BadRequest("model must be a string", code="invalid_type", param="model")
        if named is not None:
            return asked or named, self._find(named)
        if asked and asked in self._gateway.names:
            return asked, self._gateway.names[asked]
        by_host = self._by_host(headers)
        if by_host is not None:
            return asked or by_host.config.name, by_host
        if not asked:
            raise BadRequest(
                "the request names no model: say it in the body's `model`",
                code="model_missing",
                param="model",
            )
        return asked, self._find(asked)

    def _find(self, name: str) -> Backlog:
        found = self._gateway.names.get(name)
        if found is None:
            known = ", ".join(sorted(self._gateway.backlogs)) or "none"
            raise NotFound(
                f"there is no model {name!r}; there are: {known}",
                code="model_not_found",
                param="model",
            )
        return found

    def _by_host(self, headers: dict[bytes, bytes]) -> Backlog | None:
        host = _text(headers, b"host").lower().partition(":")[0]
        return self._gateway.backlogs.get(host.partition(".")[0])

    def _list(self, named: str | None) -> dict[str, Any]:
        gateway = self._gateway
        names = sorted(gateway.names) if named is None else [named]
        return {"object": "list", "data": [self._card(n, self._find(n)) for n in names]}

    def _card(self, asked: str, backlog: Backlog) -> dict[str, Any]:
        return {
            "id": asked,
            "object": "model",
            "created": self._started,
            "owned_by": "flexinfer",
            "root": backlog.config.model,
        }

    # -- the request

    def _authorize(self, headers: dict[bytes, bytes]) -> None:
        if self._key is None:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")  # Anthropic's way, for /v1/messages
        if not hmac.compare_digest(given.strip(), self._key):
            what = "wrong" if given else "missing"
            raise Unauthorized(
                f"the API key is {what}: send `Authorization: Bearer KEY`", code="invalid_api_key"
            )

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._gateway.args.max_body_bytes
        declared = headers.get(b"content-length", b"0")
        parts: list[bytes] = []
        size = int(declared) if declared.isdigit() else 0
        if size <= limit:
            size = 0
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Disconnected
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit or not message.get("more_body"):
                    break
        if size > limit:
            raise BadRequest(
                f"the body has more than {limit} bytes", code="body_too_large", status=413
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _cors(self, headers: dict[bytes, bytes]) -> Headers:
        origin = headers.get(b"origin")
        if origin is None or not self._allows(origin.decode("latin-1")):
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"vary", b"origin"),
            (b"access-control-allow-methods", b"GET, POST, PUT, PATCH, DELETE, OPTIONS"),
            (
                b"access-control-allow-headers",
                headers.get(b"access-control-request-headers", b"authorization, content-type"),
            ),
            (b"access-control-max-age", b"600"),
        ]

    def _refuse_foreign_page(self, headers: dict[bytes, bytes]) -> None:
        """A page that may not read answers may not load models either.

        Browsers send some POSTs without asking first, and then tell where they come from. A page
        of this very host is none of another's.
        """
        origin = headers.get(b"origin", b"").decode("latin-1")
        own = headers.get(b"host", b"").decode("latin-1")
        if origin and not self._allows(origin) and origin.partition("://")[2] != own:
            raise BadRequest(
                f"pages of {origin} may not call this API: --cors-origin {origin} allows them",
                code="origin_not_allowed",
                status=403,
            )

    def _allows(self, origin: str) -> bool:
        allowed = self._gateway.args.cors_origins
        return "*" in allowed or origin in allowed or bool(_LOOPBACK_ORIGIN.fullmatch(origin))


def _text(headers: dict[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1")


def _split_model(path: str) -> tuple[str | None, str]:
    """`/models/NAME/v1/...` -> (NAME, `/v1/...`); any other path -> (None, path)."""
    if path.startswith(_MODEL_PREFIX):
        name, slash, rest = path.removeprefix(_MODEL_PREFIX).partition("/v1")
        if name and slash and (rest == "" or rest.startswith("/")):
            return name, "/v1" + rest
    return None, path


def _json(method: str, headers: dict[bytes, bytes], body: bytes) -> dict[str, Any] | None:
    """The body as a JSON object; None where the request has another kind of body, or none."""
    kind = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if kind == b"multipart/form-data" or (method in _SAFE and not body):
        return None
    if not (kind == b"application/json" or kind.endswith(b"+json")):
        raise BadRequest(
            f"content-type {kind.decode('latin-1')} is not understood here: send application/json",
            code="unsupported_media_type",
            status=415,
        )
    if not body:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return value


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
