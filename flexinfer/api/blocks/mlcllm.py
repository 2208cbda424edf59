"""The `mlcllm` block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from flexinfer.api.base import ApiModel, Count, Finding, PositiveCount
from flexinfer.api.blocks.common import EXTRA_ARGS, GPUS_ARE_ASSIGNED, EngineBlock
from flexinfer.api.values import Argument, Fraction, InnerPath, Line


class MlcOverrides(ApiModel):
    """`mlcllm.overrides`: MLC's own `--overrides`, absent values as `mode` infers them."""

    max_num_sequence: PositiveCount | None = Field(
        default=None, description="Most requests at once. Absent: as the mode says."
    )
    max_total_seq_length: PositiveCount | None = Field(
        default=None,
        description="Tokens in the KV cache, all sequences together. Absent: as the mode says.",
    )
    prefill_chunk_size: PositiveCount | None = Field(
        default=None, description="Tokens of a prefill step. Absent: as the model was compiled."
    )
    gpu_memory_utilization: Fraction | None = Field(
        default=None,
        description='Share of the GPU memory to use, a string such as "0.85". '
        "Absent: MLC's 0.85, or what gpuMemoryBytes comes to.",
    )
    context_window_size: PositiveCount | None = Field(
        default=None, description="Longest sequence in tokens. Absent: as the model was compiled."
    )
    sliding_window_size: PositiveCount | None = Field(
        default=None, description="Sliding attention window. Absent: as the model was compiled."
    )
    attention_sink_size: Count | None = Field(
        default=None,
        description="Tokens kept before the window. Absent: as the model was compiled.",
    )
    tensor_parallel_shards: PositiveCount | None = Field(
        default=None,
        description="GPUs that share each layer. Absent, or with modelLibPath: as compiled.",
    )
    pipeline_parallel_stages: PositiveCount | None = Field(
        default=None,
        description="GPUs that share the layers in turn. Absent, or with modelLibPath: compiled.",
    )
    spec_draft_length: Count | None = Field(
        default=None, description="Tokens drafted at a time. Absent: MLC decides."
    )
    raw: Line | None = Field(
        default=None,
        description="Overrides without a field of their own, as MLC writes them: `key=value;...`. "
        "Added last. Absent: none.",
    )


class MlcLlmBlock(EngineBlock):
    """`mlcllm`: settings of `mlc_llm serve`."""

    mode: Literal["local", "interactive", "server"] = Field(
        default="local",
        description="How MLC sizes batch and KV cache: local (4 requests, 8k tokens), interactive "
        "(1 request, full context), server (as much as fits).",
    )
    model_lib_path: InnerPath | None = Field(
        default=None,
        description="The compiled model library. A path under /models is looked for below the "
        "model's claim, then below its weights. Absent: compiled at the first start.",
    )
    gpu_memory_bytes: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = Field(
        default=None,
        description="GPU memory to use, in bytes; passed on as a share of the GPU's memory. "
        "overrides.gpuMemoryUtilization goes before it. Absent: as that says.",
    )
    jit_policy: Literal["ON", "OFF", "REDO", "READONLY"] | None = Field(
        default=None,
        description="Whether MLC may compile when modelLibPath is absent. Absent: MLC's ON.",
    )
    overrides: MlcOverrides = Field(
        default_factory=MlcOverrides, description="Values instead of what the mode infers."
    )
    speculative_mode: Literal["disable", "small_draft", "eagle", "medusa"] | None = Field(
        default=None, description="Speculative decoding. Absent: disable."
    )
    additional_models: list[Argument] = Field(
        default_factory=list,
        description="Draft models for speculative decoding, each `path` or `path,library`.",
    )
    prefix_cache_mode: Literal["disable", "radix"] | None = Field(
        default=None, description="Reuse of common prefixes. Absent: radix."
    )
    prefill_mode: Literal["hybrid", "chunked"] | None = Field(
        default=None, description="How prefill and decoding are mixed. Absent: hybrid."
    )
    embedding_model: InnerPath | None = Field(
        default=None, description="A second model that answers /v1/embeddings. Absent: none."
    )
    embedding_model_lib: InnerPath | None = Field(
        default=None,
        description="The compiled library of embeddingModel, which needs one. Absent: none.",
    )
    extra_args: list[Argument] = Field(default_factory=list, description=EXTRA_ARGS)

    unknown_field_hints: ClassVar[Mapping[str, str]] = {"device": GPUS_ARE_ASSIGNED}

    @classmethod
    def cross_checks(cls, given: Mapping[str, Any]) -> Iterator[Finding]:
        """Yields findings for an embedding model without its library, or the reverse."""
        pair = {"embeddingModel", "embeddingModelLib"}
        if len(pair & given.keys()) == 1:
            (there,) = pair & given.keys()
            (other,) = pair - given.keys()
            yield Finding((there,), given[there], f"{there} together with {other}")
