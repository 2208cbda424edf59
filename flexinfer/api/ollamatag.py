"""Names of models as Ollama writes them: `[[host/]namespace/]name[:tag]`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"

# Ollama's own rules (types/model/name.go), letter for letter: whatever they let through is one
# component of a path that is neither `.` nor `..`.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}", re.ASCII)
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", re.ASCII)


@dataclass(frozen=True)
class OllamaTag:
    """A complete name. Raises ValueError if a part of it is none that Ollama accepts."""

    host: str
    namespace: str
    name: str
    tag: str

    def __post_init__(self) -> None:
        rules = (_HOST, _NAMESPACE, _NAME, _NAME)
        for rule, part in zip(rules, self.parts, strict=True):
            if not rule.fullmatch(part):
                raise ValueError(f"{part!r} is no part of an Ollama tag")

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """Host, namespace, name and tag: the directories and the file of its manifest."""
        return self.host, self.namespace, self.name, self.tag

    @property
    def path(self) -> PurePath:
        """Where its manifest is below `manifests` of a store."""
        return PurePath(*self.parts)

    @property
    def short(self) -> str:
        """The name without the parts that are Ollama's defaults, the tag excepted."""
        text = f"{self.name}:{self.tag}"
        if self.namespace != DEFAULT_NAMESPACE or self.host != DEFAULT_HOST:
            text = f"{self.namespace}/{text}"
        return text if self.host == DEFAULT_HOST else f"{self.host}/{text}"

    def __str__(self) -> str:
        return f"{self.host}/{self.namespace}/{self.name}:{self.tag}"


def parse_ollama_tag(text: str) -> OllamaTag:
    """Read a name, with Ollama's defaults for what it leaves out. Raises ValueError."""
    rest, tag = text, DEFAULT_TAG
    if text.rfind(":") > text.rfind("/"):
        rest, _, tag = text.rpartition(":")
    parts = rest.rsplit("/", 2)
    name = parts.pop()
    namespace = parts.pop() if parts else DEFAULT_NAMESPACE
    host = parts.pop() if parts else DEFAULT_HOST
    return OllamaTag(host, namespace, name, tag)
