"""What an engine process sees of its GPUs when Ray assigned them, seen in its own environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from engine_helpers import FAKE, REPOSITORY, engine_spec, wait_until

from flexinfer.engines.gpus import MASK, OTHER_MASKS, Inventory, assign
from flexinfer.engines.launcher import environment_of
from flexinfer.engines.llamacpp import VARIABLE, LlamaCpp
from flexinfer.engines.logs import EngineLog
from flexinfer.engines.ports import free_port
from flexinfer.engines.process import Engine
from flexinfer.engines.sweep import find

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[None]:
    paths = f"{REPOSITORY}:{Path(__file__).parent}"
    ray.init(
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "GPU_DEVICE_ORDINAL": "1"}},
    )
    yield
    ray.shutdown()


class Replica:
    """Owns an engine as a Serve replica does: in an actor with GPUs and without CPUs."""

    async def start(self, weights: str, gpus: int) -> tuple[list[int], str, dict[str, str]]:
        """Return the ids that Ray gave it, the launch id, and what the engine's process sees."""
        ids = [int(number) for number in ray.get_gpu_ids()]
        backend = LlamaCpp()
        spec = engine_spec(gpus=gpus)
        environ = {**os.environ, VARIABLE: str(FAKE)}
        plan = backend.plan(
            spec,
            Path(weights),
            assign(ids, Inventory()),
            free_port(),
            backend.find_executable(environ),
            environ,
        )
        self.engine = Engine(backend, spec, plan, EngineLog("smol", echo=False))
        await self.engine.start(timeout_s=60)
        assert self.engine.pid is not None
        return ids, self.engine.launch_id, environment_of(self.engine.pid)

    async def leave(self) -> None:
        ray.actor.exit_actor()


def test_each_engine_sees_its_own_gpu_by_one_mask(two_gpus: None, tmp_path: Path) -> None:
    weights = tmp_path / "smol.gguf"
    weights.touch()
    remote = ray.remote(Replica)
    pair = [remote.options(num_cpus=0, num_gpus=1).remote() for _ in range(2)]
    seen = ray.get([actor.start.remote(str(weights), 1) for actor in pair], timeout=120)
    assert sorted(ids for ids, _, _ in seen) == [[0], [1]]
    for ids, _, env in seen:
        assert env[MASK] == str(ids[0])
        assert not set(OTHER_MASKS) & env.keys()
        assert not [name for name in env if name.startswith("RAY_") and "USAGE" not in name]
    # Two ways in which Ray ends an actor at once, with the engine still running.
    ray.kill(pair[0])
    pair[1].leave.remote()
    wait_until(lambda: not any(find(launch_id) for _, launch_id, _ in seen))

    whole = remote.options(num_cpus=0, num_gpus=2).remote()
    ids, _, env = ray.get(whole.start.remote(str(weights), 2), timeout=120)
    assert env[MASK] == ",".join(map(str, ids)) == "0,1"
    none = remote.options(num_cpus=0).remote()
    ids, launch_id, env = ray.get(none.start.remote(str(weights), 0), timeout=120)
    assert (ids, env[MASK]) == ([], "-1")
    assert not set(OTHER_MASKS) & env.keys()
    del none  # a dropped handle ends its actor, too
    wait_until(lambda: not find(launch_id))
