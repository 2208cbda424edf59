"""The metadata of a resource, as far as FlexInfer reads it."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from flexinfer.api.base import ApiModel, refusal
from flexinfer.api.names import LABEL_RULE, is_label, is_subdomain

_LABEL_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def _check_label_key(key: str) -> str:
    prefix, slash, name = key.rpartition("/")
    if (slash and not is_subdomain(prefix)) or len(name) > 63 or not _LABEL_PART.fullmatch(name):
        raise refusal(
            "a label name: an optional DNS prefix and '/', then at most 63 of A-Z a-z 0-9 - _ ."
        )
    return key


def _check_label_value(value: str) -> str:
    if value and (len(value) > 63 or not _LABEL_PART.fullmatch(value)):
        raise refusal("a label value: at most 63 of A-Z a-z 0-9 - _ . between letters or digits")
    return value


LabelKey = Annotated[str, AfterValidator(_check_label_key)]
LabelValue = Annotated[str, AfterValidator(_check_label_value)]
Labels = dict[LabelKey, LabelValue]


def _check_namespace(name: str) -> str:
    if not is_label(name):
        raise refusal(LABEL_RULE)
    return name


class ObjectMeta(ApiModel):
    """Name, namespace, labels and annotations. What only a Kubernetes API server sets is accepted,
    so that the output of ``kubectl get -o yaml`` can be read, and means nothing here."""

    name: str = Field(description="The resource's name, unique in its namespace.")
    namespace: Annotated[str, AfterValidator(_check_namespace)] = Field(
        default="default", description="The resource's namespace."
    )
    labels: Labels = Field(default_factory=dict, description="Labels of the resource.")
    annotations: dict[str, str] = Field(
        default_factory=dict, description="Annotations of the resource."
    )

    uid: str | None = Field(default=None, description="Set by the API server.")
    resource_version: str | None = Field(default=None, description="Set by the API server.")
    generation: int | None = Field(default=None, description="Set by the API server.")
    creation_timestamp: str | None = Field(default=None, description="Set by the API server.")
    deletion_timestamp: str | None = Field(default=None, description="Set by the API server.")
    deletion_grace_period_seconds: int | None = Field(
        default=None, description="Set by the API server."
    )
    self_link: str | None = Field(default=None, description="Set by old API servers.")
    finalizers: list[str] = Field(default_factory=list, description="Set by controllers.")
    owner_references: list[dict[str, Any]] = Field(
        default_factory=list, description="Set by controllers."
    )
    managed_fields: list[dict[str, Any]] = Field(
        default_factory=list, description="Set by the API server."
    )
