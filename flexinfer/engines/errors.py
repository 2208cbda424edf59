"""What can go wrong with an engine.

EngineError
|- EngineNotFound         no executable for the backend on this machine
|- EngineConfigError      the settings cannot be turned into a start
|- EngineStartError       the engine did not become ready: reason, last lines, exit
|  |- EngineStartTimeout  ... within its time
|  `- EnginePortTaken     ... because something else listens on its port
|- EngineStopped          stop() was called while the engine was starting
|- EngineExited           the engine was ready, and its process has ended
|- EngineUnresponsive     its process lives and does not answer
`- EngineStuck            processes that survive SIGKILL
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: an exit code, or the signal that ended it, or neither if unknown."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                return f"killed by {signal.Signals(self.signal).name}"
            except ValueError:
                return f"killed by signal {self.signal}"
        return "ended" if self.code is None else f"exit code {self.code}"


class EngineError(Exception):
    """Base of this room's errors."""


class EngineNotFound(EngineError):
    """No executable was found; the message names every place that was tried."""


class EngineConfigError(EngineError):
    """The settings contradict each other, the engine's build or this machine."""


class EngineStartError(EngineError):
    """The engine did not become ready.

    `reason` is one line for a user, `log_tail` the engine's last lines, oldest first, and `exit`
    how its process ended, None if it was still running when the start was given up.
    """

    def __init__(
        self, reason: str, *, log_tail: Sequence[str] = (), exit: ExitStatus | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.log_tail = tuple(log_tail)
        self.exit = exit

    def report(self) -> str:
        """Return the reason and the engine's last lines, as several lines of text."""
        return "\n".join([self.reason, *(f"    {line}" for line in self.log_tail)])


class EngineStartTimeout(EngineStartError):
    """The engine was still not ready at its deadline."""


class EnginePortTaken(EngineStartError):
    """Another program listens on the engine's port; a start with another port may succeed."""


class EngineStopped(EngineError):
    """The start was given up because `stop()` was called."""


class EngineExited(EngineError):
    """The engine's process has ended without being asked to; `reason` says why, for a user."""

    def __init__(
        self, status: ExitStatus, *, reason: str = "", log_tail: Sequence[str] = ()
    ) -> None:
        super().__init__(f"the engine ended: {reason or status}")
        self.status = status
        self.log_tail = tuple(log_tail)


class EngineUnresponsive(EngineError):
    """The engine's process lives, but it does not answer as a working engine would."""


class EngineStuck(EngineError):
    """Processes of the engine that not even SIGKILL has ended (`pids`)."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(f"processes {', '.join(map(str, pids))} survive SIGKILL")
        self.pids = tuple(pids)
