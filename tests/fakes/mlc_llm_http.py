"""The HTTP side of the fake `mlc_llm`: FastAPI's and MLC's manners, on a thread a connection."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mlc_llm_engine import Generation, ThreadedEngine, number, say
from mlc_llm_requests import Bad, Invalid, check, prompt_tokens


class Gone(Exception):
    """The client left."""


# -- the server


class Server(ThreadingHTTPServer):
    """Knows its connections, and which of them has a request under way."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], engine: ThreadedEngine, **more: Any) -> None:
        self.engine = engine
        self.model: str = more["model"]
        self.api_key: str | None = more["api_key"]
        self.embeds: bool = more["embeds"]
        self.closing = False
        self.lock = threading.Condition()
        self.connections: dict[Handler, bool] = {}
        super().__init__(address, Handler)

    def handle_error(self, request: Any, address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (ConnectionError, Gone)):
            traceback.print_exc()

    def finish(self, patience: threading.Event) -> None:
        """Close what is idle, and wait for the rest without a limit, or until `patience` is set."""
        with self.lock:
            self.closing = True
            for connection, busy in self.connections.items():
                if not busy:
                    connection.hang_up()
        while not patience.is_set():
            with self.lock:
                if not self.connections:
                    return
                self.lock.wait(0.05)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections[self] = False

    def finish(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().finish()
        with self.server.lock:
            self.server.connections.pop(self, None)
            self.server.lock.notify_all()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._busy(self._get)

    def do_POST(self) -> None:
        self._busy(self._post)

    def _busy(self, answer: Any) -> None:
        with self.server.lock:
            self.server.connections[self] = True
        try:
            answer()
        except Gone:
            self.close_connection = True
        except Invalid as error:
            self.send(422, {"detail": error.errors})
        except Bad as error:
            self.refuse(str(error))
        except ConnectionError:
            raise
        except Exception:
            say("ERROR:    Exception in ASGI application")
            traceback.print_exc()
            self.send(500, "Internal Server Error", kind="text/plain; charset=utf-8")
        finally:
            with self.server.lock:
                self.server.connections[self] = False
                self.close_connection |= self.server.closing

    # -- routes

    def _get(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/v1/models" and self._allowed():
            model = {"id": self.server.model, "created": int(time.time()), "object": "model"}
            self.send(200, {"object": "list", "data": [{**model, "owned_by": "MLC-LLM"}]})
        elif path == "/metrics":
            lines = [f"{name}\t{value}" for name, value in self.server.engine.metrics().items()]
            self.send(200, "\n".join(lines), kind="text/plain; charset=utf-8")
        elif path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            self.send(405, {"detail": "Method Not Allowed"})
        elif path != "/v1/models":
            self.send(404, {"detail": "Not Found"})

    def _post(self) -> None:
        raw = self._body()
        path = self.path.partition("?")[0]
        if path in ("/v1/models", "/metrics"):
            self.send(405, {"detail": "Method Not Allowed"})
            return
        if path not in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            self.send(404, {"detail": "Not Found"})
            return
        if not self._allowed():
            return
        try:
            body = json.loads(raw)
        except ValueError as error:
            raise Invalid("json_invalid", [0], f"JSON decode error: {error}") from None
        if path == "/v1/embeddings":
            self._embed(body)
        else:
            self._complete(body, chat=path.endswith("chat/completions"))

    def _allowed(self) -> bool:
        key = self.server.api_key
        if key is None or self.headers.get("authorization") == f"Bearer {key}":
            return True
        self.send(401, {"detail": "Invalid API Key"})
        return False

    def _embed(self, body: Any) -> None:
        if not isinstance(body, dict) or "input" not in body:
            raise Invalid("missing", ["input"], "Field required")
        if not self.server.embeds:
            raise Bad("No embedding engine is loaded.")
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [
            {"object": "embedding", "index": index, "embedding": [float(len(str(text))), 1.0]}
            for index, text in enumerate(texts)
        ]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        answer = {"object": "list", "data": data, "model": body.get("model"), "usage": usage}
        self.send(200, answer)

    # -- generations

    def _complete(self, body: Any, *, chat: bool) -> None:
        body, engine = check(body, chat), self.server.engine
        prompt = prompt_tokens(body, chat, engine.input_limit)
        room = max(1, engine.config.single - prompt)
        limit = body.get("max_tokens")
        limit = int(number("FAKE_MLC_MAX_TOKENS", 256)) if limit is None else limit
        count = body.get("n") or 1
        prefix = "chatcmpl" if chat else "cmpl"
        name = body["user"] if body.get("user") is not None else f"{prefix}-{uuid.uuid4().hex}"
        generation = Generation(name, min(limit, room))
        engine.add(generation, prompt)
        frame = {"id": name, "created": int(time.time()), "model": body.get("model")}
        if chat:
            frame["system_fingerprint"] = ""
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": generation.limit * count,
            "total_tokens": prompt + generation.limit * count,
            "extra": None,
        }
        try:
            if body.get("stream"):
                options = body.get("stream_options") or {}
                shown = usage if options.get("include_usage") else None
                self._stream(generation, frame, shown, chat=chat, count=count)
            else:
                text = "".join(f"t{token} " for token, _ in self._tokens(generation))
                self.send(200, _whole(frame, text, usage, chat=chat, count=count))
        finally:
            engine.abort(generation)

    def _tokens(self, generation: Generation) -> Iterator[tuple[int, bool]]:
        """Yield tokens; look at each of them whether the client is still there."""
        last = False
        while not last:
            token, last = generation.tokens.get()
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                raise Gone
            yield token, last

    def _stream(
        self,
        generation: Generation,
        frame: dict[str, Any],
        usage: dict[str, Any] | None,
        *,
        chat: bool,
        count: int,
    ) -> None:
        frame["object"] = "chat.completion.chunk" if chat else "text_completion"
        begun = False
        for token, last in self._tokens(generation):
            if not begun:  # what goes wrong before the first token has a status of its own
                begun = True
                self.send_response(200)
                self.send_header("content-type", "text/event-stream; charset=utf-8")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
            text, reason = f"t{token} ", "length" if last else None
            choices = [_choice(text, reason, index, chat=chat) for index in range(count)]
            self._event(json.dumps({**frame, "choices": choices, "usage": None}))
        if usage is not None:
            self._event(json.dumps({**frame, "choices": [], "usage": usage}))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: str) -> None:
        text = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")

    # -- answers

    def refuse(self, message: str) -> None:
        """MLC's errors are JSON, and that as a string once more JSON."""
        error = {"object": "error", "message": message, "code": 400}
        self.send(400, json.dumps(error))

    def send(self, status: int, value: Any, *, kind: str = "application/json") -> None:
        data = value.encode() if kind.startswith("text/") else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        address = f"{self.client_address[0]}:{self.client_address[1]}"
        print(f'INFO:     {address} - "{self.requestline}" {status}', flush=True)

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)


def _message(text: str) -> dict[str, Any]:
    empty = {"name": None, "tool_calls": None, "tool_call_id": None}
    return {"content": text, "role": "assistant", **empty}


def _choice(text: str, reason: str | None, index: int, *, chat: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"finish_reason": reason, "index": index, "logprobs": None}
    return {**choice, "delta": _message(text)} if chat else {**choice, "text": text}


def _whole(
    frame: dict[str, Any], text: str, usage: dict[str, Any], *, chat: bool, count: int
) -> dict[str, Any]:
    choices = [_choice(text, "length", index, chat=chat) for index in range(count)]
    if chat:
        for choice in choices:
            choice["message"] = choice.pop("delta")
    kind = "chat.completion" if chat else "text_completion"
    return {**frame, "object": kind, "choices": choices, "usage": usage}


# -- its life


def serve_http(
    engine: ThreadedEngine,
    *,
    host: str,
    port: int,
    model: str,
    api_key: str | None,
    embeds: bool,
) -> None:
    """Listen until a signal comes. Ends the process; what stands behind a call of it never runs."""
    say(f"INFO:     Started server process [{os.getpid()}]")
    say("INFO:     Waiting for application startup.")
    say("INFO:     Application startup complete.")
    asked, forced = threading.Event(), threading.Event()
    signals: list[int] = []

    def hear(given: int, _: Any) -> None:
        # A second SIGTERM changes nothing, a second SIGINT does.
        if given == signal.SIGINT and asked.is_set():
            forced.set()
        signals.append(given)
        asked.set()

    signal.signal(signal.SIGTERM, hear)
    signal.signal(signal.SIGINT, hear)
    try:
        server = Server((host, port), engine, model=model, api_key=api_key, embeds=embeds)
    except OSError as error:
        say(
            f"ERROR:    [Errno {error.errno}] error while attempting to bind on address "
            f"('{host}', {port}): {os.strerror(error.errno or 0).lower()}"
        )
        say("INFO:     Waiting for application shutdown.")
        say("INFO:     Application shutdown complete.")
        os._exit(1)
    accepting = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    accepting.start()
    say(f"INFO:     Uvicorn running on http://{host}:{port} (Press CTRL+C to quit)")
    asked.wait()
    say("INFO:     Shutting down")
    server.shutdown()
    server.server_close()
    say("INFO:     Waiting for connections to close. (CTRL+C to force quit)")
    server.finish(forced)
    say(f"INFO:     Finished server process [{os.getpid()}]")
    # The signal once more, with its default effect: this is its clean end.
    signal.signal(signals[0], signal.SIG_DFL)
    os.kill(os.getpid(), signals[0])
    threading.Event().wait()
