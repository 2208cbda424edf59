"""`flexinfer fit`: what models need of their GPUs, and whether that is there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flexinfer.cli import console
from flexinfer.cli.options import Claims, ModelsDirs, Paths, parse_claims

if TYPE_CHECKING:
    from rich.table import Table

    from flexinfer.api import Manifests, ModelDeployment
    from flexinfer.engines.memory import MemoryPlan, Share, Verdict

_NOTHING = "-"
_ROOT = Path("/")  # of the file system with `sys`
_WIDEST = 1000  # the table is as wide as it needs to be
_WORDS = {True: "fits", False: "does not fit", None: "unknown"}
_STYLES = {True: "green", False: "red", None: "yellow"}


class Output(StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True)
class Row:
    """One model. Without a `plan` nobody can tell what it needs, and the verdict says why.
    `total` is the memory of each of its GPUs, None if unknown."""

    model: ModelDeployment
    weights: Path | None
    plan: MemoryPlan | None
    verdict: Verdict
    total: int | None

    def as_json(self) -> dict[str, Any]:
        """The row as data. Bytes are those of all GPUs together unless they are in `perGpu`."""
        data: dict[str, Any] = {
            "name": self.model.name,
            "namespace": self.model.metadata.namespace,
            "backend": self.model.spec.backend,
            "model": self.model.spec.model,
            "weights": None if self.weights is None else str(self.weights),
            "gpus": self.model.spec.gpus,
            "gpuBytes": self.total,
            "verdict": _WORDS[self.verdict.fits],
            "fits": self.verdict.fits,
            "message": self.verdict.message,
            "proposals": [
                [{"field": field, "value": value} for field, value in proposal.settings]
                for proposal in self.verdict.proposals
            ],
        }
        if self.plan is None:
            return {**data, "plan": None}
        plan = self.plan
        data["plan"] = {
            "weightsBytes": plan.weights_bytes,
            "kvBytes": plan.kv_bytes,
            "buffersBytes": plan.buffers_bytes,
            "totalBytes": plan.total_bytes,
            "neededBytesPerGpu": plan.needed_bytes,
            "reservedBytesPerGpu": plan.reserved_bytes,
            "slackBytesPerGpu": plan.slack_bytes,
            "perGpu": [_share(share) for share in plan.per_gpu],
            "contextTokens": plan.context_tokens,
            "cacheTokens": plan.cache_tokens,
            "sequences": plan.sequences,
            "kvBytesPerToken": plan.kv_bytes_per_token,
            "notes": list(plan.notes),
        }
        return data


def _share(share: Share) -> dict[str, int]:
    return {
        "weightsBytes": share.weights,
        "kvBytes": share.kv,
        "buffersBytes": share.buffers,
        "totalBytes": share.total,
    }


def fit(
    paths: Paths,
    vram: Annotated[
        str | None,
        typer.Option(
            metavar="24Gi",
            help="Memory of each GPU, all of it free. Default: what this machine's GPUs have free.",
        ),
    ] = None,
    models_dir: ModelsDirs = None,
    claim: Claims = None,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="A table for people, or all data.")
    ] = Output.TABLE,
) -> None:
    """Compute the GPU memory that models need, from their files and settings, and compare it.

    Each model is looked at by itself: one engine at a time has a GPU. Nothing is started. Sizes are
    those of the GPU that has the most to hold. Ends with 0 if all fit or nobody can tell (weights
    that are not here, a CPU model), with 1 if one does not fit, with 2 if the manifests do not
    validate.
    """
    from flexinfer.api import read_manifests

    size = _quantity(vram)
    claims = parse_claims(claim)
    with console.errors_to_exit():
        manifests = read_manifests(paths)
    for text in console.notice_lines(manifests.notices):
        console.err.print(text)
    roots = [root.absolute() for root in models_dir or ()]
    rows = [_row(model, manifests, claims, roots, size) for model in manifests.models]
    if output is Output.JSON:
        print(json.dumps({"models": [row.as_json() for row in rows]}, indent=2))
    elif not rows:
        console.err.print("There is no ModelDeployment.")
    else:
        # In a narrow terminal lines may wrap, but no figure may be cut short.
        Console(width=_WIDEST, highlight=False).print(_table(rows), crop=False)
        for row in rows:
            _explain(row)
    if any(row.verdict.fits is False for row in rows):
        raise typer.Exit(console.FAILURE)


def _quantity(text: str | None) -> int | None:
    if text is None:
        return None
    from flexinfer.api.quantity import parse_quantity

    try:
        value = int(parse_quantity(text))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--vram") from None
    if value <= 0:
        raise typer.BadParameter(f"{text} is no memory", param_hint="--vram")
    return value


def _row(
    model: ModelDeployment,
    manifests: Manifests,
    claims: dict[str, Path],
    roots: Sequence[Path],
    size: int | None,
) -> Row:
    from flexinfer.cache import CacheError, Weights, locate, resolve_block
    from flexinfer.engines.memory import MemoryPlanError, Verdict, judge, plan_memory
    from flexinfer.engines.spec import EngineSpec

    spec = EngineSpec.from_spec(model.name, model.metadata.namespace, model.spec)
    total, free, problem = _gpus(spec.gpus, size)
    try:
        found: Weights = locate(
            model.spec.model,
            namespace=model.metadata.namespace,
            cache_ref=model.spec.model_cache_ref,
            caches=manifests.caches,
            claims=claims,
            roots=roots,
            backend=spec.backend,
            engine_env=spec.env,
        )
    except (CacheError, OSError) as error:
        return Row(model, None, None, Verdict(None, f"no weights here: {error}"), total)
    # A library is often only where the model runs; what has to be read is missed later.
    with contextlib.suppress(CacheError):
        block = resolve_block(spec.block, found, found.claim)
        spec = dataclasses.replace(spec, block=block)
    try:
        plan = plan_memory(spec, found.path, vram_bytes=total)
    except MemoryPlanError as error:
        reason = f"{error}; {problem}" if problem else str(error)
        return Row(model, found.path, None, Verdict(None, reason), total)
    verdict = judge(plan, free, total)
    if verdict.fits is None and problem and plan.gpus:
        verdict = Verdict(None, f"{verdict.message}: {problem}")
    return Row(model, found.path, plan, verdict, total)


def _gpus(count: int, size: int | None) -> tuple[int | None, tuple[int | None, ...], str | None]:
    """Memory of each GPU, what is free on each, and why that is not known."""
    if size is not None or count == 0:
        return size, (size,) * count, None
    from flexinfer.engines.gpus import assign, count_gpus
    from flexinfer.engines.memory import free_vram, least_vram

    inventory = count_gpus(_ROOT)
    if inventory.count < count:
        return None, (), f"this machine has not that many GPUs ({inventory}); say --vram"
    everything = assign(range(inventory.count), inventory)
    free = free_vram(everything, _ROOT)
    best = sorted(range(inventory.count), key=lambda index: -(free[index] or 0))[:count]
    return least_vram(assign(best, inventory)), tuple(free[index] for index in best), None


def _table(rows: Sequence[Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from flexinfer.engines.memory import gib

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for name in ("MODEL", "BACKEND"):
        table.add_column(name, no_wrap=True)
    for name in ("GPUS", "WEIGHTS", "KV CACHE", "BUFFERS", "A GPU", "OF"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("VERDICT", no_wrap=True)
    for row in rows:
        sizes = [_NOTHING] * 4
        if row.plan is not None:
            share = row.plan.fullest
            takes = max(share.total, row.plan.reserved_bytes or 0)
            sizes = [gib(share.weights), gib(share.kv), gib(share.buffers), gib(takes)]
        table.add_row(
            Text(row.model.name),
            row.model.spec.backend,
            str(row.model.spec.gpus),
            *sizes,
            _NOTHING if row.total is None or not row.model.spec.gpus else gib(row.total),
            Text(_WORDS[row.verdict.fits], style=_STYLES[row.verdict.fits]),
        )
    return table


def _explain(row: Row) -> None:
    console.out.print(console.line(row.model.name, _STYLES[row.verdict.fits], row.verdict.message))
    for proposal in row.verdict.proposals[1:]:
        console.out.print(f"    or {proposal}", markup=False)
    for note in row.plan.notes if row.plan is not None else ():
        console.out.print(f"    note: {note}", markup=False)
