"""Files that a manifest names beside its model: libraries, templates, adapters, projectors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from flexinfer.api import Block, LlamaCppBlock, MlcLlmBlock, VllmBlock
from flexinfer.cache.errors import UserPathNotFound
from flexinfer.cache.files import check_inside
from flexinfer.cache.locate import Weights

#: Where models are inside a container, and so what manifests call their directory.
MODELS = PurePosixPath("/models")


def resolve_user_path(path: str, weights: Weights, claim_dir: Path | None = None) -> Path:
    """The file on this machine that `path` of a manifest means.

    A path under `/models` is looked for below the model's claim, then below its weights, with or
    without their directory's name, then as it is written. Any other absolute path is what it says.
    A relative one is below the weights.

    Args:
        path: as the manifest has it.
        weights: the model's.
        claim_dir: the directory of the claim; None for that of the weights.

    Raises:
        UserPathNotFound: it is in none of these places; it names them.
        PathEscapes: it leads out of the directory that it belongs to.
    """
    claim = claim_dir or weights.claim
    pure = PurePosixPath(path)
    tried: list[tuple[Path, Path | None]] = []
    own = weights.directory
    if pure.is_relative_to(MODELS):
        inner = pure.relative_to(MODELS)
        if claim is not None:
            tried.append((claim / inner, claim))
        tried.append((own / inner, weights.root))
        if inner.parts[:1] == (own.name,):
            tried.append((own.joinpath(*inner.parts[1:]), weights.root))
        tried.append((Path(path), None))
    elif pure.is_absolute():
        tried.append((Path(path), None))
    else:
        tried.append((own / pure, weights.root))
    for place, root in tried:
        if root is not None:
            check_inside(place, root)
        if place.exists():
            return place
    raise UserPathNotFound(path, [place for place, _ in tried])


def resolve_block(block: Block, weights: Weights, claim_dir: Path | None = None) -> Block:
    """`block` with every path in it as `resolve_user_path` finds it, errors as well.

    What may be a name as well as a path (a hub id of a tokenizer or an adapter) is only replaced
    where it begins with a slash.
    """

    def found(path: str) -> str:
        return str(resolve_user_path(path, weights, claim_dir))

    def found_if_absolute(text: str) -> str:
        return found(text) if text.startswith("/") else text

    changes: dict[str, object] = {}
    if isinstance(block, LlamaCppBlock):
        for name in ("mmproj", "chat_template_file", "draft_model"):
            changes[name] = _each(getattr(block, name), found)
        changes["lora"] = [found(path) for path in block.lora]
    elif isinstance(block, MlcLlmBlock):
        for name in ("model_lib_path", "embedding_model_lib"):
            changes[name] = _each(getattr(block, name), found)
        changes["embedding_model"] = _each(block.embedding_model, found_if_absolute)
        changes["additional_models"] = [
            ",".join(found_if_absolute(part) for part in text.split(","))
            for text in block.additional_models
        ]
    elif isinstance(block, VllmBlock):
        changes["chat_template"] = _each(block.chat_template, found)
        changes["tokenizer"] = _each(block.tokenizer, found_if_absolute)
        changes["lora_modules"] = [_lora(text, found_if_absolute) for text in block.lora_modules]
    return block.model_copy(update=changes)


def _each(path: str | None, found: Callable[[str], str]) -> str | None:
    return None if path is None else found(path)


def _lora(text: str, found: Callable[[str], str]) -> str:
    name, equals, path = text.partition("=")
    return f"{name}={found(path)}" if equals else text
