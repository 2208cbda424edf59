"""The Modelfile of a model that is made: the user's lines between our first and our last.

Only what has to be known of the user's lines is read here, which is where each begins and ends;
Ollama itself judges the rest, and its own grammar goes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flexinfer.api.blocks import OllamaBlock
from flexinfer.engines.errors import EngineConfigError

_COMMAND = re.compile(r"[ \t]*(?P<name>[A-Za-z]+)[ \t]+(?P<rest>.*)", re.DOTALL)
_PARAMETER = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
# Ollama drops characters that cannot be printed, which ones depends on its Unicode: quotes that are
# followed by such close a value there, and what we take for text would be commands.
_UNSEEN = re.compile(r"[^\x21-\x7e]+$")
_TRIPLE = '"""'


@dataclass(frozen=True)
class Modelfile:
    """Lines below FROM, each with its end, and the files of adapters that they name."""

    lines: tuple[str, ...] = ()
    adapters: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lines)

    def text(self, base: str) -> str:
        """Return the whole, for a model that is made from the model `base`."""
        return "\n".join([f"FROM {base}", *self.lines, ""])


def modelfile(block: OllamaBlock, directory: Path) -> Modelfile:
    """Read `modelfile` and `parameters` of a block.

    An adapter's path is relative to `directory`, the weights' own, and must not lead out of it.
    Raises `EngineConfigError`.
    """
    lines: list[str] = []
    adapters: list[Path] = []
    for number, name, whole, value in _commands(block.modelfile or ""):
        if name == "from":
            raise EngineConfigError(
                f"spec.ollama.modelfile, line {number}: FROM is written by FlexInfer, from `model`"
            )
        if name == "adapter":
            adapter = _adapter(value, directory, number)
            adapters.append(adapter)
            whole = f"ADAPTER {_TRIPLE}{adapter}{_TRIPLE}"
        lines.append(whole)
    for key, text in block.parameters.items():
        if not _PARAMETER.fullmatch(key):
            raise EngineConfigError(f"spec.ollama.parameters: {key!r} is no name of a parameter")
        if _TRIPLE in text:
            raise EngineConfigError(f"spec.ollama.parameters.{key}: it must not contain {_TRIPLE}")
        # In three quotes every value is what it is, with its spaces and quotes.
        lines.append(f"PARAMETER {key} {_TRIPLE}{text}{_TRIPLE}")
    return Modelfile(tuple(lines), tuple(adapters))


def _commands(text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield line number, name in lower case, whole text and value of each command."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    at = 0
    while at < len(lines):
        number, whole = at + 1, lines[at]
        at += 1
        if not whole.strip() or whole.lstrip().startswith("#"):
            continue
        match = _COMMAND.fullmatch(whole)
        if match is None:
            raise EngineConfigError(
                f"spec.ollama.modelfile, line {number}: {whole.strip()[:40]!r} is no command with "
                "a value"
            )
        name, value = match["name"].lower(), match["rest"]
        if name in ("parameter", "message"):
            _, _, value = value.lstrip().partition(" ")
        while not _closed(value):
            if at == len(lines):
                raise EngineConfigError(
                    f"spec.ollama.modelfile, line {number}: the quotes are not closed"
                )
            if _closed(_UNSEEN.sub("", value)):
                raise EngineConfigError(
                    f"spec.ollama.modelfile, line {at}: something is behind the closing quotes"
                )
            value += f"\n{lines[at]}"
            whole += f"\n{lines[at]}"
            at += 1
        yield number, name, whole, _unquoted(value)


def _closed(value: str) -> bool:
    text = value.strip()
    for quotes in (_TRIPLE, '"'):
        if text.startswith(quotes):
            return len(text) >= 2 * len(quotes) and text.endswith(quotes)
    return True


def _unquoted(value: str) -> str:
    text = value.strip()
    for quotes in (_TRIPLE, '"'):
        if text.startswith(quotes):
            return text[len(quotes) : -len(quotes)]
    return text


def _adapter(value: str, directory: Path, number: int) -> Path:
    where = f"spec.ollama.modelfile, line {number}"
    path = directory / value
    if not path.exists():
        raise EngineConfigError(f"{where}: there is no {path}")
    resolved = path.resolve()
    if not Path(value).is_absolute() and not resolved.is_relative_to(directory.resolve()):
        raise EngineConfigError(f"{where}: {value} leads out of {directory}")
    if _TRIPLE in str(resolved) or "\n" in str(resolved):
        raise EngineConfigError(f"{where}: a Modelfile cannot name {str(resolved)!r}")
    return resolved
