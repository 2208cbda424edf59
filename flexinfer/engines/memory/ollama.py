"""The memory of Ollama, whose runner is llama.cpp: the same formulas with Ollama's settings.

From Ollama 0.17 (`server/routes.go`, `llm/server.go`) and its successors: the context of every
request is reserved (`num_ctx` times `num_parallel`), never more than the model was trained for;
absent, it follows the GPUs' memory together. A quantised cache needs flash attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flexinfer.api.blocks import OllamaBlock
from flexinfer.engines.errors import EngineConfigError
from flexinfer.engines.memory.common import RUNTIME_BYTES, fields_of, knob, token_step, with_block
from flexinfer.engines.memory.llamacpp import Loaded, Run, load, share_out, slack_of, token_bytes
from flexinfer.engines.memory.types import Knob, MemoryPlan, MemoryPlanError, Share
from flexinfer.engines.memory.untrusted import regular_file
from flexinfer.engines.spec import EngineSpec

_BATCH = 512
_CONTEXTS = ((47 << 30, 262144), (23 << 30, 32768))  # from so many bytes on; else 4096
_LEAST = 4096
_VARIABLES = {"OLLAMA_CONTEXT_LENGTH": "context_length", "OLLAMA_NUM_PARALLEL": "num_parallel"}
_KNOBS = {"context_length": "contextLength", "num_parallel": "numParallel"}
_NO = frozenset(("0", "f", "false", "F", "FALSE", "False"))


def plan(spec: EngineSpec, weights: Path, vram_bytes: int | None) -> MemoryPlan:
    """Plan an ollama model; see `plan_memory`. `weights` is a GGUF, or the manifest of a model in
    Ollama's own store."""
    block = spec.block
    if not isinstance(block, OllamaBlock):
        raise MemoryPlanError(f"{spec.name}: the settings are not those of ollama")
    return _plan(
        spec, _in_force(spec, block), load(_blob(weights)), vram_bytes, _fields(spec, block)
    )


def default_context(vram_bytes: int | None, gpus: int) -> int:
    """The context of a request where nobody says one, by the memory of all GPUs together."""
    total = (vram_bytes or 0) * gpus
    return next((context for least, context in _CONTEXTS if total >= least), _LEAST)


def _blob(weights: Path) -> Path:
    with regular_file(weights) as (file, _):
        if file.read(4) == b"GGUF":
            return weights
    from flexinfer.engines.ollama_store import model_blob

    try:
        return model_blob(weights)
    except EngineConfigError as error:
        raise MemoryPlanError(str(error)) from None


def _in_force(spec: EngineSpec, block: OllamaBlock) -> OllamaBlock:
    """`block` with what variables and Modelfile parameters say; parameters win in Ollama."""
    changes: dict[str, object] = {}
    for variable, name in _VARIABLES.items():
        if variable in spec.env:
            changes[name] = _number(spec.env[variable], variable)
    if "OLLAMA_KV_CACHE_TYPE" in spec.env:
        changes["kv_cache_type"] = spec.env["OLLAMA_KV_CACHE_TYPE"].lower()
    if "OLLAMA_FLASH_ATTENTION" in spec.env:
        changes["flash_attention"] = spec.env["OLLAMA_FLASH_ATTENTION"] not in _NO
    if "num_ctx" in block.parameters:
        changes["context_length"] = _number(block.parameters["num_ctx"], "parameter num_ctx")
    return block.model_copy(update=changes)


def _fields(spec: EngineSpec, block: OllamaBlock) -> dict[str, str]:
    """Where the settings are to be changed: where they are said last."""
    said: dict[str, str] = {}
    for variable, name in _VARIABLES.items():
        if variable in spec.env:
            said[name] = f"spec.ollama.env.{variable}"
    if "num_ctx" in block.parameters:
        said["context_length"] = "spec.ollama.parameters.num_ctx"
    return fields_of("spec.ollama", _KNOBS, said)


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 12 and int(text) > 0):
        raise MemoryPlanError(f"{name} {text[:40]} is no number of tokens or requests")
    return int(text)


def _plan(
    spec: EngineSpec,
    block: OllamaBlock,
    model: Loaded,
    vram_bytes: int | None,
    fields: Mapping[str, str],
) -> MemoryPlan:
    parallel = block.num_parallel or 1
    context = block.context_length or default_context(vram_bytes, spec.gpus)
    context = min(context, model.shape.trained)
    quantized = block.flash_attention is not False
    cache = (block.kv_cache_type or "f16") if quantized else "f16"
    layers = block.parameters.get("num_gpu")
    gpus = max(1, spec.gpus)
    run = Run(
        context=context * parallel,
        sequences=parallel,
        streams=parallel,
        ubatch=min(_BATCH, context),
        rows=min(_BATCH, context),
        flash=block.flash_attention is not False,
        type_k=cache,
        type_v=cache,
        gpu_layers=_number(layers, "parameter num_gpu") if layers else None,
        split_mode="layer",
        split=(1.0 / gpus,) * gpus,
        main=0,
        cpu_moe=0,
    )
    overhead = int(block.gpu_overhead.value) if block.gpu_overhead is not None else 0
    shares = tuple(
        Share(share.weights, share.kv, share.buffers + RUNTIME_BYTES + overhead)
        if spec.gpus
        else share
        for share in share_out(model, run, gpus=spec.gpus)
    )
    notes = ["compute buffers are an estimate", "Ollama keeps in RAM what does not fit"]
    if block.context_length is None:
        notes.append(f"a context of {context} tokens is Ollama's choice for these GPUs")
    return MemoryPlan(
        backend=spec.backend,
        gpus=spec.gpus,
        per_gpu=shares,
        context_tokens=context,
        cache_tokens=run.cells * run.streams,
        sequences=parallel,
        kv_bytes_per_token=token_bytes(model.shape, run),
        slack_bytes=max(0, slack_of(shares) - overhead // 2),
        notes=tuple(notes),
        knobs=_knobs(spec, block, model, vram_bytes, context, parallel, fields),
    )


def _knobs(
    spec: EngineSpec,
    block: OllamaBlock,
    model: Loaded,
    vram_bytes: int | None,
    context: int,
    parallel: int,
    fields: Mapping[str, str],
) -> tuple[Knob, ...]:
    def replan(changes: dict[str, object]) -> MemoryPlan:
        changed = block.model_copy(update=changes)
        return _plan(with_block(spec, changed), changed, model, vram_bytes, fields)

    found = [
        knob(
            fields["context_length"],
            context,
            lambda value: replan({"context_length": value}),
            low=512,
            step=token_step(context),
        ),
        knob(
            fields["num_parallel"],
            parallel,
            lambda value: replan({"num_parallel": value}),
            low=1,
        ),
    ]
    return tuple(each for each in found if each is not None)
