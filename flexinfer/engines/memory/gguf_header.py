"""The header of a GGUF file: its values and the sizes of its tensors.

The reader of the `gguf` package makes an array of every token of the vocabulary, which takes
seconds, and believes every count in the file. This one walks over the long arrays, and takes only
the sizes of tensor types from the package, which knows new ones with every version.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flexinfer.engines.memory.types import MemoryPlanError
from flexinfer.engines.memory.untrusted import MOST, regular_file

Value = int | float | bool | str | tuple[int | float | bool, ...]

_STRING, _ARRAY = 8, 9
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PAIRS, _TENSORS, _STRINGS = 1 << 16, 1 << 18, 1 << 22
_SHORT = 1 << 14  # arrays of at most so many numbers are kept: there is one number a layer
_TEXT = 1 << 16  # and strings of at most so many bytes
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: name, dimensions (the first is the row's length), bytes."""

    name: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class GgufModel:
    """A model in one or several GGUF files. `lengths` are those of the arrays that were not
    kept, such as the tokens."""

    values: Mapping[str, Value]
    lengths: Mapping[str, int]
    tensors: tuple[GgufTensor, ...]


@cache
def _type_sizes() -> dict[int, tuple[int, int]]:
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (int(count), int(size)) for kind, (count, size) in GGML_QUANT_SIZES.items()}


def block_size(type_name: str) -> tuple[int, int]:
    """Elements and bytes of a block of a type such as `q8_0`. Raises `MemoryPlanError`."""
    from gguf.constants import GGMLQuantizationType

    try:
        return _type_sizes()[int(GGMLQuantizationType[type_name.upper()])]
    except KeyError:
        raise MemoryPlanError(f"the size of values of type {type_name[:40]} is not known") from None


def read_gguf(path: Path) -> GgufModel:
    """Read the header of `path`, and of all parts if it is the first of several files.

    Raises `MemoryPlanError`; never runs longer than a header of a sane size takes.
    """
    match = _SPLIT.fullmatch(path.name)
    parts = [path]
    if match is not None:
        count = int(match[3])
        if not 1 <= count <= 1024:
            raise MemoryPlanError(f"{path} would be one of {count} parts")
        parts = [
            path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, count + 1)
        ]
    values: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    tensors: list[GgufTensor] = []
    for part in parts:
        found = _read_part(part)
        values = {**found.values, **values}
        lengths = {**found.lengths, **lengths}
        tensors += found.tensors
    if not tensors:
        raise MemoryPlanError(f"{path} has no tensors")
    return GgufModel(values, lengths, tuple(tensors))


def _read_part(path: Path) -> GgufModel:
    with regular_file(path) as (file, size):
        if size < 24:
            raise MemoryPlanError(f"{path} is no GGUF file: it ends within its header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Walk(data, size).read()
            except (struct.error, OverflowError, _Bad) as error:
                reason = str(error) if isinstance(error, _Bad) else "it ends within its header"
                raise MemoryPlanError(f"{path} is no GGUF file, or damaged: {reason}") from None


class _Bad(Exception):
    """What a header says that no header of a model says."""


class _Walk:
    """Goes over a header once, from the front."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data = data
        self._size = size
        self._at = 4

    def read(self) -> GgufModel:
        if self._data[:4] != b"GGUF":
            raise _Bad("it does not begin with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise _Bad(f"version {version}")
        tensors, pairs = self._count(_TENSORS), self._count(_PAIRS)
        values: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        for _ in range(pairs):
            key = self._text()
            found = self._value(self._number("I"))
            if isinstance(found, _Length):
                lengths[key] = found.value
            elif found is not None:
                values[key] = found
        return GgufModel(values, lengths, tuple(self._tensors(tensors)))

    def _tensors(self, count: int) -> Iterator[GgufTensor]:
        sizes = _type_sizes()
        for _ in range(count):
            name = self._text()
            dimensions = self._number("I")
            if dimensions > 8:
                raise _Bad(f"{dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))
            kind = self._number("I")
            self._number("Q")
            if kind not in sizes:
                raise MemoryPlanError(f"{name[:80]} has type {kind}, whose size is not known")
            elements = 1
            for length in shape:
                elements *= length
                if elements > MOST:
                    raise _Bad(f"the shape of {name[:80]}")
            per_block, size = sizes[kind]
            size = -(-elements // per_block) * size
            if size > self._size:
                raise _Bad(f"{name[:80]} is larger than the file, which is incomplete")
            yield GgufTensor(name, shape, size)

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return int(value)

    def _count(self, most: int) -> int:
        value = self._number("Q")
        if value > most:
            raise _Bad(f"a count of {value}")
        return value

    def _text(self) -> str:
        length = self._count(_TEXT)
        self._advance(length)
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _advance(self, count: int) -> None:
        self._at += count
        if self._at > self._size:
            raise _Bad("it ends within its header")

    def _value(self, kind: int) -> Value | _Length | None:
        """A value, the length of one that is not worth keeping, or None for a long text."""
        if kind == _STRING:
            (length,) = struct.unpack_from("<Q", self._data, self._at)
            if length <= 256:
                return self._text()
            self._advance(8 + length)
            return None
        if kind == _ARRAY:
            return self._array()
        form = _FORMS.get(kind)
        if form is None:
            raise _Bad(f"a value of type {kind}")
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        found: Value = value
        return found

    def _array(self) -> Value | _Length:
        kind, count = self._number("I"), self._count(MOST)
        if kind == _STRING:
            if count > _STRINGS:
                raise _Bad(f"a list of {count} texts")
            at, data, unpack = self._at, self._data, struct.Struct("<Q").unpack_from
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
            self._at = 0
            self._advance(at)
            return _Length(count)
        form = _FORMS.get(kind)
        if form is None:
            raise _Bad(f"a list of type {kind}")
        start = self._at
        self._advance(count * struct.calcsize(f"<{form}"))
        if count > _SHORT:
            return _Length(count)
        return struct.unpack_from(f"<{count}{form}", self._data, start)


@dataclass(frozen=True)
class _Length:
    value: int
