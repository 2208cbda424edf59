"""What a running instance tells its user, as data; who prints it is not known here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexinfer.api import ManifestProblem, Notice


@dataclass(frozen=True)
class Phase:
    """The start has entered a new phase, `text`."""

    text: str


@dataclass(frozen=True)
class Machine:
    """What was found of the machine: a sentence on its GPUs."""

    text: str


@dataclass(frozen=True)
class Ready:
    """The API answers at `url`; `models` are the names of the models in it."""

    url: str
    models: Sequence[str]
    took_s: float
    log_dir: Path | None


@dataclass(frozen=True)
class Noticed:
    """A warning that has not been told before."""

    notice: Notice


@dataclass(frozen=True)
class Rejected:
    """The files changed to something that does not validate; what ran before runs on."""

    problems: Sequence[ManifestProblem]


@dataclass(frozen=True)
class Refused:
    """What the files say now could not be deployed; `retry_s` is None if only a change helps."""

    message: str
    retry_s: float | None = None


@dataclass(frozen=True)
class Applied:
    """The files changed, and Ray has taken the difference. Names of models."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Activity:
    """A model changed its state, or got further in it.

    `took_s` is set when it has become ready: the seconds since it was asked for. `reason` and
    `message` are set when it has failed.
    """

    model: str
    state: str
    progress: str | None = None
    took_s: float | None = None
    reason: str | None = None
    message: str | None = None


@dataclass(frozen=True)
class Unreachable:
    """The gateway has stopped answering (`back` False), or answers again (True)."""

    message: str
    back: bool = False


@dataclass(frozen=True)
class Stopping:
    """Everything that was started is being stopped."""


Event = (
    Phase
    | Machine
    | Ready
    | Noticed
    | Rejected
    | Refused
    | Applied
    | Activity
    | Unreachable
    | Stopping
)
Tell = Callable[[Event], None]
