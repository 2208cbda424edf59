"""One directory for each build of an engine and each kind of GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexinfer.engines.compile_cache import compile_cache
from flexinfer.engines.errors import EngineConfigError
from flexinfer.engines.gpus import Devices, Gpu
from flexinfer.engines.spec import Executable

CARD = Gpu(0, 1, "gfx1100", 128, 24 << 30, False)
ON_GPU = Devices((0,), hip_ids=(0,), gpus=(CARD,))


@pytest.fixture
def program(tmp_path: Path) -> Executable:
    path = tmp_path / "engine"
    path.touch()
    return Executable(path)


def test_it_is_made_below_the_named_root(tmp_path: Path, program: Executable) -> None:
    environ = {"FLEXINFER_COMPILE_CACHE": str(tmp_path / "root")}
    path = compile_cache(environ, "team", "vllm", program, ON_GPU)
    assert path.is_dir() and path.parent == tmp_path / "root" / "team"
    assert path.name.startswith("vllm-") and path.name.endswith("-gfx1100")
    assert path == compile_cache(environ, "team", "vllm", program, ON_GPU)


def test_another_build_or_gpu_has_another(tmp_path: Path, program: Executable) -> None:
    environ = {"FLEXINFER_COMPILE_CACHE": str(tmp_path / "root")}
    first = compile_cache(environ, "team", "vllm", program, ON_GPU)
    assert compile_cache(environ, "team", "vllm", program, Devices()).name.endswith("-cpu")
    os.utime(program.path, (1, 1))
    assert compile_cache(environ, "team", "vllm", program, ON_GPU) != first
    environ["FLEXINFER_IMAGE"] = "engines:1"
    image = compile_cache(environ, "team", "vllm", program, ON_GPU)
    os.utime(program.path, (2, 2))
    assert compile_cache(environ, "team", "vllm", program, ON_GPU) == image


def test_a_root_that_is_no_directory_is_named(tmp_path: Path, program: Executable) -> None:
    environ = {"FLEXINFER_COMPILE_CACHE": str(program.path)}
    with pytest.raises(EngineConfigError, match="FLEXINFER_COMPILE_CACHE"):
        compile_cache(environ, "team", "vllm", program, ON_GPU)
