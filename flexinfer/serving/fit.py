"""`vramCheck`: what a start does that will not fit into what is free on its GPUs."""

from __future__ import annotations

from pathlib import Path

from flexinfer.api.modeldeployment import VramCheck
from flexinfer.api.notices import Notice
from flexinfer.engines.errors import EngineStartError
from flexinfer.engines.gpus import Devices
from flexinfer.engines.memory import (
    MemoryPlanError,
    free_vram,
    judge,
    least_vram,
    plan_memory,
)
from flexinfer.engines.spec import EngineSpec

_FIELD = "spec.vramCheck"


def check_memory(
    spec: EngineSpec,
    weights: Path,
    devices: Devices,
    check: VramCheck,
    root: Path = Path("/"),
) -> tuple[Notice, ...]:
    """Return what there is to say about the memory that a start will need.

    To be called when the GPUs are the engine's own. Reads the model's files, so it blocks. Says
    nothing where there is no GPU, or where what is free cannot be read. Raises `EngineStartError`
    if it certainly will not fit and `check` is `error`. `root` is the root of the file system with
    `sys`.
    """
    if check == "off" or not devices.gpus:
        return ()
    total = least_vram(devices)
    try:
        plan = plan_memory(spec, weights, vram_bytes=total)
    except MemoryPlanError as error:
        return (spec.notice("MemoryUnknown", f"cannot tell what it needs: {error}", _FIELD),)
    free = free_vram(devices, root)
    verdict = judge(plan, free, total)
    if verdict.fits or (verdict.fits is None and None in free):
        return ()
    if check == "error" and verdict.fits is False:
        raise EngineStartError(
            f"it will not fit: {verdict.message} (vramCheck: warn would try all the same)"
        )
    return (spec.notice("MemoryTight", verdict.message, _FIELD),)
