"""What the fields of a ModelCache mean, and which values they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from flexinfer.api import ModelCache, ModelCacheSpec, Source


def cache(name: str = "c", **fields: Any) -> ModelCache:
    given = {"source": "HF://org/repo", **fields}
    return ModelCache.model_validate({"metadata": {"name": name}, "spec": given})


def test_defaults() -> None:
    plain = cache().spec
    assert plain.retention_priority == 50
    assert plain.access_modes == ["ReadWriteMany"]
    assert plain.files == []
    assert plain.secret_ref is None
    assert plain.storage_size is None
    assert plain.strategy == "NodeLocal"


def test_an_existing_claim_is_shared_unless_said_otherwise() -> None:
    assert cache(existingClaimName="nfs").spec.strategy == "SharedPVC"
    assert cache(existingClaimName="nfs", storageStrategy="Memory").spec.strategy == "Memory"


def test_the_path_is_the_name_where_absent() -> None:
    assert cache("qwen").model_path == "qwen"
    assert cache("qwen", modelPath="a/b").model_path == "a/b"


def test_the_revision_joins_the_source() -> None:
    expected = Source("huggingface", "org/repo", revision="v1")
    assert cache(revision="v1").spec.parsed_source == expected
    assert cache(source="HF://org/repo@v1").spec.parsed_source == expected
    assert cache(source="HF://org/repo@v1", revision="v1").spec.parsed_source == expected
    assert cache(source=None, existingClaimName="nfs").spec.parsed_source is None


def test_a_token_has_a_default_key() -> None:
    read = ModelCacheSpec.model_validate({"source": "HF://a/b", "secretRef": {"name": "hub"}})
    assert read.secret_ref is not None
    assert read.secret_ref.key == "HF_TOKEN"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", "s3://bucket"),
        ("source", None),
        ("storageStrategy", "memory"),
        ("existingClaimName", "Not_A_Name"),
        ("modelPath", "/absolute"),
        ("modelPath", "a/../../b"),
        ("modelPath", ".."),
        ("modelPath", ""),
        ("storageSize", "20GB"),
        ("storageSize", "0"),
        ("storageSize", "-1Gi"),
        ("nodeSelector", {"a": 1}),
        ("files", "*.gguf"),
        ("files", ["/etc/passwd"]),
        ("files", ["../*"]),
        ("secretRef", "hub"),
        ("secretRef", {"key": "HF_TOKEN"}),
        ("accessModes", []),
        ("accessModes", ["ReadWrite"]),
        ("retentionPriority", 101),
        ("retentionPriority", -1),
        ("revison", "main"),
    ],
)
def test_refused_values(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        cache(**{field: value})
    assert {line["loc"][:2] for line in caught.value.errors()} == {("spec", field)}


@pytest.mark.parametrize(
    "fields",
    [
        {"source": "HF://org/repo@v1", "revision": "v2"},
        {"source": "ollama://llama3", "revision": "v2"},
    ],
)
def test_revisions_that_contradict_the_source(fields: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="allowed:"):
        cache(**fields)


def test_names_may_have_dots_but_no_capitals() -> None:
    assert cache("qwen2.5-7b").name == "qwen2.5-7b"
    with pytest.raises(ValidationError):
        cache("Qwen")
