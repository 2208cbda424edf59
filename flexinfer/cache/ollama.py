"""Where a model of Ollama is: in a store of the user's, or in ours, where it may be still to come.

A store of the user's is read and nothing else. What is not there is pulled into ours before the
engine starts, so an Ollama tag is always found.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flexinfer.api import Source
from flexinfer.api.ollamatag import parse_ollama_tag

# Where the service that Ollama's own installer sets up keeps its models.
_SYSTEM_STORE = Path("/usr/share/ollama/.ollama/models")
_SCHEME = "ollama://"


@dataclass(frozen=True)
class OllamaPlace:
    """A tag's manifest, which need not exist; `version` is that of the weights."""

    path: Path
    version: str


def tag_text(model: str, source: Source | None) -> str | None:
    """What may be an Ollama tag: a cache's `source`, if the model has a cache, else `model` itself.

    None if neither can be one: another source, an absolute path, the name of a GGUF file.
    """
    if source is not None:
        return source.path if source.scheme == "ollama" else None
    if model.lower().startswith(_SCHEME):
        return model[len(_SCHEME) :]
    return None if model.startswith("/") or model.lower().endswith(".gguf") else model


def ollama_place(text: str, private: Path, environ: Mapping[str, str]) -> OllamaPlace | str:
    """Where the model of an Ollama tag is, or else will be; in words why `text` is no tag.

    Args:
        text: the tag.
        private: our store.
        environ: `OLLAMA_MODELS` and `HOME` say where the user's stores are.
    """
    try:
        tag = parse_ollama_tag(text)
    except ValueError as error:
        return f"{text} as an Ollama tag ({error})"
    for store in user_stores(environ):
        path = store / "manifests" / tag.path
        version = _content(path)
        if version is not None:
            return OllamaPlace(path, version)
    # The name alone: that it is pulled must not make the engine start again.
    return OllamaPlace(private / "manifests" / tag.path, _short_hash(str(tag).encode()))


def user_stores(environ: Mapping[str, str]) -> Iterator[Path]:
    """The user's stores on this machine: the one that `OLLAMA_MODELS` names, or else that of their
    home and that of Ollama's service."""
    if named := environ.get("OLLAMA_MODELS"):
        candidates = [Path(named).expanduser().absolute()]
    else:
        home = environ.get("HOME")
        candidates = [Path(home, ".ollama", "models")] if home else []
        candidates.append(_SYSTEM_STORE)
    for store in candidates:
        if os.access(store / "manifests", os.R_OK | os.X_OK):
            yield store


def _content(manifest: Path) -> str | None:
    """A short hash of a manifest, which names all that the model consists of by its own hash."""
    try:
        return _short_hash(manifest.read_bytes()) if manifest.is_file() else None
    except OSError:
        return None


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
