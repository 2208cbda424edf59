"""The replica's own order of things, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
import ray

from flexinfer.engines.errors import EngineNotFound
from flexinfer.serving import server
from flexinfer.serving.app import build_model
from flexinfer.serving.args import ModelArgs, ModelSettings
from flexinfer.serving.status import ReplicaState


class Replica(server.ModelServer):
    """Ended by the test itself, not by its last reference."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


async def test_the_first_start_waits_for_the_settings_that_bound_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF")
    looked_up: list[float] = []
    monkeypatch.setenv("FLEXINFER_LOG_DIR", str(tmp_path))
    monkeypatch.setattr(server, "_assigned_gpus", lambda: ())
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    args = ModelArgs(name="m", backend="llama-cpp", model=str(weights), gpus=0)
    replica = Replica.__new__(Replica)
    await replica.__init__(args.model_dump(mode="json"))  # type: ignore[misc, func-returns-value]

    class Backend:
        def find_executable(self, environ: Mapping[str, str]) -> None:
            looked_up.append(replica._settings.cold_start_timeout_s)
            raise EngineNotFound("none here")

    monkeypatch.setattr(server, "backend_for", lambda name: Backend())
    await asyncio.wait([replica._supervisor], timeout=0.2)
    assert not looked_up
    await replica.reconfigure(ModelSettings(cold_start_timeout_s=2).model_dump(mode="json"))
    await asyncio.wait_for(asyncio.shield(replica._supervisor), 10)
    assert looked_up == [2]
    assert replica._status.state is ReplicaState.FAILED
    await replica._shut_down()


def test_a_config_without_settings_has_the_defaults() -> None:
    """Serve calls `reconfigure` only where there is a `user_config`."""
    entry = build_model(ModelArgs(name="m", backend="llama-cpp", model="/m", gpus=0).model_dump())
    (child,) = entry._bound_deployment.init_args
    config = child._bound_deployment._deployment_config
    assert ModelSettings.model_validate(config.user_config) == ModelSettings()
