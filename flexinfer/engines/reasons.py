"""Lines of an engine's output as reasons that a user reads."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence

Reason = str | Callable[[re.Match[str]], str]

#: What a signal that nobody here sent means for any engine, after its program's name.
SIGNALS: Mapping[int, str] = {
    signal.SIGKILL: "was killed by SIGKILL (the kernel does so when memory runs out)",
    signal.SIGSEGV: "crashed (SIGSEGV)",
    signal.SIGABRT: "aborted (SIGABRT), as it does after a fault on the GPU",
    signal.SIGILL: "was killed by SIGILL (the build uses instructions that this processor lacks)",
    signal.SIGTERM: "was ended by a SIGTERM that FlexInfer did not send",
}


class Reasons:
    """Patterns of lines that say that a start has failed, the most telling first.

    Each has a reason: a template of its match (`\\1`), or a function of it. The last `vague` of
    them say that it failed, not why.
    """

    def __init__(self, patterns: Sequence[tuple[str, Reason]], *, vague: int) -> None:
        self._patterns = [(re.compile(pattern), reason) for pattern, reason in patterns]
        self._vague = len(self._patterns) - vague

    def of(self, line: str) -> str | None:
        """Return the reason if a line is one of them, else None."""
        ranked = self._rank(line)
        return None if ranked is None else ranked[1]

    def best(self, lines: Iterable[str], *, telling: bool = False) -> str | None:
        """Return the most telling reason of all lines; with `telling`, none of the vague."""
        ranked = min(
            (found for line in lines if (found := self._rank(line)) is not None), default=None
        )
        if ranked is None or (telling and ranked[0] >= self._vague):
            return None
        return ranked[1]

    def _rank(self, line: str) -> tuple[int, str] | None:
        for rank, (pattern, reason) in enumerate(self._patterns):
            if match := pattern.search(line):
                return rank, match.expand(reason) if isinstance(reason, str) else reason(match)
        return None
