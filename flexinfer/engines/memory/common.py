"""What the engines' plans share: settings as they take effect, and settings to turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from flexinfer.engines.memory.types import Knob, MemoryPlan, MemoryPlanError
from flexinfer.engines.spec import EngineSpec

#: The HIP context, loaded kernels and the BLAS library's workspace, which no engine's own figures
#: count. An estimate: a few hundred MiB are usual on ROCm.
RUNTIME_BYTES = 256 << 20

_Block = TypeVar("_Block", bound=BaseModel)


def with_block(spec: EngineSpec, block: BaseModel) -> EngineSpec:
    """`spec` with another block of the same kind."""
    return dataclasses.replace(spec, block=block)  # type: ignore[arg-type]


def with_arguments(block: _Block, words: Sequence[str], names: Mapping[str, str]) -> _Block:
    """`block` as the engine sees it when `words` follow on its command line.

    `names` maps flags to fields. `--flag value` and `--flag=value` are understood. Raises
    `MemoryPlanError` for a value that the field cannot hold: the engine may know what it means.
    """
    changes: dict[str, object] = {}
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        name = names.get(flag if equals else word)
        if name is None:
            continue
        if not equals:
            if index + 1 == len(words):
                raise MemoryPlanError(f"extraArgs end with {word}, which wants a value")
            value = words[index + 1]
        changes[name] = _read(type(block), name, value, flag)
    return block.model_copy(update=changes) if changes else block


def fields_of(path: str, names: Mapping[str, str], said: Mapping[str, str]) -> dict[str, str]:
    """Where each setting of a block is to be changed: `names` are Python names and YAML names, and
    `said` the places that go before the block's own fields."""
    return {name: said.get(name, f"{path}.{wire}") for name, wire in names.items()}


def said_in(words: Sequence[str], names: Mapping[str, str], path: str) -> dict[str, str]:
    """The settings that `words` of extraArgs decide, each with the place to change it."""
    flags = (word.partition("=")[0] for word in words)
    return {names[flag]: f"{path}.extraArgs {flag}" for flag in flags if flag in names}


def _read(model: type[BaseModel], name: str, text: str, flag: str) -> object:
    number = text.isascii() and text.isdigit() and len(text) < 40
    for value in (text, int(text)) if number else (text,):
        try:
            return getattr(model.model_validate({_alias(model, name): value}), name)
        except ValidationError:
            continue
    raise MemoryPlanError(f"extraArgs: {flag} {text[:40]} cannot be understood here")


def _alias(model: type[BaseModel], name: str) -> str:
    return model.model_fields[name].alias or name


def token_step(tokens: int) -> int:
    """A number that token counts are worth rounding to."""
    return 1024 if tokens >= 8192 else 256


def knob(
    field: str, current: int, replan: Callable[[int], MemoryPlan], *, low: int, step: int = 1
) -> Knob | None:
    """A setting that needs less the smaller it is; None if it cannot be made smaller."""
    if current <= low:
        return None
    is_text = ".parameters." in field or ".env." in field
    return Knob(field, current, low, current - 1, step, replan, _quoted if is_text else str)


def share_knob(field: str, share: float, replan: Callable[[str], MemoryPlan]) -> Knob:
    """The share of the GPU memory that an engine may use, which manifests have as a text."""

    def text(value: int) -> str:
        return f"{value / 100:.2f}"

    in_words = " " in field  # an argument, which is not quoted
    return Knob(
        field,
        round(share * 100),
        1,
        98,
        1,
        lambda value: replan(text(value)),
        text if in_words else lambda value: f'"{text(value)}"',
        is_share=True,
    )


def _quoted(value: int) -> str:
    return f'"{value}"'


def divide_up(number: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-number // by)
