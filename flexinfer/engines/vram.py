"""Whether a GPU has its memory back after an engine has ended.

The driver frees a process's memory some time after the process is gone, and an engine that starts
in between finds too little. What is measured is all use of the GPU, so others' use counts too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from flexinfer.engines.gpus import Gpu

TOLERANCE = 256 << 20  # a desktop or a monitor's frame may grow meanwhile
_LOOK_S = 0.05


class VramWatch:
    """The memory in use on some GPUs, before and after an engine."""

    def __init__(self, gpus: Sequence[Gpu], root: Path = Path("/")) -> None:
        self._gpus = tuple(gpus)
        self._root = root
        self._before: dict[int, int] = {}

    def remember(self) -> None:
        """Take what is in use now as what has to be reached again."""
        for gpu in self._gpus:
            used = self.used(gpu)
            if used is not None:
                self._before[gpu.render_minor] = used

    def used(self, gpu: Gpu) -> int | None:
        """Return the bytes in use on `gpu`, by all processes; None where that cannot be read."""
        path = self._root / f"sys/class/drm/renderD{gpu.render_minor}/device/mem_info_vram_used"
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            return None

    async def wait_back(self, timeout_s: float = 10.0, tolerance: int = TOLERANCE) -> str | None:
        """Return None as soon as no GPU uses more than before, or after `timeout_s` the reason."""
        end = asyncio.get_running_loop().time() + timeout_s
        while reason := self._above(tolerance):
            if asyncio.get_running_loop().time() >= end:
                return reason
            await asyncio.sleep(_LOOK_S)
        return None

    def _above(self, tolerance: int) -> str | None:
        for gpu in self._gpus:
            before, now = self._before.get(gpu.render_minor), self.used(gpu)
            if before is not None and now is not None and now > before + tolerance:
                return (
                    f"{gpu} has {now >> 20} MiB in use, {before >> 20} MiB before the engine: "
                    "its driver has not freed the rest, or another program came"
                )
        return None
