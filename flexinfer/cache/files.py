"""Looking at files: what is there, whether it stays where it belongs, and which version it is."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from flexinfer.cache.errors import IncompleteWeights, PathEscapes

Kind = Literal["file", "directory"]

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def kind_of(path: Path) -> Kind | str:
    """`file`, `directory`, or in words why it is neither: an empty directory has nothing in it."""
    try:
        if path.is_file():
            return "file"
        if not path.is_dir():
            return "not there"
        with os.scandir(path) as entries:
            return "directory" if any(entries) else "empty directory"
    except OSError as error:
        return error.strerror or type(error).__name__


def check_inside(path: Path, root: Path, *, also: Iterable[Path] = ()) -> None:
    """Checks that `path`, with all links followed, is below `root` or a directory of `also`.

    Raises:
        PathEscapes: it is not.
    """
    try:
        target = path.resolve()
    except RuntimeError:
        # A link that leads to itself leads nowhere else; looking at it will say so.
        return
    for allowed in (root, *also):
        if target.is_relative_to(allowed.resolve()):
            return
    raise PathEscapes(path, target, root)


def files_below(directory: Path) -> Iterator[Path]:
    """Files that belong to weights, in no order: hidden ones and caches of Python are left out.
    Links to files count, links to directories are not followed. Raises OSError for a directory
    that cannot be read: weights that are half seen are not the weights."""

    def fail(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(directory, onerror=fail):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        for name in names:
            if name[0] != "." and not name.endswith(".incomplete"):
                yield Path(here, name)


def fingerprint(path: Path, files: Sequence[Path] | None = None) -> str:
    """A short text that changes when the weights do: of names, sizes and times, not of content.

    Args:
        path: a file or a directory.
        files: the files that matter; None for `path` itself, or all files below it.
    """
    if files is None:
        files = [path] if path.is_file() else sorted(files_below(path))
    base = path if path.is_dir() else path.parent
    digest = hashlib.sha256()
    for file in files:
        try:
            state = file.stat()
        except FileNotFoundError:
            # A dangling link, or a file that went while we looked: both are another version.
            digest.update(f"{os.path.relpath(file, base)}\0gone\n".encode())
            continue
        line = f"{os.path.relpath(file, base)}\0{state.st_size}\0{state.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def check_shards(directory: Path) -> None:
    """Checks that the shards which an index in `directory` names are all there.

    Raises:
        IncompleteWeights: some are missing, as after a copy or a download that was cut.
    """
    for name in _INDEXES:
        index = directory / name
        if not index.is_file():
            continue
        try:
            shards = {str(shard) for shard in json.loads(index.read_bytes())["weight_map"].values()}
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            # An index that cannot be read is the engine's to explain, in its own words.
            continue
        missing = sorted(shard for shard in shards if not (directory / shard).is_file())
        if missing:
            # JSON can hold text that no file name and no terminal takes.
            shown = [shard.encode("utf-8", "backslashreplace").decode() for shard in missing]
            raise IncompleteWeights(directory, shown)
