"""The GPUs of this machine, and the one mask that shows an engine its own.

They are counted from the kernel's own list (KFD topology in sysfs), without ROCm's tools: those are
missing on many machines and in most images, and Ray without them sees no AMD GPU at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MASK = "HIP_VISIBLE_DEVICES"
# ROCR renumbers before HIP looks, so "1" in both leaves no device; CUDA_ and GPU_DEVICE_ORDINAL are
# read as further masks by some versions and some engines.
OTHER_MASKS = ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_ALL_MASKS = frozenset((MASK, *OTHER_MASKS))
NO_DEVICE = "-1"  # an empty mask counts as none; at the first invalid entry the list ends

# Graphics parts of processors, which the kernel lists like cards. Some have no other telling sign.
_INTEGRATED_GFX = frozenset(
    [
        "gfx902",
        "gfx909",
        "gfx90c",
        "gfx1013",
        "gfx1033",
        "gfx1035",
        "gfx1036",
        "gfx1103",
        "gfx1150",
        "gfx1151",
        "gfx1152",
        "gfx1153",
    ]
)
# An integrated part is given a slice of RAM as its own memory, by default at most this.
_CARVE_OUT = 2 << 30


class NoGpus(StrEnum):
    """Why no GPU, or not every GPU, can be used."""

    NO_DRIVER = "no-driver"
    NO_PERMISSION = "no-permission"
    NONE_FOUND = "none-found"


@dataclass(frozen=True)
class Gpu:
    """One GPU as the kernel lists it.

    `hip_index` is its place among all GPUs, which is how an unmasked HIP numbers them; `vram_bytes`
    is None where the kernel does not say.
    """

    hip_index: int
    node: int
    gfx: str
    render_minor: int
    vram_bytes: int | None
    integrated: bool

    def __str__(self) -> str:
        memory = "" if self.vram_bytes is None else f", {self.vram_bytes / 2**30:.1f} GiB"
        return f"{self.gfx}{memory} (renderD{self.render_minor})"


@dataclass(frozen=True)
class Inventory:
    """The GPUs that engines may use, in slot order, and those left out.

    `problem` says why there are none or fewer than there could be; `detail` is the sentence for it.
    """

    gpus: tuple[Gpu, ...] = ()
    integrated: tuple[Gpu, ...] = ()
    problem: NoGpus | None = None
    detail: str = ""

    @property
    def count(self) -> int:
        """How many GPUs engines may use."""
        return len(self.gpus)

    def __str__(self) -> str:
        if self.gpus:
            listed = ", ".join(str(gpu) for gpu in self.gpus)
            return f"{self.count} GPU{'s' if self.count > 1 else ''}: {listed}"
        return f"no GPU: {self.detail}"


@dataclass(frozen=True)
class Devices:
    """The GPUs of one engine. `ids` are slots as Ray assigned them, () for a CPU model.

    `gpus` are the same GPUs as the kernel lists them, and `hip_ids` in HIP's own numbering. Where
    the machine has fewer GPUs than the slots say (`pretended`), the mask is made of the slots.
    """

    ids: tuple[int, ...] = ()
    pretended: bool = False
    hip_ids: tuple[int, ...] | None = None
    gpus: tuple[Gpu, ...] = ()

    @property
    def mask(self) -> str:
        """The value of the mask."""
        ids = self.ids if self.hip_ids is None else self.hip_ids
        return ",".join(map(str, ids)) if ids else NO_DEVICE


def count_gpus(root: Path = Path("/")) -> Inventory:
    """List the AMD GPUs below `root` (the root of a file system with `sys` and `dev`).

    Never raises for a machine without GPUs or without rights: the inventory says why it is empty.
    """
    topology = root / "sys/class/kfd/kfd/topology/nodes"
    device = root / "dev/kfd"
    if not topology.is_dir():
        detail = f"the amdgpu driver is not loaded ({topology} does not exist)"
        return Inventory(problem=NoGpus.NO_DRIVER, detail=detail)
    found: list[Gpu] = []
    hidden = 0
    for node in sorted((n for n in topology.iterdir() if n.name.isdigit()), key=_number):
        try:
            properties = _properties(node / "properties")
        except PermissionError:
            hidden += 1  # a container sees all nodes, but may read only those it was given
            continue
        except OSError:
            continue
        if properties.get("simd_count", 0) > 0:
            found.append(_gpu(len(found), node, properties, root))
    integrated = tuple(gpu for gpu in found if gpu.integrated)
    gpus = tuple(gpu for gpu in found if not gpu.integrated)
    if gpus and not os.access(device, os.R_OK | os.W_OK):
        detail = (
            f"{device} does not exist"
            if not device.exists()
            else f"no permission to open {device}: add the user to the group that owns it (render)"
        )
        return Inventory(integrated=integrated, problem=NoGpus.NO_PERMISSION, detail=detail)
    if not gpus:
        if hidden:
            detail = f"no permission to read the {hidden} nodes in {topology}"
            return Inventory(integrated=integrated, problem=NoGpus.NO_PERMISSION, detail=detail)
        detail = "the driver lists none" + (" but integrated ones" if integrated else "")
        return Inventory(integrated=integrated, problem=NoGpus.NONE_FOUND, detail=detail)
    return Inventory(gpus=gpus, integrated=integrated)


def assign(ids: Sequence[int], inventory: Inventory) -> Devices:
    """Return the devices of an engine that Ray gave the slots `ids`.

    Slots beyond the GPUs that exist are pretended, all of them together: half a model on a GPU that
    is there and half on one that is not would be neither.
    """
    slots = tuple(ids)
    if all(slot < inventory.count for slot in slots):
        gpus = tuple(inventory.gpus[slot] for slot in slots)
        return Devices(slots, hip_ids=tuple(gpu.hip_index for gpu in gpus), gpus=gpus)
    return Devices(slots, pretended=True)


def is_mask(name: str) -> bool:
    """Whether a variable says which GPUs are seen."""
    return name in _ALL_MASKS


def device_env(environ: Mapping[str, str], devices: Devices) -> dict[str, str]:
    """Return a copy of `environ` with exactly one mask, which shows the engine its GPUs only.

    Inside the engine the GPUs are then 0..n-1. A CPU model sees none.
    """
    env = {name: value for name, value in environ.items() if name not in OTHER_MASKS}
    env[MASK] = devices.mask
    return env


def _number(node: Path) -> int:
    return int(node.name)


def _properties(path: Path) -> dict[str, int]:
    values: dict[str, int] = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            values[name] = int(value)
    return values


def _gpu(index: int, node: Path, properties: Mapping[str, int], root: Path) -> Gpu:
    version = properties.get("gfx_target_version", 0)
    # 110000 is gfx1100, 90010 is gfx90a: the last two digits are hexadecimal in the name.
    gfx = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    minor = properties.get("drm_render_minor", 0)
    vram = vram_figure(root, minor, "total")
    integrated = (
        properties.get("cpu_cores_count", 0) > 0  # processor and graphics in one node
        or gfx in _INTEGRATED_GFX
        or (vram is not None and vram <= _CARVE_OUT)
    )
    return Gpu(index, int(node.name), gfx, minor, vram, integrated)


def vram_figure(root: Path, render_minor: int, what: str) -> int | None:
    """Return the driver's figure `total` or `used` of a GPU's memory in bytes, None if it has none.

    `root` is what sysfs is below.
    """
    path = root / f"sys/class/drm/renderD{render_minor}/device/mem_info_vram_{what}"
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
