"""Names of resources: what Kubernetes and the Serve applications allow, and what to propose."""

from __future__ import annotations

import re

#: A ModelDeployment's name becomes a Service's, and Ray and KubeRay add to it.
LONGEST_MODEL_NAME = 50

#: Applications and Services that FlexInfer or the cluster itself owns.
RESERVED = frozenset(
    {
        "flexinfer",
        "flexinfer-agent",
        "flexinfer-gateway",
        "flexinfer-keeper",
        "flexinfer-operator",
        "kubernetes",
    }
)

MODEL_NAME_RULE = (
    f"at most {LONGEST_MODEL_NAME} of a-z, 0-9 and '-', from a letter to a letter or digit"
)
LABEL_RULE = "at most 63 of a-z, 0-9 and '-', from a letter or digit to a letter or digit"
SUBDOMAIN_RULE = "at most 253 of a-z, 0-9, '-' and '.', each part from and to a letter or digit"

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def is_model_name(name: str) -> bool:
    """Whether `name` is a DNS-1035 label of at most 50 characters. Says nothing of reservation."""
    return len(name) <= LONGEST_MODEL_NAME and bool(_DNS_1035.fullmatch(name))


def is_label(name: str) -> bool:
    """Whether `name` is a DNS-1123 label, as a namespace's name must be."""
    return len(name) <= 63 and bool(_DNS_1123.fullmatch(name))


def is_subdomain(name: str) -> bool:
    """Whether `name` is a DNS-1123 subdomain, as most Kubernetes names must be."""
    return len(name) <= 253 and all(_DNS_1123.fullmatch(part) for part in name.split("."))


def legal_name(name: str) -> str:
    """A legal ModelDeployment name close to `name`: ``Qwen2.5_7B`` gives ``qwen2-5-7b``."""
    parts = re.findall(r"[a-z0-9]+", name.lower())
    legal = "-".join(parts)
    if not legal[:1].isalpha() or legal in RESERVED:
        legal = f"model-{legal}" if legal else "model"
    return legal[:LONGEST_MODEL_NAME].rstrip("-")
