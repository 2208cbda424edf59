"""The `ollama` block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from flexinfer.api.base import PositiveCount
from flexinfer.api.blocks.common import EngineBlock
from flexinfer.api.quantity import Quantity
from flexinfer.api.values import Argument, Line


class OllamaBlock(EngineBlock):
    """`ollama`: settings of `ollama serve`. It takes no arguments, so there is no `extraArgs`:
    whatever has no field is an `OLLAMA_...` variable in `env`. How long a model stays loaded is
    the replica's life, so there is no keep-alive either."""

    context_length: PositiveCount | None = Field(
        default=None, description="Tokens of context. Absent: by the GPU's memory."
    )
    num_parallel: PositiveCount | None = Field(
        default=None, description="Requests at once. Absent: Ollama's 1."
    )
    flash_attention: bool | None = Field(
        default=None, description="Flash attention. Absent: Ollama decides."
    )
    kv_cache_type: Literal["f16", "q8_0", "q4_0"] | None = Field(
        default=None, description="Type of the KV cache. Absent: f16."
    )
    gpu_overhead: Quantity | None = Field(
        default=None, description="Memory of each GPU to leave free. Absent: 0."
    )
    modelfile: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Lines for the Modelfile (TEMPLATE, SYSTEM, ...) of a model that is made from "
        "a local file. FROM is written for you. Absent: none.",
    )
    parameters: dict[Line, Argument] = Field(
        default_factory=dict,
        description='PARAMETER lines of that Modelfile, values quoted: `temperature: "0.7"`.',
    )

    unknown_field_hints: ClassVar[Mapping[str, str]] = {
        "extraArgs": "use env: ollama serve takes no arguments",
        "keepAlive": "use idleTimeoutSeconds: the model stays loaded while its replica lives",
        "maxLoadedModels": "leave it out: a replica serves one model",
    }
