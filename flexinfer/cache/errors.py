"""Errors of this room. All say what is on this machine's disk and what a user can do about it.

CacheError
├── ModelNotFound        no place that `model` may mean holds weights
├── AmbiguousModel       more than one thing fits: the manifest has to say which
├── IncompleteWeights    weights are there, but not all of their files
├── PathEscapes          a path leads out of the directory that it belongs to
└── UserPathNotFound     a file that the manifest names beside the model is missing
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class CacheError(Exception):
    """Base of all errors of `flexinfer.cache`. The message is one a user can act on."""


class ModelNotFound(CacheError):
    """`tried` has one line a place, in the order in which they were tried; `hint` is what to do."""

    def __init__(self, model: str, tried: Sequence[str], hint: str) -> None:
        self.model = model
        self.tried = tuple(tried)
        self.hint = hint
        places = "; ".join(self.tried) or "there is no place to look in"
        super().__init__(f"no weights for model {model!r}. Tried: {places}. {hint}")


class AmbiguousModel(CacheError):
    """`choices` are the things that fit, as a user can name them."""

    def __init__(self, message: str, choices: Sequence[str]) -> None:
        self.choices = tuple(choices)
        super().__init__(f"{message}: {', '.join(self.choices)}")


class IncompleteWeights(CacheError):
    """`path` is where the weights are, `missing` the names of files that belong to them."""

    def __init__(self, path: Path, missing: Sequence[str]) -> None:
        self.path = path
        self.missing = tuple(missing)
        shown = ", ".join(self.missing[:5])
        more = f" and {len(self.missing) - 5} more" if len(self.missing) > 5 else ""
        super().__init__(f"weights in {path} are incomplete, missing: {shown}{more}")


class PathEscapes(CacheError):
    """`path` is what was asked for, `target` where it really leads, `root` where it must stay."""

    def __init__(self, path: Path, target: Path, root: Path) -> None:
        self.path = path
        self.target = target
        self.root = root
        super().__init__(f"{path} leads to {target}, which is outside of {root}")


class UserPathNotFound(CacheError):
    """`path` is as the manifest has it, `tried` the places where it could have been."""

    def __init__(self, path: str, tried: Sequence[Path]) -> None:
        self.path = path
        self.tried = tuple(tried)
        super().__init__(f"no file {path!r}. Tried: {', '.join(str(place) for place in tried)}")
