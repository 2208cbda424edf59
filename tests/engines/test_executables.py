"""Which Python a console script belongs to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flexinfer.engines.executables import interpreter_of


@pytest.mark.parametrize(
    "head",
    [
        f"#!{sys.executable}\n",
        f"#!{sys.executable} -E\n",
        f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\n",
        f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_an_installed_script_names_its_interpreter(tmp_path: Path, head: str) -> None:
    script = tmp_path / "tool"
    script.write_text(f"{head}print()\n")
    assert interpreter_of(script) == Path(sys.executable)


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"#!\n", b"#!/bin/sh\necho\n", b"#!/nowhere/bin/python3\n"]
)
def test_other_programs_have_none(tmp_path: Path, content: bytes) -> None:
    script = tmp_path / "tool"
    script.write_bytes(content)
    assert interpreter_of(script) is None


def test_a_missing_file_has_none(tmp_path: Path) -> None:
    assert interpreter_of(tmp_path / "tool") is None
