"""From a resource to Ollama's environment, and from its output to reasons."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_helpers import engine_spec
from ollama_helpers import ollama_spec

from flexinfer.api.blocks import OllamaBlock
from flexinfer.engines.backend import backend_for
from flexinfer.engines.errors import EngineConfigError, EngineNotFound, ExitStatus
from flexinfer.engines.gpus import Devices, Gpu
from flexinfer.engines.ollama import _RESERVED, _VARIABLES, Ollama
from flexinfer.engines.spec import EngineSpec, Executable, LaunchPlan

TAG = "registry.ollama.ai/library/qwen3/8b"
MASKS = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@pytest.fixture
def program(tmp_path: Path) -> Executable:
    path = tmp_path / "bin/ollama"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return Executable(path)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return tmp_path / "models/manifests" / TAG


def plan(
    program: Executable,
    manifest: Path,
    *,
    devices: Devices | None = None,
    spec: EngineSpec | None = None,
    environ: dict[str, str] | None = None,
    **block: Any,
) -> LaunchPlan:
    devices = devices or Devices()
    spec = spec or ollama_spec(gpus=len(devices.ids), **block)
    store = {"FLEXINFER_OLLAMA_STORE": str(manifest.parents[5] / "private")}
    environ = {"PATH": os.environ["PATH"], **store, **(environ or {})}
    return Ollama().plan(spec, manifest, devices, 20001, program, environ)


def gpus(*slots: int) -> Devices:
    """Real GPUs."""
    found = tuple(Gpu(slot, slot + 1, "gfx1100", 128 + slot, 24 << 30, False) for slot in slots)
    return Devices(slots, hip_ids=slots, gpus=found)


# -- the environment


def test_the_smallest_plan(program: Executable, manifest: Path, tmp_path: Path) -> None:
    made = plan(program, manifest)
    assert made.argv == (str(program.path), "serve")
    assert made.url == "http://127.0.0.1:20001"
    assert made.model == manifest
    assert made.warnings == ()
    own = {name: value for name, value in made.env.items() if name.startswith("OLLAMA_")}
    assert own == {
        "OLLAMA_HOST": "127.0.0.1:20001",
        "OLLAMA_MODELS": str(tmp_path / "models"),
        "OLLAMA_NOPRUNE": "1",
        "OLLAMA_NO_CLOUD": "1",
        "OLLAMA_VULKAN": "0",
        "OLLAMA_KEEP_ALIVE": "-1",
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "OLLAMA_LOAD_TIMEOUT": "0",
    }
    assert made.env["HIP_VISIBLE_DEVICES"] == "-1"
    home = Path(made.env["HOME"])
    assert home.is_relative_to(tmp_path / "private") and os.access(home, os.W_OK)


def test_every_field_of_the_block_reaches_the_plan_or_the_model() -> None:
    assert set(OllamaBlock.model_fields) == {*_VARIABLES, "modelfile", "parameters", "env"}


def test_settings_are_variables(program: Executable, manifest: Path) -> None:
    made = plan(
        program,
        manifest,
        contextLength=8192,
        numParallel=4,
        flashAttention=True,
        kvCacheType="q8_0",
        gpuOverhead="1.5Gi",
    )
    assert made.env["OLLAMA_CONTEXT_LENGTH"] == "8192"
    assert made.env["OLLAMA_NUM_PARALLEL"] == "4"
    assert made.env["OLLAMA_FLASH_ATTENTION"] == "1"
    assert made.env["OLLAMA_KV_CACHE_TYPE"] == "q8_0"
    assert made.env["OLLAMA_GPU_OVERHEAD"] == str(3 << 29)
    assert made.warnings == ()
    assert plan(program, manifest, flashAttention=False).env["OLLAMA_FLASH_ATTENTION"] == "0"


def test_a_quantised_cache_without_flash_attention_is_a_warning(
    program: Executable, manifest: Path
) -> None:
    made = plan(program, manifest, flashAttention=False, kvCacheType="q4_0")
    (notice,) = made.warnings
    assert (notice.reason, notice.field) == ("SettingIgnored", "spec.ollama.kvCacheType")
    assert plan(program, manifest, flashAttention=False, kvCacheType="f16").warnings == ()


def test_nothing_of_another_ollama_is_inherited(program: Executable, manifest: Path) -> None:
    theirs = {
        "OLLAMA_HOST": "0.0.0.0:11434",
        "OLLAMA_MODELS": "/theirs",
        "OLLAMA_ORIGINS": "*",
        "OLLAMA_DEBUG": "2",
        "OLLAMA_SCHED_SPREAD": "1",
        "LLAMA_ARG_CTX_SIZE": "1",
        "HF_TOKEN": "secret",
        "HOME": "/root",
    }
    made = plan(program, manifest, environ=theirs)
    assert made.env == plan(program, manifest).env


def test_a_users_variables_go_last(program: Executable, manifest: Path) -> None:
    env = {
        "OLLAMA_DEBUG": "1",
        "OLLAMA_NUM_PARALLEL": "3",
        "OLLAMA_MODELS": "/theirs",
        "SOME_TOKEN": "x",
    }
    made = plan(program, manifest, env=env, numParallel=2)
    assert made.warnings == ()
    assert made.env["OLLAMA_DEBUG"] == "1"
    assert made.env["OLLAMA_NUM_PARALLEL"] == "3"
    assert made.env["OLLAMA_MODELS"] != "/theirs"  # it says where to look for the model
    assert made.secrets == ("SOME_TOKEN",)
    assert Ollama().parallel(ollama_spec(env=env, numParallel=2)) == 3


@pytest.mark.parametrize("name", [*_RESERVED, *MASKS, "GPU_DEVICE_ORDINAL", "OLLAMA_VULKAN"])
def test_variables_that_are_ours(program: Executable, manifest: Path, name: str) -> None:
    made = plan(program, manifest, env={name: "7"})
    assert made.env == plan(program, manifest).env
    (notice,) = made.warnings
    assert (notice.reason, notice.field) == ("EnvironmentIgnored", "spec.ollama.env")
    assert name in notice.message


def test_weights_that_were_not_prepared(program: Executable, tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"m\.gguf is no model in a store"):
        plan(program, tmp_path / "a/b/c/d/e/m.gguf")


def test_settings_of_another_engine(program: Executable, manifest: Path) -> None:
    with pytest.raises(EngineConfigError, match="not those of ollama"):
        plan(program, manifest, spec=engine_spec())


# -- GPUs: one mask, which one depends on the build


def masks(made: LaunchPlan) -> dict[str, str]:
    return {name: made.env[name] for name in (*MASKS, "GPU_DEVICE_ORDINAL") if name in made.env}


INHERITED = {
    "HIP_VISIBLE_DEVICES": "5",
    "ROCR_VISIBLE_DEVICES": "5",
    "CUDA_VISIBLE_DEVICES": "5",
    "GPU_DEVICE_ORDINAL": "5",
}


def test_builds_with_their_own_runner_need_rocrs_mask(program: Executable, manifest: Path) -> None:
    made = plan(program, manifest, devices=gpus(1, 3), environ=INHERITED)
    assert masks(made) == {"ROCR_VISIBLE_DEVICES": "1,3"}


@pytest.mark.parametrize("place", ["lib/ollama", "bin/lib/ollama", "bin"])
def test_builds_that_run_llama_server_renumber_hips(
    program: Executable, manifest: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / "llama-server").touch()
    made = plan(program, manifest, devices=gpus(1), environ=INHERITED)
    assert masks(made) == {"HIP_VISIBLE_DEVICES": "1"}


def test_a_cpu_model_sees_no_gpu(program: Executable, manifest: Path) -> None:
    made = plan(program, manifest, environ=INHERITED)
    assert masks(made) == {"HIP_VISIBLE_DEVICES": "-1"}
    assert made.busy_limit_s > plan(program, manifest, devices=gpus(0)).busy_limit_s


def test_pretended_gpus_are_a_warning(program: Executable, manifest: Path) -> None:
    made = plan(program, manifest, devices=Devices((1,), pretended=True), environ=INHERITED)
    assert masks(made) == {"HIP_VISIBLE_DEVICES": "1"}
    (notice,) = made.warnings
    assert notice.reason == "PretendedGpu"


# -- the program


def test_the_program_is_named_or_on_path(program: Executable, tmp_path: Path) -> None:
    backend = backend_for("ollama")
    assert backend.find_executable({"PATH": str(program.path.parent)}).path == program.path
    for named in (program.path, program.path.parent):
        found = backend.find_executable({"FLEXINFER_OLLAMA": str(named), "PATH": ""})
        assert (found.path, found.found_by) == (program.path, "FLEXINFER_OLLAMA")
    with pytest.raises(EngineNotFound, match="FLEXINFER_OLLAMA is not set, and it is not on PATH"):
        backend.find_executable({"PATH": str(tmp_path)})


# -- requests


def test_requests(manifest: Path) -> None:
    backend = Ollama()
    assert backend.request_model(ollama_spec(), manifest) == "registry.ollama.ai/library/qwen3:8b"
    assert backend.parallel(ollama_spec()) == 1
    assert backend.parallel(ollama_spec(numParallel=4)) == 4
    assert backend.parallel(ollama_spec(env={"OLLAMA_NUM_PARALLEL": "many"})) == 1
    assert backend.parallel(ollama_spec(env={"OLLAMA_NUM_PARALLEL": "²"})) == 1
    # Either would unload the model, or load it again.
    assert {"keep_alive", "options"} <= backend.requests.drop_fields


# -- output


@pytest.mark.parametrize(
    ("line", "ready"),
    [
        (
            "time=2026-11-30T07:09:01.532Z level=INFO source=routes.go:1718 "
            'msg="Listening on 127.0.0.1:21999 (version 0.17.4)"',
            True,
        ),
        ('time=.. level=INFO source=runner.go:1001 msg="Server listening on 127.0.0.1:1"', False),
        ('time=.. level=INFO msg="starting runner" cmd="/x/ollama runner --port 38569"', False),
    ],
)
def test_ready_lines(line: str, ready: bool) -> None:
    assert Ollama().ready_line(line) is ready


@pytest.mark.parametrize(
    ("lines", "status", "reason"),
    [
        (
            ["Error: listen tcp 127.0.0.1:20001: bind: address already in use"],
            ExitStatus(code=1),
            "port 20001 of 127.0.0.1 is taken by another program",
        ),
        (
            ['level=INFO msg="x"', "Error: could not create directory mkdir /x: permission denied"],
            ExitStatus(code=1),
            "could not create directory mkdir /x: permission denied",
        ),
        ([], ExitStatus(code=2), "ollama ended: exit code 2"),
        ([], ExitStatus(signal=9), "ollama was killed by SIGKILL (the kernel does so"),
    ],
)
def test_the_reason_of_an_end(
    program: Executable, manifest: Path, lines: list[str], status: ExitStatus, reason: str
) -> None:
    backend, made = Ollama(), plan(program, manifest)
    assert backend.explain(made, status, lines).startswith(reason)
    assert backend.port_taken(lines) is ("address already in use" in "".join(lines))


async def test_nothing_that_listens_is_neither_ready_nor_alive() -> None:
    backend = Ollama()
    async with aiohttp.ClientSession() as client:
        assert not await backend.is_ready(client, "http://127.0.0.1:1")
        assert not await backend.is_alive(client, "http://127.0.0.1:1")
