"""ModelCache: weights, where they come from and where they are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from flexinfer.api.base import API_VERSION, ApiModel, Finding, refusal
from flexinfer.api.meta import Labels, ObjectMeta
from flexinfer.api.names import SUBDOMAIN_RULE, is_subdomain
from flexinfer.api.quantity import Quantity
from flexinfer.api.source import ALLOWED, Source, parse_source
from flexinfer.api.values import InnerPath, Line

StorageStrategy = Literal["SharedPVC", "NodeLocal", "Memory"]
AccessMode = Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]


def _check_source(text: str) -> str:
    try:
        parse_source(text)
    except ValueError:
        raise refusal(ALLOWED) from None
    return text


def _check_relative(path: str) -> str:
    if path.startswith("/"):
        raise refusal(
            "a relative path, below the claim or the cache's root", f"use {path.lstrip('/')}"
        )
    return path


def _check_object_name(name: str) -> str:
    if not is_subdomain(name):
        raise refusal(SUBDOMAIN_RULE)
    return name


RelativePath = Annotated[InnerPath, AfterValidator(_check_relative)]
ObjectName = Annotated[str, AfterValidator(_check_object_name)]


def _shared_by_nodes() -> list[AccessMode]:
    return ["ReadWriteMany"]


class SecretRef(ApiModel):
    """`spec.secretRef`: the Secret that holds the hub's token."""

    name: ObjectName = Field(description="The Secret's name, in the cache's namespace.")
    key: Line = Field(default="HF_TOKEN", description="The key of the token in the Secret.")


class ModelCacheSpec(ApiModel):
    """`spec` of a ModelCache."""

    source: Annotated[str, AfterValidator(_check_source)] | None = Field(
        default=None,
        description="Where the weights come from: huggingface://ORG/REPO or HF://ORG/REPO, with "
        "@REVISION and one /FILE if wanted, ollama://NAME:TAG, file:///PATH, pvc://CLAIM/PATH. "
        "Absent: they are already under existingClaimName.",
    )
    storage_strategy: StorageStrategy | None = Field(
        default=None,
        description="Where they are kept: SharedPVC (a claim), NodeLocal (disk of each node) or "
        "Memory (RAM of each node). Absent: SharedPVC with existingClaimName, else NodeLocal.",
    )
    existing_claim_name: ObjectName | None = Field(
        default=None,
        description="A claim that exists and is used as it is. Absent: SharedPVC makes one.",
    )
    model_path: RelativePath | None = Field(
        default=None,
        description="Directory below the claim or the store. Absent: the cache's name.",
    )
    storage_size: Quantity | None = Field(
        default=None,
        description="Size of a claim that is made, or the most that a node may spend. Absent: 50Gi "
        "for a claim, no limit on a node.",
    )
    node_selector: Labels = Field(
        default_factory=dict, description="Labels of the nodes that keep it. Absent: all."
    )
    revision: Line | None = Field(
        default=None, description="Branch, tag or commit of the source. Absent: main."
    )
    files: list[RelativePath] = Field(
        default_factory=list,
        description="Patterns of the files to fetch, such as `*.safetensors`. Absent: all.",
    )
    secret_ref: SecretRef | None = Field(
        default=None,
        description="Where the hub's token is. Absent: no token, or the process's own.",
    )
    storage_class_name: Line | None = Field(
        default=None, description="Storage class of a claim that is made. Absent: the default one."
    )
    access_modes: list[AccessMode] = Field(
        default_factory=_shared_by_nodes,
        description="Access modes of a claim that is made. Absent: ReadWriteMany.",
        min_length=1,
    )
    retention_priority: Annotated[int, Field(ge=0, le=100)] = Field(
        default=50, description="Who stays when a node's store is full; higher stays longer."
    )

    @classmethod
    def cross_checks(cls, given: Mapping[str, Any]) -> Iterator[Finding]:
        """Yields findings for a cache without weights, and for two revisions."""
        if "source" not in given and "existingClaimName" not in given:
            yield Finding(("source",), None, f"a source or an existingClaimName; {ALLOWED}")
        size = given.get("storageSize")
        if size in ("0", 0):
            yield Finding(("storageSize",), size, "more than zero")
        text, revision = given.get("source"), given.get("revision")
        if isinstance(text, str) and isinstance(revision, str):
            try:
                source = parse_source(text)
            except ValueError:
                return
            if source.scheme != "huggingface":
                yield Finding(("revision",), revision, "only with a huggingface:// source")
            elif source.revision not in (None, revision):
                allowed = f"the source's own revision, which is {source.revision}"
                yield Finding(("revision",), revision, allowed)

    @property
    def strategy(self) -> StorageStrategy:
        """`storageStrategy`, or its default where it is absent."""
        if self.storage_strategy is not None:
            return self.storage_strategy
        return "SharedPVC" if self.existing_claim_name else "NodeLocal"

    @property
    def parsed_source(self) -> Source | None:
        """The source in parts, with `revision` in place; None where it is absent."""
        if self.source is None:
            return None
        source = parse_source(self.source)
        if source.scheme != "huggingface" or source.revision or not self.revision:
            return source
        return Source(source.scheme, source.path, source.file, self.revision)


class ModelCache(ApiModel):
    """Weights to keep ready."""

    api_version: Literal["ai.flexinfer/v1alpha1"] = Field(
        default=API_VERSION, description="Group and version of the resource."
    )
    kind: Literal["ModelCache"] = Field(default="ModelCache", description="Kind of the resource.")
    metadata: ObjectMeta = Field(description="Name, namespace, labels.")
    spec: ModelCacheSpec = Field(description="Which weights, and where.")
    status: dict[str, Any] | None = Field(
        default=None, description="Written by the operator; ignored when read."
    )

    @classmethod
    def cross_checks(cls, given: Mapping[str, Any]) -> Iterator[Finding]:
        """Yields a finding for a name that Kubernetes refuses."""
        metadata = given.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        if isinstance(name, str) and not is_subdomain(name):
            yield Finding(("metadata", "name"), name, SUBDOMAIN_RULE)

    @property
    def name(self) -> str:
        """`metadata.name`."""
        return self.metadata.name

    @property
    def model_path(self) -> str:
        """Directory of the weights below the claim or the store."""
        return self.spec.model_path or self.metadata.name
