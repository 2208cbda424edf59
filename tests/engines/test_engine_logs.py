"""An engine's output: in a rotated file, on our own output, in memory."""

from __future__ import annotations

import io
from pathlib import Path

from flexinfer.engines.logs import MAX_LINE, EngineLog, RotatedFile, log_path


def test_lines_are_put_together_and_prefixed(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = EngineLog("smol", log_path(tmp_path, "default", "smol"), stream=stream)
    heard: list[str] = []
    forget = log.listen(heard.append)
    log.feed(b"one\ntw")
    assert heard == ["one"]
    log.feed(b"o\nthree")
    forget()
    assert log.tail() == ["one", "two", "three"]
    log.close()
    assert heard == ["one", "two"]
    assert stream.getvalue() == "[smol] one\n[smol] two\n[smol] three\n"
    assert (tmp_path / "default/smol.log").read_text() == "one\ntwo\nthree\n"


def test_colours_progress_bars_and_broken_text(tmp_path: Path) -> None:
    log = EngineLog("smol", echo=False)
    log.feed(b"\x1b[31mred\x1b[0m\n10%\r50%\r100%\r\n\xff\xfe\n")
    assert log.tail() == ["red", "100%", "\ufffd\ufffd"]


def test_an_endless_line_is_cut() -> None:
    log = EngineLog("smol", echo=False)
    for _ in range(10):
        log.feed(b"x" * MAX_LINE)
    assert all(len(line) <= MAX_LINE for line in log.tail())


def test_remembers_the_last_lines_only() -> None:
    log = EngineLog("smol", echo=False, remember=3)
    log.feed(b"".join(b"%d\n" % number for number in range(10)))
    assert log.tail() == ["7", "8", "9"]
    assert log.tail(1) == ["9"]
    log.clear()
    assert log.tail() == []


def test_the_file_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "smol.log"
    log = EngineLog("smol", path, echo=False, max_bytes=100, keep=2)
    for number in range(40):
        log.feed(b"line number %03d\n" % number)
    log.close()
    files = sorted(file.name for file in tmp_path.iterdir() if not file.name.startswith("."))
    assert files == ["smol.log", "smol.log.1", "smol.log.2"]
    assert all((tmp_path / name).stat().st_size <= 100 for name in files)
    newest = [f"line number {number:03d}" for number in range(36, 40)]
    assert path.read_text().splitlines() == newest


def test_two_writers_share_a_file_through_rotations(tmp_path: Path) -> None:
    path = tmp_path / "smol.log"
    writers = [RotatedFile(path, max_bytes=200, keep=50) for _ in range(2)]
    for number in range(100):
        writers[number % 2].write(b"%04d\n" % number)
    for writer in writers:
        writer.close()
        writer.close()
    lines = [line for file in tmp_path.glob("smol.log*") for line in file.read_text().split()]
    assert sorted(lines) == [f"{number:04d}" for number in range(100)]


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "smol.log"
    file = RotatedFile(path)
    file.write(b"old\n")
    path.unlink()
    file.write(b"new\n")
    file.close()
    assert path.read_text() == "new\n"


def test_a_closed_output_and_a_full_disk_do_not_stop_the_engine(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = EngineLog("smol", tmp_path / "smol.log", stream=stream)
    stream.close()
    (tmp_path / "smol.log").unlink()
    (tmp_path / "smol.log").mkdir()  # opening it again fails
    log.feed(b"one\n")
    log.feed(b"two\n")
    assert log.tail() == ["one", "two"]
    log.close()
