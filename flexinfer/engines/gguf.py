"""What is wrong with a GGUF file, as far as its own header tells."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# Bytes of each type of a value that has a fixed size.
_VALUES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Elements and bytes of a block of each tensor type. One that is missing here counts as empty, so
# that a cut inside a last tensor of such a type goes unseen.
_BLOCKS = {
    **{0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)},
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210)},
    **{16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110)},
    **{22: (256, 82), 23: (256, 136), 29: (256, 56), 30: (1, 2), 39: (32, 17)},
}
_MOST = 1 << 32  # no count in a header is larger; a larger one is garbage


def fault(path: Path) -> str | None:
    """Return in one line why `path` cannot be a whole GGUF file, or None if it may be one.

    Reads the header only. Never raises.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < len(_MAGIC) or file.read(len(_MAGIC)) != _MAGIC:
                return f"{path} is not a GGUF file" if size else f"{path} is empty"
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                wanted = _Header(data).size()
    except OSError as error:
        return f"cannot open {path}: {error.strerror}"
    except (struct.error, ValueError, IndexError):
        return f"{path} ends within its header: it is incomplete, or damaged"
    if size < wanted:
        return f"{path} is incomplete: it has {size} bytes of {wanted}"
    return None


class _Header:
    """Walks over a header once, from the front."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(_MAGIC)

    def size(self) -> int:
        """Return the size that the whole file has to have."""
        self._number("I")  # version
        tensors, pairs = self._count(), self._count()
        alignment = 32
        for _ in range(pairs):
            key = self._string()
            kind = self._number("I")
            if key == b"general.alignment" and kind == 4:
                alignment = self._number("I")
            else:
                self._skip(kind)
        end = 0
        for _ in range(tensors):
            self._string()
            elements = 1
            for _ in range(self._number("I")):
                elements *= self._number("Q")
            per_block, block = _BLOCKS.get(self._number("I"), (1, 0))
            end = max(end, self._number("Q") + elements // per_block * block)
        return -(-self._at // alignment) * alignment + end

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return int(value)

    def _count(self) -> int:
        value = self._number("Q")
        if value > _MOST:
            raise ValueError(f"a count of {value}")
        return value

    def _string(self) -> bytes:
        length = self._count()
        self._at += length
        return self._data[self._at - length : self._at]

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            kind, count = self._number("I"), self._count()
            if kind in _VALUES:
                self._at += _VALUES[kind] * count
            else:
                for _ in range(count):
                    self._skip(kind)
        elif kind in _VALUES:
            self._at += _VALUES[kind]
        else:
            raise ValueError(f"type {kind}")
