from __future__ import annotations

import importlib.util
from pathlib import Path

from flexinfer.translate import VARIABLES, missing_variables, serve_environment
from flexinfer.translate.environment import PRELOADED_MODULES


def test_every_variable_has_a_reason_and_is_there_once() -> None:
    names = [variable.name for variable in VARIABLES]
    assert len(set(names)) == len(names)
    assert all(variable.reason.endswith(".") for variable in VARIABLES)


def test_without_choices_it_is_exactly_the_table() -> None:
    assert serve_environment() == {variable.name: variable.value for variable in VARIABLES}


def test_the_files_of_haproxy_can_be_kept_apart_from_other_instances() -> None:
    before = serve_environment()
    after = serve_environment(
        haproxy_dir=Path("/run/x"), haproxy_stats_port=1, haproxy_metrics_port=2, auth_mode="token"
    )
    assert {name: value for name, value in after.items() if name not in before} == {
        "RAY_AUTH_MODE": "token",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "/run/x/haproxy.cfg",
        "RAY_SERVE_HAPROXY_METRICS_PORT": "2",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "/run/x/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "/run/x",
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "/run/x/server-state",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": "/run/x/admin.sock",
        "RAY_SERVE_HAPROXY_STATS_PORT": "1",
    }


def test_variables_that_ray_started_without_are_named() -> None:
    assert missing_variables(serve_environment()) == []
    assert missing_variables({}) == list(VARIABLES)
    other = serve_environment() | {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    assert [variable.name for variable in missing_variables(other)] == ["RAY_SERVE_ENABLE_HA_PROXY"]


def test_the_modules_that_workers_preload_exist() -> None:
    for module in PRELOADED_MODULES:
        assert importlib.util.find_spec(module) is not None, module


def test_ray_serve_knows_every_variable_of_its_own() -> None:
    spec = importlib.util.find_spec("ray.serve._private.constants")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    everything = serve_environment(
        haproxy_dir=Path("/run/x"), haproxy_stats_port=1, haproxy_metrics_port=2
    )
    for name in everything:
        if name.startswith("RAY_SERVE_"):
            assert f'"{name}"' in text, name
