"""`flexinfer logs`: what a model's engine has written."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexinfer.cli import console
from flexinfer.cli.options import Url
from flexinfer.engines.logs import log_path
from flexinfer.local import logfiles
from flexinfer.local.errors import GatewayError, LocalError
from flexinfer.local.state import State, find

if TYPE_CHECKING:
    from flexinfer.local.gateway import ModelStatus

_LOOK_S = 0.25


def logs(
    name: Annotated[str, typer.Argument(help="Name of the model, or another of its names.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what is added, until Ctrl-C.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, metavar="LINES", help="Only the last lines. Default: all.")
    ] = None,
    url: Url = None,
) -> None:
    """Print the log of a model's engine, of starts that are over too."""
    with console.errors_to_exit():
        path = asyncio.run(_path_of(find(url), name))
        if follow:
            chunks = logfiles.follow(path, lambda: time.sleep(_LOOK_S), last=tail)
        elif path.exists():
            chunks = logfiles.read(path, last=tail)
        else:
            raise LocalError(f"there is no log yet: no engine of {name} has been started")
    try:
        for chunk in chunks:
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        raise typer.Exit(console.INTERRUPTED) from None
    except BrokenPipeError:
        # The reader has seen enough. Python would try to flush once more at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _path_of(state: State, name: str) -> Path:
    if state.log_dir is None:
        raise LocalError(f"the engines of {state.url} write their logs on the cluster's nodes")
    from flexinfer.local.gateway import Gateway

    directory = Path(state.log_dir)
    async with Gateway(state.url) as gateway:
        try:
            models = await gateway.models()
        except GatewayError:
            # It cannot be asked, and its logs may say why.
            if (found := _by_file(directory, name)) is not None:
                return found
            raise
    for model in models:
        if name in _names(model):
            namespace = str(model.raw.get("namespace") or "default")
            return log_path(directory, namespace, model.name)
    # A model that is served no more.
    if (found := _by_file(directory, name)) is not None:
        return found
    known = ", ".join(sorted(model.name for model in models)) or "none"
    raise LocalError(f"there is no model {name}; the models are: {known}")


def _names(model: ModelStatus) -> set[str]:
    return {model.name, *model.raw.get("names", ())}


def _by_file(directory: Path, name: str) -> Path | None:
    if "/" in name or "\0" in name:
        return None
    folders = sorted(directory.iterdir()) if directory.is_dir() else []
    paths = (log_path(directory, folder.name, name) for folder in folders)
    return next((path for path in paths if path.is_file()), None)
