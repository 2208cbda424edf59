from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from aiohttp import web
from local_fakes import FakeServe, write_models

from flexinfer.api import ManifestErrors
from flexinfer.local import instance, state
from flexinfer.local.errors import ForeignApplications, LocalError, PortTaken
from flexinfer.local.events import (
    Activity,
    Applied,
    Event,
    Noticed,
    Phase,
    Ready,
    Refused,
    Rejected,
    Stopping,
    Unreachable,
)
from flexinfer.local.follow import Follower
from flexinfer.local.instance import Instance, Options

T = TypeVar("T")
GATEWAY = "flexinfer-gateway"


class Told:
    """Collects events, and waits for those to come."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._news = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()

    async def of(self, kind: type[T], fits: Callable[[T], bool] = lambda _: True) -> T:
        async with asyncio.timeout(20):
            while True:
                self._news.clear()
                for event in self.events:
                    if isinstance(event, kind) and fits(event):
                        self.events.remove(event)
                        return event
                await self._news.wait()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "Follower", partial(Follower, interval_s=0.02))
    monkeypatch.setattr(instance, "_LOOK_S", 0.02)
    monkeypatch.setattr(instance, "_GATEWAY_POLL_S", 0.02)
    monkeypatch.setattr(instance, "_APPLICATIONS_POLL_S", 0.02)
    monkeypatch.setattr(instance, "_RETRY_S", 0.02)


@asynccontextmanager
async def running(serve: FakeServe, *paths: Path, told: Told) -> AsyncIterator[Instance]:
    """An instance on a cluster that was joined, until the end of the block."""
    running_instance = Instance(Options(paths=paths, address=serve.url, port=serve.port), told)
    task = asyncio.create_task(running_instance.run())
    try:
        yield running_instance
    finally:
        running_instance.stop()
        async with asyncio.timeout(20):
            await task


async def test_from_files_to_an_api_and_back(serve: FakeServe, tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a", "b")
    told = Told()
    async with running(serve, path, told=told):
        ready = await told.of(Ready)
        assert ready.url == serve.url
        assert ready.models == ["a", "b"]
        assert serve.applications == [GATEWAY, "a", "b"]
        assert state.find().url == serve.url
    await told.of(Stopping)
    # Serve did not run before.
    assert serve.deleted == 1
    assert state.running(state.runtime_dir()) == []


async def test_a_serve_that_ran_before_stays(serve: FakeServe, tmp_path: Path) -> None:
    serve.serve_runs = True
    path = write_models(tmp_path / "a.yaml", "a")
    told = Told()
    async with running(serve, path, told=told):
        await told.of(Ready)
    assert serve.deleted == 0
    assert serve.applications == []


async def test_files_are_followed(serve: FakeServe, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_models(folder / "a.yaml", "a", "b")
    told = Told()
    async with running(serve, folder, told=told):
        await told.of(Ready)
        write_models(folder / "c.yaml", "c")
        assert await told.of(Applied) == Applied(added=("c",))
        write_models(folder / "a.yaml", "a", "b", priority=7)
        assert await told.of(Applied) == Applied(
            changed=(
                "a",
                "b",
            )
        )
        write_models(folder / "a.yaml", "a", priority=7)
        assert await told.of(Applied) == Applied(removed=("b",))
        assert serve.applications == [GATEWAY, "a", "c"]


async def test_what_does_not_validate_changes_nothing(serve: FakeServe, tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a")
    told = Told()
    async with running(serve, path, told=told):
        await told.of(Ready)
        good = path.read_text()
        path.write_text(good.replace("priority", "prioritie").replace("llama-cpp", "llama"))
        rejected = await told.of(Rejected)
        assert {problem.field for problem in rejected.problems} == {
            "spec.prioritie",
            "spec.backend",
        }
        assert len(serve.configs) == 1
        # The same content again is no reason to deploy anything.
        path.write_text(good)
        (tmp_path / "unused").mkdir()
        write_models(path, "a", "b")
        assert await told.of(Applied) == Applied(added=("b",))
        assert len(serve.configs) == 2


async def test_a_comment_deploys_nothing(serve: FakeServe, tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a")
    told = Told()
    async with running(serve, path, told=told):
        await told.of(Ready)
        path.write_text("# new\n" + path.read_text())
        path.write_text(path.read_text() + path.read_text().replace("name: a", "name: b"))
        await told.of(Applied)
        assert [len(config["applications"]) for config in serve.configs] == [2, 3]


async def test_trouble_is_tried_again_and_a_wrong_config_is_not(
    serve: FakeServe, tmp_path: Path
) -> None:
    path = write_models(tmp_path / "a.yaml", "a")
    told = Told()
    async with running(serve, path, told=told):
        await told.of(Ready)
        serve.put_answer = lambda: web.Response(status=400, text="ValueError: nonsense")
        write_models(path, "a", "b")
        refused = await told.of(Refused)
        assert refused.retry_s is None
        assert "nonsense" in refused.message
        serve.put_answer = lambda: web.Response(status=503, text="busy")
        write_models(path, "a", "c")
        refused = await told.of(Refused)
        assert refused.retry_s is not None
        serve.put_answer = None
        assert await told.of(Applied) == Applied(added=("c",))


async def test_activations_and_failures_are_told(serve: FakeServe, tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a", "b")
    told = Told()
    async with running(serve, path, told=told):
        await told.of(Ready)
        serve.model_states["a"] = {"state": "starting", "progress": "loading"}
        assert await told.of(Activity) == Activity("a", "starting", progress="loading")
        serve.model_states["a"] = {"state": "serving"}
        assert (await told.of(Activity)).took_s is not None
        serve.model_states["b"] = {"state": "failed", "reason": "ModelNotFound", "message": "no"}
        failed = Activity("b", "failed", reason="ModelNotFound", message="no")
        assert await told.of(Activity) == failed


async def test_an_application_that_ray_cannot_build_is_told(
    serve: FakeServe, tmp_path: Path
) -> None:
    path = write_models(tmp_path / "a.yaml", "a")
    serve.statuses["a"] = ("DEPLOY_FAILED", "ImportError: no such module\n")
    told = Told()
    async with running(serve, path, told=told):
        failed = await told.of(Activity)
        assert failed.reason == "DeployFailed"
        assert failed.message == "ImportError: no such module"


async def test_a_gateway_that_ray_cannot_build_is_the_end(serve: FakeServe, tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a")
    serve.healthy = False
    serve.statuses[GATEWAY] = ("DEPLOY_FAILED", "ImportError: flexinfer")
    started = Instance(Options([path], address=serve.url, port=serve.port), Told())
    with pytest.raises(LocalError, match="gateway cannot be started: ImportError"):
        await started.run()
    assert serve.deleted == 1


async def test_a_silent_gateway_is_told_once(serve: FakeServe, tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a")
    told = Told()
    async with running(serve, path, told=told):
        await told.of(Ready)
        serve.model_states["a"] = {"state": None, "replicas": [{}]}  # not FlexInfer's
        await told.of(Unreachable, lambda event: not event.back)
        del serve.model_states["a"]
        await told.of(Unreachable, lambda event: event.back)
        assert not [event for event in told.events if isinstance(event, Unreachable)]


async def test_applications_of_others_are_not_replaced(serve: FakeServe, tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a")
    theirs = {"import_path": "shop.app:build"}
    serve.foreign["shop"] = {"status": "RUNNING", "message": "", "deployed_app_config": theirs}
    with pytest.raises(ForeignApplications, match="already serves shop"):
        await Instance(Options([path], address=serve.url), Told()).run()
    assert serve.configs == []
    assert serve.deleted == 0


async def test_nothing_starts_with_wrong_manifests(serve: FakeServe, tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a", "a")
    told = Told()
    with pytest.raises(ManifestErrors):
        await Instance(Options([path]), told).run()
    assert not [event for event in told.events if isinstance(event, Phase | Stopping)]
    assert state.running(state.runtime_dir()) == []


async def test_nothing_starts_on_a_taken_port(serve: FakeServe, tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a")
    told = Told()
    with pytest.raises(PortTaken, match=str(serve.port)):
        await Instance(Options([path], port=serve.port), told).run()
    assert not [event for event in told.events if isinstance(event, Phase)]
    assert state.running(state.runtime_dir()) == []


async def test_a_key_file_has_to_have_a_key(serve: FakeServe, tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a")
    key = tmp_path / "key"
    key.write_text("\n")
    with pytest.raises(LocalError, match="empty"):
        await Instance(Options([path], api_key_file=key), Told()).run()


async def test_off_loopback_without_a_key_is_a_warning(
    serve: FakeServe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_models(tmp_path / "a.yaml", "a")

    async def reasons() -> set[str]:
        told = Told()
        options = Options([path], host="0.0.0.0", address=serve.url, port=serve.port)
        started = Instance(options, told)
        task = asyncio.create_task(started.run())
        await told.of(Ready)
        started.stop()
        await task
        return {event.notice.reason for event in told.events if isinstance(event, Noticed)}

    assert "NoAPIKey" in await reasons()
    monkeypatch.setenv("FLEXINFER_API_KEY", "secret")
    assert "NoAPIKey" not in await reasons()


async def test_a_second_stop_does_not_wait(serve: FakeServe, tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a")
    serve.serve_runs = True
    told = Told()
    never = asyncio.Event()
    async with running(serve, path, told=told) as started:
        await told.of(Ready)

        async def hang() -> web.Response:
            await never.wait()
            return web.Response()

        serve.put_answer = hang
        started.stop()
        await told.of(Stopping)
    never.set()
