"""How the command line prints: results to stdout, everything about them to stderr."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from flexinfer.local.errors import LocalError

# The resources take a second to import on a small machine, and half of the subcommands need none.
if TYPE_CHECKING:
    from flexinfer.api import ManifestProblem, Notice

FAILURE = 1
INVALID = 2
INTERRUPTED = 130

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def line(label: str, style: str, text: object) -> Text:
    """`label: text`, the label in colour. What users wrote is never read as markup."""
    return Text.assemble((f"{label}:", style), " ", str(text))


def problem_lines(problems: Iterable[ManifestProblem]) -> Iterator[Text]:
    """One line a problem of a manifest."""
    return (line("error", "bold red", problem) for problem in problems)


def notice_lines(notices: Iterable[Notice]) -> Iterator[Text]:
    """One line a warning."""
    return (line("warning", "yellow", notice) for notice in notices)


@contextmanager
def errors_to_exit() -> Iterator[None]:
    """Prints what a user can act on and ends with the exit code for it: 2 for manifests that do
    not validate, 1 for everything else. A program error stays a traceback."""
    try:
        yield
    except LocalError as error:
        err.print(line("error", "bold red", error))
        raise typer.Exit(FAILURE) from None
    except Exception as error:
        from flexinfer.api import ManifestErrors

        if not isinstance(error, ManifestErrors):
            raise
        for text in problem_lines(error.errors):
            err.print(text)
        raise typer.Exit(INVALID) from None
