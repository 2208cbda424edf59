"""A model's name on its way to the engine and back."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.serving.naming import NameRewriter, multipart_model, replace_multipart_model

NAMES = st.text(min_size=1, max_size=12)
KIND = "multipart/form-data; boundary=XX"


def rewritten(engine: str, client: str, *pieces: bytes) -> bytes:
    rewriter = NameRewriter(engine, client)
    return b"".join(rewriter.feed(piece) for piece in pieces) + rewriter.finish()


@pytest.mark.parametrize("form", ['"model":"e"', '"model": "e"', '"model" : "e"'])
def test_the_engines_name_becomes_the_clients(form: str) -> None:
    out = rewritten("e", 'c "\\" d', b"data: {" + form.encode() + b"}\n\n")
    assert json.loads(out.removeprefix(b"data: ")) == {"model": 'c "\\" d'}


def test_another_model_of_the_answer_stays() -> None:
    body = b'{"model": "other", "served_model": "e", "models": ["e"]}'
    assert rewritten("e", "c", body) == body


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_name_in_any_script_is_found_as_the_engine_writes_it(ascii_only: bool) -> None:
    body = json.dumps({"model": "größe/模型"}, ensure_ascii=ascii_only).encode()
    assert json.loads(rewritten("größe/模型", "c", body)) == {"model": "c"}


@given(st.text())
def test_generated_text_is_never_touched(text: str) -> None:
    text += ' "model": "e" \\"model\\": \\"e\\" '
    answer = {"model": "e", "choices": [{"message": {"content": text}}], text: 1}
    assert json.loads(rewritten("e", "c", json.dumps(answer).encode())) == {**answer, "model": "c"}


def test_a_key_that_ends_like_the_pattern_is_not_touched() -> None:
    strange = json.dumps({'a"model"': "e", 'b"model': "e"}).encode()
    assert rewritten("e", "c", strange) == strange


@given(
    NAMES,
    NAMES,
    st.lists(st.sampled_from((b'"model"', b":", b" ", b"\n", b'"e"', b"data: {", b"}", b"\\"))),
    st.lists(st.integers(0, 80), max_size=8),
    st.booleans(),
)
def test_it_does_not_matter_where_the_pieces_end(
    engine: str, client: str, tokens: list[bytes], cuts: list[int], known: bool
) -> None:
    stream = b"".join(tokens)
    if known:
        stream = stream.replace(b'"e"', json.dumps(engine).encode())
    ends = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(ends)]
    assert rewritten(engine, client, *pieces) == rewritten(engine, client, stream)


@pytest.mark.parametrize("client", ["c", "e"])
def test_lines_are_passed_on_whole(client: str) -> None:
    """So an error event never follows half a line, which a client would try to read as JSON."""
    rewriter = NameRewriter("e", client)
    assert rewriter.feed(b"data: 1\nda") == b"data: 1\n"
    assert rewriter.feed(b"ta: 2") == b""
    assert rewriter.finish() == b"data: 2"


# -- multipart


def form(*parts: tuple[str, str]) -> bytes:
    return (
        "".join(f"--XX\r\nContent-Disposition: {head}\r\n\r\n{value}\r\n" for head, value in parts)
        + "--XX--\r\n"
    ).encode()


def test_the_model_of_a_form_is_read_and_replaced() -> None:
    body = form(
        ('form-data; name="file"; filename="model"\r\nContent-Type: audio/wav', "RIFF"),
        ('form-data; name="model"', "whisper"),
        ('form-data; name="prompt"', "model"),
    )
    assert multipart_model(body, KIND) == "whisper"
    replaced = replace_multipart_model(body, KIND, "w.bin")
    assert replaced == body.replace(b"whisper", b"w.bin")
    assert multipart_model(replaced, KIND) == "w.bin"


@pytest.mark.parametrize(
    "head",
    ["form-data; name=model", 'form-data; name="model"\r\nContent-Type: text/plain'],
)
@pytest.mark.parametrize("kind", [KIND, 'multipart/form-data; charset=x; boundary="XX"'])
def test_forms_are_written_in_several_ways(head: str, kind: str) -> None:
    assert multipart_model(form((head, "m")), kind) == "m"


def test_what_a_file_contains_is_not_a_field() -> None:
    content = 'Content-Disposition: form-data; name="model"\r\n\r\nfake\r\n'
    body = form(('form-data; name="file"; filename="f"', content), ('form-data; name="model"', "m"))
    assert multipart_model(body, KIND) == "m"
    assert b"fake" in replace_multipart_model(body, KIND, "other")


@pytest.mark.parametrize("body", [b"", b"--XX--\r\n", b"--XX\r\n", form(('name="file"', "x"))])
def test_a_form_without_a_model_stays_as_it_is(body: bytes) -> None:
    assert multipart_model(body, KIND) is None
    assert replace_multipart_model(body, KIND, "m") == body


@given(st.binary(max_size=200), st.text(max_size=40))
def test_broken_forms_are_forms_without_a_model_at_worst(body: bytes, kind: str) -> None:
    multipart_model(b"--XX\r\n" + body, KIND)
    multipart_model(body, kind)
