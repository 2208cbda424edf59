"""What tensors a model in the hub's format has, from the headers of its safetensors files."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flexinfer.engines.memory.tensors import SAFETENSORS
from flexinfer.engines.memory.types import MemoryPlanError
from flexinfer.engines.memory.untrusted import (
    Fields,
    elements,
    parse_json,
    read_json,
    regular_file,
    whole,
)

_HEADER_LIMIT = 32 << 20
_FILES = 4096
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = re.compile(r"(pytorch_model|model).*\.(bin|pt|pth)")


@dataclass(frozen=True)
class Tensor:
    """One tensor: its type as safetensors names it, the number of its elements and of its
    dimensions, and its bytes in the file."""

    name: str
    dtype: str
    count: int
    dimensions: int
    size: int


def read_tensors(directory: Path) -> list[Tensor]:
    """All tensors of the model in `directory`, those of a file of pickles as one of no type.

    Raises `MemoryPlanError`.
    """
    found: dict[str, Tensor] = {}
    for path in _files(directory):
        for tensor in header(path):
            found[tensor.name] = tensor
    if found:
        return list(found.values())
    tensors = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if _PICKLED.fullmatch(path.name):
            with regular_file(path) as (_, size):
                tensors.append(Tensor(path.name, "", 0, 2, size))
    if not tensors:
        raise MemoryPlanError(f"{directory} has no safetensors files")
    return tensors


def _files(directory: Path) -> list[Path]:
    """The files that make up the model: what the index says, or else all there are."""
    if (directory / _INDEX).exists():
        index = Fields(read_json(directory / _INDEX), _INDEX).object("weight_map").data
        names = set(index.values()) if all(isinstance(v, str) for v in index.values()) else set()
        if not names or len(names) > _FILES or any(_outside(name) for name in names):
            raise MemoryPlanError(f"{_INDEX} names no files, or files that are not beside it")
        return [directory / name for name in sorted(names)]
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    try:
        found = sorted(directory.glob("*.safetensors"))
    except OSError as error:
        raise MemoryPlanError(f"cannot read {directory}: {error.strerror}") from None
    if len(found) > _FILES:
        raise MemoryPlanError(f"{directory} has {len(found)} safetensors files")
    return found


def _outside(name: str) -> bool:
    return not name or "/" in name or "\0" in name or name in (".", "..")


def header(path: Path) -> Iterator[Tensor]:
    """The tensors of one file. Reads its header only, never more than 32 MiB.

    The format: 8 bytes with the header's length, little endian, then a JSON object of names, types,
    shapes and offsets. Raises `MemoryPlanError` if the header is not that, or if the file is
    shorter than it says.
    """
    with regular_file(path) as (file, size):
        head = file.read(8)
        if len(head) < 8:
            raise MemoryPlanError(f"{path} is no safetensors file: it ends within its header")
        (length,) = struct.unpack("<Q", head)
        if length > min(_HEADER_LIMIT, size - 8):
            raise MemoryPlanError(
                f"{path} is no safetensors file, or incomplete: its header would have "
                f"{length} bytes, the file has {size}"
            )
        text = file.read(length)
    for name, value in parse_json(text, f"the header of {path.name}").items():
        if name == "__metadata__":
            continue
        if not isinstance(value, dict):
            raise MemoryPlanError(f"{path.name}: {name[:80]} is no description of a tensor")
        yield _tensor(name, Fields(value, f"{name[:80]} in {path.name}"), size - 8 - length)


def _tensor(name: str, fields: Fields, room: int) -> Tensor:
    dtype = fields.text("dtype")
    offsets = fields.list("data_offsets", most=2)
    if len(offsets) != 2:
        raise MemoryPlanError(f"{fields.name} has no two offsets")
    start, end = (whole(offset, f"an offset of {fields.name}", least=0) for offset in offsets)
    count = elements(fields.data.get("shape"), fields.name)
    if not start <= end <= room:
        raise MemoryPlanError(f"{fields.name} lies outside the file, which is incomplete")
    if dtype in SAFETENSORS and count * SAFETENSORS[dtype] != end - start:
        raise MemoryPlanError(f"{fields.name} has not the size that its shape says")
    return Tensor(name, dtype, count, len(fields.list("shape")), end - start)
