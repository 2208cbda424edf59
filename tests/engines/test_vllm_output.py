"""What vLLM says when it fails, as 0.32 and 0.33 write it, and what a user reads of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from flexinfer.engines import vllm_output
from flexinfer.engines.errors import ExitStatus
from flexinfer.engines.spec import LaunchPlan
from flexinfer.engines.vllm import Vllm

CORE = "(EngineCore pid=348) ERROR 11-30 07:07:32 [core.py:1512] "
WORKER = "(Worker pid=441) ERROR 11-30 07:07:32 [multiproc_executor.py:953] "
SERVER = "(APIServer pid=12) ERROR 11-30 07:07:32 [async_llm.py:906] "


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "ValueError: Free memory on device cuda:0 (11.53/23.98 GiB) on startup is less than "
            "desired GPU memory utilization (0.92, 22.06 GiB). Decrease GPU memory utilization or "
            "reduce GPU memory used by other processes.",
            "not enough free GPU memory: 11.53 of 23.98 GiB are free, and gpuMemoryUtilization "
            "0.92 wants 22.06 GiB",
        ),
        (
            "ValueError: Available memory on node 0 (10.84/12.84 GiB) on startup is less than "
            "desired CPU memory utilization (0.99, 12.71 GiB). On the CPU backend, ..",
            "not enough free memory: 10.84 of 12.84 GiB are free, and gpuMemoryUtilization 0.99 "
            "(on a CPU a share of the RAM) wants 12.71 GiB",
        ),
        (
            "ValueError: Available memory on node 0 (10.91/12.84 GiB) on kv cache allocation is "
            "less than requested memory for kv (100.0 GiB). Decrease --kv-cache-memory-bytes, ..",
            "not enough free memory for the KV cache: 10.91 of 12.84 GiB are free, and 100.0 GiB "
            "are wanted; kvCacheMemoryBytes or the variable VLLM_CPU_KVCACHE_SPACE (GiB) sets less",
        ),
        (
            "ValueError: Available memory on node 0 (10.85/12.84 GiB) on kv cache allocation is "
            "less than requested memory for kv (-0.75/0.13 GiB). Reduce CPU memory used by ..",
            "no memory is left for the KV cache: the model and vLLM itself take more than the "
            "0.13 GiB that gpuMemoryUtilization gives",
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing ..",
            "no memory is left for the KV cache once the weights are loaded: raise "
            "gpuMemoryUtilization, or take a smaller or quantized model",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (40960), "
            "(5.62 GiB KV cache is needed, which is larger than the available KV cache memory "
            "(3.1 GiB). Based on the available memory, the estimated maximum model length is "
            "22576. Try increasing `gpu_memory_utilization` ..",
            "the KV cache is too small: one sequence of 40960 tokens needs 5.62 GiB, and there are "
            "3.1 GiB; maxModelLen 22576 would fit",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (40960), "
            "5.62 GiB KV cache is needed, which is larger than the available KV cache memory "
            "(0.01 GiB). Try increasing ..",
            "the KV cache is too small: one sequence of 40960 tokens needs 5.62 GiB, and there are "
            "0.01 GiB; a smaller maxModelLen or more memory (gpuMemoryUtilization) may fit",
        ),
        (
            "ValueError: The model's max seq len (32768) is larger than the maximum number of "
            "tokens that can be stored in KV cache (8192). Try ..",
            "the KV cache is too small: one sequence has 32768 tokens, and there is room for 8192; "
            "maxModelLen 8192 would fit",
        ),
        (
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.16 GiB. GPU 0 has a "
            "total capacity of 23.98 GiB of which 402.00 MiB is free. Of the allocated ..",
            "not enough GPU memory: 1.16 GiB more were wanted; lower maxModelLen, maxNumSeqs or "
            "gpuMemoryUtilization",
        ),
        (
            "  Value error, User-specified max_model_len (100000) is greater than the derived "
            "max_model_len (max_position_embeddings=2048 or model_max_length=None in ..",
            "maxModelLen 100000 is more than the model's own 2048",
        ),
        (
            "  Value error, max_num_batched_tokens (512) is smaller than max_model_len (2048). ..",
            "maxNumBatchedTokens 512 is less than the longest sequence (2048) without "
            "enableChunkedPrefill",
        ),
        (
            "  Value error, Model architectures ['NobodyForCausalLM'] are not supported for now. "
            "Supported architectures: dict_keys([..])",
            "this vLLM does not know the architecture 'NobodyForCausalLM'",
        ),
        (
            "  Value error, The checkpoint you are trying to load has model type `nobody` but "
            "Transformers does not recognize this architecture. This could be because ..",
            "this vLLM's Transformers does not know the model type nobody",
        ),
        (
            "RuntimeError: Cannot find any model weights with `/models/a`",
            "there are no weights in /models/a",
        ),
        (
            "OSError: It looks like the config file at '/m/config.json' is not a valid JSON file.",
            "/m/config.json is not valid JSON",
        ),
        (
            "ValueError: Couldn't instantiate the backend tokenizer from one of: ",
            "the tokenizer cannot be loaded: tokenizer.json is missing or broken",
        ),
        (
            "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: "
            "incomplete metadata, file not fully covered",
            "the weights are damaged: incomplete metadata, file not fully covered",
        ),
        (
            "RuntimeError: Failed to load the model config. If the model is a custom model not yet "
            "available in the HuggingFace transformers library, consider setting ..",
            "the model comes with code of its own: trustRemoteCode: true lets it run",
        ),
        (
            "  Value error, Total number of attention heads (4) must be divisible by tensor "
            "parallel size (3). [type=value_error, ..]",
            "the model's 4 attention heads cannot be divided among tensorParallelSize 3",
        ),
        (
            "ValueError: World size (4) is larger than the number of available GPUs (2) in ..",
            "it wants 4 GPUs and sees 2",
        ),
        (
            "  Value error, Quantization method specified in the model config (awq) does not match "
            "the quantization method specified in the `quantization` argument (gptq). [type=..",
            "quantization gptq does not match the model's own awq",
        ),
        (
            "  Value error, Unknown quantization method: nobody. Must be one of ['awq', ..",
            "this vLLM does not know quantization nobody",
        ),
        (
            "  Value error, fbgemm_fp8 quantization is currently not supported in rocm. [type=..",
            "no fbgemm_fp8 quantization on rocm",
        ),
        (
            "KeyError: 'invalid tool call parser: nobody (chose from { apertus,hermes })'",
            "this vLLM does not know toolCallParser nobody",
        ),
        (
            "KeyError: 'invalid reasoning parser: nobody (chose from { qwen3 })'",
            "this vLLM does not know reasoningParser nobody",
        ),
        (
            "KeyError: \"Reasoning parser 'nobody' not found. Available parsers: qwen3\"",
            "this vLLM does not know reasoningParser nobody",
        ),
        (
            "RuntimeError: Failed to infer device type, please set the environment variable ..",
            "vLLM finds no GPU: it is a build for another kind of GPU, or the driver is missing",
        ),
        (
            "ValueError: Inconsistent GPU visibility env vars: HIP_VISIBLE_DEVICES='0' vs "
            "CUDA_VISIBLE_DEVICES='1'. ..",
            "two masks that differ: HIP_VISIBLE_DEVICES=0 and CUDA_VISIBLE_DEVICES=1",
        ),
        (
            "ValueError: VLLM_PORT 'tcp://10.0.0.1:8000' appears to be a URI. This may be ..",
            "the variable VLLM_PORT is no port: tcp://10.0.0.1:8000",
        ),
        (
            "Memory access fault by GPU node-1 (Agent handle: 0x55) on address 0x7f. Reason: ..",
            "a memory access fault on the GPU: node-1 (Agent handle: 0x55) on address 0x7f. "
            "Reason: ..",
        ),
        ("OSError: [Errno 98] Address already in use", "its port is taken by another program"),
        (
            "vllm: error: unrecognized arguments: --bogus 3",
            "this vLLM does not know the arguments --bogus 3",
        ),
        (
            "vllm serve: error: argument --max-num-seqs: invalid int value: 'many'",
            "the command line: argument --max-num-seqs: invalid int value: 'many'",
        ),
        (
            "Fatal Python error: Illegal instruction",
            "it crashed in compiled code: Illegal instruction",
        ),
        (f"{CORE}EngineCore failed to start.", "EngineCore did not start"),
        (
            "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause "
            "above. Failed core proc(s): {}",
            "EngineCore did not start",
        ),
        ("(APIServer pid=1) INFO 11-30 07:05:59 [model.py:733] Resolved architecture: X", None),
        ("(EngineCore pid=3) WARNING 11-30 07:06:09 [cpu.py:224] Triton is not installed.", None),
        ("Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00]", None),
        ("INFO:     Application startup complete.", None),
    ],
)
def test_fatal_lines(line: str, reason: str | None) -> None:
    assert Vllm().fatal_line(line) == reason
    if reason is not None and not line.startswith("Fatal Python"):
        assert Vllm().fatal_line(f"{WORKER}{line}") == reason


def test_ready_lines() -> None:
    ready = Vllm().ready_line
    assert ready("INFO:     Application startup complete.")
    assert ready("(APIServer pid=7) INFO .. Starting vLLM server on http://127.0.0.1:1")
    assert not ready("INFO:     Waiting for application startup.")


def test_a_taken_port() -> None:
    taken = Vllm().port_taken
    assert taken(["hello", "(APIServer pid=7) OSError: [Errno 98] Address already in use"])
    assert not taken(["(APIServer pid=7) OSError: [Errno 13] Permission denied"])


def explain(status: ExitStatus, *lines: str) -> str:
    plan = LaunchPlan(argv=("/vllm",), env={}, cwd=Path("/"), model=Path("/m"), port=1)
    return Vllm().explain(plan, status, lines)


def test_the_first_word_explains_and_the_rest_passes_it_on() -> None:
    lines = [
        f"{WORKER}Traceback (most recent call last):",
        f'{WORKER}  File "/x/multiproc_executor.py", line 1, in worker_main',
        f"{WORKER}RuntimeError: start (0) + length (512) exceeds dimension size (256).",
        f"{CORE}EngineCore failed to start.",
        f"{CORE}Exception: WorkerProc initialization failed due to an exception in a background "
        "process. See stack trace for root cause.",
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {'EngineCore': 1}",
    ]
    said = "vllm failed: RuntimeError: start (0) + length (512) exceeds dimension size (256)."
    assert explain(ExitStatus(code=1), *lines) == said
    assert explain(ExitStatus(), *lines) == said
    assert explain(ExitStatus(code=1), *lines[3:4], *lines[5:]) == "EngineCore did not start"


def test_a_validation_error_is_its_value() -> None:
    lines = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig",
        "  Value error, something is odd [type=value_error, input_value=ArgsKwargs(..), input_ty..",
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
    ]
    assert explain(ExitStatus(code=1), *lines) == "vllm failed: something is odd"


def test_the_end_of_an_engine_that_ran() -> None:
    passed_on = [
        f"{SERVER}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See "
        "stack trace (above) for the root cause.",
    ]
    told = [
        f"{CORE}EngineCore encountered a fatal error.",
        f"{CORE}RuntimeError: Worker failed with error 'odd', please check the stack trace",
    ]
    killed = [f"{SERVER}Engine core proc EngineCore died unexpectedly, shutting down client."]
    ended = ExitStatus(code=0)
    assert explain(ended, *passed_on, *killed) == "EngineCore ended without a word"
    assert explain(ended, *told, *passed_on) == (
        "EngineCore ended: RuntimeError: Worker failed with error 'odd', please check the stack "
        "trace"
    )
    worker = f"{CORE}Worker proc VllmWorker-1 died unexpectedly, shutting down executor."
    assert explain(ended, worker, *passed_on) == "the worker VllmWorker-1 ended without a word"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (ExitStatus(signal=signal.SIGKILL), "memory runs out"),
        (ExitStatus(signal=signal.SIGSEGV), "crashed"),
        (ExitStatus(signal=signal.SIGABRT), "fault on the GPU"),
        (ExitStatus(signal=signal.SIGILL), "processor lacks"),
        (ExitStatus(signal=signal.SIGTERM), "did not send"),
        (ExitStatus(signal=signal.SIGUSR1), "vllm ended: killed by SIGUSR1"),
        (ExitStatus(code=3), "vllm ended: exit code 3"),
        (ExitStatus(code=0), "vllm ended: exit code 0"),
    ],
)
def test_an_end_without_words(status: ExitStatus, words: str) -> None:
    assert words in explain(status, "INFO: hello")


def test_the_more_telling_line_wins_in_any_order() -> None:
    telling = "ValueError: No available memory for the cache blocks. Try .."
    for lines in (
        [telling, f"{CORE}EngineCore failed to start."],
        ["EngineCore failed to start.", telling],
    ):
        assert vllm_output.explain(ExitStatus(code=1), lines).startswith("no memory is left")
