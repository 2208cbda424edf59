from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexinfer.engines.logs import RotatedFile
from flexinfer.local.logfiles import follow, read


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "default" / "m.log"


def lines(count: int, first: int = 0) -> list[bytes]:
    return [b"line %06d\n" % number for number in range(first, first + count)]


def test_older_files_come_first(path: Path) -> None:
    file = RotatedFile(path, max_bytes=120, keep=10)
    for line in lines(50):
        file.write(line)
    assert path.with_name("m.log.3").exists()
    assert b"".join(read(path)) == b"".join(lines(50))


def test_the_last_lines(path: Path) -> None:
    file = RotatedFile(path, max_bytes=120, keep=10)
    for line in lines(50):
        file.write(line)
    assert list(read(path, last=20)) == lines(20, 30)
    assert list(read(path, last=0)) == []
    file.write(b"unfinished")
    assert list(read(path, last=2)) == [*lines(1, 49), b"unfinished"]


def test_no_log_is_empty(path: Path) -> None:
    assert list(read(path)) == []


class Ended(Exception):
    pass


def collected(path: Path, *steps: Callable[[], None], last: int | None = None) -> bytes:
    """What `follow` gives when one step is done at each of its looks, and nothing at two more."""
    found: list[bytes] = []
    todo = [*steps]
    idle = 0

    def wait() -> None:
        nonlocal idle
        if todo:
            todo.pop(0)()
            return
        idle += 1
        if idle == 2:
            raise Ended

    try:
        for chunk in follow(path, wait, last=last):
            found.append(chunk)
    except Ended:
        return b"".join(found)
    raise AssertionError("it ended by itself")


def test_following_goes_through_rotations(path: Path) -> None:
    file = RotatedFile(path, max_bytes=60, keep=20)

    def write(count: int, first: int) -> Callable[[], None]:
        def step() -> None:
            for line in lines(count, first):
                file.write(line)

        return step

    write(7, 0)()
    found = collected(path, write(1, 7), write(30, 8), write(2, 38), lambda: None, write(3, 40))
    assert found == b"".join(lines(43))


def test_following_waits_for_a_log(path: Path) -> None:
    def begin() -> None:
        RotatedFile(path).write(b"hello\n")

    assert collected(path, lambda: None, begin) == b"hello\n"


def test_following_from_the_last_lines(path: Path) -> None:
    file = RotatedFile(path)
    for line in lines(10):
        file.write(line)
    found = collected(path, lambda: file.write(b"new\n"), last=1)
    assert found == lines(1, 9)[0] + b"new\n"


def test_following_a_log_that_is_removed_and_begun_anew(path: Path) -> None:
    file = RotatedFile(path)
    file.write(b"old\n")

    def anew() -> None:
        path.unlink()
        file.write(b"new\n")

    assert collected(path, anew) == b"old\nnew\n"
