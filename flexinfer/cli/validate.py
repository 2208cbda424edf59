"""`flexinfer validate`: are manifests right, without serving them."""

from __future__ import annotations

from flexinfer.cli import console
from flexinfer.cli.options import Paths


def validate(paths: Paths) -> None:
    """Check manifests. Prints every problem and warning; ends with 2 if there is a problem."""
    from flexinfer.api import read_manifests

    with console.errors_to_exit():
        manifests = read_manifests(paths)
    for text in console.notice_lines(manifests.notices):
        console.err.print(text)
    counts = [
        f"{len(found)} {kind}{'' if len(found) == 1 else 's'}"
        for kind, found in (
            ("ModelDeployment", manifests.models),
            ("ModelCache", manifests.caches),
        )
    ]
    console.out.print(f"valid: {', '.join(counts)}")
