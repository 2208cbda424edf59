"""What is free, whether a plan fits, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flexinfer.engines.gpus import Devices, Gpu
from flexinfer.engines.memory import (
    Knob,
    MemoryPlan,
    MemoryPlanError,
    Share,
    free_vram,
    judge,
    least_vram,
)
from flexinfer.engines.memory.verdict import gib

GIB = 2**30


def plan(
    *totals: int, gpus: int | None = None, refusal: str | None = None, knobs: tuple[Knob, ...] = ()
) -> MemoryPlan:
    """A plan of so many GiB on each GPU."""
    return MemoryPlan(
        backend="llama-cpp",
        gpus=len(totals) if gpus is None else gpus,
        per_gpu=tuple(Share(total * GIB, 0, 0) for total in totals),
        context_tokens=1,
        cache_tokens=1,
        sequences=1,
        kv_bytes_per_token=1,
        refusal=refusal,
        knobs=knobs,
    )


def knob(
    replan: Callable[[int], MemoryPlan], *, low: int = 1, high: int = 100, step: int = 1
) -> Knob:
    return Knob("spec.x.size", high + 1, low, high, step, replan)


def test_it_fits_or_not() -> None:
    assert judge(plan(8), [8 * GIB], 24 * GIB).fits is True
    verdict = judge(plan(8), [8 * GIB - 1], 24 * GIB)
    assert verdict.fits is False
    assert "needs 8.0 GiB" in verdict.message
    assert "of 24.0 GiB is free" in verdict.message


def test_every_gpu_counts() -> None:
    assert judge(plan(8, 4), [8 * GIB, 4 * GIB], None).fits is True
    verdict = judge(plan(8, 4), [24 * GIB, 3 * GIB], None)
    assert verdict.fits is False
    assert "on GPU 1" in verdict.message


def test_one_that_is_too_small_is_enough_to_know() -> None:
    assert judge(plan(8, 4), [None, 3 * GIB], None).fits is False
    assert judge(plan(8, 4), [24 * GIB, None], None).fits is None
    assert judge(plan(8, 4), [24 * GIB], None).fits is None
    assert judge(plan(8), [], None).fits is None


def test_on_the_cpu_nobody_knows() -> None:
    verdict = judge(plan(8, gpus=0), [], None)
    assert verdict.fits is None
    assert "8.0 GiB of RAM" in verdict.message


def test_a_refusal_counts_whatever_is_free() -> None:
    verdict = judge(plan(8, refusal="it will not"), [None], None)
    assert (verdict.fits, verdict.message) == (False, "it will not")


def test_within_the_error_of_an_estimate_nobody_knows() -> None:
    close = replace(plan(8, knobs=(knob(lambda value: plan(value)),)), slack_bytes=GIB)
    verdict = judge(close, [7 * GIB + GIB // 2], None)
    assert verdict.fits is None
    assert "too close to tell" in verdict.message
    assert verdict.proposals[0].settings == (("spec.x.size", "7"),)
    assert judge(close, [8 * GIB], None).fits is True
    assert judge(close, [7 * GIB - 1], None).fits is False
    doubtful = replace(plan(8), slack_bytes=GIB, doubt="it may not start")
    verdict = judge(doubtful, [24 * GIB], None)
    assert verdict.fits is None
    assert "it may not start" in verdict.message
    # What is reserved is taken in any case.
    reserved = replace(close, reserved_bytes=20 * GIB)
    assert judge(reserved, [19 * GIB], None).fits is False


def test_what_is_reserved_must_be_free() -> None:
    reserved = replace(plan(8), reserved_bytes=20 * GIB)
    assert judge(reserved, [20 * GIB], None).fits is True
    verdict = judge(reserved, [10 * GIB], None)
    assert verdict.fits is False
    assert "takes 20.0 GiB" in verdict.message


def test_the_largest_value_is_proposed_and_rounded() -> None:
    found = judge(plan(99, knobs=(knob(lambda value: plan(value)),)), [42 * GIB], None)
    assert found.proposals[0].settings == (("spec.x.size", "42"),)
    assert "it would fit with spec.x.size: 42" in found.message
    rounded = knob(lambda value: plan(value), step=10)
    found = judge(plan(99, knobs=(rounded,)), [42 * GIB], None)
    assert found.proposals[0].settings == (("spec.x.size", "40"),)
    # Where rounding would go below the least, it is left as it is.
    narrow = knob(lambda value: plan(value), low=41, step=50)
    found = judge(plan(99, knobs=(narrow,)), [42 * GIB], None)
    assert found.proposals[0].settings == (("spec.x.size", "42"),)


def test_nothing_is_proposed_that_does_not_help() -> None:
    found = judge(plan(99, knobs=(knob(lambda value: plan(50)),)), [42 * GIB], None)
    assert found.proposals == ()
    assert "no value of size would make it fit" in found.message


def test_a_value_that_cannot_be_planned_is_not_proposed() -> None:
    def replan(value: int) -> MemoryPlan:
        if value > 30:
            raise MemoryPlanError("no")
        return plan(value)

    found = judge(plan(99, knobs=(knob(replan),)), [42 * GIB], None)
    assert found.proposals[0].settings == (("spec.x.size", "30"),)


def test_two_settings_together() -> None:
    def outer(one: int) -> MemoryPlan:
        inner = Knob("spec.x.other", 101, 1, 100, 1, lambda other: plan(one + other))
        return plan(one + 101, knobs=(inner,))

    found = judge(plan(200, knobs=(knob(outer, low=10),)), [42 * GIB], None)
    assert found.proposals[0].settings == (("spec.x.size", "10"), ("spec.x.other", "32"))
    assert "spec.x.size: 10 and spec.x.other: 32" in found.message


def test_a_share_moves_to_the_nearest_that_works() -> None:
    def replan(value: int) -> MemoryPlan:
        return plan(value, refusal=None if value >= 60 else "too small")

    share = Knob("spec.x.share", 30, 1, 98, 1, replan, is_share=True)
    found = judge(plan(30, refusal="too small", knobs=(share,)), [80 * GIB], 100 * GIB)
    assert found.proposals[0].settings == (("spec.x.share", "60"),)
    found = judge(plan(90, knobs=(replace(share, current=90),)), [80 * GIB], 100 * GIB)
    assert found.proposals[0].settings == (("spec.x.share", "80"),)


def test_sums() -> None:
    both = replace(plan(1, 1), per_gpu=(Share(1, 2, 3), Share(10, 20, 30)))
    assert (both.weights_bytes, both.kv_bytes, both.buffers_bytes) == (11, 22, 33)
    assert (both.total_bytes, both.needed_bytes) == (66, 60)
    assert both.fullest == Share(10, 20, 30)


@pytest.mark.parametrize(("size", "text"), [(0, "0.0 GiB"), (24560 << 20, "24.0 GiB")])
def test_sizes_for_people(size: int, text: str) -> None:
    assert gib(size) == text


def gpu(minor: int, total: int | None) -> Gpu:
    return Gpu(minor - 128, minor, "gfx1100", minor, total, False)


def in_use(root: Path, minor: int, text: str) -> None:
    path = root / f"sys/class/drm/renderD{minor}/device/mem_info_vram_used"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_free_is_what_nobody_uses(tmp_path: Path) -> None:
    in_use(tmp_path, 128, f"{5 * GIB}\n")
    in_use(tmp_path, 129, "0\n")
    in_use(tmp_path, 130, "nonsense\n")
    in_use(tmp_path, 132, f"{99 * GIB}\n")
    gpus = tuple(
        gpu(minor, total)
        for minor, total in (
            (129, 24 * GIB),
            (128, 24 * GIB),
            (130, 24 * GIB),
            (131, 24 * GIB),
            (132, 24 * GIB),
            (128, None),
        )
    )
    devices = Devices(ids=tuple(range(6)), gpus=gpus)
    assert free_vram(devices, tmp_path) == (24 * GIB, 19 * GIB, None, None, 0, None)
    assert least_vram(devices) is None
    known = Devices(ids=(0, 1), gpus=(gpu(128, 24 * GIB), gpu(129, 16 * GIB)))
    assert least_vram(known) == 16 * GIB


def test_of_pretended_gpus_nothing_is_known(tmp_path: Path) -> None:
    devices = Devices(ids=(0, 1), pretended=True)
    assert free_vram(devices, tmp_path) == (None, None)
    assert least_vram(devices) is None
    assert free_vram(Devices(), tmp_path) == ()
    assert least_vram(Devices()) is None
