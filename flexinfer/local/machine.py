"""What this machine is, as far as manifests can ask for it: its GPUs, its name, its labels."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flexinfer.api import ModelCache, ModelDeployment, Notice, resource_id
from flexinfer.engines.gpus import Inventory, count_gpus

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Computer:
    """`gpus` is what Ray is told; None where nobody knows (a cluster that was joined)."""

    gpus: int | None
    inventory: Inventory
    hostname: str
    architecture: str

    @property
    def pretended(self) -> bool:
        """Whether more GPUs were decreed than there are."""
        return self.gpus is not None and self.gpus > self.inventory.count

    @property
    def labels(self) -> Mapping[str, str]:
        """What a Kubernetes node of this kind would be labelled with."""
        labels = {
            "kubernetes.io/hostname": self.hostname,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": self.architecture,
        }
        if self.gpus:
            labels["flexinfer.ai/gpu.vendor"] = "AMD"
        return labels

    def __str__(self) -> str:
        if self.pretended:
            count = f"{self.gpus} GPU{'s' if self.gpus != 1 else ''} pretended"
            return f"{count}; found: {self.inventory}"
        if self.gpus is not None and self.gpus < self.inventory.count:
            return f"using {self.gpus} of {self.inventory}"
        return str(self.inventory)


def this_computer(num_gpus: int | None = None) -> Computer:
    """This machine, with `num_gpus` GPUs by decree or those that were counted."""
    inventory = count_gpus()
    gpus = inventory.count if num_gpus is None else num_gpus
    machine = platform.machine()
    return Computer(gpus, inventory, platform.node(), _ARCHITECTURES.get(machine, machine))


def local_notices(
    models: Sequence[ModelDeployment],
    caches: Sequence[ModelCache],
    computer: Computer,
    claims: Mapping[str, object],
) -> Iterator[Notice]:
    """Warnings that only this machine can give: labels that it does not have, claims that nobody
    said the directory of, and options that no manifest needs."""
    for model in models:
        for label, wanted in model.spec.node_selector.items():
            if (message := _mismatch(label, wanted, computer)) is not None:
                field = f"spec.nodeSelector[{label}]"
                yield Notice("NodeSelectorMismatch", message, resource_id(model), field)
    needed: set[str] = set()
    for cache in caches:
        source = cache.spec.parsed_source
        wanted_claims = {
            "spec.existingClaimName": cache.spec.existing_claim_name,
            "spec.source": source.claim if source is not None else None,
        }
        for field, claim in wanted_claims.items():
            if claim is None or claim in needed:
                continue
            needed.add(claim)
            if claim not in claims:
                message = f"say what the claim {claim} is on this machine: --claim {claim}=DIR"
                yield Notice("ClaimUnknown", message, resource_id(cache), field)
    for claim in sorted(claims.keys() - needed):
        message = f"no ModelCache uses a claim {claim}"
        yield Notice("ClaimUnused", message, "flexinfer up", "--claim")


def _mismatch(label: str, wanted: str, computer: Computer) -> str | None:
    has = computer.labels.get(label)
    if has == wanted:
        return None
    rest = "it is served here all the same"
    if has is not None:
        return f"it wants {wanted}, and this machine is {has}; {rest}"
    if label == "flexinfer.ai/gpu.vendor":
        return f"it wants a GPU of {wanted}, and this machine has none; {rest}"
    return f"it wants {wanted}, and a machine without Kubernetes has no such label; {rest}"
