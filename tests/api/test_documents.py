"""Text becomes data as kubectl reads it, with a line for every value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.api.documents import field_name, parse


def values(text: str, file: str = "m.yaml") -> list[Any]:
    documents, problems = parse(file, text)
    assert problems == []
    return [document.value for document in documents]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-5", -5),
        ("0x1F", 31),
        ("010", 8),
        ("1_000", 1000),
        ("0.85", 0.85),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("OFF", False),
        ("off", False),
        ("No", False),
        ("on", True),
        ("Yes", True),
        ("true", True),
        ("~", None),
        ("''", ""),
        ('"OFF"', "OFF"),
        ("!!str 5", "5"),
        ("2024-01-01", "2024-01-01"),
        ("12:30:45", "12:30:45"),
        ("16Gi", "16Gi"),
        ("v1.5", "v1.5"),
        ("=", "="),
        ("-", [None]),
    ],
)
def test_scalars(text: str, value: object) -> None:
    (read,) = values(f"a: {text}" if text != "-" else "a:\n-")
    assert read == {"a": value}
    assert type(read["a"]) is type(value)


def test_documents_and_lines() -> None:
    documents, problems = parse(
        "m.yaml", "---\n---\na: 1\nb:\n  - x\n  - c: [2,\n      3]\n---\nd: 4\n"
    )
    assert problems == []
    first, second = documents
    assert first.value == {"a": 1, "b": ["x", {"c": [2, 3]}]}
    assert first.mark(("a",)).line == 3
    assert first.mark(("b", 1, "c", 1)).line == 7
    assert first.mark(("b", 0)).plain == "x"
    assert first.mark(("b", 7, "nowhere")).line == 4
    assert second.mark(()).line == 9
    assert second.mark(("d",)).plain == "4"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "---\n---\n"])
def test_empty_documents_are_none(text: str) -> None:
    assert values(text) == []


def test_merge_keys() -> None:
    text = (
        "base: &base {a: 1, b: 2}\nother: &other {b: 5, d: 6}\nx:\n  <<: [*base, *other]\n  a: 3\n"
    )
    documents, problems = parse("m.yaml", text)
    assert problems == []
    assert documents[0].value["x"] == {"a": 3, "b": 2, "d": 6}
    assert documents[0].mark(("x", "d")).line == 2


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "line 1 has the first"),
        ("a:\n  b: 1\n  b: 1\n", 3, "a.b: found a second b"),
        ("a: [1\nb: 2\n", 2, "flow"),
        ("a: b\n c: d\n", 2, "mapping values are not allowed"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("a: \x01\n", 1, "characters are not allowed"),
        ("1: a\n", 1, 'quote it: "1"'),
        ("on: a\n", 1, 'quote it: "on"'),
        ("[a]: b\n", 1, "text as a key"),
        ("a: !!python/name:os.system x\n", 1, "without tags"),
        ("a: !mine {b: c}\n", 1, "the tag !mine"),
        ("a: !!binary aGk=\n", 1, "as binary"),
        ("a: !!int x\n", 1, "as int"),
        ("a: " + "9" * 5000 + "\n", 1, "as int"),
        ('a: "\\uD83D"\n', 1, ""),
        ("a:\n  <<: 5\n", 2, "<< of a mapping"),
        ("\ta: b\n", 1, "cannot start any token"),
    ],
)
def test_what_is_wrong_has_a_line(text: str, line: int, words: str) -> None:
    _, problems = parse("m.yaml", text)
    assert problems
    assert problems[0].line == line
    assert words in str(problems[0])


def test_what_comes_before_a_syntax_error_is_kept() -> None:
    documents, problems = parse("m.yaml", "a: 1\n---\nb: [\n")
    assert [document.value for document in documents] == [{"a": 1}]
    assert len(problems) == 1


def test_aliases_that_multiply_are_stopped() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    _, problems = parse("m.yaml", "\n".join(lines))
    assert "aliases" in problems[0].found


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "a: &a {b: *a}\n", "a: &a {<<: *a}\n"])
def test_an_alias_inside_itself_is_stopped(text: str) -> None:
    _, problems = parse("m.yaml", text)
    assert "contains itself" in problems[0].found


def test_deep_nesting_is_stopped() -> None:
    for file in ("m.yaml", "m.json"):
        _, problems = parse(file, "[" * 50_000 + "]" * 50_000)
        assert "nesting" in problems[0].found


def test_json_with_tabs_escapes_and_lines() -> None:
    documents, problems = parse("m.json", '{\n\t"a": "\\ud83d\\ude00 \\/ \\t",\n\t"b": 1E2\n}')
    assert problems == []
    assert documents[0].value == {"a": "\U0001f600 / \t", "b": 100.0}
    assert documents[0].mark(("b",)).line == 3


@pytest.mark.parametrize("text", ["{", "{'a': 1}", '{"a": 1,}', '{"a": 1} {"b": 2}', "a: 1"])
def test_json_must_be_json(text: str) -> None:
    documents, problems = parse("m.json", text)
    assert documents == []
    assert problems[0].allowed == "one JSON document"


def test_json_knows_second_keys_too() -> None:
    _, problems = parse("m.json", '{"a": 1,\n "a": 2}')
    assert problems[0].line == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(min_size=1, max_size=8), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(min_size=1, max_size=8), JSON, max_size=4))
def test_any_json_object_is_read_as_json_reads_it(value: dict[str, Any]) -> None:
    for indent, ascii_only in ((None, True), ("\t", True), (1, False)):
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
        assert values(text, "m.json") == [json.loads(text)]


@given(st.text(max_size=200))
def test_any_text_is_documents_or_problems(text: str) -> None:
    for file in ("m.yaml", "m.json"):
        parse(file, text)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("spec", "replicas"), "spec.replicas"),
        (("spec", "aliases", 0), "spec.aliases[0]"),
        (("spec", "requests", "amd.com/gpu"), "spec.requests[amd.com/gpu]"),
        (("items", 2, "spec"), "items[2].spec"),
        ((), ""),
    ],
)
def test_field_names(path: tuple[str | int, ...], name: str) -> None:
    assert field_name(path) == name
