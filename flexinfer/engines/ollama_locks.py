"""Who makes, uses and removes models of a store that several processes share.

All of it is `flock` on files, which the kernel ends with the process that holds it, in any pod that
sees the same file. Nothing of it is inherited by engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

_ASK_AGAIN_S = 0.1

# The models that this process needs, by who needs them: a replica serves one until it ends.
_pins: dict[str, list[int]] = {}


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


def pin(who: str, paths: list[Path]) -> None:
    """Keep models from being removed for as long as this process lives, or pins others for `who`.

    `paths` are the locks of the models. Raises `BlockingIOError` if one is just being removed.
    """
    fds: list[int] = []
    try:
        for path in paths:
            fds.append(_open(path))
            fcntl.flock(fds[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    for fd in _pins.pop(who, []):
        os.close(fd)
    _pins[who] = fds


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _try(fd: int, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        return False
    return True
