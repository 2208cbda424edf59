"""The `vllm` block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from flexinfer.api.base import Finding, PositiveCount
from flexinfer.api.blocks.common import EXTRA_ARGS, GPUS_ARE_ASSIGNED, EngineBlock
from flexinfer.api.quantity import Quantity
from flexinfer.api.values import Argument, Fraction, InnerPath, Line


class VllmBlock(EngineBlock):
    """`vllm`: settings of `vllm serve`. GPU counts follow `resources`."""

    tensor_parallel_size: PositiveCount | None = Field(
        default=None, description="GPUs that share each layer. Absent: all GPUs of the model."
    )
    pipeline_parallel_size: PositiveCount | None = Field(
        default=None, description="GPUs that share the layers in turn. Absent: 1."
    )
    max_model_len: PositiveCount | None = Field(
        default=None, description="Longest sequence in tokens. Absent: the model's own."
    )
    max_num_seqs: PositiveCount | None = Field(
        default=None, description="Most sequences at once. Absent: vLLM decides."
    )
    max_num_batched_tokens: PositiveCount | None = Field(
        default=None, description="Most tokens of a step. Absent: vLLM decides."
    )
    gpu_memory_utilization: Fraction | None = Field(
        default=None,
        description='Share of the GPU memory to use, a string such as "0.9". Absent: vLLM\'s 0.92.',
    )
    kv_cache_memory_bytes: Quantity | None = Field(
        default=None,
        description="Memory of the KV cache, before gpuMemoryUtilization. Absent: what is left.",
    )
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = Field(
        default=None, description="Type of weights and activations. Absent: auto."
    )
    quantization: Line | None = Field(
        default=None, description="Method of quantization. Absent: as the model's config says."
    )
    kv_cache_dtype: Line | None = Field(
        default=None, description="Type of the KV cache, for example fp8. Absent: auto."
    )
    load_format: Line | None = Field(
        default=None, description="Format of the weights. Absent: auto."
    )
    tokenizer: Line | None = Field(
        default=None, description="Name or path of another tokenizer. Absent: the model's own."
    )
    enforce_eager: bool | None = Field(
        default=None, description="No graphs: starts faster, runs slower. Absent: false."
    )
    trust_remote_code: bool = Field(
        default=False, description="Whether code that comes with the model may run."
    )
    enable_prefix_caching: bool | None = Field(
        default=None, description="Reuse of common prefixes. Absent: vLLM decides."
    )
    enable_chunked_prefill: bool | None = Field(
        default=None, description="Prefill in pieces between decoding steps. Absent: vLLM decides."
    )
    block_size: PositiveCount | None = Field(
        default=None, description="Tokens of a KV cache block. Absent: vLLM decides."
    )
    attention_backend: Line | None = Field(
        default=None, description="Attention implementation. Absent: vLLM decides."
    )
    chat_template: InnerPath | None = Field(
        default=None, description="File with the chat template. Absent: the model's own."
    )
    tool_call_parser: Line | None = Field(
        default=None, description="Parser of tool calls, for example hermes. Absent: none."
    )
    enable_auto_tool_choice: bool | None = Field(
        default=None, description="Whether the model may choose tools. Absent: false."
    )
    reasoning_parser: Line | None = Field(
        default=None, description="Parser of reasoning, for example qwen3. Absent: none."
    )
    speculative_config: Line | None = Field(
        default=None, description="Speculative decoding, a JSON object as a string. Absent: none."
    )
    enable_lora: bool = Field(default=False, description="Whether LoRA adapters can be used.")
    lora_modules: list[Argument] = Field(
        default_factory=list, description="LoRA adapters, each `name=path`; needs enableLora."
    )
    max_lora_rank: PositiveCount | None = Field(
        default=None, description="Highest rank of an adapter. Absent: vLLM's 16."
    )
    cpu_offload_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="GiB of weights a GPU kept in RAM instead. Absent: 0."
    )
    runner: Literal["auto", "generate", "pooling", "draft"] | None = Field(
        default=None, description="What the model is for. Absent: auto."
    )
    convert: Literal["auto", "none", "embed", "classify"] | None = Field(
        default=None, description="Turns a generative model into a pooling one. Absent: auto."
    )
    extra_args: list[Argument] = Field(default_factory=list, description=EXTRA_ARGS)

    unknown_field_hints: ClassVar[Mapping[str, str]] = {
        "swapSpace": "leave it out: vLLM has no swap space any more",
        "task": "use runner (and convert)",
        "hipVisibleDevices": GPUS_ARE_ASSIGNED,
    }

    @classmethod
    def cross_checks(cls, given: Mapping[str, Any]) -> Iterator[Finding]:
        """Yields findings for settings that vLLM refuses together."""
        if given.get("loraModules") and given.get("enableLora") is not True:
            yield Finding(("loraModules",), given["loraModules"], "only with enableLora: true")
        if given.get("enableAutoToolChoice") is True and "toolCallParser" not in given:
            yield Finding(("enableAutoToolChoice",), True, "only with a toolCallParser")
