from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flexinfer.local.haproxy import find_haproxy, write_wrapper

CONFIG = """\
frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:8000
    # bind :9999
listen stats
  bind *:8404
"""


def rewritten(tmp_path: Path, address: str) -> list[str]:
    """The `bind` lines of the configuration that a program in HAProxy's place gets."""
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    program = tmp_path / "it's haproxy"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o700)
    wrapper = tmp_path / "wrapper"
    write_wrapper(wrapper, program, address, 8000)
    words = ["-db", "-f", str(config), "-sf", "1", "2"]
    run = subprocess.run([wrapper, *words], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:-1] == words
    return [line.strip() for line in config.read_text().splitlines() if "bind" in line]


@pytest.mark.parametrize(
    ("address", "frontend"),
    [
        ("127.0.0.1", "bind 127.0.0.1:8000"),
        ("0.0.0.0", "bind 0.0.0.0:8000"),
        ("192.0.2.7", "bind 192.0.2.7:8000,127.0.0.1:8000"),
        ("::1", "bind ::1:8000,127.0.0.1:8000"),
        ("::", "bind :::8000 v4v6"),
    ],
)
def test_only_the_api_leaves_loopback(tmp_path: Path, address: str, frontend: str) -> None:
    assert rewritten(tmp_path, address) == [
        "bind 127.0.0.1:9101",
        frontend,
        "# bind :9999",
        "bind 127.0.0.1:8404",
    ]


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "192.0.2.7", "::1", "::"])
def test_haproxy_understands_what_is_written(tmp_path: Path, address: str) -> None:
    binary = find_haproxy()
    if binary is None:
        pytest.skip("no HAProxy on this machine")
    config = tmp_path / "haproxy.cfg"
    config.write_text("defaults\n  mode http\n  timeout connect 1s\n  timeout client 1s\n"
                      "  timeout server 1s\n" + CONFIG)  # fmt: skip
    wrapper = tmp_path / "wrapper"
    write_wrapper(wrapper, binary, address, 8000)
    run = subprocess.run([wrapper, "-c", "-f", config], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_rays_template_binds_as_the_wrapper_expects() -> None:
    templates = pytest.importorskip("ray.serve._private.haproxy_templates")
    text = templates.HAPROXY_CONFIG_TEMPLATE
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("bind ")]
    assert lines == [
        "bind :{{ config.metrics_port }}",
        "bind {{ config.frontend_host }}:{{ config.frontend_port }}",
        "bind {{ config.grpc_frontend_host }}:{{ config.grpc_frontend_port }} proto h2",
        "bind *:{{ config.stats_port }}",
    ]
