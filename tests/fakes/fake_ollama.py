#!/usr/bin/env python3
"""An Ollama for machines without one: the API, the store and the pull protocol, and no model.

It serves nothing but words, and has a runner of its own that does nothing: what the real one does
with a start, a download, a dead runner and a signal, it does as well.

FAKE_LOAD_S: how long a model takes to load. FAKE_LOAD_ERROR: what it fails with instead.
FAKE_EMBED_ONLY: the model can do nothing but embeddings.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

STORE = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
HOST, _, PORT = os.environ.get("OLLAMA_HOST", "127.0.0.1:11434").rpartition(":")
COMMANDS = "from license template system adapter renderer parser parameter message requires"


# -- the store


def blob(digest: str) -> Path:
    return STORE / "blobs" / digest.replace(":", "-")


def manifest(name: str) -> Path:
    rest, _, tag = name.rpartition(":") if name.rfind(":") > name.rfind("/") else (name, "", "")
    parts = (rest or name).split("/")
    parts = ["registry.ollama.ai", "library"][: 3 - len(parts)] + parts
    return STORE.joinpath("manifests", *parts, tag or "latest")


def add_blob(data: bytes, kind: str) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if not blob(digest).exists():
        blob(digest).write_bytes(data)
    return {"mediaType": kind, "digest": digest, "size": len(data)}


def write_manifest(name: str, layers: list[dict[str, Any]]) -> None:
    config = add_blob(b"{}", "application/vnd.docker.container.image.v1+json")
    path = manifest(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": layers}))


# -- the server


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    runners: ClassVar[dict[str, subprocess.Popen[bytes]]] = {}
    loading = threading.Lock()

    def do_HEAD(self) -> None:
        self.answer(200 if blob(self.path.rpartition("/")[2]).exists() else 404, {})

    def do_GET(self) -> None:
        if self.path == "/api/version":
            self.answer(200, {"version": "0.17.4-fake"})
        elif self.path == "/api/ps":
            self.answer(200, {"models": [{"name": name, "model": name} for name in self.runners]})
        else:
            self.answer(404, {"error": "not found"})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if self.path.startswith("/api/blobs/"):
            blob(self.path.rpartition("/")[2]).write_bytes(self.rfile.read(length))
            self.answer(201, {})
            return
        body = json.loads(self.rfile.read(length) or b"{}")
        verb = self.path.rpartition("/")[2]
        if verb == "pull":
            self.stream()
            Pull(self, body).run()
        elif verb == "create":
            self.create(body)
        elif not manifest(body["model"]).exists():
            text = f"model '{body['model']}' not found"
            self.answer(404, {"error": text})
        elif verb == "generate" and os.environ.get("FAKE_EMBED_ONLY"):
            self.answer(400, {"error": f'"{body["model"]}" does not support generate'})
        elif self.load(body["model"]):
            self.serve(verb, body)

    def serve(self, verb: str, body: dict[str, Any]) -> None:
        if verb == "generate":
            self.answer(200, {"model": body["model"], "done": True, "done_reason": "load"})
        elif verb in ("embed", "embeddings"):
            data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.5]}]
            self.answer(200, {"object": "list", "model": body["model"], "data": data})
        elif body.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for text, why in (("Hi", None), (" there", None), ("", "stop")):
                choice = {"index": 0, "delta": {"content": text}, "finish_reason": why}
                chunk = {"object": "chat.completion.chunk", "model": body["model"]}
                self.wfile.write(
                    b"data: " + json.dumps({**chunk, "choices": [choice]}).encode() + b"\n\n"
                )
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True
        else:
            message = {"role": "assistant", "content": "Hi there"}
            choice = {"index": 0, "message": message, "text": "Hi there", "finish_reason": "stop"}
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            answer = {"object": "chat.completion", "model": body["model"], "usage": usage}
            self.answer(200, {**answer, "choices": [choice]})

    def load(self, name: str) -> bool:
        """Have a living runner; false if that failed or the client has gone."""
        with self.loading:
            runner = self.runners.get(name)
            if runner is not None and runner.poll() is None:
                return True
            if error := os.environ.get("FAKE_LOAD_ERROR"):
                self.answer(500, {"error": error})
                return False
            command = [sys.executable, __file__, "runner", "--model", name]
            runner = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert runner.stdout is not None
            runner.stdout.readline()  # a model is loaded when its runner is there, and idle
            end = time.monotonic() + float(os.environ.get("FAKE_LOAD_S", "0"))
            while time.monotonic() < end:
                if self.client_gone(0.02):
                    runner.kill()
                    return False
            self.runners[name] = runner
            return True

    def create(self, body: dict[str, Any]) -> None:
        layers = []
        if "from" in body:
            layers = json.loads(manifest(body["from"]).read_bytes())["layers"]
            layers.append(
                add_blob(body["modelfile"].encode(), "application/vnd.ollama.image.params")
            )
        for digest in body.get("files", {}).values():
            data = blob(digest)
            with data.open("rb") as file:
                if file.read(4) != b"GGUF":
                    self.answer(400, {"error": "supplied file was not in GGUF format"})
                    return
            kind = "application/vnd.ollama.image.model"
            layers.append({"mediaType": kind, "digest": digest, "size": data.stat().st_size})
        self.stream()
        self.line({"status": "parsing GGUF"})
        write_manifest(body["model"], layers)
        self.line({"status": "success"})

    # -- how it answers

    def client_gone(self, wait_s: float) -> bool:
        readable, _, _ = select.select([self.connection], [], [], wait_s)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def line(self, event: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(event).encode() + b"\n")

    def log_message(self, format: str, *args: Any) -> None:
        print(f'[GIN] | {args[1]} | {self.command} "{self.path}"', file=sys.stderr, flush=True)


class Pull:
    """One pull: parts of one piece, noted in a file of their own as the real one does."""

    def __init__(self, api: Api, body: dict[str, Any]) -> None:
        self.api = api
        self.name = body["model"]
        host, _, rest = self.name.partition("/")
        path, _, self.tag = rest.rpartition(":")
        scheme = "http" if body.get("insecure") else "https"
        self.base = f"{scheme}://{host}/v2/{path}"

    def run(self) -> None:
        try:
            self.pull()
        except (BrokenPipeError, ConnectionResetError):
            return
        except urllib.error.HTTPError as error:
            missing = "file does not exist" if error.code == 404 else f"{error.code}: {{}}"
            self.api.line({"error": f"pull model manifest: {missing}"})
        except OSError as error:
            self.api.line({"error": f"pull model manifest: dial tcp: {error}"})
        except ValueError as error:
            self.api.line({"error": str(error)})

    def pull(self) -> None:
        self.api.line({"status": "pulling manifest"})
        with urllib.request.urlopen(f"{self.base}/manifests/{self.tag}", timeout=10) as response:
            text = response.read()
        content = json.loads(text)
        layers = [*content["layers"], content["config"]]
        new = [layer["digest"] for layer in layers if not blob(layer["digest"]).exists()]
        for digest in new:
            self.blob(digest)
        self.api.line({"status": "verifying sha256 digest"})
        for digest in new:
            got = f"sha256:{hashlib.sha256(blob(digest).read_bytes()).hexdigest()}"
            if got != digest:
                blob(digest).unlink()
                raise ValueError(
                    f"digest mismatch, file must be downloaded again: want {digest}, got {got}"
                )
        self.api.line({"status": "writing manifest"})
        path = manifest(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        self.api.line({"status": "success"})

    def blob(self, digest: str) -> None:
        data = Path(f"{blob(digest)}-partial")
        note = Path(f"{data}-0")
        url = f"{self.base}/blobs/{digest}"
        head = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(head, timeout=10) as response:
            total = int(response.headers["Content-Length"])
        done = json.loads(note.read_bytes())["Completed"] if note.exists() else 0
        asked = urllib.request.Request(url, headers={"Range": f"bytes={done}-{total - 1}"})
        part = {"N": 0, "Offset": 0, "Size": total, "Completed": done}
        note.write_text(json.dumps(part))
        data.touch()
        with urllib.request.urlopen(asked, timeout=60) as response, data.open("r+b") as file:
            file.seek(done)
            try:
                done = self.copy(digest, response, file, done, total)
            except BaseException:
                file.flush()
                note.write_text(json.dumps({**part, "Completed": file.tell()}))
                raise
        note.unlink()
        data.rename(blob(digest))

    def copy(self, digest: str, response: Any, file: Any, done: int, total: int) -> int:
        """Copy what comes, and say so every 60 ms, also when nothing does."""
        chunks: list[bytes] = []
        ended = threading.Event()

        def read() -> None:
            try:
                while data := response.read1(1 << 16):
                    chunks.append(data)
            except (OSError, ValueError):
                pass
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        while True:
            over = ended.wait(0.06)
            while chunks:
                file.write(chunks.pop(0))
            done = file.tell()
            event = {"status": f"pulling {digest[7:19]}", "digest": digest, "total": total}
            self.api.line(event | ({"completed": done} if done else {}))
            if done == total:
                return done
            if over:
                raise ValueError("max retries exceeded: unexpected EOF")


def serve() -> None:
    try:
        key = Path.home() / ".ollama" / "id_ed25519"
        key.parent.mkdir(parents=True, exist_ok=True)
        key.touch()
        for directory in ("blobs", "manifests"):
            (STORE / directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"Error: could not create directory {error}")
    try:
        server = ThreadingHTTPServer((HOST, int(PORT)), Api)
    except OSError:
        sys.exit(f"Error: listen tcp {HOST}:{PORT}: bind: address already in use")
    server.daemon_threads = True

    def end(*_: object) -> None:
        for runner in Api.runners.values():
            runner.kill()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    text = (
        f'level=INFO source=routes.go:1718 msg="Listening on {HOST}:{PORT} (version 0.17.4-fake)"'
    )
    print(text, file=sys.stderr, flush=True)
    server.serve_forever()


def create(name: str, file: Path) -> None:
    text = file.read_text()
    base, bare = "", re.sub(r'"""(?s:.*?)"""', '""', text)
    for number, line in enumerate(bare.splitlines(), 1):
        word, _, rest = line.partition(" ")
        if word and word.lower() not in COMMANDS.split():
            known = ", ".join(f'"{command}"' for command in COMMANDS.split())
            sys.exit(f"Error: (line {number}): command must be one of {known}")
        base = rest if word == "FROM" else base
    body = {"model": name, "from": base, "modelfile": text}
    request = urllib.request.Request(
        f"http://{HOST}:{PORT}/api/create",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).read()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    elif sys.argv[1] == "create":
        create(sys.argv[2], Path(sys.argv[4]))
    elif sys.argv[1] == "runner":
        print("ready", flush=True)
        threading.Event().wait()
    else:
        print("Warning: client version is 0.17.4-fake")
