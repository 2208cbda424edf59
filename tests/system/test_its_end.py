"""What `flexinfer up` leaves behind, however it ends: nothing. And what keeps it from starting."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from up_process import Up, manifest, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.llama]


def test_killed_it_leaves_no_process_within_ten_seconds(tmp_path: Path) -> None:
    up = Up(tmp_path)
    up.write(manifest("real"))
    up.write(manifest("stubborn", fake={"FAKE_IGNORE_SIGTERM": "1", "FAKE_SPAWN_STUBBORN": "1"}))
    try:
        up.start()
        assert up.chat("real").status_code == 200
        assert up.chat("stubborn").status_code == 200
        assert len(up.engines()) == 2

        up.stop(signal.SIGKILL)
        wait_for(lambda: not up.processes(), lambda: f"nothing is left: {up.processes()}", 10)
    finally:
        up.close()


def test_a_taken_port_is_said_before_anything_starts(tmp_path: Path) -> None:
    up = Up(tmp_path)
    up.write(manifest("any"))
    with socket.create_server(("127.0.0.1", up.port)):
        done = up.run("up", str(up.manifests), "--port", str(up.port))
    assert done.returncode == 1
    assert str(up.port) in done.stderr and "--port" in done.stderr
    assert up.processes() == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"replica": 2}, "replicas"),
        ({"priority": "high"}, "spec.priority"),
        ({"resources": {"limits": {"memory": "16 gigs"}}}, "16 gigs"),
        ({"backend": "llamacpp"}, "llama-cpp"),
    ],
)
def test_a_manifest_that_does_not_validate_starts_nothing(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    up = Up(tmp_path)
    document = manifest("wrong")
    document["spec"].update(change)
    (up.manifests / "wrong.yaml").write_text(yaml.safe_dump(document))
    done: subprocess.CompletedProcess[str] = up.run("up", str(up.manifests))
    assert done.returncode == 2
    assert said in done.stderr
    assert up.processes() == []
