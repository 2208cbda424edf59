"""Stand-ins for what `flexinfer.local` speaks to over HTTP: Ray's dashboard and the gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from aiohttp import web

MODEL = """\
apiVersion: ai.flexinfer/v1alpha1
kind: ModelDeployment
metadata:
  name: {name}
spec:
  backend: llama-cpp
  model: {name}.gguf
  priority: {priority}
  resources:
    requests:
      amd.com/gpu: "0"
---
"""


def write_models(path: Path, *names: str, priority: int = 100) -> Path:
    """A manifest with one CPU model a name."""
    path.write_text("".join(MODEL.format(name=name, priority=priority) for name in names))
    return path


class FakeServe:
    """Takes Serve configs, and says of every application that it runs."""

    def __init__(self) -> None:
        self.configs: list[dict[str, Any]] = []
        self.deleted = 0
        self.foreign: dict[str, Any] = {}
        self.statuses: dict[str, tuple[str, str]] = {}
        self.model_states: dict[str, dict[str, Any]] = {}
        self.healthy = True
        self.put_answer: Callable[[], web.Response | Awaitable[web.Response]] | None = None
        self.token: str | None = None
        self.serve_runs = False
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/api/serve/applications/", self._get)
        app.router.add_put("/api/serve/applications/", self._put)
        app.router.add_delete("/api/serve/applications/", self._delete)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/-/models", self._models)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port: int = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def applications(self) -> list[str]:
        """Names of what was deployed last, the gateway included."""
        if not self.configs:
            return []
        return [application["name"] for application in self.configs[-1]["applications"]]

    async def _get(self, request: web.Request) -> web.Response:
        wanted = f"Bearer {self.token}"
        if self.token is not None and request.headers.get("x-ray-authorization") != wanted:
            return web.Response(status=401, text="token?")
        body: dict[str, Any] = {"applications": dict(self.foreign)}
        if self.serve_runs or self.configs:
            body["http_options"] = {"host": "127.0.0.1", "port": self.port}
        for application in self.configs[-1]["applications"] if self.configs else ():
            name = application["name"]
            status, message = self.statuses.get(name, ("RUNNING", ""))
            body["applications"][name] = {
                "status": status,
                "message": message,
                "deployed_app_config": application,
            }
        return web.json_response(body)

    async def _put(self, request: web.Request) -> web.Response:
        if self.put_answer is not None:
            answer = self.put_answer()
            return answer if isinstance(answer, web.Response) else await answer
        self.configs.append(await request.json())
        return web.Response()

    async def _delete(self, _: web.Request) -> web.Response:
        self.deleted += 1
        return web.Response()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy and self.configs else 503)

    async def _models(self, _: web.Request) -> web.Response:
        models = [
            {"name": name, "names": [name], "state": "zero", "replicas": []}
            | self.model_states.get(name, {})
            for name in self.applications
            if name != "flexinfer-gateway"
        ]
        return web.json_response({"models": models})
