"""Reading files that anybody may have made: no size, number or nesting in them is believed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from flexinfer.engines.memory.types import MemoryPlanError

_JSON_LIMIT = 64 << 20  # the largest index of a published model has 9 MB
#: No number of layers, heads, elements or bytes is larger; a larger one is garbage.
MOST = 1 << 50


@contextmanager
def regular_file(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file and yield it with its size in bytes. A pipe or a device is never waited
    for. Raises `MemoryPlanError` if it cannot be opened or read."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise MemoryPlanError(f"{path} is not a regular file")
            yield file, state.st_size
    except OSError as error:
        raise MemoryPlanError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:  # a path with a NUL character
        raise MemoryPlanError(f"cannot read {path}: {error}") from None


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises `MemoryPlanError`."""
    with regular_file(path) as (file, size):
        if size > _JSON_LIMIT:
            raise MemoryPlanError(f"{path} has {size} bytes: too large for what it should be")
        data = file.read(_JSON_LIMIT + 1)
    return parse_json(data, str(path))


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """Read bytes that hold one JSON object. Raises `MemoryPlanError`, which calls them `name`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "nested too deeply"
        raise MemoryPlanError(f"{name} is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise MemoryPlanError(f"{name} does not hold a JSON object")
    return value


def whole(value: object, name: str, *, least: int = 1, most: int = MOST) -> int:
    """Return `value` if it is a whole number between `least` and `most`.

    A float without a fraction counts. Raises `MemoryPlanError`, which calls it `name`.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        shown = str(value)[:40] if isinstance(value, int | float | str) else type(value).__name__
        raise MemoryPlanError(f"{name} is {shown}: not a whole number from {least} to {most}")
    return value


class Fields:
    """The fields of a JSON object that came from outside, read with their checks."""

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        """`name` is what errors call it, such as the file's path."""
        self.data = data
        self.name = name

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def whole(
        self, *keys: str, least: int = 1, most: int = MOST, default: int | None = None
    ) -> int:
        """The whole number under the first of `keys` that is there, else `default`.

        Raises `MemoryPlanError` if it is none, or if there is neither a field nor a default.
        """
        for key in keys:
            if key in self:
                return whole(self.data[key], f"{key} in {self.name}", least=least, most=most)
        if default is None:
            raise MemoryPlanError(f"{self.name} has no {' or '.join(keys)}")
        return default

    def number(self, key: str, default: float) -> float:
        """The finite number under `key`, else `default`. Raises `MemoryPlanError`."""
        value = self.data.get(key, default)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST:
            raise MemoryPlanError(f"{key} in {self.name} is no number that could be meant")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """The text under `key`, else `default`. Raises `MemoryPlanError`."""
        value = self.data.get(key, default)
        if value is None:
            value = default
        if not isinstance(value, str):
            reason = "has no" if value is None else "has no text under"
            raise MemoryPlanError(f"{self.name} {reason} {key}")
        return value

    def object(self, key: str) -> Fields:
        """The object under `key`, an empty one if it is absent. Raises `MemoryPlanError`."""
        value = self.data.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise MemoryPlanError(f"{key} in {self.name} is not an object")
        return Fields(value, f"{key} in {self.name}")

    def list(self, key: str, *, most: int = 1 << 20) -> list[Any]:
        """The list under `key`. Raises `MemoryPlanError`."""
        value = self.data.get(key)
        if not isinstance(value, list) or len(value) > most:
            raise MemoryPlanError(f"{self.name} has no list {key}")
        return value


def elements(shape: object, name: str) -> int:
    """The number of elements of a tensor of this shape. Raises `MemoryPlanError`."""
    if not isinstance(shape, list) or len(shape) > 16:
        raise MemoryPlanError(f"the shape of {name} is no list of numbers")
    product = 1
    for size in shape:
        product *= whole(size, f"the shape of {name}", least=0)
        if product > MOST:
            raise MemoryPlanError(f"the shape of {name} is impossible")
    return product
