"""Which headers pass from a client to an engine, and back."""

from __future__ import annotations

from collections.abc import Iterable

from flexinfer.serving.lease import KEY_HEADER

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# Ours to write, not the client's; and a client's key is for us, not for an engine.
_NOT_TO_ENGINE = _HOP_BY_HOP | frozenset(
    (
        b"host",
        b"content-length",
        b"accept-encoding",
        b"authorization",
        b"x-api-key",
        b"expect",
        b"x-conversation-id",
        KEY_HEADER.lower().encode(),
    )
)
# The length may change with the name of the model; the request's id is Serve's to repeat.
_NOT_TO_CLIENT = _HOP_BY_HOP | frozenset((b"content-length", b"server", b"date", b"x-request-id"))


def to_engine(
    headers: Iterable[tuple[bytes, bytes]], drop: Iterable[str], *, json: bool
) -> list[tuple[str, str]]:
    """A client's headers for an engine that wants none of `drop`.

    `json`: the body is JSON, also where the client has not said so.
    """
    given = [(name.lower(), value) for name, value in headers]
    dropped = (
        _NOT_TO_ENGINE | _named_by_connection(given) | {name.lower().encode() for name in drop}
    )
    kept = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in given
        if name not in dropped
    ]
    if json and not any(name == "content-type" for name, _ in kept):
        kept.append(("content-type", "application/json"))
    # What is not compressed needs no unpacking to be rewritten.
    kept.append(("accept-encoding", "identity"))
    return kept


def to_client(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """An engine's headers for a client, without a content-length."""
    given = [(name.lower(), value) for name, value in headers]
    dropped = _NOT_TO_CLIENT | _named_by_connection(given)
    return [
        (name, value)
        for name, value in given
        if name not in dropped and not name.startswith(b"access-control-")
    ]


def _named_by_connection(headers: Headers) -> set[bytes]:
    """The headers that are meant for the next hop only, because `Connection` says so."""
    return {
        name.strip().lower()
        for key, value in headers
        if key == b"connection"
        for name in value.split(b",")
    }
