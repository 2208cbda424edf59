"""GPUs, cpu and memory of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from flexinfer.api.base import ApiModel, Finding
from flexinfer.api.quantity import Quantity

AMD_GPU = "amd.com/gpu"
NVIDIA_GPU = "nvidia.com/gpu"
GPU_KEYS = (AMD_GPU, NVIDIA_GPU)
RESOURCE_KEYS = (*GPU_KEYS, "cpu", "memory", "ephemeral-storage")


class Resources(ApiModel):
    """`spec.resources`. GPUs are assigned; cpu and memory advise where to place the model."""

    requests: dict[str, Quantity] = Field(
        default_factory=dict, description="What the model needs, by resource name."
    )
    limits: dict[str, Quantity] = Field(
        default_factory=dict, description="Upper bounds; for GPUs equal to the requests."
    )

    @classmethod
    def cross_checks(cls, given: Mapping[str, Any]) -> Iterator[Finding]:
        """Yields findings for unknown resources, parts of GPUs, two vendors, and requests that
        their limits do not allow."""
        sides = {
            side: given[side] if isinstance(given.get(side), Mapping) else {}
            for side in ("requests", "limits")
        }
        vendors: dict[str, tuple[str, Any]] = {}
        for side, amounts in sides.items():
            for key, found in amounts.items():
                if key not in RESOURCE_KEYS:
                    meant = _closest_resource(key)
                    yield Finding((side, key), found, f"one of {', '.join(RESOURCE_KEYS)}", meant)
                amount = _amount(found)
                if key in GPU_KEYS and amount is not None:
                    if amount != int(amount):
                        yield Finding((side, key), found, "a whole number of GPUs")
                    if amount > 0:
                        vendors.setdefault(key, (side, found))
        if len(vendors) > 1:
            side, found = vendors[NVIDIA_GPU]
            yield Finding((side, NVIDIA_GPU), found, "GPUs of one vendor for one model")
        for key in sorted(sides["requests"].keys() & sides["limits"].keys()):
            request, limit = _amount(sides["requests"][key]), _amount(sides["limits"][key])
            if request is None or limit is None:
                continue
            text = sides["limits"][key]
            if key in GPU_KEYS and request != limit:
                rule = f"the same number of GPUs as limits, which is {text}"
                yield Finding(("requests", key), sides["requests"][key], rule)
            elif request > limit:
                rule = f"at most limits, which is {text}"
                yield Finding(("requests", key), sides["requests"][key], rule)

    @property
    def gpus(self) -> int:
        """GPUs of one replica: 1 where no GPU is named, 0 where zero is named (CPU)."""
        named = [
            int(amounts[key].value)
            for amounts in (self.requests, self.limits)
            for key in GPU_KEYS
            if key in amounts
        ]
        return max(named) if named else 1

    @property
    def gpu_vendor(self) -> Literal["amd", "nvidia"] | None:
        """Whose GPUs the model asks for; None where it names none, or zero."""
        for key, vendor in ((AMD_GPU, "amd"), (NVIDIA_GPU, "nvidia")):
            for amounts in (self.requests, self.limits):
                if key in amounts and amounts[key].value > 0:
                    return "amd" if vendor == "amd" else "nvidia"
        return None


def _amount(found: Any) -> Any:
    try:
        return Quantity.read(found).value
    except ValueError:
        return None


def _closest_resource(key: Any) -> str | None:
    if isinstance(key, str) and "gpu" in key.lower():
        vendor = NVIDIA_GPU if "nvidia" in key.lower() else AMD_GPU
        return f"did you mean {vendor}?"
    return None
