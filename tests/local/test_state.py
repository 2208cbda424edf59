from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flexinfer.local import state
from flexinfer.local.errors import LocalError, NoInstance
from flexinfer.local.state import State


def living(url: str, **rest: str) -> State:
    started = state.start_time_of(os.getpid())
    assert started is not None
    return State(os.getpid(), started, url, **rest)


def test_a_saved_instance_is_found() -> None:
    saved = living("http://127.0.0.1:8000", log_dir="/logs")
    state.save(saved, state.runtime_dir())
    assert state.find() == saved
    state.remove(saved, state.runtime_dir())
    state.remove(saved, state.runtime_dir())
    with pytest.raises(NoInstance, match="no instance is running"):
        state.find()


def test_files_are_for_this_user_only(runtime_dir: Path) -> None:
    state.save(living("http://127.0.0.1:8000"), state.runtime_dir())
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o700
    (file,) = runtime_dir.glob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_file_of_an_ended_process_is_removed_with_its_working_directory(
    runtime_dir: Path,
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    work_dir = state.make_work_dir()
    (work_dir / "token").write_text("secret")
    state.save(
        State(ended.pid, 1, "http://127.0.0.1:1", work_dir=str(work_dir)), state.runtime_dir()
    )
    assert state.running(runtime_dir) == []
    assert not work_dir.exists()
    assert list(runtime_dir.glob("*.json")) == []


def test_a_later_process_with_the_same_number_is_another_one(runtime_dir: Path) -> None:
    earlier = living("http://127.0.0.1:8000")
    state.save(State(earlier.pid, earlier.start_time - 1, earlier.url), state.runtime_dir())
    assert state.running(runtime_dir) == []


def test_a_broken_file_is_removed(runtime_dir: Path) -> None:
    directory = state.runtime_dir()
    (directory / "17.json").write_text("{")
    (directory / "18.json").write_text('{"version": 99}')
    assert state.running(directory) == []
    assert list(runtime_dir.glob("*.json")) == []


def test_only_working_directories_are_removed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    state.remove_work_dir(home)
    state.remove_work_dir(None)
    assert home.exists()


def test_a_url_goes_before_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = living("http://127.0.0.1:8000", log_dir="/logs")
    state.save(mine, state.runtime_dir())
    assert state.find("http://127.0.0.1:8000/") == mine
    assert state.find("gpu-box:9000") == State(0, 0, "http://gpu-box:9000")
    monkeypatch.setenv("FLEXINFER_URL", "http://other:1")
    assert state.find().url == "http://other:1"


def test_several_instances_need_a_choice(runtime_dir: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = state.start_time_of(other.pid)
        assert started is not None
        state.save(living("http://127.0.0.1:8000"), state.runtime_dir())
        state.save(State(other.pid, started, "http://127.0.0.1:8001"), runtime_dir)
        with pytest.raises(NoInstance, match=r"8000.*8001"):
            state.find()
        assert state.find("http://127.0.0.1:8001").pid == other.pid
    finally:
        other.communicate()


def test_a_directory_of_somebody_else_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(LocalError, match="another user"):
        state.runtime_dir()


def test_paths_of_sockets_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(state.tempfile, "gettempdir", lambda: str(tmp_path))
    work_dir = state.make_work_dir()
    try:
        node = "0" * 56
        # HAProxy binds a temporary name first.
        assert len(f"{work_dir}/{node}/metrics.sock.4194304.tmp") < 108
        session = "session_2026-01-01_00-00-00_000000_4194304"
        assert len(f"{work_dir}/ray/{session}/sockets/plasma_store") < 108
    finally:
        work_dir.rmdir()
