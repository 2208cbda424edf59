"""Whether a GPU has its memory back after an engine has ended.

The driver frees a process's memory some time after the process is gone, and an engine that starts
in between finds too little. What is measured is all use of the GPU, so others' use counts too.

Whoever stops an engine waits for that. When its owner was killed, nobody did: what was in use
before each start is therefore kept in a file until the memory is back, and the next start on that
GPU waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexinfer.engines.gpus import Gpu, vram_figure

#: Where the files are; else a directory of this user's among the temporary ones.
VARIABLE = "FLEXINFER_VRAM_STATE"
TOLERANCE = 256 << 20  # a desktop or a monitor's frame may grow meanwhile
_LOOK_S = 0.05
_BOOT_ID = "proc/sys/kernel/random/boot_id"


def state_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of the files, which need not exist."""
    named = environ.get(VARIABLE)
    return Path(named) if named else Path(tempfile.gettempdir()) / f"flexinfer-{os.getuid()}-vram"


class VramWatch:
    """The memory in use on some GPUs, before and after an engine.

    `state` is the directory of the files; None keeps none. `root` is what sysfs is below.
    """

    def __init__(
        self, gpus: Sequence[Gpu], root: Path = Path("/"), *, state: Path | None = None
    ) -> None:
        self._gpus = tuple(gpus)
        self._root = root
        self._state = state
        self._before: dict[int, int] = {}

    async def before_start(self, timeout_s: float = 10.0, tolerance: int = TOLERANCE) -> str | None:
        """Wait until the last engines of these GPUs have given their memory back.

        Takes what is in use then as what has to be reached again after the engine that now starts.
        Returns the reason if memory is still missing after `timeout_s`; it is then taken as lost to
        another program, and no start waits for it again.
        """
        self._before = await asyncio.to_thread(self._recall)
        kept = await self._wait(timeout_s, tolerance)
        self._before = {
            gpu.render_minor: used for gpu in self._gpus if (used := self.used(gpu)) is not None
        }
        await asyncio.to_thread(self._note)
        return kept

    async def wait_back(self, timeout_s: float = 10.0, tolerance: int = TOLERANCE) -> str | None:
        """Return None as soon as no GPU uses more than before, or after `timeout_s` the reason."""
        kept = await self._wait(timeout_s, tolerance)
        await asyncio.to_thread(self._forget)
        return kept

    def used(self, gpu: Gpu) -> int | None:
        """Return the bytes in use on `gpu`, by all processes; None where that cannot be read."""
        return vram_figure(self._root, gpu.render_minor, "used")

    async def _wait(self, timeout_s: float, tolerance: int) -> str | None:
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

    # -- the files: one a GPU, there while an engine may hold memory of it

    def _file(self, gpu: Gpu) -> Path | None:
        return None if self._state is None else self._state / f"renderD{gpu.render_minor}.json"

    def _boot(self) -> str:
        """What tells this run of the machine from others: memory does not outlive it, files do."""
        try:
            return (self._root / _BOOT_ID).read_text().strip()
        except OSError:
            return ""

    def _recall(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for gpu in self._gpus:
            file = self._file(gpu)
            if file is None:
                continue
            # No file is the usual case; a spoilt one only means that nothing is waited for.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(file.read_text())
                if record["boot"] == self._boot():
                    found[gpu.render_minor] = int(record["used_before"])
        return found

    def _note(self) -> None:
        for gpu in self._gpus:
            file, used = self._file(gpu), self._before.get(gpu.render_minor)
            if file is None or used is None:
                continue
            record = json.dumps({"boot": self._boot(), "used_before": used})
            # Without the file a later start may come too early; that is no reason not to start now.
            with contextlib.suppress(OSError):
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if file.parent.lstat().st_uid != os.getuid():
                    continue  # somebody else made it, and could lead what is written elsewhere
                temporary = file.with_suffix(f".{os.getpid()}")
                temporary.write_text(record)
                temporary.rename(file)

    def _forget(self) -> None:
        for gpu in self._gpus:
            file = self._file(gpu)
            if file is not None:
                with contextlib.suppress(OSError):
                    file.unlink()
