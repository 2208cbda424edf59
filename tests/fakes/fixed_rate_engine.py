#!/usr/bin/env python3
"""An engine that makes tokens at a fixed rate out of nothing: OpenAI's API, llama-server's flags.

For measuring what stands between a client and an engine, and for engines that misbehave on cue.
It needs only the standard library. Flags: `--host`, `--port`, `--model`, `--alias`, `--parallel`
(requests beyond it wait), `--help`, `--list-devices`; all others are taken and ignored.

Variables:
    FAKE_TOKENS_PER_S  50   rate of each stream; 0 sends all tokens at once
    FAKE_TTFB_MS       0    time to the first token
    FAKE_LOAD_S        0    time during which it answers 503, as llama-server does
    FAKE_MAX_TOKENS    128  tokens of a request that names no limit
    FAKE_HANG_LOADING       `deaf` never listens, `503` loads for ever
    FAKE_EXIT_LOADING       exit code with which it ends instead of becoming ready
    FAKE_FATAL_LINE         a line that it prints while it loads
    FAKE_CRASH_AFTER        tokens after which the process kills itself with SIGSEGV
    FAKE_HANG_AFTER         tokens after which it generates no more while /health still says ok
    FAKE_SPAWN_STUBBORN     starts a child that ignores SIGTERM
    FAKE_IGNORE_SIGTERM     ignores SIGTERM itself

`GET /fake/stats`: {"running", "waiting", "served", "cancelled", "tokens"}; cancelled are streams
whose client left. `POST /fake/hang` and `POST /fake/crash` do at once what the variables do later.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

HELP = """\
-h,    --help, --usage                  print usage and exit
-c,    --ctx-size N                     size of the prompt context
-b,    --batch-size N                   logical batch size
-t,    --threads N                      number of threads
-np,   --parallel N                     number of server slots (default: -1, -1 = auto)
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
-ngl,  --gpu-layers, --n-gpu-layers N   layers in VRAM, a number, 'auto', or 'all'
-dev,  --device <dev1,dev2,..>          devices to use
--list-devices                          print list of available devices and exit
-fit,  --fit [on|off]                   whether to adjust unset arguments
-lm,   --load-mode MODE                 model loading mode
-m,    --model FNAME                    model path
-a,    --alias STRING                   model name
--host HOST                             address to listen on
--port PORT                             port to listen on
--slots, --no-slots                     expose slots monitoring endpoint
--embedding, --embeddings               serve embeddings
"""


def _number(name: str, default: float) -> float:
    return float(os.environ.get(name) or default)


class Engine:
    def __init__(self, model: str, slots: int) -> None:
        self.model = model
        self.rate = _number("FAKE_TOKENS_PER_S", 50)
        self.ttfb_s = _number("FAKE_TTFB_MS", 0) / 1000
        self.max_tokens = int(_number("FAKE_MAX_TOKENS", 128))
        self.crash_after = int(_number("FAKE_CRASH_AFTER", 0))
        self.hang_after = int(_number("FAKE_HANG_AFTER", 0))
        self.ready = False
        self.hanging = asyncio.Event()
        self.slots = asyncio.Semaphore(slots)
        self.stats = dict.fromkeys(("running", "waiting", "served", "cancelled", "tokens"), 0)

    async def load(self) -> None:
        if line := os.environ.get("FAKE_FATAL_LINE"):
            print(line, file=sys.stderr, flush=True)
        await asyncio.sleep(_number("FAKE_LOAD_S", 0))
        if code := os.environ.get("FAKE_EXIT_LOADING"):
            print("giving up while loading", file=sys.stderr, flush=True)
            os._exit(int(code))
        if os.environ.get("FAKE_HANG_LOADING") != "503":
            self.ready = True
            print("model loaded", file=sys.stderr, flush=True)

    async def tokens(self, count: int) -> AsyncIterator[int]:
        """Yield token numbers on time: a late one does not make the next ones late."""
        start = time.perf_counter() + self.ttfb_s
        for number in range(count):
            due = start + (number / self.rate if self.rate else 0)
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            if self.hang_after and self.stats["tokens"] >= self.hang_after:
                self.hanging.set()
            if self.hanging.is_set():
                await asyncio.Event().wait()
            self.stats["tokens"] += 1
            yield number
            if self.crash_after and self.stats["tokens"] >= self.crash_after:
                crash()


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


class Connection:
    """One client, request after request on one connection."""

    def __init__(
        self, engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.engine = engine
        self.reader = reader
        self.writer = writer
        self.ahead = b""  # of the next request, read while the last one ran

    async def serve(self) -> None:
        try:
            while await self.request():
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            self.writer.close()

    async def request(self) -> bool:
        head = self.ahead + await self.reader.readuntil(b"\r\n\r\n")
        self.ahead = b""
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines if line)
        }
        body = await self.body(headers)
        path = target.partition("?")[0]
        engine = self.engine
        if path == "/fake/stats":
            self.answer(engine.stats)
        elif path == "/fake/hang":
            engine.hanging.set()
            self.answer({})
        elif path == "/fake/crash":
            crash()
        elif not engine.ready:
            self.error(503, "unavailable_error", "Loading model")
        elif path in ("/health", "/v1/health"):
            self.answer({"status": "ok"})
        elif path == "/slots":
            if engine.hanging.is_set():
                await asyncio.Event().wait()
            self.answer([])
        elif path == "/v1/models":
            model = {"id": engine.model, "object": "model", "created": 0, "owned_by": "fake"}
            self.answer({"object": "list", "data": [model]})
        elif method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
            await self.complete(path.endswith("chat/completions"), body)
        elif method == "POST" and path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}]
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            self.answer({"object": "list", "data": data, "model": engine.model, "usage": usage})
        else:
            self.error(404, "not_found_error", "File Not Found")
        await self.writer.drain()
        return headers.get("connection", "").lower() != "close"

    async def body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            return await self.reader.readexactly(int(headers.get("content-length") or 0))
        parts = []
        while size := int((await self.reader.readline()).partition(b";")[0], 16):
            parts.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readline()
        return b"".join(parts)

    def answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.writer.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )

    def error(self, status: int, kind: str, message: str) -> None:
        self.answer({"error": {"code": status, "type": kind, "message": message}}, status)

    async def complete(self, chat: bool, body: bytes) -> None:
        try:
            request = json.loads(body)
            assert isinstance(request, dict)
        except (ValueError, AssertionError):
            self.error(400, "invalid_request_error", "the body is not a JSON object")
            return
        engine, stats = self.engine, self.engine.stats
        count = request.get("max_tokens") or request.get("max_completion_tokens")
        work = asyncio.ensure_future(self.generate(chat, request, count or engine.max_tokens))
        gone = asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ConnectionResetError
            work.result()
            stats["served"] += 1
        except ConnectionError:
            stats["cancelled"] += 1
            raise
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def watch(self) -> None:
        """Return when the client is gone. A byte of its next request is kept for that."""
        self.ahead = await self.reader.read(1)
        if self.ahead:
            await asyncio.Event().wait()

    async def generate(self, chat: bool, request: dict[str, Any], count: int) -> None:
        engine, stats = self.engine, self.engine.stats
        stats["waiting"] += 1
        try:
            await engine.slots.acquire()
        finally:
            stats["waiting"] -= 1
        stats["running"] += 1
        try:
            if request.get("stream"):
                await self.stream(chat, request, count)
            else:
                words = [f"t{number} " async for number in engine.tokens(count)]
                self.answer(self.whole(chat, "".join(words), count))
        finally:
            stats["running"] -= 1
            engine.slots.release()

    def frame(self, chat: bool, **extra: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chat else "text_completion"
        return {"id": "fake", "object": kind, "created": 0, "model": self.engine.model, **extra}

    def whole(self, chat: bool, text: str, count: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        whole = self.frame(chat, choices=[choice], usage=_usage(count))
        return {**whole, "object": "chat.completion"} if chat else whole

    async def stream(self, chat: bool, request: dict[str, Any], count: int) -> None:
        # Serialised once: the rest of a chunk is the same for each token.
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": "@@"}} if chat else {"text": "@@"}
        before, after = json.dumps(self.frame(chat, choices=[choice])).split("@@")
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        self.writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        async for number in self.engine.tokens(count):
            self.event(f"{before}t{number} {after}")
            await self.writer.drain()
        last: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        last["delta" if chat else "text"] = {} if chat else ""
        self.event(json.dumps(self.frame(chat, choices=[last])))
        if (request.get("stream_options") or {}).get("include_usage"):
            self.event(json.dumps(self.frame(chat, choices=[], usage=_usage(count))))
        self.event("[DONE]")
        self.writer.write(b"0\r\n\r\n")

    def event(self, data: str) -> None:
        text = f"data: {data}\n\n".encode()
        self.writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")


def _usage(count: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}


def arguments(argv: list[str]) -> dict[str, str]:
    """Return `{flag: value}`; a flag followed by another flag has the value ""."""
    values = [*argv[1:], ""]
    return {
        flag: "" if value.startswith("--") else value
        for flag, value in zip(argv, values, strict=False)
        if flag.startswith("-")
    }


def spawn_stubborn() -> None:
    code = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code])
    print(f"child {child.pid}", file=sys.stderr, flush=True)


async def main(argv: list[str]) -> None:
    given = arguments(argv)
    if "--help" in given:
        print(HELP, end="")
        return
    if "--list-devices" in given:
        print("Available devices:")
        print(os.environ.get("FAKE_DEVICES", "  (none)"))
        return
    if os.environ.get("FAKE_IGNORE_SIGTERM"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ.get("FAKE_SPAWN_STUBBORN"):
        spawn_stubborn()
    if os.environ.get("FAKE_HANG_LOADING") == "deaf":
        print("deaf", file=sys.stderr, flush=True)
        await asyncio.Event().wait()
    parallel = int(given.get("--parallel") or 0)
    model = given.get("--alias") or given.get("--model") or "fake"
    engine = Engine(model, parallel if parallel > 0 else 1024)
    clients: set[asyncio.Task[None]] = set()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        clients.add(task)
        task.add_done_callback(clients.discard)
        await Connection(engine, reader, writer).serve()

    host, port = given.get("--host") or "127.0.0.1", int(given.get("--port") or 8080)
    try:
        server = await asyncio.start_server(client, host, port, backlog=1024)
    except OSError:
        print(
            f"couldn't bind HTTP server socket, hostname: {host}, port: {port}",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(1)
    async with server:
        await engine.load()
        await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
