"""The plan against the real llama-server's own log."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexinfer.api.blocks import LlamaCppBlock
from flexinfer.engines.errors import EngineNotFound
from flexinfer.engines.llamacpp import LlamaCpp
from flexinfer.engines.memory import MemoryPlan, plan_memory
from flexinfer.engines.ports import free_port
from flexinfer.engines.spec import EngineSpec
from tests.engines.memory_models import Shape, gguf_model

pytestmark = pytest.mark.llama

MIB = 2**20
_LAST = re.compile(rb"compute buffer size = .*\n")
# 7 layers, so that a pattern of windows is cut off. The vocabulary is the demo's.
SMALL = Shape(256, 7, 4, 2, 64, 512, 49152, tied=True, context=32768)
SHAPES = {
    "gemma2": replace(SMALL, post_norms=True),
    "gemma3": replace(SMALL, post_norms=True, qk_norm=True),
    "qwen3": replace(SMALL, qk_norm=True),
    "qwen2": replace(SMALL, bias=True),
}

Log = Callable[..., dict[str, float]]


@pytest.fixture(scope="module")
def log() -> Log:
    """Has the real llama-server load a file, and returns the sizes that its log says, in MiB."""
    try:
        found = LlamaCpp().find_executable({"PATH": ""})
    except EngineNotFound as error:
        pytest.skip(str(error))

    def run(file: Path, *flags: str) -> dict[str, float]:
        argv = [str(found.path), "--model", str(file), "--device", "none", "--no-warmup"]
        argv += ["--host", "127.0.0.1", "--port", str(free_port()), "-lv", "4", "--fit", "off"]
        process = subprocess.Popen(
            [*argv, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LD_LIBRARY_PATH": str(found.libraries or "")},
            start_new_session=True,
        )
        try:
            text = _until(process, _LAST, 60).decode(errors="replace")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        sizes: dict[str, float] = {}
        for kind, size in re.findall(r" (KV|RS|compute) buffer size = +([\d.]+) MiB", text):
            sizes[kind] = sizes.get(kind, 0.0) + float(size)
        assert "compute" in sizes, text
        return sizes

    return run


def _until(process: subprocess.Popen[bytes], wanted: re.Pattern[bytes], limit_s: float) -> bytes:
    """The output until it holds `wanted`, until its end, or until the time is over."""
    assert process.stdout is not None
    end = time.monotonic() + limit_s
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not wanted.search(text) and selector.select(max(0.0, end - time.monotonic())):
            data = os.read(process.stdout.fileno(), 65536)
            if not data:
                break
            text += data
    return text


def planned(file: Path, **block: Any) -> MemoryPlan:
    spec = EngineSpec("m", "default", "llama-cpp", LlamaCppBlock(**block), gpus=0)
    return plan_memory(spec, file, vram_bytes=None)


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "defaults": ({}, []),
    "one slot": ({"context_size": 4096, "parallel": 1}, ["-c", "4096", "-np", "1"]),
    "two slots": ({"context_size": 4096, "parallel": 2}, ["-c", "4096", "-np", "2"]),
    "odd context": ({"context_size": 1000, "parallel": 3}, ["-c", "1000", "-np", "3"]),
    "unified": (
        {"context_size": 4096, "parallel": 2, "kv_unified": True},
        ["-c", "4096", "-np", "2", "-kvu"],
    ),
    "q8_0": (
        {"context_size": 4096, "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        ["-c", "4096", "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on"],
    ),
    "q4_0": (
        {"context_size": 4096, "cache_type_k": "q4_0", "cache_type_v": "f16"},
        ["-c", "4096", "-ctk", "q4_0", "-fa", "on"],
    ),
    "large batch": ({"context_size": 8192, "ubatch_size": 1024}, ["-c", "8192", "-ub", "1024"]),
    "no flash attention": (
        {"context_size": 4096, "flash_attention": "off"},
        ["-c", "4096", "-fa", "off"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_demo(log: Log, weights: Path, case: str) -> None:
    block, flags = CASES[case]
    sizes, plan = log(weights, *flags), planned(weights, **block)
    assert plan.kv_bytes / MIB == pytest.approx(sizes["KV"], abs=0.01)
    assert plan.buffers_bytes / MIB == pytest.approx(sizes["compute"], rel=0.12)


@pytest.mark.parametrize(
    ("architecture", "values", "flags", "block"),
    [
        ("gemma3", {"attention__sliding_window": 1024}, ["-np", "1"], {"parallel": 1}),
        ("gemma3", {"attention__sliding_window": 1024}, [], {}),
        ("gemma3", {"attention__sliding_window": 512}, ["-np", "4"], {"parallel": 4}),
        ("gemma3", {"attention__sliding_window": None}, [], {}),
        ("gemma2", {"attention__sliding_window": 1024}, ["-np", "1"], {"parallel": 1}),
        ("qwen3", {"attention__sliding_window": 1024}, [], {}),
        ("qwen2", {"attention__head_count_kv": [2] * 7}, [], {}),
    ],
)
def test_windows(
    log: Log,
    weights: Path,
    tmp_path: Path,
    architecture: str,
    values: dict[str, Any],
    flags: list[str],
    block: dict[str, Any],
) -> None:
    file = gguf_model(
        tmp_path / "m.gguf",
        SHAPES[architecture],
        architecture=architecture,
        vocabulary=weights,
        attention__layer_norm_rms_epsilon=1e-6,
        **values,
    )
    sizes = log(file, "-c", "16384", *flags)
    plan = planned(file, context_size=16384, **block)
    assert plan.kv_bytes / MIB == pytest.approx(sizes["KV"], abs=0.02)
    assert plan.buffers_bytes / MIB == pytest.approx(sizes["compute"], rel=0.12)
