from __future__ import annotations

import socket

import pytest

from flexinfer.local.errors import LocalError, PortTaken
from flexinfer.local.ports import (
    _FIXED,
    BLOCK,
    PortPlan,
    check_port,
    is_free,
    is_loopback,
    plan_ports,
    resolve_host,
    url_of,
)


def listener() -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken


def test_all_ports_of_a_plan_differ() -> None:
    plan = PortPlan(12_000)
    ports = [getattr(plan, name) for name in _FIXED]
    for first, last in (plan.ingress_http, plan.ingress_grpc, plan.workers):
        ports += range(first, last + 1)
    assert len(ports) == len(set(ports))
    assert min(ports) >= 12_000
    assert max(ports) < 12_000 + BLOCK


def test_plans_of_several_instances_do_not_meet() -> None:
    first = plan_ports()
    second = plan_ports([first.base])
    third = plan_ports([first.base, second.base], avoid=[18_000])
    bases = sorted(plan.base for plan in (first, second, third))
    assert bases[1] - bases[0] >= BLOCK
    assert bases[2] - bases[1] >= BLOCK
    assert 18_000 not in range(third.base, third.base + BLOCK)


def test_no_room_is_an_error() -> None:
    with pytest.raises(LocalError, match="free ports in a row"):
        plan_ports(range(10_000, 20_000, 1_000))


def test_a_name_that_is_no_port() -> None:
    with pytest.raises(AttributeError):
        _ = PortPlan(12_000).nothing


def test_a_taken_port_is_named_with_what_to_do() -> None:
    with listener() as taken:
        port = taken.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        with pytest.raises(PortTaken, match=rf"port {port} .*already in use.*--port"):
            check_port("127.0.0.1", port)
        with pytest.raises(PortTaken):
            check_port("0.0.0.0", port)
    check_port("127.0.0.1", port)


def test_hosts() -> None:
    assert resolve_host("localhost") == "127.0.0.1"
    assert resolve_host("[::1]") == "::1"
    assert is_loopback("127.0.0.1")
    assert not is_loopback("0.0.0.0")
    with pytest.raises(LocalError, match=r"--host no-such-host\.invalid"):
        resolve_host("no-such-host.invalid")


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://127.0.0.1:8000"),
        ("192.0.2.7", "http://192.0.2.7:8000"),
        ("2001:db8::7", "http://[2001:db8::7]:8000"),
    ],
)
def test_urls(address: str, url: str) -> None:
    assert url_of(address, 8000) == url
