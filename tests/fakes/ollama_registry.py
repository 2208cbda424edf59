"""A registry of Ollama's on loopback, from which the real Ollama pulls.

It answers as the real one does: manifests itself, blobs by a redirect to another host, in parts as
they are asked for. What may go wrong on the way can be switched on.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

_CHUNK = 64 << 10


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Registry:
    """`url_host` is the host part of its tags.

    `stop_at`: a blob's bytes end to come at this offset, until `go_on` is set. `cut`: connections
    are closed there instead. `damage`: digests whose content is served with one bit wrong.
    `status`: what every manifest is answered with, if it is not to be found.
    """

    stop_at: int | None = None
    cut: bool = False
    damage: set[str] = field(default_factory=set)
    status: int = 200
    go_on: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)
    sent: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    _server: ThreadingHTTPServer | None = None

    def add(self, name: str, layers: dict[str, bytes], config: dict[str, Any]) -> bytes:
        """Offer a model `namespace/name:tag` of these layers (media type: content)."""

        def layer(media_type: str, data: bytes) -> dict[str, Any]:
            digest = digest_of(data)
            self.blobs[digest] = data
            return {"mediaType": media_type, "digest": digest, "size": len(data)}

        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": layer(
                "application/vnd.docker.container.image.v1+json", json.dumps(config).encode()
            ),
            "layers": [layer(kind, data) for kind, data in layers.items()],
        }
        path, _, tag = name.rpartition(":")
        self.manifests[f"/v2/{path}/manifests/{tag}"] = json.dumps(manifest).encode()
        return self.manifests[f"/v2/{path}/manifests/{tag}"]

    def add_gguf(self, name: str, gguf: bytes) -> bytes:
        """Offer a model of one GGUF file."""
        config = {
            "model_format": "gguf",
            "model_family": "llama",
            "model_families": ["llama"],
            "model_type": "134.52M",
            "file_type": "Q4_1",
            "architecture": "amd64",
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [digest_of(gguf)]},
        }
        template = b"{{ .System }}{{ .Prompt }}"
        layers = {
            "application/vnd.ollama.image.model": gguf,
            "application/vnd.ollama.image.template": template,
        }
        return self.add(name, layers, config)

    @property
    def url_host(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.server_port}"

    def start(self) -> Registry:
        registry = self

        class Handler(_Handler):
            offer = registry

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self) -> None:
        assert self._server is not None
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    offer: ClassVar[Registry]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._blob_of(self.path.rpartition("/")[2], body=False)

    def do_GET(self) -> None:
        offer = self.offer
        offer.requests.append(f"{self.path} {self.headers.get('Range', '')}".strip())
        if offer.status != 200:
            self._answer(offer.status, b'{"errors": [{"code": "NO"}]}')
        elif "/manifests/" in self.path:
            manifest = offer.manifests.get(self.path)
            self._answer(404 if manifest is None else 200, manifest or b"{}")
        elif self.path.startswith("/v2/"):
            # Another name of this host: to Ollama a place where only blobs are.
            port = offer.url_host.rpartition(":")[2]
            location = f"http://localhost:{port}/blobs/{self.path.rpartition('/')[2]}"
            self._answer(307, b"", Location=location)
        else:
            self._blob_of(self.path.rpartition("/")[2], body=True)

    def _blob_of(self, digest: str, *, body: bool) -> None:
        data = self.offer.blobs.get(digest)
        if data is None:
            self._answer(404, b"{}")
            return
        if digest in self.offer.damage:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start, end = 0, len(data)
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) + 1
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if body:
            self._send(data, start, end)

    def _send(self, data: bytes, start: int, end: int) -> None:
        offer = self.offer
        while start < end:
            upto = min(start + _CHUNK, end)
            if offer.stop_at is not None and not offer.go_on.is_set():
                upto = min(upto, offer.stop_at)
                if start >= offer.stop_at:
                    offer.stopped.set()
                    if offer.cut:
                        self.close_connection = True
                        return
                    offer.go_on.wait(60)
                    continue
            try:
                self.wfile.write(data[start:upto])
                self.wfile.flush()
            except OSError:
                self.close_connection = True
                return
            offer.sent += upto - start
            start = upto

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
