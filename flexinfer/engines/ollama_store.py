"""Ollama's store on disk: manifests that name blobs.

    <store>/manifests/<host>/<namespace>/<name>/<tag>    JSON: layers by digest
    <store>/blobs/sha256-<64 hexadecimal digits>

A manifest comes from a registry or a user, so it is read as something that nobody vouches for.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexinfer.api.ollamatag import OllamaTag
from flexinfer.engines.errors import EngineConfigError
from flexinfer.engines.memory.types import MemoryPlanError
from flexinfer.engines.memory.untrusted import regular_file

MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_BLOB = re.compile(r"sha256-[0-9a-f]{64}(-partial.*)?")
_LARGEST_MANIFEST = 4 << 20  # a model of ten thousand tensors, each a layer, takes half of it


@dataclass(frozen=True)
class Layer:
    """One blob of a model. `digest` is `sha256:` and 64 digits, `size` its length in bytes."""

    media_type: str
    digest: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """What a model consists of; `path` is the file that says so."""

    path: Path
    layers: tuple[Layer, ...]

    @property
    def store(self) -> Path:
        """The directory that it is in, with `manifests` and `blobs`."""
        return self.path.parents[4]

    def blob(self, layer: Layer) -> Path:
        """Return where a layer's blob is."""
        return blob_path(self.store, layer.digest)

    def missing(self) -> list[Layer]:
        """Return the layers whose blob is not there, or has another size."""
        return [layer for layer in self.layers if _size(self.store, layer) != layer.size]


def store_and_tag(path: Path) -> tuple[Path, OllamaTag] | None:
    """Return the store and the tag of a manifest's path; None if `path` is no such path.

    The file need not exist: a tag that is not pulled yet has a path already.
    """
    parts = path.parts
    if len(parts) < 6 or parts[-5] != "manifests":
        return None
    try:
        return path.parents[4], OllamaTag(*parts[-4:])
    except ValueError:
        return None


def manifest_path(store: Path, tag: OllamaTag) -> Path:
    """Return where the manifest of `tag` is in `store`."""
    return store / "manifests" / tag.path


def blob_path(store: Path, digest: str) -> Path:
    """Return where a blob is in `store`. Raises `EngineConfigError` for what is no digest."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise EngineConfigError(f"{digest[:80]!r} is no digest of a blob")
    return store / "blobs" / f"sha256-{match[1]}"


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises `EngineConfigError` if it is not there, or is not one."""
    try:
        with regular_file(path) as (file, _):
            data = file.read(_LARGEST_MANIFEST + 1)
    except MemoryPlanError as error:
        raise EngineConfigError(str(error)) from None
    try:
        if len(data) > _LARGEST_MANIFEST:
            raise ValueError("too large")
        content = json.loads(data)
        layers = [_layer(entry) for entry in content["layers"]]
        config = content.get("config") or {}
        if config.get("digest"):
            layers.append(_layer(config))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise EngineConfigError(f"{path} is not a manifest of Ollama ({error})") from error
    return Manifest(path, tuple(layers))


def model_blob(manifest: Path) -> Path:
    """Return the file with the weights (GGUF) of the model that a manifest describes.

    Raises `EngineConfigError` if the manifest cannot be read, names no such file, or the file is
    not there.
    """
    found = read_manifest(manifest)
    for layer in found.layers:
        if layer.media_type == MODEL_LAYER:
            path = blob_path(found.store, layer.digest)
            if not path.is_file():
                raise EngineConfigError(f"{manifest} names {path.name}, which is not in its store")
            return path
    raise EngineConfigError(f"{manifest} has no weights of its own: Ollama runs it elsewhere")


def remove_model(path: Path) -> None:
    """Remove a model of a private store: its manifest, and the blobs that no other one names.

    The caller holds the store: a blob whose manifest is still to come would go as well. Raises
    OSError.
    """
    try:
        model = read_manifest(path)
    except EngineConfigError:
        path.unlink(missing_ok=True)
        return
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    remove_unnamed(model.store, [layer.digest for layer in model.layers])


def remove_unnamed(store: Path, digests: Iterable[str]) -> None:
    """Remove blobs that no manifest of a private store names.

    With a manifest in it that cannot be read, all stay. Otherwise as `remove_model`.
    """
    try:
        models = [read_manifest(path) for path in store.glob("manifests/*/*/*/*")]
    except EngineConfigError:
        return
    for digest in set(digests) - {layer.digest for model in models for layer in model.layers}:
        blob_path(store, digest).unlink(missing_ok=True)


def remove_litter(store: Path) -> None:
    """Remove what processes that were killed have left half done; parts of downloads stay.

    The caller holds a private store, so that nobody is at work in it. Raises OSError.
    """
    for path in store.glob("blobs/*"):
        if not _BLOB.fullmatch(path.name):
            path.unlink(missing_ok=True)
    for path in store.glob("ollama-safetensors*"):  # where Ollama converts
        shutil.rmtree(path, ignore_errors=True)


def _layer(entry: Any) -> Layer:
    media_type, digest, size = entry["mediaType"], entry["digest"], entry["size"]
    if not isinstance(media_type, str) or type(size) is not int or size < 0:
        raise ValueError("a layer without type or size")
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise ValueError(f"{str(digest)[:80]!r} is no digest")
    return Layer(media_type, f"sha256:{match[1]}", size)


def _size(store: Path, layer: Layer) -> int | None:
    try:
        return blob_path(store, layer.digest).stat().st_size
    except OSError:
        return None
