"""Print what a running instance tells: lines that stay, and below them what is going on now."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from flexinfer.cli.console import line, notice_lines, problem_lines
from flexinfer.local.activity import ON_THE_WAY
from flexinfer.local.events import (
    Activity,
    Applied,
    Event,
    Machine,
    Noticed,
    Phase,
    Ready,
    Refused,
    Rejected,
    Stopping,
    Unreachable,
)

_START = "flexinfer"


class Reporter:
    """Takes events. On a terminal, what is going on has a line with a clock of its own; elsewhere
    each step is printed once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._live,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Print one event."""
        match event:
            case Machine(text):
                self._print(text)
            case Phase(text):
                self._going_on(_START, text)
            case Ready():
                self._ready(event)
            case Noticed(notice):
                self._print(*notice_lines([notice]))
            case Rejected(problems):
                self._print("The files changed and do not validate. What ran before runs on.")
                self._print(*problem_lines(problems))
            case Refused(message, retry_s):
                self._print(line("error", "bold red", message))
                again = "" if retry_s is None else f" Trying again in {retry_s:g} s."
                self._print(f"What ran before runs on.{again}")
            case Applied():
                self._applied(event)
            case Activity():
                self._activity(event)
            case Unreachable(message, back):
                self._print(message if back else line("warning", "yellow", message))
            case Stopping():
                for name in tuple(self._tasks):
                    self._over(name)
                self._going_on(_START, "stopping")

    def _ready(self, ready: Ready) -> None:
        self._over(_START)
        self._print(Text.assemble("Ready after ", f"{ready.took_s:.0f} s: ", (ready.url, "bold")))
        self._print(f"Models: {', '.join(ready.models) or 'none'}")
        if ready.log_dir is not None:
            self._print(f"Engine logs: {ready.log_dir}")

    def _applied(self, applied: Applied) -> None:
        parts = {"added": applied.added, "changed": applied.changed, "removed": applied.removed}
        words = [f"{verb} {', '.join(names)}" for verb, names in parts.items() if names]
        self._print(f"The files changed: {'; '.join(words) or 'nothing that concerns a model'}.")

    def _activity(self, activity: Activity) -> None:
        name = activity.model
        if activity.state in ON_THE_WAY:
            detail = f" ({activity.progress})" if activity.progress else ""
            self._going_on(name, f"{name}: {activity.state}{detail}")
            return
        self._over(name)
        if activity.state == "failed":
            reason = f" ({activity.reason})" if activity.reason else ""
            message = activity.message or "no reason is known"
            self._print(line("error", "bold red", f"{name} has failed: {message}{reason}"))
        elif activity.state == "serving":
            took = f", ready after {activity.took_s:.1f} s" if activity.took_s is not None else ""
            self._print(Text.assemble(f"{name}: ", ("serving", "green"), took))
        else:
            words = {"zero": "at zero, no engine runs", "parked": "parked"}
            self._print(f"{name}: {words.get(activity.state, activity.state)}")

    def _going_on(self, key: str, text: str) -> None:
        if not self._live:
            self._print(text)
        elif key in self._tasks:
            self._progress.update(self._tasks[key], description=text)
        else:
            self._tasks[key] = self._progress.add_task(text, total=None)

    def _over(self, key: str) -> None:
        task = self._tasks.pop(key, None)
        if task is not None:
            self._progress.remove_task(task)

    def _print(self, *texts: str | Text) -> None:
        for text in texts:
            self._console.print(text, markup=False)
