"""`flexinfer up`: serve manifests on this machine."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexinfer.cli import console
from flexinfer.cli.options import Claims, CorsOrigins, Host, ModelsDirs, Port, parse_claims

if TYPE_CHECKING:
    from flexinfer.cli.reporter import Reporter
    from flexinfer.local.instance import Options


def up(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH]...",
            help="Manifests: files, or folders with them. Without any, a small demo model.",
        ),
    ] = None,
    port: Port = 8000,
    host: Host = "127.0.0.1",
    num_gpus: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="GPUs to use. Default: those that were found. More than there are are pretended, "
            "for development.",
        ),
    ] = None,
    models_dir: ModelsDirs = None,
    claim: Claims = None,
    cors_origin: CorsOrigins = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="File with the key that clients must send; else FLEXINFER_API_KEY, else none.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:8265",
            help="Dashboard of a Ray cluster that runs already: serve there instead.",
        ),
    ] = None,
) -> None:
    """Serve models on this machine until Ctrl-C, and follow changes of their manifests.

    Ends with 0 after SIGTERM, with 130 after Ctrl-C; with 2 if the manifests do not validate, with
    1 if something else fails. A second Ctrl-C does not wait for anything.
    """
    from flexinfer.cli.demo import demo_manifest
    from flexinfer.cli.reporter import Reporter
    from flexinfer.local.instance import Options

    claims = parse_claims(claim)
    with console.errors_to_exit():
        options = Options(
            paths=paths or [demo_manifest()],
            host=host,
            port=port,
            num_gpus=num_gpus,
            roots=models_dir or [],
            claims=claims,
            cors_origins=cors_origin or [],
            api_key_file=api_key_file,
            address=address,
        )
        with Reporter(console.out) as reporter:
            ended_by = asyncio.run(_run(options, reporter))
    raise typer.Exit(console.INTERRUPTED if ended_by == signal.SIGINT else 0)


async def _run(options: Options, reporter: Reporter) -> int | None:
    """Serve until a signal; returns the first one."""
    from flexinfer.local.instance import Instance

    instance = Instance(options, reporter)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        instance.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    await instance.run()
    return received[0] if received else None
