"""Who makes, uses and removes models of a store that several processes share.

All of it is `flock` on files, which the kernel ends with the process that holds it, in any pod that
sees the same file. Nothing of it is inherited by engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path

_ASK_AGAIN_S = 0.1

# The models that this process needs, by who needs them: a replica serves one until it ends.
_pins: dict[str, dict[Path, int]] = {}


@contextlib.asynccontextmanager
async def locked(
    path: Path, *, shared: bool = False, waiting: Callable[[], None] | None = None
) -> AsyncIterator[None]:
    """Hold the lock `path`, waiting for it as long as it takes; `waiting()` is called once then."""
    fd = _open(path)
    try:
        operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        while not _try(fd, operation):
            if waiting is not None:
                waiting()
                waiting = None
            await asyncio.sleep(_ASK_AGAIN_S)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def if_free(path: Path) -> Iterator[bool]:
    """Hold the lock `path` alone if nobody holds it, and give whether that is so."""
    fd = _open(path)
    try:
        yield _try(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def pin(who: str, path: Path) -> None:
    """Keep a model from being removed until `unpin`, or the end of this process.

    `path` is the lock of its users; the caller holds that of its makers, so nobody removes it now.
    """
    pins = _pins.setdefault(who, {})
    if path not in pins:
        fd = _open(path)
        fcntl.flock(fd, fcntl.LOCK_SH)
        pins[path] = fd


def unpin(who: str, *, but: Collection[Path] = ()) -> None:
    """Let go of what `who` has pinned, but for these."""
    pins = _pins.get(who, {})
    for path in pins.keys() - set(but):
        os.close(pins.pop(path))


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _try(fd: int, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        return False
    return True
