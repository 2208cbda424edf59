"""Which GGUF of a directory is the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from flexinfer.cache.errors import AmbiguousModel, IncompleteWeights
from flexinfer.cache.files import files_below

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.I)
# Projectors lie beside the model that they belong to, but are not one.
_NOT_A_MODEL = re.compile(r"(mmproj[-_.]|.*[-_.]mmproj[-_.])", re.I)


@dataclass(frozen=True)
class Gguf:
    """A model in GGUF: one file, or all shards of one. The engine is given the first."""

    files: tuple[Path, ...]

    @property
    def path(self) -> Path:
        return self.files[0]

    @property
    def size(self) -> int:
        """In bytes, all shards together."""
        return sum(file.stat().st_size for file in self.files)


def whole_model(file: Path) -> Gguf:
    """The model that `file` is, or is any shard of.

    Raises:
        IncompleteWeights: other shards of it are missing.
    """
    match = _SHARD.fullmatch(file.name)
    if match is None:
        return Gguf((file,))
    count = int(match["count"])
    names = [f"{match['stem']}-{i:05}-of-{match['count']}.gguf" for i in range(1, count + 1)]
    shards = [file.with_name(name) for name in names]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise IncompleteWeights(file.parent, missing)
    return Gguf(tuple(shards))


def choose(directory: Path, wanted: Sequence[str] = ()) -> Gguf | None:
    """The model in `directory` and the directories below it; None if there is no GGUF.

    Args:
        directory: where to look.
        wanted: file names or patterns, the most telling first, matched against a file's path below
            `directory` and against its name. The first that matches anything decides.

    Raises:
        AmbiguousModel: several remain; it lists them with their sizes.
        IncompleteWeights: the chosen model lacks shards.
    """
    found = sorted(
        path
        for path in files_below(directory)
        if path.suffix.lower() == ".gguf" and not _NOT_A_MODEL.match(path.name)
    )
    found = next(filter(None, (_matching(found, directory, name) for name in wanted)), found)
    # Shards of one model are one choice, whichever of them was found first.
    stems: dict[Path, Path] = {}
    for path in found:
        match = _SHARD.fullmatch(path.name)
        key = path if match is None else path.with_name(f"{match['stem']}-of-{match['count']}")
        stems.setdefault(key, path)
    if not stems:
        return None
    if len(stems) > 1:
        choices = [_described(path, directory) for path in stems.values()]
        message = (
            f"{directory} holds several GGUF models; name one in `model`, or in the cache's "
            f"`source` or `files`"
        )
        raise AmbiguousModel(message, choices)
    return whole_model(next(iter(stems.values())))


def _matching(paths: Sequence[Path], directory: Path, wanted: str) -> list[Path]:
    """Those that are called `wanted`, or else fit it as a pattern: `[` is legal in a name."""
    names = {path: (path.relative_to(directory).as_posix(), path.name) for path in paths}
    exact = [path for path in paths if wanted in names[path]]
    return exact or [path for path in paths if any(fnmatch(name, wanted) for name in names[path])]


def _described(path: Path, directory: Path) -> str:
    try:
        size = f"{whole_model(path).size / 2**30:.2f} GiB"
    except IncompleteWeights:
        size = "incomplete"
    except OSError as error:
        size = error.strerror or "unreadable"
    return f"{path.relative_to(directory)} ({size})"
