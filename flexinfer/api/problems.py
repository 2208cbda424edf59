"""Validation errors in the words of a manifest: what was written, what is allowed, what to do."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from flexinfer.api.base import ApiModel, wire_name
from flexinfer.api.documents import Document, Path, field_name
from flexinfer.api.errors import ManifestProblem

_WHOLE_NUMBER = re.compile(r"[-+]?[0-9]+")
_LONGEST_SHOWN = 60


def problems_of(
    error: ValidationError, model: type[ApiModel], document: Document, at: Path, file: str
) -> list[ManifestProblem]:
    """The problems of a document (or of the item at path `at` of a List) that `model` refused,
    in the order of their lines."""
    value = _value_at(document.value, at)
    problems: dict[tuple[Path, str], ManifestProblem] = {}
    for line in error.errors(include_url=False):
        path, alternative = _real_path(value, line["loc"])
        problem = _problem(line, model, document, at, path, file)
        # The alternatives of a value that may be of two types each report why they refused it.
        key = (path, "" if alternative else problem.allowed + problem.found)
        if key in problems:
            first = problems[key]
            problem = ManifestProblem(
                file,
                first.line,
                first.field,
                first.found,
                f"{first.allowed}, or {problem.allowed}",
                first.suggestion or problem.suggestion,
            )
        problems[key] = problem
    return sorted(problems.values(), key=lambda problem: problem.line or 0)


def shown(value: Any, plain: str | None = None) -> str:
    """A value as its author wrote it, shortened."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "nothing"
    text = plain if plain is not None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def closest(word: str, known: typing.Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that was probably meant: the same but for case and punctuation, or alike."""
    by_core = {_core(name): name for name in known}
    if _core(word) in by_core:
        return by_core[_core(word)]
    alike = difflib.get_close_matches(_core(word), by_core, n=1, cutoff=cutoff)
    return by_core[alike[0]] if alike else None


def _core(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower()) or word


def _value_at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


def _real_path(value: Any, loc: tuple[str | int, ...]) -> tuple[Path, bool]:
    """The part of an error's location that is in the document, without pydantic's own marks for
    keys and alternatives; and whether it is one of several alternatives."""
    path: list[str | int] = []
    for index, part in enumerate(loc):
        is_item = isinstance(value, list) and isinstance(part, int)
        if not is_item and not (isinstance(value, Mapping) and part != "[key]"):
            return tuple(path), part != "[key]"
        path.append(part)
        try:
            value = value[part]
        except (KeyError, IndexError):
            return (*path, *loc[index + 1 :]), False
    return tuple(path), False


def _problem(
    line: Any, model: type[ApiModel], document: Document, at: Path, path: Path, file: str
) -> ManifestProblem:
    mark = document.mark((*at, *path))
    kind, found, context = line["type"], line["input"], line.get("ctx", {})
    plain = mark.plain if (*at, *path) in document.marks else None
    text = shown(found, plain)
    allowed, suggestion = line["msg"].removeprefix("Input should be "), None
    match kind:
        case "flexinfer":
            allowed, suggestion = context["allowed"], context["suggestion"]
            if line["loc"] and line["loc"][-1] == "[key]":
                text = f"the key {found}"
        case "extra_forbidden":
            allowed, suggestion = _known_fields(model, path, document.value, at)
            text = "an unknown field"
        case "missing":
            text, allowed = "nothing", _wanted(model, path)
        case "string_type":
            allowed = "text"
            suggestion = _quote(found, plain)
        case "int_type" | "int_from_float" | "int_parsing":
            allowed = "a whole number"
            if isinstance(found, str) and _WHOLE_NUMBER.fullmatch(found):
                suggestion = f"write {found}, without quotes"
        case "float_type":
            allowed = "a number"
            if isinstance(found, str) and re.fullmatch(r"[-+]?[0-9.]+", found):
                suggestion = f"write {found}, without quotes"
        case "bool_type":
            allowed = "true or false"
            if isinstance(found, str) and found.lower() in ("true", "false"):
                suggestion = f"write {found.lower()}, without quotes"
        case "literal_error":
            options = _options(model, path) or [str(context["expected"])]
            allowed = "one of " + ", ".join(options) if len(options) > 1 else options[0]
            suggestion = _option(found, plain, options)
        case "greater_than_equal":
            allowed = f"{context['ge']} or more"
        case "greater_than":
            allowed = f"more than {context['gt']}"
        case "less_than_equal":
            allowed = f"at most {context['le']}"
        case "list_type":
            allowed = "a list"
            if isinstance(found, str | int | float):
                suggestion = f"write it as a list: [{json.dumps(found)}]"
        case "dict_type" | "model_type" | "model_attributes_type":
            allowed = "a mapping"
        case "string_too_short":
            allowed = "text, not empty"
        case "too_short":
            allowed = "a list with at least one item"
    return ManifestProblem(file, mark.line, field_name((*at, *path)), text, allowed, suggestion)


def _quote(found: Any, plain: str | None) -> str | None:
    if not isinstance(found, bool | int | float):
        return None
    text = plain if plain is not None else json.dumps(found)
    return f'quote it: "{text}"'


def _option(found: Any, plain: str | None, options: list[str]) -> str | None:
    if isinstance(found, bool):
        # YAML has read on, off, yes, no without quotes as a boolean.
        for word in (plain or "", "on" if found else "off"):
            for option in options:
                if word.lower() == option.lower():
                    return f'quote it: "{option}"'
        return None
    if isinstance(found, int | float):
        return _quote(found, plain) if plain in options else None
    meant = closest(found, options, cutoff=0.4) if isinstance(found, str) and found else None
    return f"did you mean {meant}?" if meant else None


def _inner_model(annotation: Any) -> type[ApiModel] | None:
    """The model class in an annotation such as ``list[Toleration]`` or ``VllmBlock | None``."""
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        return annotation
    for part in typing.get_args(annotation):
        if (inner := _inner_model(part)) is not None:
            return inner
    return None


def _field(model: type[ApiModel], path: Path) -> tuple[type[ApiModel], FieldInfo | None]:
    """The model that holds the last name of `path`, and that field if it exists."""
    owner, info = model, None
    for part in path:
        if isinstance(part, int):
            continue
        inner = _inner_model(info.annotation) if info is not None else None
        if info is not None:
            if inner is None:
                return owner, info
            owner = inner
        info = next(
            (known for name, known in owner.model_fields.items() if wire_name(name) == part), None
        )
        if info is None:
            return owner, None
    return owner, info


def _literals(annotation: Any) -> Iterator[str]:
    if typing.get_origin(annotation) is typing.Literal:
        yield from (str(option) for option in typing.get_args(annotation))
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for part in typing.get_args(annotation):
            yield from _literals(part)


def _options(model: type[ApiModel], path: Path) -> list[str]:
    _, info = _field(model, path)
    return list(_literals(info.annotation)) if info is not None else []


def _wanted(model: type[ApiModel], path: Path) -> str:
    options = _options(model, path)
    if options:
        return "one of " + ", ".join(options)
    _, info = _field(model, path)
    if info is not None and _inner_model(info.annotation) is not None:
        return "a mapping; it is required"
    return "a value; it is required"


def _wire_fields(model: type[BaseModel]) -> list[str]:
    """The fields that a user may write; what an API server sets is read and means nothing."""
    return [
        wire_name(name)
        for name, info in model.model_fields.items()
        if not (info.description or "").startswith("Set by ")
    ]


def _known_fields(
    model: type[ApiModel], path: Path, value: Any, at: Path
) -> tuple[str, str | None]:
    owner, _ = _field(model, path)
    fields, wrong = _wire_fields(owner), str(path[-1])
    allowed = "the fields " + ", ".join(fields)
    if wrong in owner.unknown_field_hints:
        return allowed, owner.unknown_field_hints[wrong]
    if (same := {_core(name): name for name in fields}.get(_core(wrong))) is not None:
        return allowed, f"did you mean {same}?"
    spec = _value_at(value, at).get("spec")
    used = spec.keys() if isinstance(spec, Mapping) else set()
    elsewhere = [place for place in _places(model) if _core(str(place[-1])) == _core(wrong)]
    # A field of the block that is in use is a better guess than one of another backend.
    elsewhere.sort(key=lambda place: not used & set(map(str, place)))
    if elsewhere:
        return allowed, f"did you mean {field_name(elsewhere[0])}?"
    meant = closest(wrong, fields)
    return allowed, f"did you mean {meant}?" if meant else None


def _places(model: type[ApiModel], path: Path = ()) -> Iterator[Path]:
    """The paths of all fields below a model."""
    for name, info in model.model_fields.items():
        here = (*path, wire_name(name))
        yield here
        if (inner := _inner_model(info.annotation)) is not None:
            yield from _places(inner, here)
