"""The `flexinfer` command."""

from __future__ import annotations

from typing import Annotated

import typer

import flexinfer
from flexinfer.cli import fit, get, logs, render, up, validate

app = typer.Typer(
    name="flexinfer",
    no_args_is_help=True,
    add_completion=False,
    # Values of variables can be secrets.
    pretty_exceptions_show_locals=False,
    help="Serve large language models on Ray: describe a model, get an OpenAI API.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"flexinfer {flexinfer.__version__}")
        raise typer.Exit


@app.callback()
def _flexinfer(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Serve large language models on Ray: describe a model, get an OpenAI API."""


app.command("up")(up.up)
app.command("validate")(validate.validate)
app.command("fit")(fit.fit)
app.add_typer(get.app, name="get")
app.command("logs")(logs.logs)
app.add_typer(render.app, name="render")


def main() -> None:
    """The entry point."""
    app()
