"""Errors of this room.

    ApiError
    └── ManifestErrors     manifests that cannot be used; carries every problem of the run

Values that are wrong by themselves (a quantity, a source) raise ValueError, as in pydantic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class ApiError(Exception):
    """Base of all errors of `flexinfer.api`."""


@dataclass(frozen=True)
class ManifestProblem:
    """One thing that is wrong, as a user can act on it.

    `line` counts from 1 and is None where no line can be named; `field` is a path such as
    ``spec.resources.requests[amd.com/gpu]`` and empty where the whole file is meant; `found` and
    `allowed` are in words or as written; `suggestion` is what to write instead, if that is known.
    """

    file: str
    line: int | None
    field: str
    found: str
    allowed: str
    suggestion: str | None = None

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        field = f" {self.field}:" if self.field else ""
        suggestion = f"; {self.suggestion}" if self.suggestion else ""
        line = f"{where}:{field} found {self.found}{suggestion}; allowed: {self.allowed}"
        # Manifests may hold anything, and a terminal obeys control characters.
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


class ManifestErrors(ApiError):
    """Manifests that cannot be used. `errors` holds every problem of the run in reading order,
    `files` every file that was read."""

    def __init__(self, errors: Sequence[ManifestProblem], files: Sequence[Path] = ()) -> None:
        self.errors = tuple(errors)
        self.files = tuple(files)
        super().__init__("\n".join(str(error) for error in self.errors))
