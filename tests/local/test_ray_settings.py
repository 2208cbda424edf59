from __future__ import annotations

import re
from pathlib import Path

import flexinfer
from flexinfer.local.ports import PortPlan
from flexinfer.local.ray_settings import RaySettings, label_value, ray_command, ray_environment


def settings(**more: object) -> RaySettings:
    known: dict[str, object] = {
        "work_dir": Path("/tmp/flexinfer-x"),
        "ports": PortPlan(12_000),
        "gpus": 2,
        "token_file": Path("/tmp/flexinfer-x/token"),
        "log_dir": Path("/logs"),
        "haproxy": Path("/tmp/flexinfer-x/haproxy"),
    }
    return RaySettings(**(known | more))  # type: ignore[arg-type]


def test_every_port_is_given_once() -> None:
    plan = PortPlan(12_000)
    environment = ray_environment(settings(), {})
    text = " ".join([*ray_command(settings()), *environment.values()])
    ports = [int(number) for number in re.findall(r"\b(1[2-4]\d{3})\b", text)]
    assert len(ports) == len(set(ports))
    singles = [port for port in ports if port < plan.ingress_http[0]]
    assert len(singles) == 15


def test_nothing_listens_beyond_loopback() -> None:
    command = ray_command(settings())
    assert "--node-ip-address=127.0.0.1" in command
    assert "--dashboard-host=127.0.0.1" in command
    assert ray_environment(settings(), {})["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


def test_the_token_is_named_not_told() -> None:
    environment = ray_environment(settings(), {"RAY_AUTH_TOKEN": "of another cluster"})
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == "/tmp/flexinfer-x/token"
    assert "RAY_AUTH_TOKEN" not in environment
    assert "token" not in " ".join(ray_command(settings()))


def test_the_users_environment_passes_but_for_what_leads_elsewhere() -> None:
    given = {
        "FLEXINFER_API_KEY": "secret",
        "HF_HOME": "/hub",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "HIP_VISIBLE_DEVICES": "1",
        "ROCR_VISIBLE_DEVICES": "1",
    }
    environment = ray_environment(settings(), given)
    assert environment["FLEXINFER_API_KEY"] == "secret"
    assert environment["HF_HOME"] == "/hub"
    assert environment.keys().isdisjoint(
        {"RAY_ADDRESS", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
    )
    assert environment["FLEXINFER_LOG_DIR"] == "/logs"


def test_workers_find_this_package_first() -> None:
    root = str(Path(flexinfer.__file__).parents[1])
    environment = ray_environment(settings(), {"PYTHONPATH": f"/mine::{root}"})
    assert environment["PYTHONPATH"] == f"{root}:/mine"


def test_without_haproxy_serves_own_proxy_takes_over() -> None:
    environment = ray_environment(settings(haproxy=None), {})
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" not in environment


def test_the_node_has_a_name_that_a_label_may_have() -> None:
    assert label_value("work station.") == "work-station"
    assert label_value("_" * 70) == "localhost"
    assert len(label_value("x" * 70)) == 63
    assert any(word.startswith("--labels=flexinfer.ai/node=") for word in ray_command(settings()))


def test_workers_import_what_keeps_them_on_loopback() -> None:
    modules = ray_environment(settings(), {})["RAY_preload_python_modules"].split(",")
    assert modules[-1] == "flexinfer.local.loopback"
    assert len(modules) > 1
