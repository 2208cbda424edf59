"""The next engine starts when the last one's memory is back. The sysfs trees are fixtures."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from engine_helpers import Workshop

from flexinfer.engines.errors import EngineStartError
from flexinfer.engines.gpus import Gpu
from flexinfer.engines.vram import VramWatch, state_directory

GIB = 1 << 30
CARD = Gpu(0, 1, "gfx1100", 128, 24 * GIB, False)
OTHER = Gpu(1, 2, "gfx1100", 129, 24 * GIB, False)


class Machine:
    """A root with two cards, and a directory of state files."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.state = folder / "state"
        boot = self.root / "proc/sys/kernel/random"
        boot.mkdir(parents=True)
        (boot / "boot_id").write_text("first\n")
        for card in (CARD, OTHER):
            self._file(card).parent.mkdir(parents=True)
            self.use(card, GIB)

    def _file(self, card: Gpu) -> Path:
        return self.root / f"sys/class/drm/renderD{card.render_minor}/device/mem_info_vram_used"

    def use(self, card: Gpu, used: int) -> None:
        self._file(card).write_text(f"{used}\n")

    def reboot(self) -> None:
        (self.root / "proc/sys/kernel/random/boot_id").write_text("second\n")

    def watch(self, *cards: Gpu) -> VramWatch:
        return VramWatch(cards or (CARD,), self.root, state=self.state)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.state.glob("*"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


async def test_a_stop_waits_until_a_gpu_has_its_memory_back(machine: Machine) -> None:
    watch = machine.watch()
    assert await watch.before_start(0) is None
    machine.use(CARD, 3 * GIB)
    stopping = asyncio.ensure_future(watch.wait_back(30))
    await asyncio.wait([stopping], timeout=0.1)
    assert not stopping.done()
    machine.use(CARD, GIB + GIB // 8)
    assert await stopping is None
    assert machine.files() == []


async def test_what_does_not_come_back_is_said_with_numbers(machine: Machine) -> None:
    watch = machine.watch()
    await watch.before_start(0)
    machine.use(CARD, 3 * GIB)
    reason = await watch.wait_back(0)
    assert reason is not None
    assert "renderD128" in reason and "3072 MiB in use, 1024 MiB before" in reason
    # It was waited for once; another program may hold it for ever.
    assert await machine.watch().before_start(0) is None


async def test_the_next_start_waits_where_nobody_waited_at_the_end(machine: Machine) -> None:
    """The owner of the last engine was killed: all that is left of it is the file."""
    await machine.watch().before_start(0)
    machine.use(CARD, 20 * GIB)
    starting = asyncio.ensure_future(machine.watch().before_start(30))
    await asyncio.wait([starting], timeout=0.1)
    assert not starting.done()
    machine.use(CARD, GIB)
    assert await starting is None


async def test_memory_that_stays_missing_holds_up_one_start(machine: Machine) -> None:
    await machine.watch().before_start(0)
    machine.use(CARD, 20 * GIB)
    second = machine.watch()
    reason = await second.before_start(0)
    assert reason is not None and "20480 MiB in use, 1024 MiB before" in reason
    assert await second.wait_back(0) is None
    assert await machine.watch().before_start(0) is None


async def test_gpus_are_waited_for_one_by_one(machine: Machine) -> None:
    await machine.watch(CARD, OTHER).before_start(0)
    machine.use(OTHER, 20 * GIB)
    assert await machine.watch(CARD).before_start(0) is None
    assert await machine.watch(CARD, OTHER).before_start(0) is not None


async def test_a_file_of_before_a_reboot_means_nothing(machine: Machine) -> None:
    await machine.watch().before_start(0)
    machine.use(CARD, 20 * GIB)
    machine.reboot()
    assert await machine.watch().before_start(0) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"boot": "first", "used_before": "x"}', "\0"])
async def test_a_spoilt_file_means_nothing(machine: Machine, content: str) -> None:
    await machine.watch().before_start(0)
    (machine.state / "renderD128.json").write_text(content)
    machine.use(CARD, 20 * GIB)
    assert await machine.watch().before_start(0) is None
    record = json.loads((machine.state / "renderD128.json").read_text())
    assert record["used_before"] == 20 * GIB


async def test_without_sysfs_or_gpus_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    for cards in ((), (CARD,)):
        watch = VramWatch(cards, tmp_path, state=tmp_path / "state")
        assert await watch.before_start(0) is None
        assert await watch.wait_back(0) is None
    assert not (tmp_path / "state").exists()


async def test_no_engine_is_there_before_the_memory_is_back(
    machine: Machine, workshop: Workshop
) -> None:
    await machine.watch().before_start(0)
    machine.use(CARD, 20 * GIB)
    engine = workshop.engine(vram=machine.watch())
    starting = asyncio.ensure_future(engine.start(timeout_s=30))
    await asyncio.wait([starting], timeout=0.3)
    assert engine.pid is None and not starting.done()
    machine.use(CARD, GIB)
    await starting
    assert engine.vram_missing is None
    machine.use(CARD, 20 * GIB)
    stopping = asyncio.ensure_future(engine.stop())
    await asyncio.wait([engine.exited], timeout=20)
    assert not stopping.done()
    machine.use(CARD, GIB)
    await stopping
    assert engine.vram_kept is None
    assert machine.files() == []


async def test_an_engine_that_is_not_admitted_is_not_started(
    machine: Machine, workshop: Workshop
) -> None:
    await machine.watch().before_start(0)
    machine.use(CARD, 20 * GIB)
    asked: list[str] = []

    def refuse() -> None:
        asked.append("asked")
        raise EngineStartError("it will not fit")

    engine = workshop.engine(vram=machine.watch(), admit=refuse)
    starting = asyncio.ensure_future(engine.start(timeout_s=30))
    await asyncio.wait([starting], timeout=0.2)
    assert not asked, "it is asked only when the last engine's memory is back"
    machine.use(CARD, GIB)
    with pytest.raises(EngineStartError, match="it will not fit"):
        await starting
    assert asked and engine.pid is None


def test_the_directory_is_this_users(tmp_path: Path) -> None:
    assert str(os.getuid()) in state_directory({}).name
    assert state_directory({"FLEXINFER_VRAM_STATE": str(tmp_path)}) == tmp_path
