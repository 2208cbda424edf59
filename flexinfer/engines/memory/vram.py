"""What is free on GPUs now, from sysfs."""

from __future__ import annotations

from pathlib import Path

from flexinfer.engines.gpus import Devices, vram_figure


def free_vram(devices: Devices, root: Path = Path("/")) -> tuple[int | None, ...]:
    """Return the free bytes of each GPU of `devices`, in their order.

    None stands for a GPU whose driver does not say, and for a pretended one; a CPU model has none.
    Free is the total less what all processes use, so what a dying engine still holds counts as
    used. `root` is the root of the file system with `sys`.
    """
    if devices.pretended:
        return (None,) * len(devices.ids)
    found: list[int | None] = []
    for gpu in devices.gpus:
        used = vram_figure(root, gpu.render_minor, "used")
        known = gpu.vram_bytes is not None and used is not None
        found.append(max(0, (gpu.vram_bytes or 0) - (used or 0)) if known else None)
    return tuple(found)


def least_vram(devices: Devices) -> int | None:
    """The total bytes of the smallest of these GPUs; None where there is none or one is unknown."""
    if devices.pretended or not devices.gpus:
        return None
    totals = [gpu.vram_bytes for gpu in devices.gpus if gpu.vram_bytes is not None]
    return min(totals) if len(totals) == len(devices.gpus) else None
