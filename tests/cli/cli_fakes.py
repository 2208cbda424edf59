"""A gateway that answers `GET /-/models`, and a state file that leads to it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typer.testing import Result

from flexinfer.local import state

Run = Callable[..., Result]

MODEL: dict[str, Any] = {
    "name": "qwen",
    "namespace": "team",
    "names": ["qwen", "Qwen/Qwen3-8B"],
    "backend": "llama-cpp",
    "model": "qwen.gguf",
    "state": "serving",
    "reason": None,
    "message": None,
    "progress": None,
    "replicas": [
        {
            "id": "r1",
            "node": "workstation",
            "pid": 11,
            "enginePid": 12,
            "state": "serving",
            "sinceSeconds": 3.5,
        }
    ],
    "lastActivitySecondsAgo": 75.2,
    "queued": 0,
    "running": 2,
    "priority": 100,
    "gpus": 1,
    "warnings": [{"reason": "R", "message": "m", "field": None}],
    "logFile": None,
}
FAILED: dict[str, Any] = {
    **MODEL,
    "name": "broken",
    "namespace": "default",
    "names": ["broken"],
    "state": "failed",
    "reason": "ModelNotFound",
    "message": "no weights for\nmodel 'broken'",
    "replicas": [],
    "lastActivitySecondsAgo": None,
    "running": 0,
}


@contextmanager
def instance(*models: dict[str, Any], log_dir: Path | None = None) -> Iterator[str]:
    """An instance with these models; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/-/models"
            body = json.dumps({"models": models}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    started = state.start_time_of(os.getpid())
    assert started is not None
    known = state.State(os.getpid(), started, url, log_dir=str(log_dir) if log_dir else None)
    state.save(known, state.runtime_dir())
    try:
        yield url
    finally:
        state.remove(known, state.runtime_dir())
        server.shutdown()
        server.server_close()
