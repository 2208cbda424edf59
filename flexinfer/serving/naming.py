"""A model's name on its way: what the client asked for, what the engine wants, and back."""

from __future__ import annotations

import json
import re

_BOUNDARY = re.compile(r'boundary=(?:"([^"]+)"|([^\s;,"]+))', re.IGNORECASE)
_MODEL_FIELD = re.compile(
    rb'^content-disposition:[^\r\n]*[;\s]name=(?:"model"|model(?=[;\s]|$))',
    re.IGNORECASE | re.MULTILINE,
)


class NameRewriter:
    """Puts the client's name for the model into an engine's answer, piece by piece.

    Rewrites `"model": "<engine's name>"` wherever it stands as a JSON key; inside a JSON string the
    quotes would be escaped, so generated text is never touched. A piece may end anywhere: a line is
    passed on when it has ended.
    """

    def __init__(self, engine_name: str, client_name: str) -> None:
        self._idle = engine_name == client_name
        ways = {json.dumps(engine_name), json.dumps(engine_name, ensure_ascii=False)}
        wanted = b"|".join(re.escape(way.encode("utf-8", "replace")) for way in sorted(ways))
        self._pattern = re.compile(rb'(?<!\\)"model"([ \t]*:[ \t]*)(?:' + wanted + rb")")
        given = json.dumps(client_name).encode().replace(b"\\", b"\\\\")
        self._replacement = rb'"model"\g<1>' + given
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Returns what can be passed on now: whole lines."""
        data = self._held + data
        end = data.rfind(b"\n") + 1
        self._held = data[end:]
        return self._rewrite(data[:end])

    def finish(self) -> bytes:
        """Returns the rest."""
        rest, self._held = self._held, b""
        return self._rewrite(rest)

    def _rewrite(self, lines: bytes) -> bytes:
        return lines if self._idle else self._pattern.sub(self._replacement, lines)


def multipart_model(body: bytes, content_type: str) -> str | None:
    """The form field `model` of a multipart body, None if it has none."""
    found = _model_field(body, content_type)
    return body[slice(*found)].decode("utf-8", "replace") if found is not None else None


def replace_multipart_model(body: bytes, content_type: str, name: str) -> bytes:
    """The same form with another value of the field `model`."""
    found = _model_field(body, content_type)
    if found is None:
        return body
    return body[: found[0]] + name.encode() + body[found[1] :]


def _model_field(body: bytes, content_type: str) -> tuple[int, int] | None:
    """Where the value of the field `model` begins and ends."""
    named = _BOUNDARY.search(content_type)
    if named is None:
        return None
    mark = b"--" + (named[1] or named[2]).encode("utf-8", "replace")
    start = 0 if body.startswith(mark) else body.find(b"\r\n" + mark)
    while start >= 0:
        head = start + len(mark)
        end = body.find(b"\r\n" + mark, head)
        value = body.find(b"\r\n\r\n", head, end + 2)
        if end >= 0 <= value and _MODEL_FIELD.search(body[head:value]):
            return min(value + 4, end), end
        start = end + 2 if end >= 0 else -1
    return None
