"""The `llamacpp` block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from flexinfer.api.base import Count, Finding, PositiveCount
from flexinfer.api.blocks.common import EXTRA_ARGS, GPUS_ARE_ASSIGNED, EngineBlock
from flexinfer.api.values import Argument, InnerPath, Line, PositiveFloat

OnOffAuto = Literal["on", "off", "auto"]
LayerCount = Count | Literal["all", "auto"]


class LlamaCppBlock(EngineBlock):
    """`llamacpp`: settings of `llama-server`."""

    context_size: Count | None = Field(
        default=None,
        description="Tokens of context, all slots together; 0 is the model's own. Absent: what the "
        "model has, or what fits.",
    )
    n_gpu_layers: LayerCount | None = Field(
        default=None,
        description="Layers on the GPU: a number, all, or auto. Absent: auto; none without a GPU.",
        json_schema_extra={"x-kubernetes-int-or-string": True},
    )
    batch_size: PositiveCount | None = Field(
        default=None, description="Logical batch in tokens. Absent: llama.cpp's 2048."
    )
    ubatch_size: PositiveCount | None = Field(
        default=None, description="Physical batch in tokens. Absent: llama.cpp's 512."
    )
    threads: PositiveCount | None = Field(
        default=None, description="CPU threads for generation. Absent: llama.cpp decides."
    )
    threads_batch: PositiveCount | None = Field(
        default=None, description="CPU threads for prompts. Absent: as threads."
    )
    parallel: PositiveCount | None = Field(
        default=None, description="Slots, that is requests at once. Absent: llama.cpp's 4."
    )
    kv_unified: bool | None = Field(
        default=None,
        description="Whether slots share one KV cache. Absent: only if parallel is absent too.",
    )
    flash_attention: OnOffAuto | None = Field(
        default=None, description='Flash attention; quote "on" and "off". Absent: auto.'
    )
    cache_type_k: Line | None = Field(
        default=None, description="Type of the K cache, for example q8_0. Absent: f16."
    )
    cache_type_v: Line | None = Field(
        default=None, description="Type of the V cache, for example q8_0. Absent: f16."
    )
    split_mode: Literal["none", "layer", "row", "tensor"] | None = Field(
        default=None, description="How several GPUs share the model. Absent: layer."
    )
    tensor_split: Line | None = Field(
        default=None, description='Share of each GPU, for example "3,1". Absent: by free memory.'
    )
    main_gpu: Count | None = Field(
        default=None, description="Index of the main one among the model's GPUs. Absent: 0."
    )
    n_cpu_moe: Count | None = Field(
        default=None, description="Layers whose experts stay in RAM. Absent: 0."
    )
    embeddings: bool = Field(
        default=False, description="Serve embeddings, and only these: for embedding models."
    )
    reranking: bool = Field(default=False, description="Serve reranking: for reranking models.")
    pooling: Literal["none", "mean", "cls", "last", "rank"] | None = Field(
        default=None, description="Pooling of embeddings. Absent: the model's own."
    )
    mmproj: InnerPath | None = Field(
        default=None, description="File of the multimodal projector. Absent: none."
    )
    chat_template: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="A template's name or its Jinja text. Absent: the model's own."
    )
    chat_template_file: InnerPath | None = Field(
        default=None, description="File with the chat template. Absent: the model's own."
    )
    jinja: bool | None = Field(
        default=None, description="Jinja templates, needed by tool calls. Absent: true."
    )
    rope_freq_base: PositiveFloat | None = Field(
        default=None, description="RoPE base frequency. Absent: the model's own."
    )
    rope_freq_scale: PositiveFloat | None = Field(
        default=None, description="RoPE frequency scale. Absent: the model's own."
    )
    load_mode: Literal["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"] | None = Field(
        default=None,
        description="How weights are read. Absent: none for weights in RAM and a GPU, else auto.",
    )
    reasoning_format: Literal["auto", "none", "deepseek", "deepseek-legacy"] | None = Field(
        default=None, description="Where a model's thoughts appear in answers. Absent: auto."
    )
    reasoning_budget: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        default=None, description="Tokens of thought, -1 for no limit. Absent: -1."
    )
    lora: list[InnerPath] = Field(
        default_factory=list, description="Files of LoRA adapters to apply."
    )
    draft_model: InnerPath | None = Field(
        default=None, description="File of the draft model. Absent: no speculative decoding."
    )
    draft_gpu_layers: LayerCount | None = Field(
        default=None,
        description="The draft model's layers on the GPU: a number, all, or auto. Absent: auto.",
        json_schema_extra={"x-kubernetes-int-or-string": True},
    )
    draft_max: PositiveCount | None = Field(
        default=None, description="Most tokens to draft. Absent: llama.cpp's 3."
    )
    draft_min: Count | None = Field(
        default=None, description="Fewest tokens to draft. Absent: llama.cpp's 0."
    )
    extra_args: list[Argument] = Field(default_factory=list, description=EXTRA_ARGS)

    unknown_field_hints: ClassVar[Mapping[str, str]] = {
        "device": GPUS_ARE_ASSIGNED,
        "slots": "use parallel",
        "noMmap": 'use loadMode: "none"',
        "mlock": 'use loadMode: "mlock"',
    }

    @classmethod
    def cross_checks(cls, given: Mapping[str, Any]) -> Iterator[Finding]:
        """Yields findings for settings that exclude or need each other."""
        if "chatTemplate" in given and "chatTemplateFile" in given:
            found = given["chatTemplateFile"]
            yield Finding(("chatTemplateFile",), found, "either chatTemplate or chatTemplateFile")
        if "draftModel" not in given:
            for name in ("draftGPULayers", "draftMax", "draftMin"):
                if name in given:
                    yield Finding((name,), given[name], "only with a draftModel")
        low, high = given.get("draftMin"), given.get("draftMax")
        if type(low) is int and type(high) is int and low > high:
            yield Finding(("draftMin",), low, f"at most draftMax, which is {high}")
