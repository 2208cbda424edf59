"""The grammar of a ModelCache's source."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.api import Source, parse_source


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("huggingface://org/repo", Source("huggingface", "org/repo")),
        ("HF://org/repo", Source("huggingface", "org/repo")),
        ("hf://Org-1/Re.po_2", Source("huggingface", "Org-1/Re.po_2")),
        ("HuggingFace://org/repo/", Source("huggingface", "org/repo")),
        ("HF://org/repo/file.gguf", Source("huggingface", "org/repo", file="file.gguf")),
        ("HF://org/repo/q4/file.gguf", Source("huggingface", "org/repo", file="q4/file.gguf")),
        ("HF://org/repo@v1", Source("huggingface", "org/repo", revision="v1")),
        ("HF://org/repo@v1/a.gguf", Source("huggingface", "org/repo", "a.gguf", "v1")),
        ("ollama://llama3.2:1b", Source("ollama", "llama3.2:1b")),
        ("ollama://user/model", Source("ollama", "user/model")),
        ("file:///srv/models/x", Source("file", "/srv/models/x")),
        ("pvc://claim/a/b", Source("pvc", "a/b", claim="claim")),
        ("pvc://claim", Source("pvc", "", claim="claim")),
    ],
)
def test_reads(text: str, source: Source) -> None:
    assert parse_source(text) == source
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "org/repo",
        "HF:/org/repo",
        "HF://",
        "HF://org",
        "HF://org/",
        "HF://org/repo@",
        "HF://org/repo/../../x",
        "HF://o rg/repo",
        "s3://bucket/key",
        "https://host/org/repo",
        "file://relative/path",
        "file:///",
        "pvc://",
        "pvc://Claim/x",
        "ollama://",
        "ollama://a:b:c",
    ],
)
def test_refuses_and_says_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="huggingface://ORG/REPO"):
        parse_source(text)


@given(st.text(max_size=60))
def test_any_text_is_a_source_or_a_value_error(text: str) -> None:
    for candidate in (text, f"HF://{text}", f"pvc://{text}", f"ollama://{text}", f"file://{text}"):
        try:
            source = parse_source(candidate)
        except ValueError:
            continue
        assert ".." not in source.path.split("/")
