"""`vramCheck` at a start: refuse, say, or do not look. The sysfs tree is a fixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexinfer.api.blocks import VllmBlock
from flexinfer.engines.errors import EngineStartError
from flexinfer.engines.gpus import Devices, Gpu
from flexinfer.engines.memory import MemoryPlan, MemoryPlanError, Share
from flexinfer.engines.spec import EngineSpec
from flexinfer.serving import fit

GIB = 1 << 30
CARD = Gpu(0, 1, "gfx1100", 128, 24 * GIB, False)
ON_CARD = Devices((0,), hip_ids=(0,), gpus=(CARD,))
SPEC = EngineSpec("m", "default", "vllm", VllmBlock())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    device = tmp_path / "sys/class/drm/renderD128/device"
    device.mkdir(parents=True)
    (device / "mem_info_vram_used").write_text(f"{4 * GIB}\n")
    return tmp_path


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the model needs, in GiB: the files' sizes are another test's matter."""

    def set_needed(gib: float) -> None:
        plan = MemoryPlan("vllm", 1, (Share(int(gib * GIB), 0, 0),), 8192, 8192, 1, 1)
        monkeypatch.setattr(fit, "plan_memory", lambda *_, **__: plan)

    return set_needed


def test_what_fits_is_not_spoken_of(root: Path, needs: Any) -> None:
    needs(19)
    assert fit.check_memory(SPEC, root, ON_CARD, "error", root) == ()


def test_what_does_not_fit_into_what_is_free_is_refused(root: Path, needs: Any) -> None:
    needs(21)
    with pytest.raises(EngineStartError) as refused:
        fit.check_memory(SPEC, root, ON_CARD, "error", root)
    assert "will not fit" in refused.value.reason
    assert "21" in refused.value.reason and "20" in refused.value.reason
    assert "vramCheck: warn" in refused.value.reason


def test_a_warning_only_says_so(root: Path, needs: Any) -> None:
    needs(21)
    (notice,) = fit.check_memory(SPEC, root, ON_CARD, "warn", root)
    assert notice.reason == "MemoryTight" and notice.resource == "ModelDeployment/default/m"
    assert fit.check_memory(SPEC, root, ON_CARD, "off", root) == ()


def test_what_is_too_close_to_tell_is_tried_with_a_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Share(21 * GIB, 0, 0)
    plan = MemoryPlan("vllm", 1, (share,), 8192, 8192, 1, 1, slack_bytes=2 * GIB)
    monkeypatch.setattr(fit, "plan_memory", lambda *_, **__: plan)
    (notice,) = fit.check_memory(SPEC, root, ON_CARD, "error", root)
    assert notice.reason == "MemoryTight" and "too close to tell" in notice.message


def test_a_gpu_that_does_not_say_what_is_free_is_tried(tmp_path: Path, needs: Any) -> None:
    needs(1000)
    assert fit.check_memory(SPEC, tmp_path, ON_CARD, "error", tmp_path) == ()


def test_what_the_engine_itself_would_refuse_is_refused_whatever_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Share(GIB, 0, 0)
    plan = MemoryPlan("vllm", 1, (share,), 8192, 8192, 1, 1, refusal="it wants 2 GPUs")
    monkeypatch.setattr(fit, "plan_memory", lambda *_, **__: plan)
    with pytest.raises(EngineStartError, match="it wants 2 GPUs"):
        fit.check_memory(SPEC, tmp_path, ON_CARD, "error", tmp_path)


@pytest.mark.parametrize("devices", [Devices(), Devices((0,), pretended=True)])
def test_without_a_gpu_nothing_is_said(root: Path, needs: Any, devices: Devices) -> None:
    needs(1000)
    assert fit.check_memory(SPEC, root, devices, "error", root) == ()


def test_files_that_do_not_tell_are_no_reason_not_to_try(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_tell(*_: Any, **__: Any) -> MemoryPlan:
        raise MemoryPlanError("an architecture that is not known here")

    monkeypatch.setattr(fit, "plan_memory", cannot_tell)
    (notice,) = fit.check_memory(SPEC, root, ON_CARD, "error", root)
    assert notice.reason == "MemoryUnknown" and "architecture" in notice.message
