"""What a GGUF file says of itself."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from flexinfer.engines.gguf import fault


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def header() -> bytes:
    pairs = [
        string("general.name") + struct.pack("<I", 8) + string("small"),
        string("general.alignment") + struct.pack("<II", 4, 64),
        string("words") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("b"),
        string("scores") + struct.pack("<IIQ3f", 9, 6, 3, 1.0, 2.0, 3.0),
    ]
    tensors = [
        string("first") + struct.pack("<IQQIQ", 2, 4, 8, 0, 0),  # 32 floats
        string("last") + struct.pack("<IQIQ", 1, 64, 8, 128),  # 64 elements of q8_0
    ]
    counts = struct.pack("<IQQ", 3, len(tensors), len(pairs))
    return b"GGUF" + counts + b"".join(pairs) + b"".join(tensors)


def whole() -> bytes:
    head = header()
    return head + bytes(-len(head) % 64) + bytes(128 + 2 * 34)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_a_whole_file(path: Path) -> None:
    path.write_bytes(whole())
    assert fault(path) is None
    path.write_bytes(whole() + b"padding")
    assert fault(path) is None


def test_one_byte_less(path: Path) -> None:
    path.write_bytes(whole()[:-1])
    size = len(whole())
    assert fault(path) == f"{path} is incomplete: it has {size - 1} bytes of {size}"


def test_any_cut_of_the_header(path: Path) -> None:
    for length in range(5, len(header())):
        path.write_bytes(header()[:length])
        assert fault(path) == f"{path} ends within its header: it is incomplete, or damaged"


def test_garbage_behind_the_magic(path: Path) -> None:
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    assert "damaged" in (fault(path) or "")


def test_no_model_at_all(path: Path) -> None:
    assert fault(path) == f"cannot open {path}: No such file or directory"
    path.touch()
    assert fault(path) == f"{path} is empty"
    path.write_bytes(b"hello")
    assert fault(path) == f"{path} is not a GGUF file"


@pytest.mark.llama
def test_the_real_model(weights: Path, path: Path) -> None:
    assert fault(weights) is None
    data = weights.read_bytes()
    path.write_bytes(data[:-100_000])
    assert f"it has {len(data) - 100_000} bytes of" in (fault(path) or "")
