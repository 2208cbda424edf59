"""One request from a place in the queue to the engine's last byte.

Headers go to the client when the engine's do, but not before the model's load is decided or the
grace has passed: a failure until then is a plain error. After the grace a streaming client gets an
event stream with comments about the load, and a failure is its last event. A stream never ends
silently: either with the engine's own end, or with an error event.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from flexinfer.serving.backlog import Backlog
from flexinfer.serving.errors import BadRequest, Gone, RequestError
from flexinfer.serving.headers import Headers, to_client, to_engine
from flexinfer.serving.lease import KEY_HEADER, UNREACHED_HEADER
from flexinfer.serving.metrics import GatewayMetrics
from flexinfer.serving.naming import NameRewriter, replace_multipart_model
from flexinfer.serving.responses import (
    EVENT_STREAM,
    Receive,
    Send,
    engine_error,
    error_event,
    is_unknown_path,
    proper_end,
    send_error,
    send_json,
)
from flexinfer.serving.slots import Slot
from flexinfer.serving.status import EngineAddress

_PROGRESS_S = 1.0
_DIAL_ATTEMPTS = 20
_DIAL_PAUSE_S = 0.1
_REFUSAL_S = 0.25
_MAX_ERROR_BODY = 1 << 20
_PATH_SAFE = "/:@!$&'()*+,;=-._~"

_log = logging.getLogger("ray.serve")


@dataclass
class Request:
    """A request as far as forwarding needs it: the body read, the model found."""

    method: str
    path: str
    """Below the ingress, beginning with /v1."""
    query: bytes
    headers: Headers
    body: bytes
    json: dict[str, Any] | None
    """The body, where it is a JSON object."""
    content_type: str
    asked: str
    """The model's name as the client wrote it."""
    stream: bool


class ClientGone(Exception):
    """The client closed its connection: nobody is there to be told anything."""


class Broken(Exception):
    """An answer that is no event stream cannot go on: only a broken connection can say so."""


class _Unreached(Exception):
    """The engine took no connection: nothing was said to it."""


class Exchange:
    """Carries out one request. Made for one use; `run` returns when all is said."""

    def __init__(
        self,
        request: Request,
        backlog: Backlog,
        client: aiohttp.ClientSession,
        metrics: GatewayMetrics,
        *,
        header_grace_s: float,
        never: Callable[[], str | None],
    ) -> None:
        self._request = request
        self._backlog = backlog
        self._client = client
        self._metrics = metrics
        self._grace_s = header_grace_s
        self._never = never
        self._began = time.monotonic()
        self._head_sent = False
        self._body_sent = False
        self._is_events = False
        self._first_byte_seen = False

    async def run(self, receive: Receive, send: Send) -> None:
        """Answer the request through `send`.

        Raises `Broken` when the server has to break the connection, else only what is a fault of
        this program.
        """
        name = self._backlog.config.name
        gone = asyncio.ensure_future(_until_gone(receive))
        status = "client_gone"  # also where the server cancels this task because of that
        try:
            status = await self._run(gone, send)
        except ClientGone:
            pass
        except RequestError as error:
            status = error.code or str(error.status)
            await self._report(error, send)
        except Exception:
            status = "internal_error"
            raise
        finally:
            gone.cancel()
            self._metrics.requests.labels(name, status).inc()
            await asyncio.gather(gone, return_exceptions=True)

    async def _run(self, gone: asyncio.Future[None], send: Send) -> str:
        for _ in range(_DIAL_ATTEMPTS):
            slot = await self._place(gone, send)
            try:
                # A place that was lost in the moment of its grant is asked for again.
                if not slot.lost.done():
                    return await self._exchange(slot, gone, send)
            except _Unreached as error:
                # Nothing can be done twice. Its replica will tell in a moment that it has ended.
                _log.debug("model %s: %s", self._backlog.config.name, error)
            finally:
                slot.release()
            await asyncio.wait([gone], timeout=_DIAL_PAUSE_S)
            if gone.done():
                raise ClientGone
        raise Gone(
            f"the engine of model {self._backlog.config.name} takes no connection",
            code="engine_lost",
            retry_after_s=self._backlog.retry_after_s(),
        )

    # -- waiting

    async def _place(self, gone: asyncio.Future[None], send: Send) -> Slot:
        asked = time.monotonic()
        acquiring = asyncio.ensure_future(self._backlog.acquire(self._never))
        try:
            # The usual case, without a wait: a place is free.
            await asyncio.sleep(0)
            while not acquiring.done():
                events: list[asyncio.Future[Any]] = [acquiring, gone]
                await asyncio.wait(
                    events,
                    timeout=self._next_word_s(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if gone.done():
                    raise ClientGone
                if not acquiring.done() and self._request.stream:
                    await self._say_progress(send)
            slot = acquiring.result()
        except BaseException:
            # A callback, because a second cancellation could end any wait here.
            acquiring.add_done_callback(_give_back)
            await _undo(acquiring)
            raise
        self._metrics.waiting.labels(self._backlog.config.name).observe(time.monotonic() - asked)
        return slot

    def _next_word_s(self) -> float | None:
        if not self._request.stream:
            return None
        if self._head_sent:
            return _PROGRESS_S
        return max(0.0, self._began + self._grace_s - time.monotonic())

    async def _say_progress(self, send: Send) -> None:
        if not self._head_sent:
            await self._send_head(send, 200, list(EVENT_STREAM))
            self._is_events = True
        state, why = self._backlog.describe()
        waited = time.monotonic() - self._began
        text = f": model {self._backlog.config.name} is {state} after {waited:.0f} s"
        text += f": {why}" if why else ""
        line = text.replace("\r", " ").replace("\n", " ")
        await send(
            {"type": "http.response.body", "body": f"{line}\n\n".encode(), "more_body": True}
        )

    # -- the engine

    async def _exchange(self, slot: Slot, gone: asyncio.Future[None], send: Send) -> str:
        talk = asyncio.ensure_future(self._talk(slot, send))
        try:
            events: list[asyncio.Future[Any]] = [talk, gone, slot.lost]
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            if talk.done():
                return talk.result()
            if slot.lost.done():
                if not self._first_byte_seen:
                    # The word that the engine is gone may come while it is dialled. If the dial is
                    # refused, nothing was said to it, and so nothing is lost.
                    await asyncio.wait([talk], timeout=_REFUSAL_S)
                    if talk.done() and isinstance(talk.exception(), _Unreached):
                        return talk.result()
                raise slot.lost.result()
            raise ClientGone
        finally:
            # Closing the connection is what cancels the engine's work.
            await _undo(talk)

    async def _talk(self, slot: Slot, send: Send) -> str:
        request, replica = self._request, slot.replica
        headers = to_engine(
            request.headers, slot.engine.drop_headers, json=request.json is not None
        )
        host, port = slot.engine.host, slot.engine.port
        if not replica.local:
            host, port = replica.link.address
            headers.append((KEY_HEADER, replica.link.key))
        # Encoded here, so that nothing in the path is taken for another path, or for a query.
        target = quote(request.path, safe=_PATH_SAFE)
        if request.query:
            target += "?" + request.query.decode("latin-1")
        try:
            async with self._client.request(
                request.method,
                URL(f"http://{host}:{port}{target}", encoded=True),
                data=self._body_for(slot) or None,
                headers=headers,
                allow_redirects=False,
            ) as response:
                if not replica.local and UNREACHED_HEADER in response.headers:
                    raise _Unreached("its replica cannot reach the engine")
                return await self._answer(response, slot, send)
        except aiohttp.ClientConnectorError as error:
            raise _Unreached(str(error)) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._lost(str(error) or type(error).__name__) from error

    def _lost(self, why: str) -> Gone:
        return Gone(
            f"the engine of model {self._backlog.config.name} ended under the request: {why}",
            code="engine_lost",
            retry_after_s=1.0,
        )

    def _body_for(self, slot: Slot) -> bytes:
        request = self._request
        wanted = slot.engine.request_model
        if request.json is None:
            return replace_multipart_model(request.body, request.content_type, wanted)
        changed = _for_engine(request.json, slot.engine)
        if changed == request.json:
            return request.body
        try:
            return json.dumps(changed).encode()
        except RecursionError:
            raise BadRequest("the body is nested too deeply", code="invalid_json") from None

    async def _answer(self, response: aiohttp.ClientResponse, slot: Slot, send: Send) -> str:
        if response.status >= 400:
            await self._pass_error(response, send)
            return str(response.status)
        kind = response.headers.get("content-type", "")
        rewriter = NameRewriter(slot.engine.request_model, self._request.asked)
        packed = response.headers.get("content-encoding", "identity") != "identity"
        if packed or self._request.method == "HEAD":
            await self._pass_bytes(response, send)
        elif kind.startswith("text/event-stream"):
            await self._pass_stream(response, rewriter, send)
        elif kind.startswith("application/json"):
            body = rewriter.feed(await response.read()) + rewriter.finish()
            await self._pass_whole(response, body, send)
        else:
            await self._pass_bytes(response, send)
        return "success"

    async def _pass_error(self, response: aiohttp.ClientResponse, send: Send) -> None:
        body = b""
        while len(body) < _MAX_ERROR_BODY and (data := await response.content.readany()):
            body += data
        error = engine_error(response.status, body)
        if is_unknown_path(response.status, body):
            model = self._backlog.config.name
            error["error"]["message"] = f"model {model} does not serve {self._request.path}"
            error["error"]["code"] = "not_served"
        if self._head_sent:
            await self._end(send, error_event(error, self._request.path))
            return
        self._head_sent = self._body_sent = True
        kept = (b"content-type", b"content-encoding")
        headers = [(n, v) for n, v in to_client(response.raw_headers) if n not in kept]
        await send_json(send, response.status, error, headers)

    async def _pass_stream(
        self, response: aiohttp.ClientResponse, rewriter: NameRewriter, send: Send
    ) -> None:
        if not self._head_sent:
            await self._send_head(send, response.status, to_client(response.raw_headers))
        self._is_events = True
        wanted = proper_end(self._request.path)
        ended = False
        try:
            async for data in response.content.iter_any():
                piece = rewriter.feed(data)
                if piece:
                    ended = ended or (wanted is not None and bool(wanted.search(piece)))
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    self._note_first_byte()
        except (aiohttp.ClientError, ConnectionError):
            if not ended:
                raise
        rest = rewriter.finish()
        if wanted is not None and not ended and not wanted.search(rest):
            # An engine that fails in a stream says so in an event; one that just ends, died.
            raise self._lost("it ended the stream before its end")
        await self._end(send, rest)

    async def _pass_whole(self, response: aiohttp.ClientResponse, body: bytes, send: Send) -> None:
        if self._head_sent:  # a stream was asked for, and promised, but the engine sends none
            await self._end(
                send, b"data: " + b" ".join(body.splitlines()) + b"\n\ndata: [DONE]\n\n"
            )
            return
        headers = to_client(response.raw_headers)
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send_head(send, response.status, headers)
        self._note_first_byte()
        await self._end(send, body)

    async def _pass_bytes(self, response: aiohttp.ClientResponse, send: Send) -> None:
        if not self._head_sent:
            headers = to_client(response.raw_headers)
            if response.content_length is not None:
                headers.append((b"content-length", str(response.content_length).encode()))
            await self._send_head(send, response.status, headers)
        async for data in response.content.iter_any():
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._note_first_byte()
        await self._end(send, b"")

    # -- the client

    async def _send_head(self, send: Send, status: int, headers: Headers) -> None:
        self._head_sent = True
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _end(self, send: Send, body: bytes) -> None:
        self._body_sent = True
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _report(self, error: RequestError, send: Send) -> None:
        if not self._head_sent:
            await send_error(send, error)
        elif self._is_events and not self._body_sent:
            # A blank line first: what was sent last may have been one line of an event.
            await self._end(send, b"\n\n" + error_event(error.body(), self._request.path))
        elif not self._body_sent:
            raise Broken(error.message) from error

    def _note_first_byte(self) -> None:
        if not self._first_byte_seen:
            self._first_byte_seen = True
            elapsed = time.monotonic() - self._began
            self._metrics.first_byte.labels(self._backlog.config.name).observe(elapsed)


def _for_engine(body: dict[str, Any], engine: EngineAddress) -> dict[str, Any]:
    changed = {name: value for name, value in body.items() if name not in engine.drop_fields}
    for old, new in engine.rename_fields.items():
        if old in changed:
            value = changed.pop(old)
            if changed.get(new) is None:  # a null is a field left out
                changed[new] = value
    return {**changed, "model": engine.request_model}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _undo(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end; what it ended with is for its owner to look at."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _give_back(acquiring: asyncio.Future[Slot]) -> None:
    if not acquiring.cancelled() and acquiring.exception() is None:
        acquiring.result().release()
