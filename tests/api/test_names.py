"""Which names are legal, and what is proposed for one that is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.api.names import RESERVED, is_label, is_model_name, is_subdomain, legal_name


@pytest.mark.parametrize("name", ["a", "qwen3-8b", "a" * 50, "x-1"])
def test_model_names(name: str) -> None:
    assert is_model_name(name)


@pytest.mark.parametrize(
    "name", ["", "A", "1a", "-a", "a-", "a.b", "a_b", "a b", "a" * 51, "ä", "a\n", "a/b"]
)
def test_illegal_model_names(name: str) -> None:
    assert not is_model_name(name)


@pytest.mark.parametrize(
    ("name", "proposal"),
    [
        ("Qwen2.5_7B", "qwen2-5-7b"),
        ("meta/Llama 3", "meta-llama-3"),
        ("7b", "model-7b"),
        ("", "model"),
        ("---", "model"),
        ("flexinfer", "model-flexinfer"),
        ("a" * 49 + "-b", "a" * 49),
    ],
)
def test_proposals(name: str, proposal: str) -> None:
    assert legal_name(name) == proposal


@given(st.text(max_size=120))
def test_a_proposal_is_always_legal(name: str) -> None:
    proposal = legal_name(name)
    assert is_model_name(proposal)
    assert proposal not in RESERVED


@given(st.from_regex(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", fullmatch=True))
def test_a_legal_name_is_a_label_and_a_subdomain(name: str) -> None:
    assert is_model_name(name)
    assert is_label(name)
    assert is_subdomain(name)


def test_subdomains_have_parts() -> None:
    assert is_subdomain("qwen2.5-7b")
    assert not is_subdomain("a..b")
    assert not is_subdomain("a.")
    assert not is_subdomain("A.b")
