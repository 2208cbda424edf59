"""Read an engine's rotated log: what it holds, and what is added, across rotations."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 16
_MOST_FILES = 100


def read(path: Path, *, last: int | None = None) -> Iterator[bytes]:
    """The log at `path` with its older files, oldest first; of all lines only the `last` ones.

    Yields nothing if there is no log.
    """
    with ExitStack() as stack:
        files = _open_all(path, stack)
        chunks = (chunk for file in files for chunk in _rest(file))
        yield from chunks if last is None else _last_lines(chunks, last)


def follow(path: Path, wait: Callable[[], None], *, last: int | None = None) -> Iterator[bytes]:
    """What `read` gives, then what is added. `wait` is called between two looks, and may raise to
    end it. A log that does not exist yet is waited for."""
    with ExitStack() as stack:
        files = _open_all(path, stack)
        chunks = (chunk for file in files for chunk in _rest(file))
        yield from chunks if last is None else _last_lines(chunks, last)
        current = files[-1] if files else None
        while True:
            if current is not None:
                yield from _rest(current)
            if not _is_current(path, current):
                newer = _open_all(path, stack, until=current)
                if current is not None:
                    # What was written between the last look and the rotation.
                    yield from _rest(current)
                for file in newer:
                    yield from _rest(file)
                    if current is not None:
                        current.close()
                    current = file
            wait()


def _open_all(path: Path, stack: ExitStack, until: BinaryIO | None = None) -> list[BinaryIO]:
    """The files of the log that are newer than `until`, oldest first.

    Opened newest first: a rotation meanwhile moves files on to names that are still to be opened,
    where one that is open already is recognised.
    """
    known = {_identity(until)} if until is not None else set()
    found: list[BinaryIO] = []
    for number in range(_MOST_FILES):
        name = path if number == 0 else path.with_name(f"{path.name}.{number}")
        try:
            file = stack.enter_context(name.open("rb"))
        except FileNotFoundError:
            if number == 0:
                continue  # in the middle of a rotation
            break
        if until is not None and _identity(file) == _identity(until):
            break
        if _identity(file) not in known:
            known.add(_identity(file))
            found.append(file)
    return found[::-1]


def _is_current(path: Path, file: BinaryIO | None) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return True  # nothing newer to read
    return file is not None and (there.st_dev, there.st_ino) == _identity(file)


def _identity(file: BinaryIO) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino


def _rest(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk


def _last_lines(chunks: Iterator[bytes], count: int) -> Iterator[bytes]:
    lines: deque[bytes] = deque(maxlen=count)
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        lines.extend(line + b"\n" for line in whole)
    if rest and count:
        lines.append(rest)
    yield from lines
