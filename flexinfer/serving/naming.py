"""A model's name on its way: what the client asked for, what the engine wants, and back."""

from __future__ import annotations

import json
import re

_MULTIPART_MODEL = re.compile(
    rb'content-disposition:[^\r\n]*\bname="model"[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n',
    re.IGNORECASE,
)


class NameRewriter:
    """Puts the client's name for the model into an engine's answer, piece by piece.

    Rewrites `"model": "<engine's name>"` wherever it stands as a JSON key; inside a JSON string the
    quotes would be escaped, so generated text is never touched. A piece may end anywhere: what may
    be the beginning of a line's key is kept until the line has ended.
    """

    def __init__(self, engine_name: str, client_name: str) -> None:
        self.idle = engine_name == client_name
        wanted = json.dumps(engine_name)
        self._pattern = re.compile(rb'"model"(\s*):(\s*)' + re.escape(wanted.encode()))
        given = json.dumps(client_name).encode().replace(b"\\", b"\\\\")
        self._replacement = rb'"model"\1:\2' + given
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Returns what can be passed on now."""
        if self.idle:
            return data
        data = self._held + data
        end = data.rfind(b"\n") + 1
        self._held = data[end:]
        return self._pattern.sub(self._replacement, data[:end])

    def finish(self) -> bytes:
        """Returns the rest."""
        rest, self._held = self._held, b""
        return self._pattern.sub(self._replacement, rest) if not self.idle else rest


def multipart_model(body: bytes) -> str | None:
    """The form field `model` of a multipart body, None if it has none."""
    found = _MULTIPART_MODEL.search(body)
    return found.group(1).decode("utf-8", "replace") if found else None


def replace_multipart_model(body: bytes, name: str) -> bytes:
    """The same form with another value of the field `model`."""
    found = _MULTIPART_MODEL.search(body)
    if found is None:
        return body
    return body[: found.start(1)] + name.encode() + body[found.end(1) :]
