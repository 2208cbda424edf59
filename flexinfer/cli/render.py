"""`flexinfer render`: manifests as what somebody else deploys."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from flexinfer.cli import console
from flexinfer.cli.options import (
    Claims,
    CorsOrigins,
    Host,
    ModelsDirs,
    Paths,
    Port,
    parse_claims,
)

app = typer.Typer(no_args_is_help=True, help="Print manifests in another form.")


@app.callback()
def _render() -> None:
    """Print manifests in another form."""


@app.command("serve")
def serve(
    paths: Paths,
    port: Port = 8000,
    host: Host = "127.0.0.1",
    models_dir: ModelsDirs = None,
    claim: Claims = None,
    cors_origin: CorsOrigins = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File on the cluster with the key that clients must send."),
    ] = None,
) -> None:
    """Print the config that `serve deploy` takes. It does not depend on this machine."""
    from flexinfer.api import read_manifests
    from flexinfer.translate import ServeSettings, render_serve, serve_config

    claims = parse_claims(claim)
    roots = [root.absolute() for root in models_dir or ()]
    with console.errors_to_exit():
        manifests = read_manifests(paths)
    for text in console.notice_lines(manifests.notices):
        console.err.print(text)
    settings = ServeSettings(
        http_host=host,
        http_port=port,
        claims=claims,
        roots=roots,
        cors_origins=cors_origin or (),
        api_key_file=api_key_file,
    )
    config = serve_config(
        manifests.models, manifests.caches, settings=settings, notices=manifests.notices
    )
    words = ["flexinfer", "render", "serve", *map(str, paths)]
    options: list[tuple[str, object]] = []
    if port != 8000:
        options.append(("--port", port))
    if host != "127.0.0.1":
        options.append(("--host", host))
    options += [("--models-dir", root) for root in roots]
    options += [("--claim", f"{name}={directory}") for name, directory in claims.items()]
    options += [("--cors-origin", origin) for origin in cors_origin or ()]
    if api_key_file is not None:
        options.append(("--api-key-file", api_key_file))
    words += [str(word) for option in options for word in option]
    print(render_serve(config, command=shlex.join(words)), end="")
