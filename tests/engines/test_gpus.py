"""GPUs from the kernel's list, and the one mask. The trees are like those of real machines."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexinfer.engines import gpus
from flexinfer.engines.gpus import Devices, NoGpus, assign, count_gpus, device_env

GIB = 1 << 30
XTX_VRAM = 25_753_026_560


@dataclass(frozen=True)
class Node:
    gfx: int
    simds: int
    cpus: int = 0
    vram: int = 0


CPU = Node(gfx=0, simds=0, cpus=32)
XTX = Node(gfx=110000, simds=192, vram=XTX_VRAM)
RAPHAEL = Node(gfx=100306, simds=4, vram=GIB // 2)
RENOIR = Node(gfx=90012, simds=28, cpus=16, vram=GIB // 2)


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """Write the tree of a machine with these nodes, in the kernel's order; returns its root."""

    def write(*nodes: Node, kfd: bool = True) -> Path:
        minor = 128
        for number, node in enumerate(nodes):
            directory = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
            directory.mkdir(parents=True)
            values = {
                "cpu_cores_count": node.cpus,
                "simd_count": node.simds,
                "gfx_target_version": node.gfx,
                "drm_render_minor": minor if node.simds else 0,
            }
            text = "".join(f"{name} {value}\n" for name, value in values.items())
            (directory / "properties").write_text(text)
            if node.simds:
                device = tmp_path / f"sys/class/drm/renderD{minor}/device"
                device.mkdir(parents=True)
                (device / "mem_info_vram_total").write_text(f"{node.vram}\n")
                (device / "mem_info_vram_used").write_text(f"{GIB}\n")
                minor += 1
        if kfd:
            (tmp_path / "dev").mkdir()
            (tmp_path / "dev/kfd").touch()
        return tmp_path

    return write


def test_two_cards_and_an_integrated_gpu(machine: Callable[..., Path]) -> None:
    found = count_gpus(machine(CPU, XTX, XTX, RAPHAEL))
    assert found.problem is None
    assert found.count == 2
    assert [(gpu.gfx, gpu.vram_bytes, gpu.render_minor) for gpu in found.gpus] == [
        ("gfx1100", XTX_VRAM, 128),
        ("gfx1100", XTX_VRAM, 129),
    ]
    assert [gpu.gfx for gpu in found.integrated] == ["gfx1036"]
    assert str(found) == ("2 GPUs: gfx1100, 24.0 GiB (renderD128), gfx1100, 24.0 GiB (renderD129)")


def test_processor_and_graphics_in_one_node(machine: Callable[..., Path]) -> None:
    found = count_gpus(machine(RENOIR, XTX))
    assert [gpu.gfx for gpu in found.gpus] == ["gfx1100"]
    assert [gpu.gfx for gpu in found.integrated] == ["gfx90c"]


def test_hip_counts_an_integrated_gpu_that_we_leave_out(machine: Callable[..., Path]) -> None:
    found = count_gpus(machine(CPU, RAPHAEL, XTX, XTX))
    assert assign([1], found).mask == "2"
    assert assign([0, 1], found).mask == "1,2"


def test_only_an_integrated_gpu(machine: Callable[..., Path]) -> None:
    found = count_gpus(machine(CPU, RAPHAEL))
    assert found.count == 0
    assert found.problem is NoGpus.NONE_FOUND
    assert "integrated" in found.detail


def test_nodes_are_in_the_order_of_their_numbers(machine: Callable[..., Path]) -> None:
    found = count_gpus(machine(*[CPU] * 9, XTX, XTX))
    assert [gpu.node for gpu in found.gpus] == [9, 10]


def test_no_driver(tmp_path: Path) -> None:
    found = count_gpus(tmp_path)
    assert found.count == 0
    assert found.problem is NoGpus.NO_DRIVER
    assert "amdgpu driver is not loaded" in str(found)


def test_no_permission(machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(CPU, XTX)
    monkeypatch.setattr(os, "access", lambda path, mode: path != root / "dev/kfd")
    found = count_gpus(root)
    assert found.count == 0
    assert found.problem is NoGpus.NO_PERMISSION
    assert "render" in found.detail


def test_a_container_without_the_device(machine: Callable[..., Path]) -> None:
    found = count_gpus(machine(CPU, XTX, kfd=False))
    assert found.problem is NoGpus.NO_PERMISSION
    assert "does not exist" in found.detail


def test_a_container_with_one_of_two(
    machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(CPU, XTX, XTX)
    read = gpus._properties

    def refuse_first(path: Path) -> dict[str, int]:
        if path.parent.name == "1":
            raise PermissionError(path)
        return read(path)

    monkeypatch.setattr(gpus, "_properties", refuse_first)
    found = count_gpus(root)
    assert [(gpu.node, gpu.hip_index) for gpu in found.gpus] == [(2, 0)]


MASKED = {
    "HIP_VISIBLE_DEVICES": "7",
    "ROCR_VISIBLE_DEVICES": "7",
    "CUDA_VISIBLE_DEVICES": "7",
    "GPU_DEVICE_ORDINAL": "7",
    "HOME": "/root",
}


@pytest.mark.parametrize(
    ("devices", "mask"),
    [
        (Devices((1,)), "1"),
        (Devices((0, 1)), "0,1"),
        (Devices(()), "-1"),
        (Devices((5,), pretended=True), "5"),
    ],
)
def test_exactly_one_mask(devices: Devices, mask: str) -> None:
    assert device_env(MASKED, devices) == {"HIP_VISIBLE_DEVICES": mask, "HOME": "/root"}


def test_more_slots_than_gpus_are_pretended(machine: Callable[..., Path]) -> None:
    found = count_gpus(machine(CPU, XTX))
    assert not assign([0], found).pretended
    assert not assign([], found).pretended
    both = assign([0, 1], found)
    assert both.pretended
    assert both.mask == "0,1"
