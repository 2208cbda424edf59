"""`flexinfer get models`: how the models of a running instance are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexinfer.cli import console
from flexinfer.cli.options import Url
from flexinfer.local.state import find

if TYPE_CHECKING:
    from flexinfer.local.gateway import ModelStatus

app = typer.Typer(no_args_is_help=True, help="Show what a running instance serves.")

_NOTHING = "-"


class Output(StrEnum):
    """How to print."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


@app.callback()
def _get() -> None:
    """Show what a running instance serves."""


@app.command("models")
def models(
    output: Annotated[
        Output, typer.Option("--output", "-o", help="Columns for people, or all data.")
    ] = Output.TABLE,
    url: Url = None,
) -> None:
    """List the models with their state and replicas."""
    with console.errors_to_exit():
        found = asyncio.run(_fetch(find(url).url))
    match output:
        case Output.JSON:
            print(json.dumps({"models": [model.raw for model in found]}, indent=2))
        case Output.YAML:
            import yaml

            data = {"models": [dict(model.raw) for model in found]}
            print(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), end="")
        case _:
            columns = _WIDE if output is Output.WIDE else _COLUMNS
            if not found:
                console.err.print("No models are served.")
            else:
                print(table(found, columns))


async def _fetch(url: str) -> list[ModelStatus]:
    from flexinfer.local.gateway import Gateway

    async with Gateway(url) as gateway:
        return await gateway.models()


Column = Callable[["ModelStatus"], object]


def table(models: Sequence[ModelStatus], columns: Mapping[str, Column]) -> str:
    """Columns side by side, as wide as they need to be, three spaces between them."""
    rows = [list(columns)]
    for model in models:
        cells = (cell(model) for cell in columns.values())
        rows.append([_NOTHING if value in (None, "") else str(value) for value in cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def age(seconds: float | None) -> str | None:
    """A duration in the shortest words, as kubectl has it: 45s, 12m, 3h5m, 2d."""
    if seconds is None:
        return None
    whole = int(seconds)
    if whole < 120:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes}m" if minutes >= 10 or not rest else f"{minutes}m{rest}s"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h" if hours >= 10 or not rest else f"{hours}h{rest}m"
    return f"{hours // 24}d"


def _of_replicas(value: Callable[[Any], object]) -> Column:
    def cell(model: ModelStatus) -> object:
        values = (value(replica) for replica in model.replicas)
        return ",".join(str(found) for found in values if found is not None)

    return cell


def _names(model: ModelStatus) -> str:
    return ",".join(name for name in model.raw.get("names", ()) if name != model.name)


_COLUMNS: dict[str, Column] = {
    "NAME": lambda model: model.name,
    "BACKEND": lambda model: model.raw.get("backend"),
    "STATE": lambda model: model.state,
    "REPLICAS": lambda model: len(model.replicas),
    "RUNNING": lambda model: model.raw.get("running"),
    "QUEUED": lambda model: model.raw.get("queued"),
    "LAST-ACTIVITY": lambda model: age(model.raw.get("lastActivitySecondsAgo")),
    "REASON": lambda model: model.reason,
}
_WIDE: dict[str, Column] = {
    **_COLUMNS,
    "NODE": _of_replicas(lambda replica: replica.node),
    "PID": _of_replicas(lambda replica: replica.pid),
    "ENGINE-PID": _of_replicas(lambda replica: replica.engine_pid),
    "GPUS": lambda model: model.raw.get("gpus"),
    "PRIORITY": lambda model: model.raw.get("priority"),
    "MODEL": lambda model: model.raw.get("model"),
    "OTHER-NAMES": _names,
    "WARNINGS": lambda model: len(model.raw.get("warnings") or ()),
    "MESSAGE": lambda model: " ".join((model.message or "").split()),
}
