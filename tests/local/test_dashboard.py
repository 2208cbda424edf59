from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from aiohttp import web
from local_fakes import FakeServe

from flexinfer.local.dashboard import Dashboard, dashboard_url, token_of
from flexinfer.local.errors import ConfigRefused, DashboardError


async def test_nothing_runs_at_first(serve: FakeServe) -> None:
    async with Dashboard(serve.url) as dashboard:
        found = await dashboard.get()
    assert not found.running
    assert found.applications == {}


async def test_what_was_put_is_ours(serve: FakeServe) -> None:
    application = {"name": "a", "import_path": "flexinfer.serving.app:build_model"}
    serve.foreign["theirs"] = {"status": "RUNNING", "message": "", "deployed_app_config": None}
    serve.statuses["a"] = ("DEPLOY_FAILED", "why")
    async with Dashboard(serve.url) as dashboard:
        await dashboard.put({"applications": [application]})
        found = await dashboard.get()
        assert found.running
        assert found.http_port == serve.port
        assert found.applications["a"].ours
        assert found.applications["a"].status == "DEPLOY_FAILED"
        assert found.applications["a"].message == "why"
        assert not found.applications["theirs"].ours
        await dashboard.delete()
    assert serve.deleted == 1


async def test_a_wrong_config_is_ours_to_explain(serve: FakeServe) -> None:
    serve.put_answer = lambda: web.Response(
        status=400, text="Traceback\n...\nValueError: no such app"
    )
    async with Dashboard(serve.url) as dashboard:
        with pytest.raises(ConfigRefused, match="ValueError: no such app"):
            await dashboard.put({"applications": []})


async def test_trouble_of_the_dashboard_is_another_error(serve: FakeServe) -> None:
    serve.put_answer = lambda: web.Response(status=503, text="the GCS may be down")
    async with Dashboard(serve.url) as dashboard:
        with pytest.raises(DashboardError, match=r"503.*GCS may be down") as caught:
            await dashboard.put({"applications": []})
    assert not isinstance(caught.value, ConfigRefused)


async def test_the_token_is_sent_and_a_missing_one_explained(serve: FakeServe) -> None:
    serve.token = "t0ken"
    async with Dashboard(serve.url, "t0ken") as dashboard:
        await dashboard.get()
    async with Dashboard(serve.url) as dashboard:
        with pytest.raises(DashboardError, match="RAY_AUTH_TOKEN"):
            await dashboard.get()


@pytest.mark.parametrize("body", ["hello", "[]", "{}", '{"applications": {"a": 1}}'])
async def test_another_server_is_recognised(body: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=body))
    async with Dashboard("http://127.0.0.1:1", transport=transport) as dashboard:
        with pytest.raises(DashboardError, match="not a Ray dashboard"):
            await dashboard.get()


async def test_nobody_there() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    async with Dashboard("http://127.0.0.1:1", transport=httpx.MockTransport(refuse)) as dashboard:
        with pytest.raises(DashboardError, match="connection refused"):
            await dashboard.get()


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://head:8265", "http://head:8265"),
        ("http://head:8265/", "http://head:8265"),
        ("head:9000", "http://head:9000"),
        ("head", "http://head:8265"),
        ("https://head", "https://head:443"),
        ("[::1]:8265", "http://[::1]:8265"),
    ],
)
def test_addresses(address: str, url: str) -> None:
    assert dashboard_url(address) == url


@pytest.mark.parametrize(
    "address", ["ray://head:10001", "head:port", "head:99999", "", "a/b", "::1"]
)
def test_no_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="Ray dashboard"):
        dashboard_url(address)


def test_the_token_is_where_ray_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert token_of({}) is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("of home\n")
    assert token_of({}) == "of home"
    named = tmp_path / "named"
    named.write_text("named")
    assert token_of({"RAY_AUTH_TOKEN_PATH": str(named)}) == "named"
    environ = {"RAY_AUTH_TOKEN_PATH": str(named), "RAY_AUTH_TOKEN": "first"}
    assert token_of(environ) == "first"
    with pytest.raises(DashboardError, match="cannot read Ray's token"):
        token_of({"RAY_AUTH_TOKEN_PATH": str(tmp_path)})
