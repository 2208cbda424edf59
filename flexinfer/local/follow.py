"""Notice that files change. Polling, because that works on every file system, and a folder of
manifests is small."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from flexinfer.api import manifest_files

Fingerprint = tuple[tuple[str, int, int, int], ...]

INTERVAL_S = 0.4


def fingerprint(paths: Sequence[Path]) -> Fingerprint:
    """What `paths` look like now: name, inode, size and time of every manifest below them."""
    seen: list[tuple[str, int, int, int]] = []
    for file in manifest_files(paths):
        try:
            stat = os.stat(file)
        except OSError:
            continue  # an editor that writes by renaming: it is back in a moment, or is gone
        seen.append((str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(seen)


class Follower:
    """Follows manifests. Make it before the first reading, so that no change is missed."""

    def __init__(self, paths: Sequence[Path], *, interval_s: float = INTERVAL_S) -> None:
        self._paths = tuple(paths)
        self._interval_s = interval_s
        self._known = fingerprint(self._paths)

    async def changes(self) -> AsyncIterator[None]:
        """Yields whenever the files have changed and then stayed the same for one interval, so
        that a file is not read in the middle of being written. Ends only by cancellation."""
        while True:
            now = await self._look()
            if now == self._known:
                continue
            while (later := await self._look()) != now:
                now = later
            if now != self._known:
                self._known = now
                yield

    async def _look(self) -> Fingerprint:
        await asyncio.sleep(self._interval_s)
        return await asyncio.to_thread(fingerprint, self._paths)
