"""Where an engine's output goes: a rotated file a model, this process's output, and memory."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

MAX_LINE = 16 * 1024  # bytes; an engine that prints a prompt in one line must not fill the memory
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

_log = logging.getLogger(__name__)


def log_path(directory: Path, namespace: str, name: str) -> Path:
    """Return the file that the engine of a model writes to, below `directory`."""
    return directory / namespace / f"{name}.log"


class RotatedFile:
    """Append to `path`; from `max_bytes` on, shift it to `path.1`, `path.2` .. `path.<keep>`.

    Several processes may append to one path (replicas of one model on one node): each chunk is one
    write, and the shift is done by whoever gets the lock. Raises OSError as the file system does.
    """

    def __init__(self, path: Path, *, max_bytes: int = 16 << 20, keep: int = 3) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._keep = keep
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = self._open()

    def write(self, data: bytes) -> None:
        """Append `data`, which should end with a line."""
        if self._moved():
            self._reopen()
        if os.fstat(self._fd).st_size + len(data) > self._max_bytes:
            self._rotate()
        os.write(self._fd, data)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _reopen(self) -> None:
        self.close()
        self._fd = self._open()

    def _moved(self) -> bool:
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return True
        return not os.path.samestat(there, os.fstat(self._fd))

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _rotate(self) -> None:
        lock = os.open(
            self.path.with_name(f".{self.path.name}.lock"),
            os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC,
            0o640,
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._moved() and os.fstat(self._fd).st_size > 0:
                for number in range(self._keep - 1, 0, -1):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(self._numbered(number), self._numbered(number + 1))
                os.replace(self.path, self._numbered(1))
        finally:
            os.close(lock)
        self._reopen()


class EngineLog:
    """Takes an engine's output as bytes and hands out lines.

    `file` None keeps no file. `echo` prints each line as `[name] line`, on `stream` or, where that
    is None, on what `sys.stdout` is at that moment (Ray and tests replace it).
    Listeners get each line, without its end, in the order of arrival.
    """

    def __init__(
        self,
        name: str,
        file: Path | None = None,
        *,
        echo: bool = True,
        stream: TextIO | None = None,
        max_bytes: int = 16 << 20,
        keep: int = 3,
        remember: int = 200,
    ) -> None:
        self.name = name
        self._file = None if file is None else RotatedFile(file, max_bytes=max_bytes, keep=keep)
        self._echo = echo
        self._stream = stream
        self._last: deque[str] = deque(maxlen=remember)
        self._partial = b""
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call `listener(line)` for every line from now on; returns what ends that."""
        self._listeners.append(listener)

        def forget() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return forget

    def feed(self, data: bytes) -> None:
        """Take in output as it was read, cut anywhere."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_LINE:
            lines.append(self._partial)
            self._partial = b""
        if lines:
            self._emit([self._text(line) for line in lines])

    def note(self, text: str) -> None:
        """Add a line of our own, marked as such."""
        self._emit([f"flexinfer: {text}"])

    def tail(self, count: int = 20) -> list[str]:
        """Return the last `count` lines, oldest first, an unfinished one included."""
        lines = list(self._last)
        if self._partial:
            lines.append(self._text(self._partial))
        return lines[-count:]

    def clear(self) -> None:
        """Forget the lines of an earlier start (the file keeps them)."""
        self.flush()
        self._last.clear()

    def flush(self) -> None:
        """Count an unfinished line as finished: its writer has ended."""
        if self._partial:
            rest, self._partial = self._partial, b""
            self._emit([self._text(rest)])

    def close(self) -> None:
        """Flush, and close the file; what comes later is printed and remembered only."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    @staticmethod
    def _text(line: bytes) -> str:
        # A progress bar redraws one line with carriage returns: its last state is what counts.
        line = line.rstrip(b"\r").rpartition(b"\r")[2][:MAX_LINE]
        return _COLOURS.sub("", line.decode("utf-8", "replace"))

    def _emit(self, lines: list[str]) -> None:
        self._last.extend(lines)
        if self._file is not None:
            try:
                self._file.write("".join(f"{line}\n" for line in lines).encode())
            except OSError as error:  # a full disk must not take the model down
                _log.warning("no more log file for %s: %s", self.name, error)
                self._file.close()
                self._file = None
        if self._echo:
            stream = self._stream or sys.stdout
            try:
                stream.write("".join(f"[{self.name}] {line}\n" for line in lines))
                stream.flush()
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self._echo = False
                _log.warning("no more output of %s: %s", self.name, error)
        for listener in tuple(self._listeners):
            for line in lines:
                listener(line)
