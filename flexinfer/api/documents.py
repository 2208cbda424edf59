"""YAML and JSON text as plain data that remembers where each value stands.

Scalars are read as kubectl reads them (``off`` is a boolean, a date is text), so that a manifest
means the same to both. Nothing is built but dicts, lists, strings, numbers, booleans and None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from flexinfer.api.errors import ManifestProblem

Path = tuple[str | int, ...]

#: Values a file may expand to. Aliases multiply, and a few lines of them can fill any memory.
_MOST_VALUES = 100_000
_LONGEST_NUMBER = 100


@dataclass(frozen=True)
class Mark:
    """Where a value stands: its line, from 1, and its text if it is a scalar without quotes."""

    line: int
    plain: str | None = None


@dataclass
class Document:
    """One document of a file: plain data, and a mark for the path of every value in it."""

    value: Any
    marks: dict[Path, Mark] = field(default_factory=dict)

    def mark(self, path: Path) -> Mark:
        """The mark of `path`, or of the nearest value above it that exists."""
        while path not in self.marks and path:
            path = path[:-1]
        return self.marks[path]


def field_name(path: Path) -> str:
    """A path in Kubernetes' notation: ``spec.requests[amd.com/gpu]``, ``spec.aliases[0]``."""
    text = ""
    for part in path:
        if isinstance(part, int) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", part):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


# Composes nodes; their tags follow the rules below and not PyYAML's. libyaml's is fifteen times as
# fast, which a thousand manifests notice; every wheel of PyYAML has it.
_Loader: Any = type(
    "_Loader",
    (getattr(yaml, "CSafeLoader", yaml.SafeLoader),),
    {"yaml_implicit_resolvers": {}},
)


_TAG = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT, _STR, _MERGE = (
    _TAG + kind for kind in ("null", "bool", "int", "float", "str", "merge")
)
for _kind, _pattern in (
    (_NULL, r"(?:~|null|Null|NULL|)"),
    (
        _BOOL,
        r"(?:y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE"
        r"|on|On|ON|off|Off|OFF)",
    ),
    (_INT, r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+)"),
    (_FLOAT, r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"),
    (_FLOAT, r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"),
    (_MERGE, r"<<"),
):
    _Loader.add_implicit_resolver(_kind, re.compile(_pattern + r"\Z"), None)

_FALSE = {"n", "no", "false", "off"}


def _number(text: str) -> int:
    digits = text.replace("_", "").lower().lstrip("+-")
    base = {"0b": 2, "0o": 8, "0x": 16}.get(digits[:2])
    if base is None and len(digits) > 1 and digits[0] == "0":
        base = 8
    value = int(digits, base or 10)
    return -value if text.startswith("-") else value


def _text(text: str) -> str:
    text.encode()  # Raises ValueError for half a character, which an escape can name.
    return text


_SCALARS: dict[str, Callable[[str], Any]] = {
    _NULL: lambda text: None,
    _BOOL: lambda text: text.lower() not in _FALSE,
    _INT: _number,
    _FLOAT: lambda text: float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan")),
    _STR: _text,
    _MERGE: _text,
}


@dataclass
class _Builder:
    """Turns the nodes of one file into documents, collecting what is wrong with them."""

    file: str
    problems: list[ManifestProblem]
    values: int = 0
    open_nodes: set[int] = field(default_factory=set)

    def document(self, node: Node) -> Document:
        document = Document(None)
        document.marks[()] = Mark(node.start_mark.line + 1)
        document.value = self._build(node, (), document)
        return document

    def _build(self, node: Node, path: Path, document: Document) -> Any:
        self.values += 1
        if self.values > _MOST_VALUES:
            raise _TooMuch(f"more than {_MOST_VALUES} values with aliases written out")
        if id(node) in self.open_nodes:
            raise _TooMuch("an alias that contains itself")
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, MappingNode) and node.tag == _TAG + "map":
                return self._mapping(node, path, document)
            if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
                return self._sequence(node, path, document)
        finally:
            self.open_nodes.discard(id(node))
        self._problem(node, path, f"the tag {node.tag}", "plain YAML without tags")
        return None

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        build = _SCALARS.get(node.tag)
        try:
            if build is None:
                raise ValueError
            if build is _number and len(node.value) > _LONGEST_NUMBER:
                raise ValueError
            return build(node.value)
        except ValueError:
            kind = node.tag.removeprefix(_TAG)
            found = f"{node.value[:_LONGEST_NUMBER]!r} as {kind}"
            self._problem(node, path, found, "text, a number, a boolean or null, without tags")
            return None

    def _sequence(self, node: SequenceNode, path: Path, document: Document) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            document.marks[*path, index] = _mark(item, item)
            items.append(self._build(item, (*path, index), document))
        return items

    def _mapping(self, node: MappingNode, path: Path, document: Document) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        merged: list[MappingNode] = []
        for key, value in node.value:
            if key.tag == _MERGE:
                merged += self._merged(value, path)
                continue
            if not isinstance(key, ScalarNode) or key.tag != _STR:
                written = key.value if isinstance(key, ScalarNode) else "a list or mapping"
                hint = f'quote it: "{written}"' if isinstance(key, ScalarNode) else None
                self._problem(key, path, f"the key {written}", "text as a key", hint)
                continue
            name = self._scalar(key, path)
            if name is None:
                continue
            here = (*path, name)
            if name in mapping:
                first = document.marks[here].line
                self._problem(key, here, f"a second {name}", f"one; line {first} has the first")
                continue
            document.marks[here] = _mark(key, value)
            mapping[name] = self._build(value, here, document)
        for other in merged:
            inherited = Document(None)
            values = self._build(other, path, inherited)
            new = (values or {}).keys() - mapping.keys()
            mapping |= {name: value for name, value in (values or {}).items() if name in new}
            document.marks |= {
                at: mark for at, mark in inherited.marks.items() if at[len(path)] in new
            }
        return mapping

    def _merged(self, node: Node, path: Path) -> list[MappingNode]:
        nodes = node.value if isinstance(node, SequenceNode) else [node]
        for other in nodes:
            if not isinstance(other, MappingNode):
                self._problem(other, path, "<< of something else", "<< of a mapping")
        return [other for other in nodes if isinstance(other, MappingNode)]

    def _problem(
        self, node: Node, path: Path, found: str, allowed: str, hint: str | None = None
    ) -> None:
        line = node.start_mark.line + 1
        self.problems.append(
            ManifestProblem(self.file, line, field_name(path), found, allowed, hint)
        )


def _mark(where: Node, value: Node) -> Mark:
    plain = value.value if isinstance(value, ScalarNode) and not value.style else None
    return Mark(where.start_mark.line + 1, plain)


class _TooMuch(Exception):
    """The file expands without end."""


def parse(file: str, text: str) -> tuple[list[Document], list[ManifestProblem]]:
    """All documents of a text that are not empty, and all problems of their form.

    `file` names the text in problems; if it ends in ``.json`` the text must be one JSON document.
    What comes before an error in the syntax is still returned.
    """
    problems: list[ManifestProblem] = []
    if file.endswith(".json"):
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            found = f"{error.msg} in column {error.colno}"
            return [], [ManifestProblem(file, error.lineno, "", found, "one JSON document")]
        except RecursionError:
            return [], [ManifestProblem(file, None, "", "deep nesting", "a manifest")]
        text = _json_as_yaml(text)
    builder = _Builder(file, problems)
    documents = []
    try:
        for node in _nodes(text):
            document = builder.document(node)
            if document.value is not None:
                documents.append(document)
    except yaml.YAMLError as error:
        problems.append(_syntax_problem(file, text, error))
    except _TooMuch as error:
        problems.append(ManifestProblem(file, None, "", str(error), "a manifest"))
    except RecursionError:
        problems.append(ManifestProblem(file, None, "", "deep nesting", "a manifest"))
    return documents, problems


_ESCAPE = re.compile(
    r"\\\\|\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?P<raw>[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff])"
)


def _json_as_yaml(text: str) -> str:
    """Valid JSON in the form that YAML reads alike, line by line.

    YAML knows no tabs between tokens (JSON has them nowhere else), no character written as two
    escapes, and takes some characters inside a string for line breaks or errors.
    """

    def rewrite(match: re.Match[str]) -> str:
        if match["raw"]:
            return f"\\u{ord(match['raw']):04x}"
        if match["high"]:
            pair = bytes.fromhex(match["high"] + match["low"])
            return pair.decode("utf-16-be")
        return match[0]

    return _ESCAPE.sub(rewrite, text.replace("\t", " "))


def _nodes(text: str) -> Iterator[Node]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                yield node
    finally:
        loader.dispose()


def _syntax_problem(file: str, text: str, error: yaml.YAMLError) -> ManifestProblem:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line = error.problem_mark.line + 1
        found = " ".join(part for part in (error.context, error.problem) if part)
        return ManifestProblem(file, line, "", found, "YAML")
    position = getattr(error, "position", None)
    line = text.count("\n", 0, position) + 1 if isinstance(position, int) else 1
    reason = getattr(error, "reason", None) or "something that is no text"
    return ManifestProblem(file, line, "", str(reason), "YAML")
