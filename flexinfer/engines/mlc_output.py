"""What `mlc_llm serve` says, as reasons for a user.

A load that fails does not end the process: the thread that loads dies with a traceback, and the
main thread waits for it for ever. So its lines are all there is to go by.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from flexinfer.engines.errors import EngineConfigError, ExitStatus
from flexinfer.engines.mlc_weights import INDEX, OLD_INDEX, read_weights
from flexinfer.engines.reasons import SIGNALS, Reasons


def _cannot_open(match: re.Match[str]) -> str:
    path = Path(match[1])
    if path.name != INDEX:
        return f"cannot open {path}"
    hint = f"; {OLD_INDEX} is its old name" if path.with_name(OLD_INDEX).is_file() else ""
    return f"cannot open {path}: this version of MLC reads the weights by it{hint}"


# From the most telling to the least. Each is final, whether the process then ends or hangs.
_FATAL = Reasons(
    (
        (
            r"Insufficient GPU memory error: The available single GPU memory is (\S+) MB, which is "
            r"less than the sum of model weight size \((\S+) MB\) and temporary buffer size "
            r"\((\S+) MB\)",
            r"not enough GPU memory: MLC may use \1 MB, the weights take \2 MB and the buffers "
            r"\3 MB; overrides.gpuMemoryUtilization raises the first",
        ),
        (r"Insufficient GPU memory error: (.+)", r"not enough GPU memory: \1"),
        (
            # The whole call is quoted: `hipMalloc(&ret, nbytes) failed with error: ..`
            r"\b(hip\w+)\b.*? failed with error: out of memory",
            r"not enough GPU memory (\1): lower overrides.maxTotalSeqLength or maxNumSequence",
        ),
        (
            r"loading parameters from (\S+?): .*corrupted parameter shard",
            r"the weights are damaged: \1 does not have the size that the index says",
        ),
        (
            r"corrupted parameter shard",
            "the weights are damaged: a file does not have the size that the index says",
        ),
        (r"Check failed: .*Cannot open (\S+)", _cannot_open),
        (
            r"\bhipModuleLoadData\b.*? failed with error: (.+)",
            r"the model library was compiled for another GPU (\1)",
        ),
        (r"\bCUDA: out of memory", "not enough GPU memory: lower overrides.maxTotalSeqLength"),
        (r"hipErrorNoBinaryForGpu", "the build of MLC has no code for this GPU"),
        (
            r"JIT is disabled by MLC_JIT_POLICY=OFF",
            'there is no modelLibPath, and jitPolicy "OFF" forbids to compile one',
        ),
        (
            r"JIT is disabled by MLC_JIT_POLICY=READONLY",
            "there is no modelLibPath and no library in the compile cache, and jitPolicy "
            '"READONLY" forbids to compile one',
        ),
        (
            r"The `model_lib` you passed in is not a file: (.+?)\.?$",
            r"the model library \1 is not a file",
        ),
        (r"Cannot find model (.+), directory does not exist", r"there is no directory \1"),
        (r"Cannot find (.+) in the model directory provided", r"the model has no \1"),
        (
            r"Device is not found on your local environment: (\S+)",
            r"MLC finds no device \1: it is a build for another kind of GPU, or the driver is "
            r"missing",
        ),
        (r"(Invalid MLC_JIT_POLICY.+)", r"\1"),
        (
            r"error while attempting to bind on address \('(\S+)', (\d+)\)",
            r"port \2 of \1 is taken by another program",
        ),
        (r"Memory access fault by GPU (.+)", r"a memory access fault on the GPU: \1"),
        (
            r"Cannot find compilation output, compilation failed",
            "MLC could not compile the model; its compiler's output is in the log",
        ),
        (
            r"TVM FFI encountered a Segfault",
            "it crashed inside TVM (SIGSEGV)",
        ),
        (
            r"^Exception in thread Thread-\d+",
            "the thread that loads the model ended with an error",
        ),
    ),
    vague=2,
)
_READY = re.compile(r"Uvicorn running on|Application startup complete")
_PORT_TAKEN = re.compile(r"error while attempting to bind on address")
_UNKNOWN_ARGUMENTS = re.compile(r"\bunrecognized arguments: (.+)")
_BAD_ARGUMENT = re.compile(
    r"^(?:.* error: )?(?:argument (\S+): |ambiguous option: |the following )"
)
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Fault|Interrupt)): (.+)")
_ESTIMATE = "Estimated total single GPU memory usage"


def fatal_reason(line: str) -> str | None:
    """Return the reason if a line says that the start has failed, else None."""
    return _FATAL.of(line)


def says_ready(line: str) -> bool:
    """Whether a line says that it listens."""
    return _READY.search(line) is not None


def says_port_taken(lines: Sequence[str]) -> bool:
    """Whether it could not listen on its port."""
    return any(_PORT_TAKEN.search(line) for line in lines)


def explain(argv: Sequence[str], model: Path, status: ExitStatus, lines: Sequence[str]) -> str:
    """Return in one line why it ended, or, with an empty `status`, why it never will be ready.

    `argv` is its command line, `model` the directory of its weights.
    """
    if status.code == 2 and (reason := _usage(argv, lines)):
        return reason
    if reason := _FATAL.best(lines, telling=True):
        return reason
    number = status.signal
    if number is None and status.code is not None and status.code > 128:
        number = status.code - 128  # as a shell around it says it
    crashed = number == signal.SIGSEGV or any("Segfault" in line for line in lines)
    if not crashed and (said := _last_exception(lines)):
        return f"mlc_llm failed: {said}"
    if crashed:
        return f"mlc_llm crashed (SIGSEGV){_crash_hint(model, lines)}"
    if number is not None and number in SIGNALS:
        return f"mlc_llm {SIGNALS[number]}"
    return _FATAL.best(lines) or f"mlc_llm ended: {status}"


def _usage(argv: Sequence[str], lines: Sequence[str]) -> str | None:
    for line in reversed(lines):
        if match := _UNKNOWN_ARGUMENTS.search(line):
            word = match[1].split()[0]
            if word in argv:
                return f"this mlc_llm does not know the argument {match[1]}"
            # MLC reads overrides as a command line of their own.
            return f"overrides: this mlc_llm does not know {word.lstrip('-')}"
        if match := _BAD_ARGUMENT.match(line):
            said = line.rpartition(" error: ")[2]
            if match[1] and not any(word.partition("=")[0] == match[1] for word in argv):
                return f"overrides: {said.removeprefix('argument --')}"
            return f"the command line: {said}"
    return None


def _last_exception(lines: Sequence[str]) -> str | None:
    found = [f"{m[1]}: {m[2]}" for line in lines if (m := _EXCEPTION.match(line))]
    return found[-1] if found else None


def _crash_hint(model: Path, lines: Sequence[str]) -> str:
    try:
        quantization = read_weights(model).quantization
    except EngineConfigError:
        quantization = ""
    if re.search(r"qwen3", model.name, re.IGNORECASE) and "q4f16" in quantization:
        return (
            ": Qwen3 with q4f16 weights has crashed like this on ROCm; weights in q4f32_1 are the "
            "known way round it"
        )
    if any(_ESTIMATE in line for line in lines):
        # An allocation that fails on ROCm has been seen to end so, not in a clean error.
        return (
            " while it allocated its buffers, perhaps for want of GPU memory: lower "
            "overrides.maxTotalSeqLength or maxNumSequence"
        )
    return ""
