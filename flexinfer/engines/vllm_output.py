"""What `vllm serve` says, as reasons for a user.

One fault is told several times: by the worker that had it, by EngineCore that waits for the worker,
and by the API server that waits for EngineCore. The first is the one that helps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from flexinfer.engines.errors import ExitStatus
from flexinfer.engines.reasons import SIGNALS, Reasons

# From the most telling to the least. Each is final: vLLM tries nothing again.
_FATAL = Reasons(
    (
        (
            r"Free memory on device \S+ \((\S+)/(\S+) GiB\) on startup is less than desired GPU "
            r"memory utilization \((\S+), (\S+) GiB\)",
            r"not enough free GPU memory: \1 of \2 GiB are free, and gpuMemoryUtilization \3 wants "
            r"\4 GiB",
        ),
        (
            r"Available memory on node \d+ \((\S+)/(\S+) GiB\) on startup is less than desired CPU "
            r"memory utilization \((\S+), (\S+) GiB\)",
            r"not enough free memory: \1 of \2 GiB are free, and gpuMemoryUtilization \3 (on a CPU "
            r"a share of the RAM) wants \4 GiB",
        ),
        (
            r"Available memory on node \d+ .* on kv cache allocation is less than requested memory "
            r"for kv \(-\S+/(\S+) GiB",
            r"no memory is left for the KV cache: the model and vLLM itself take more than the "
            r"\1 GiB that gpuMemoryUtilization gives",
        ),
        (
            r"Available memory on node \d+ \((\S+)/(\S+) GiB\) on kv cache allocation is less than "
            r"requested memory for kv \(([^)/ ]+)",
            r"not enough free memory for the KV cache: \1 of \2 GiB are free, and \3 GiB are "
            r"wanted; kvCacheMemoryBytes or the variable VLLM_CPU_KVCACHE_SPACE (GiB) sets less",
        ),
        (
            r"max seq len \((\d+)\), \(?(\S+) GiB KV cache is needed, which is larger than the "
            r"available KV cache memory \((\S+) GiB\)\.(?: Based on the available memory, the "
            r"estimated maximum model length is (\d+))",
            r"the KV cache is too small: one sequence of \1 tokens needs \2 GiB, and there are "
            r"\3 GiB; maxModelLen \4 would fit",
        ),
        (
            r"max seq len \((\d+)\), \(?(\S+) GiB KV cache is needed, which is larger than the "
            r"available KV cache memory \((\S+) GiB\)",
            r"the KV cache is too small: one sequence of \1 tokens needs \2 GiB, and there are "
            r"\3 GiB; a smaller maxModelLen or more memory (gpuMemoryUtilization) may fit",
        ),
        (
            r"max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored "
            r"in KV cache \((\d+)\)",
            r"the KV cache is too small: one sequence has \1 tokens, and there is room for \2; "
            r"maxModelLen \2 would fit",
        ),
        (
            r"No available memory for the cache blocks",
            "no memory is left for the KV cache once the weights are loaded: raise "
            "gpuMemoryUtilization, or take a smaller or quantized model",
        ),
        (
            r"\b(?:HIP|CUDA) out of memory\. Tried to allocate ([\d.]+ \w+)(?:.*? of which ([\d.]+ "
            r"\w+) is free)?",
            r"not enough GPU memory: \1 more were wanted; lower maxModelLen, maxNumSeqs or "
            r"gpuMemoryUtilization",
        ),
        (
            r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len "
            r"\(\w+=(\d+)",
            r"maxModelLen \1 is more than the model's own \2",
        ),
        (
            r"max_num_batched_tokens \((\d+)\) is smaller than max_model_len \((\d+)\)",
            r"maxNumBatchedTokens \1 is less than the longest sequence (\2) without "
            r"enableChunkedPrefill",
        ),
        (
            r"Model architectures \[(.+?)\] are not supported for now",
            r"this vLLM does not know the architecture \1",
        ),
        (
            r"Model architectures? \[?(.+?)\]? (?:failed to be inspected|has no vLLM "
            r"implementation)",
            r"this vLLM cannot use the architecture \1",
        ),
        (
            r"model type `(.+?)` but Transformers does not recognize this architecture",
            r"this vLLM's Transformers does not know the model type \1",
        ),
        (r"Cannot find any model weights with [`'\"](.+?)[`'\"]", r"there are no weights in \1"),
        (
            r"Invalid repository ID or local directory specified: ?'?([^'\n]*)",
            r"\1 is no model that vLLM can read: config.json is missing or broken",
        ),
        (r"config file at '(.+?)' is not a valid JSON file", r"\1 is not valid JSON"),
        (
            r"Couldn't instantiate the backend tokenizer|Can't load tokenizer for '(?:.+?)'",
            "the tokenizer cannot be loaded: tokenizer.json is missing or broken",
        ),
        (
            r"(?:SafetensorError: Error while deserializing header|SafetensorError): (.+)",
            r"the weights are damaged: \1",
        ),
        (
            r"Failed to load the (?:model config|tokenizer)\. If the \w+ is a custom|"
            r"contains custom code which must be executed|requires you to execute the \w+ file",
            "the model comes with code of its own: trustRemoteCode: true lets it run",
        ),
        (
            r"attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)",
            r"the model's \1 attention heads cannot be divided among tensorParallelSize \2",
        ),
        (
            r"World size \((\d+)\) is larger than the number of available GPUs \((\d+)\)",
            r"it wants \1 GPUs and sees \2",
        ),
        (
            r"Quantization method specified in the model config \((.+?)\) does not match the "
            r"quantization method specified in the `quantization` argument \((.+?)\)",
            r"quantization \2 does not match the model's own \1",
        ),
        (
            r"Unknown quantization method: (\S+?)\. ",
            r"this vLLM does not know quantization \1",
        ),
        (r"(\S+) quantization is currently not supported in (\S+?)\.", r"no \1 quantization on \2"),
        (r"invalid tool call parser: (\S+)", r"this vLLM does not know toolCallParser \1"),
        (
            r"(?:invalid reasoning parser: (?=\S)|Reasoning parser ')([^' ]+)(?:' not found)?",
            r"this vLLM does not know reasoningParser \1",
        ),
        (
            r"Failed to infer device type|No (?:HIP|CUDA) GPUs are available",
            "vLLM finds no GPU: it is a build for another kind of GPU, or the driver is missing",
        ),
        (
            r"HIP_VISIBLE_DEVICES='(.*?)' vs CUDA_VISIBLE_DEVICES='(.*?)'",
            r"two masks that differ: HIP_VISIBLE_DEVICES=\1 and CUDA_VISIBLE_DEVICES=\2",
        ),
        (r"VLLM_PORT '(.+?)' (?:appears|must)", r"the variable VLLM_PORT is no port: \1"),
        (r"Memory access fault by GPU (.+)", r"a memory access fault on the GPU: \1"),
        (
            r"\[Errno 98\].*(?:[Aa]ddress already in use|while attempting to bind)",
            "its port is taken by another program",
        ),
        (r"error: unrecognized arguments: (.+)", r"this vLLM does not know the arguments \1"),
        (r"error: (argument \S+: .+)", r"the command line: \1"),
        (r"error: (ambiguous option: .+)", r"the command line: \1"),
        (r"^Fatal Python error: (.+)", r"it crashed in compiled code: \1"),
        (r"WorkerProc initialization failed", "a worker did not start"),
        (
            r"EngineCore failed to start|Engine core initialization failed",
            "EngineCore did not start",
        ),
    ),
    vague=2,
)
_READY = re.compile(r"Application startup complete|Starting vLLM server on")
_PORT_TAKEN = re.compile(r"\[Errno 98\].*[Aa]ddress already in use")
_PREFIX = re.compile(r"^(?:\(\w[^)]*\) )*(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]+\] ?)?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*(\w*(?:Error|Exception|Fault)): (.+)")
_VALIDATION = re.compile(r"^\s+Value error, (.+?)(?: \[type=.*)?$")
# Words of processes that only pass on what another one said.
_PASSED_ON = re.compile(
    r"EngineDeadError|EngineCore encountered an issue|See root cause above|validation error"
)
_CORE_DIED = re.compile(
    r"Engine core proc \S+ died unexpectedly|EngineCore encountered a(?:n issue| fatal error)"
)
_WORKER_DIED = re.compile(r"Worker proc (\S+) died unexpectedly")


def fatal_reason(line: str) -> str | None:
    """Return the reason if a line says that the start has failed, else None."""
    return _FATAL.of(line)


def says_ready(line: str) -> bool:
    """Whether a line says that it listens, or will in a moment."""
    return _READY.search(line) is not None


def says_port_taken(lines: Sequence[str]) -> bool:
    """Whether it could not bind its port."""
    return any(_PORT_TAKEN.search(line) for line in lines)


def explain(status: ExitStatus, lines: Sequence[str]) -> str:
    """Return in one line why it ended, or, with an empty `status`, why it never will be ready."""
    if reason := _FATAL.best(lines, telling=True):
        return reason
    if status.signal is not None and status.signal in SIGNALS:
        return f"vllm {SIGNALS[status.signal]}"
    said = _first_exception(lines)
    for line in lines:
        if match := _WORKER_DIED.search(line):
            return f"the worker {match[1]} ended{f': {said}' if said else ' without a word'}"
    if any(_CORE_DIED.search(line) for line in lines):
        return f"EngineCore ended{f': {said}' if said else ' without a word'}"
    if said:
        return f"vllm failed: {said}"
    return _FATAL.best(lines) or f"vllm ended: {status}"


def _first_exception(lines: Sequence[str]) -> str | None:
    """Return the exception that the others follow from."""
    for line in lines:
        text = line[_PREFIX.match(line).end() :]  # type: ignore[union-attr]
        if match := _VALIDATION.match(text):
            return match[1]
        match = _EXCEPTION.match(text)
        if match and not _PASSED_ON.search(text):
            return f"{match[1]}: {match[2]}"
    return None
