"""`flexinfer fit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Run

from flexinfer.cli import fit
from tests.engines.memory_models import (
    LLAMA3_8B,
    QWEN3_8B,
    TINY,
    XTX,
    gguf_model,
    hf_model,
    mlc_model,
)

GIB = 2**30


def manifest(name: str, backend: str, model: str, **spec: Any) -> str:
    data = {
        "apiVersion": "ai.flexinfer/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name},
        "spec": {"backend": backend, "model": model, **spec},
    }
    return json.dumps(data)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A models directory with a model for each backend."""
    root = tmp_path / "models"
    mlc_model(root / "qwen-q4f32_1-MLC", QWEN3_8B, "q4f32_1")
    hf_model(root / "llama", LLAMA3_8B, model_type="llama")
    gguf_model(root / "tiny.gguf", TINY)
    return root


@pytest.fixture(autouse=True)
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs, whatever this one has."""
    monkeypatch.setattr(fit, "_ROOT", tmp_path / "root")


def machine(tmp_path: Path, *used: int) -> None:
    """Give it as many 7900 XTX, each with so many bytes in use."""
    root = tmp_path / "root"
    for number, size in enumerate(used):
        minor = 128 + number
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        values = {"simd_count": 192, "gfx_target_version": 110000, "drm_render_minor": minor}
        (node / "properties").write_text("".join(f"{k} {v}\n" for k, v in values.items()))
        device = root / f"sys/class/drm/renderD{minor}/device"
        device.mkdir(parents=True)
        (device / "mem_info_vram_total").write_text(f"{XTX}\n")
        (device / "mem_info_vram_used").write_text(f"{size}\n")
    (root / "dev").mkdir()
    (root / "dev/kfd").touch()


def wrote(tmp_path: Path, *texts: str) -> Path:
    path = tmp_path / "manifests"
    path.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (path / f"{number}.json").write_text(text)
    return path


def test_all_fit(run: Run, tmp_path: Path, site: Path) -> None:
    total = {"overrides": {"maxTotalSeqLength": 32768}}
    path = wrote(
        tmp_path,
        manifest("qwen", "mlc-llm", "qwen-q4f32_1-MLC", mlcllm=total),
        manifest("llama", "vllm", "llama"),
        manifest("tiny", "llama-cpp", "tiny.gguf"),
        manifest("otiny", "ollama", "tiny.gguf"),
    )
    result = run("fit", path, "--models-dir", site, "--vram", XTX)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:3] == ["MODEL", "BACKEND", "GPUS"]
    assert [line[0] for line in lines[1:5]] == ["qwen", "llama", "tiny", "otiny"]
    assert all(line[-1] == "fits" for line in lines[1:5])
    # What vLLM takes is its share, not what it needs: 0.92 x 24.
    assert "22.1" in result.stdout.splitlines()[2]


def test_one_does_not_fit(run: Run, tmp_path: Path, site: Path) -> None:
    path = wrote(tmp_path, manifest("llama", "vllm", "llama"))
    result = run("fit", path, "--models-dir", site, "--vram", "16Gi")
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    assert "no value of" in result.stdout or "it would fit with" in result.stdout


def test_the_proposal_is_below_the_table(run: Run, tmp_path: Path, site: Path) -> None:
    mode = {"mode": "server"}
    path = wrote(tmp_path, manifest("qwen", "mlc-llm", "qwen-q4f32_1-MLC", mlcllm=mode))
    result = run("fit", path, "--models-dir", site, "--vram", "24Gi")
    assert result.exit_code == 1
    assert "it would fit with spec.mlcllm.overrides.maxTotalSeqLength: " in result.stdout
    assert "fp32 KV cache" in result.stdout
    value = result.stdout.partition("maxTotalSeqLength: ")[2].split()[0]
    mode["overrides"] = {"maxTotalSeqLength": int(value)}  # type: ignore[assignment]
    path = wrote(tmp_path, manifest("qwen", "mlc-llm", "qwen-q4f32_1-MLC", mlcllm=mode))
    assert run("fit", path, "--models-dir", site, "--vram", "24Gi").exit_code == 0


def test_all_data(run: Run, tmp_path: Path, site: Path) -> None:
    path = wrote(
        tmp_path,
        manifest("llama", "vllm", "llama", resources={"limits": {"amd.com/gpu": "2"}}),
        manifest("absent", "vllm", "not-here"),
    )
    result = run("fit", path, "--models-dir", site, "--vram", "24Gi", "-o", "json")
    assert result.exit_code == 0
    llama, absent = json.loads(result.stdout)["models"]
    assert (llama["name"], llama["gpus"], llama["verdict"]) == ("llama", 2, "fits")
    assert llama["gpuBytes"] == 24 * GIB
    plan = llama["plan"]
    assert len(plan["perGpu"]) == 2
    assert plan["weightsBytes"] == sum(gpu["weightsBytes"] for gpu in plan["perGpu"])
    assert plan["kvBytesPerToken"] == 131072
    assert plan["totalBytes"] == plan["weightsBytes"] + plan["kvBytes"] + plan["buffersBytes"]
    assert absent["plan"] is None
    assert (absent["fits"], absent["verdict"], absent["weights"]) == (None, "unknown", None)
    assert str(site / "not-here") in absent["message"]


def test_proposals_as_data(run: Run, tmp_path: Path, site: Path) -> None:
    path = wrote(tmp_path, manifest("llama", "vllm", "llama", vllm={"maxModelLen": 8192}))
    words = ("fit", path, "--models-dir", site, "--vram", "18Gi", "-o", "json")
    (row,) = json.loads(run(*words).stdout)["models"]
    assert row["fits"] is False
    assert all({"field", "value"} == set(pair) for each in row["proposals"] for pair in each)


def test_a_model_on_the_cpu(run: Run, tmp_path: Path, site: Path) -> None:
    cpu = {"limits": {"amd.com/gpu": "0"}}
    path = wrote(tmp_path, manifest("tiny", "llama-cpp", "tiny.gguf", resources=cpu))
    result = run("fit", path, "--models-dir", site)
    assert result.exit_code == 0
    assert "runs on the CPU" in result.stdout


def test_without_a_gpu_nobody_knows(run: Run, tmp_path: Path, site: Path) -> None:
    path = wrote(
        tmp_path,
        manifest("tiny", "llama-cpp", "tiny.gguf"),
        manifest("qwen", "mlc-llm", "qwen-q4f32_1-MLC", mlcllm={"mode": "server"}),
    )
    result = run("fit", path, "--models-dir", site)
    assert result.exit_code == 0
    assert result.stdout.count("say --vram") == 2
    assert "the GPU's memory is not known" in result.stdout


def test_this_machines_gpus(run: Run, tmp_path: Path, site: Path) -> None:
    machine(tmp_path, 20 * GIB, GIB)
    one = manifest("llama", "vllm", "llama")
    path = wrote(tmp_path, one)
    # One of the two has enough, and that one is looked at.
    assert run("fit", path, "--models-dir", site).exit_code == 0
    both = manifest("llama", "vllm", "llama", resources={"limits": {"amd.com/gpu": "2"}})
    path = wrote(tmp_path, both)
    result = run("fit", path, "--models-dir", site)
    assert result.exit_code == 1
    assert "gpuMemoryUtilization" in result.stdout
    many = manifest("llama", "vllm", "llama", resources={"limits": {"amd.com/gpu": "4"}})
    path = wrote(tmp_path, many)
    result = run("fit", path, "--models-dir", site)
    assert result.exit_code == 0
    assert "has not that many GPUs (2 GPUs: gfx1100" in result.stdout


def test_files_that_tell_nothing(run: Run, tmp_path: Path, site: Path) -> None:
    (site / "llama" / "config.json").write_text("[]")
    path = wrote(tmp_path, manifest("llama", "vllm", "llama"))
    result = run("fit", path, "--models-dir", site, "--vram", "24Gi")
    assert result.exit_code == 0
    assert "does not hold a JSON object" in result.stdout


def test_a_library_that_is_elsewhere(run: Run, tmp_path: Path, site: Path) -> None:
    block = {"modelLibPath": "/models/lib_rocm_gfx1100.so"}
    path = wrote(tmp_path, manifest("qwen", "mlc-llm", "qwen-q4f32_1-MLC", mlcllm=block))
    assert run("fit", path, "--models-dir", site, "--vram", "24Gi").exit_code == 0


def test_a_claim(run: Run, tmp_path: Path, site: Path) -> None:
    cache = {
        "apiVersion": "ai.flexinfer/v1alpha1",
        "kind": "ModelCache",
        "metadata": {"name": "cache"},
        "spec": {
            "storageStrategy": "SharedPVC",
            "existingClaimName": "nfs",
            "modelPath": "llama",
            "source": "huggingface://a/b",
        },
    }
    text = manifest("m", "vllm", "llama", modelCacheRef="cache")
    path = wrote(tmp_path, text, json.dumps(cache))
    result = run("fit", path, "--claim", f"nfs={site}", "--vram", "24Gi")
    assert result.exit_code == 0
    assert "fits" in result.stdout


def test_manifests_that_are_wrong(run: Run, tmp_path: Path) -> None:
    path = wrote(tmp_path, manifest("m", "no-such-backend", "x"))
    result = run("fit", path)
    assert result.exit_code == 2
    assert "backend" in result.stderr


@pytest.mark.parametrize("text", ["24GB!", "-1", "0", "lots"])
def test_memory_that_is_none(run: Run, tmp_path: Path, text: str) -> None:
    path = wrote(tmp_path, manifest("m", "vllm", "x"))
    result = run("fit", path, f"--vram={text}")
    assert result.exit_code == 2
    assert "--vram" in result.stderr


def test_nothing_to_look_at(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("---\n")
    result = run("fit", path)
    assert result.exit_code == 0
    assert "no ModelDeployment" in result.stderr
