from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flexinfer.local.follow import Follower, fingerprint

SOON_S = 20.0
QUICK_S = 0.01


async def one_change(changes: AsyncIterator[None]) -> None:
    async with asyncio.timeout(SOON_S):
        await anext(changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "manifests"
    path.mkdir()
    (path / "a.yaml").write_text("a")
    return path


async def test_new_changed_renamed_and_removed_files_are_changes(folder: Path) -> None:
    changes = Follower([folder], interval_s=QUICK_S).changes()
    (folder / "b.yaml").write_text("b")
    await one_change(changes)
    (folder / "a.yaml").write_text("longer")
    await one_change(changes)
    # As editors save: the same size and time, another file.
    times = (folder / "a.yaml").stat()
    (folder / "new").write_text("longee")
    os.utime(folder / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (folder / "new").rename(folder / "a.yaml")
    await one_change(changes)
    (folder / "b.yaml").unlink()
    await one_change(changes)


async def test_a_change_between_making_and_following_is_not_missed(folder: Path) -> None:
    follower = Follower([folder], interval_s=QUICK_S)
    (folder / "a.yaml").unlink()
    await one_change(follower.changes())


async def test_a_file_that_keeps_changing_is_read_when_it_has_settled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Follower([folder], interval_s=QUICK_S)
    known = fingerprint([folder])
    looks = [(("half", 1, 1, 1),), (("most", 1, 2, 2),), (("all", 1, 3, 3),), (("all", 1, 3, 3),)]
    seen: list[object] = []

    def scripted(_: object) -> object:
        seen.append(looks[min(len(seen), 3)])
        return seen[-1]

    monkeypatch.setattr("flexinfer.local.follow.fingerprint", scripted)
    await one_change(follower.changes())
    assert seen == looks
    assert known != looks[-1]


async def test_a_change_that_is_taken_back_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Follower([folder], interval_s=QUICK_S)
    known = fingerprint([folder])
    looks = [(("half", 1, 1, 1),), known, known, (("new", 1, 1, 1),), (("new", 1, 1, 1),)]
    seen = 0

    def scripted(_: object) -> object:
        nonlocal seen
        seen += 1
        return looks[min(seen, len(looks)) - 1]

    monkeypatch.setattr("flexinfer.local.follow.fingerprint", scripted)
    await one_change(follower.changes())
    assert seen == len(looks)


def test_files_that_are_no_manifests_do_not_count(folder: Path) -> None:
    before = fingerprint([folder])
    (folder / "notes.txt").write_text("x")
    (folder / ".a.yaml.swp").write_text("x")
    assert fingerprint([folder]) == before
    assert fingerprint([folder / "nothing"]) == ()
