"""Options that several subcommands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Paths = Annotated[
    list[Path],
    typer.Argument(metavar="PATH...", help="Manifests: files, or folders with them."),
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of the API.")]
Host = Annotated[
    str, typer.Option(help="Address of the API. Everything else stays on the loopback address.")
]
ModelsDirs = Annotated[
    list[Path] | None,
    typer.Option(
        "--models-dir",
        exists=True,
        file_okay=False,
        help="Directory in which `model` is looked for. Repeatable.",
    ),
]
Claims = Annotated[
    list[str] | None,
    typer.Option(
        "--claim",
        metavar="NAME=DIR",
        help="The directory that a claim of the manifests is on this machine. Repeatable.",
    ),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        metavar="ORIGIN",
        help="Origin that browsers may call from, beside those on loopback; * for all. Repeatable.",
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        envvar="FLEXINFER_URL", help="URL of the API. Without it, the instance that runs here."
    ),
]


def parse_claims(texts: Sequence[str] | None) -> dict[str, Path]:
    """``NAME=DIR`` each. Raises typer.BadParameter for anything else."""
    claims: dict[str, Path] = {}
    for text in texts or ():
        name, equals, directory = text.partition("=")
        if not (name and equals and directory):
            raise typer.BadParameter(f"{text}: write NAME=DIR", param_hint="--claim")
        if name in claims:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--claim")
        path = Path(directory).expanduser()
        if not path.is_dir():
            raise typer.BadParameter(f"{directory} is not a directory", param_hint="--claim")
        claims[name] = path.absolute()
    return claims
