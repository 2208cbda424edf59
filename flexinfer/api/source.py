"""Where weights come from: the `source` of a ModelCache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Scheme = Literal["huggingface", "ollama", "file", "pvc"]

_SCHEMES: dict[str, Scheme] = {
    "huggingface": "huggingface",
    "hf": "huggingface",
    "ollama": "ollama",
    "file": "file",
    "pvc": "pvc",
}

ALLOWED = (
    "huggingface://ORG/REPO[@REVISION][/FILE] (or HF://), ollama://NAME[:TAG], "
    "file:///PATH, pvc://CLAIM[/PATH]"
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OLLAMA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*(:[A-Za-z0-9._-]+)?")
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True)
class Source:
    """A parsed source.

    `path` is the repository (``org/repo``), the Ollama tag, the absolute path, or the path inside
    the claim (may be empty). `file` is one file of a repository, `revision` its branch, tag or
    commit, `claim` the claim of a ``pvc`` source.
    """

    scheme: Scheme
    path: str
    file: str | None = None
    revision: str | None = None
    claim: str | None = None

    def __str__(self) -> str:
        if self.scheme == "pvc":
            return f"pvc://{self.claim}/{self.path}".rstrip("/")
        revision = f"@{self.revision}" if self.revision else ""
        file = f"/{self.file}" if self.file else ""
        return f"{self.scheme}://{self.path}{revision}{file}"


def parse_source(text: str) -> Source:
    """Reads a source; the scheme in any case.

    Raises:
        ValueError: `text` is no source; the message says what is allowed.
    """
    word, separator, rest = text.partition("://")
    scheme = _SCHEMES.get(word.lower())
    if not separator or scheme is None or ".." in rest.split("/") or re.search(r"[\s\0]", rest):
        raise ValueError(f"{text!r} is no source; allowed: {ALLOWED}")
    source = None
    if scheme == "huggingface":
        source = _hub(rest)
    elif scheme == "ollama" and _OLLAMA.fullmatch(rest):
        source = Source(scheme, rest)
    elif scheme == "file" and rest.startswith("/") and rest.strip("/"):
        source = Source(scheme, "/" + rest.strip("/"))
    elif scheme == "pvc":
        claim, _, path = rest.partition("/")
        if _CLAIM.fullmatch(claim):
            source = Source(scheme, path.strip("/"), claim=claim)
    if source is None:
        raise ValueError(f"{text!r} is no source; allowed: {ALLOWED}")
    return source


def _hub(rest: str) -> Source | None:
    organisation, _, below = rest.rstrip("/").partition("/")
    repository, _, file = below.partition("/")
    repository, at, revision = repository.partition("@")
    if not _HUB_NAME.fullmatch(organisation) or not _HUB_NAME.fullmatch(repository):
        return None
    if at and not revision:
        return None
    return Source("huggingface", f"{organisation}/{repository}", file or None, revision or None)
