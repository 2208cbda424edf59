"""The engine behind the fake `mlc_llm`: its memory logic, its thread, and how that can fail.

The memory logic is that of MLC's cpp/serve/config.cc. As there, the thread loads the model, and
whoever asked for that waits for a word which a thread that has died never says.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20


def number(name: str, default: float) -> float:
    return float(os.environ.get(name) or default)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def say_native(line: int, text: str) -> None:
    say(f"[{time.strftime('%H:%M:%S')}] /workspace/mlc-llm/cpp/serve/config.cc:{line}: {text}")


class InternalError(RuntimeError):
    """What a failed check of the native code becomes in Python."""


InternalError.__module__ = "tvm.error"


@dataclass
class Plan:
    """What one mode comes to: sequences at once, tokens in the KV cache, tokens of a prefill."""

    sequences: int
    total: int
    chunk: int


@dataclass
class Config:
    """One start: the model's files, and what mode, library and overrides make of them."""

    path: Path
    mode: str
    mock: bool
    single: int
    shards: int
    stages: int
    utilization: float
    said: dict[str, Any]
    compiled: dict[str, int]
    model: dict[str, Any]

    @classmethod
    def infer(
        cls, path: Path, compiled: dict[str, int], said: dict[str, Any], *, mode: str, mock: bool
    ) -> Config:
        config = json.loads((path / "mlc-chat-config.json").read_text())
        inner = config.get("model_config", {})
        if said["max_history_size"]:
            raise ValueError("max_history_size is for models with a recurrent state")
        own = compiled.get("context_window_size", 0)
        windows = [window for window in (said["context_window_size"], own) if window]
        return cls(
            path=path,
            mode=mode,
            mock=mock,
            single=min(windows, default=4096),
            # From the library, whatever the overrides say.
            shards=compiled.get("tensor_parallel_shards", 1),
            stages=compiled.get("pipeline_parallel_stages", 1),
            utilization=said["gpu_memory_utilization"] or 0.85,
            said=said,
            compiled=compiled,
            model={**config, **inner},
        )

    # -- memory, in bytes of one GPU

    def params(self) -> float:
        cache = json.loads((self.path / "tensor-cache.json").read_text())
        total = float(cache["metadata"]["ParamBytes"])
        return total / self.stages / self.shards

    def kv_per_token(self) -> float:
        layers = self.model["num_hidden_layers"] / self.stages
        heads = self.model["num_key_value_heads"] / self.shards
        return float(self._head() * heads * layers * 4 + 1.25)

    def buffers(self, sequences: int) -> float:
        chunk, head = self.compiled.get("prefill_chunk_size", 2048), self._head()
        queries = self.model["num_attention_heads"] / self.shards
        keys = self.model["num_key_value_heads"] / self.shards
        auxiliary = (sequences + 1) * 88 + chunk * (queries + 1) * 8
        auxiliary += chunk * head * (queries + keys) * 4 + 48 * MIB
        work = chunk * 4 + sequences * 4 + (2 * chunk + sequences) * (head * queries) * 2
        logits = sequences * 20 + sequences * self.model["vocab_size"] * 16.125
        return float(auxiliary + work + logits)

    def memory(self) -> float:
        return number("FAKE_MLC_GPU_BYTES", 25753026560) * self.utilization

    def plan(self, mode: str) -> Plan:
        """Raises InternalError where not one token of the KV cache would fit."""
        batch = self.compiled.get("max_batch_size", 128)
        sequences = {"local": min(4, batch), "interactive": 1, "server": batch}[mode]
        sequences = self.said["max_num_sequence"] or sequences
        params, buffers = self.params(), self.buffers(sequences)
        fit = int((self.memory() - params - buffers) / self.kv_per_token())
        if fit <= 0:
            raise InternalError(
                "Check failed: (output_res.IsOk()) is false: Insufficient GPU memory error: The "
                f"available single GPU memory is {self.memory() / 1e6:.3f} MB, which is less than "
                f"the sum of model weight size ({params / 1e6:.3f} MB) and temporary buffer size "
                f"({buffers / 1e6:.3f} MB).\n"
                '1. You can set a larger "gpu_memory_utilization" value.\n'
                "2. If the model weight size is too large, please enable tensor parallelism."
            )
        limits = {
            "local": min(self.single, 8192),
            "interactive": self.single,
            "server": sequences * self.single,
        }
        # What the user says is used as it is, whether it fits or not.
        total = self.said["max_total_seq_length"] or min(fit, limits[mode])
        chunk = self.compiled.get("prefill_chunk_size", 2048)
        if mode != "server":
            chunk = min(chunk, total, self.single)
        return Plan(sequences, total, self.said["prefill_chunk_size"] or chunk)

    def _head(self) -> int:
        given = self.model.get("head_dim")
        return int(given or self.model["hidden_size"] // self.model["num_attention_heads"])


@dataclass
class Generation:
    """One request: `limit` tokens, sent into `tokens` as (number, whether it was the last)."""

    id: str
    limit: int
    tokens: queue.SimpleQueue[tuple[int, bool]] = field(default_factory=queue.SimpleQueue)
    done: int = 0


class ThreadedEngine:
    """The thread that loads and generates, and what the HTTP server asks of it."""

    def __init__(self, config: Config, worker: Sequence[str]) -> None:
        self.config = config
        self.plan = Plan(1, config.single, 1)
        self._worker = worker
        self._workers: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Condition()
        self._reloading = False
        self._reloaded = threading.Event()
        self._waiting: list[Generation] = []
        self._running: list[Generation] = []
        self._questions: list[queue.SimpleQueue[dict[str, float]]] = []
        self._totals = {"prompt_tokens_sum": 0, "completion_tokens_sum": 0, "decode_tokens_sum": 0}
        self._pause_s = 1 / rate if (rate := number("FAKE_MLC_TOKENS_PER_S", 200)) else 0.0
        # Named by Python itself, Thread-1 (_background_loop), which its traceback shows.
        threading.Thread(target=self._background_loop, daemon=True).start()

    @property
    def input_limit(self) -> int:
        return min(self.config.single, self.plan.total)

    def reload(self) -> None:
        """Have the model loaded. Nobody tells when the thread has died of it."""
        with self._lock:
            self._reloading = True
            self._lock.notify()
        self._reloaded.wait()

    def add(self, sequence: Generation, prompt_tokens: int) -> None:
        """Raises ValueError for an id that is in use."""
        with self._lock:
            if any(other.id == sequence.id for other in self._waiting + self._running):
                raise ValueError(f'The request id "{sequence.id}" already exists')
            self._totals["prompt_tokens_sum"] += prompt_tokens
            self._waiting.append(sequence)
            self._lock.notify()

    def abort(self, sequence: Generation) -> None:
        with self._lock:
            for place in (self._waiting, self._running):
                if sequence in place:
                    place.remove(sequence)

    def metrics(self) -> dict[str, float]:
        """Asked of the thread: without it, an answer never comes."""
        answer: queue.SimpleQueue[dict[str, float]] = queue.SimpleQueue()
        with self._lock:
            self._questions.append(answer)
            self._lock.notify()
        return answer.get()

    # -- the thread

    def _background_loop(self) -> None:
        with self._lock:
            while not self._reloading:
                self._lock.wait()
        self._load()
        self._reloaded.set()
        due = 0.0
        while True:
            with self._lock:
                while not (self._waiting or self._running or self._questions):
                    self._lock.wait()
                for answer in self._questions:
                    answer.put(dict(self._totals))
                self._questions.clear()
                if (left := due - time.monotonic()) > 0:
                    self._lock.wait(left)
                    continue
                due = time.monotonic() + self._pause_s
                self._step()

    def _step(self) -> None:
        """One token for every sequence of the batch."""
        room = self.plan.sequences - len(self._running)
        self._running += self._waiting[:room]
        del self._waiting[:room]
        for sequence in tuple(self._running):
            sequence.done += 1
            last = sequence.done >= sequence.limit
            sequence.tokens.put((sequence.done - 1, last))
            self._totals["completion_tokens_sum"] += 1
            self._totals["decode_tokens_sum"] += 1
            if last:
                self._running.remove(sequence)
            made = self._totals["completion_tokens_sum"]
            if made == number("FAKE_MLC_DIE_AFTER", 0):
                raise InternalError("Check failed: (result) is false: a page table is corrupt")
            if made == number("FAKE_MLC_CRASH_AFTER", 0):
                crash()

    def _load(self) -> None:
        others = self.config.shards * self.config.stages - 1
        self._workers = [subprocess.Popen(self._worker) for _ in range(others)]
        if not self.config.mock:
            check_shards(self.config.path)
            self._infer()
        time.sleep(number("FAKE_MLC_LOAD_S", 0))
        fail(os.environ.get("FAKE_MLC_FAIL", ""))

    def _infer(self) -> None:
        config = self.config
        for mode in ("local", "interactive", "server"):
            plan = config.plan(mode)
            say_native(
                646,
                f'Under mode "{mode}", max batch size will be set to {plan.sequences}, max KV '
                f"cache token capacity will be set to {plan.total}, prefill chunk size will be set "
                f"to {plan.chunk}. ",
            )
        self.plan = plan = config.plan(config.mode)
        said = config.said["max_num_sequence"] is not None
        say_native(
            726,
            f'The actual engine mode is "{config.mode}". So max batch size is {plan.sequences}'
            f"{' (specified by user)' if said else ''}, max KV cache token capacity is "
            f"{plan.total}, prefill chunk size is {plan.chunk}.",
        )
        params, cache = config.params(), plan.total * config.kv_per_token()
        buffers = config.buffers(plan.sequences)
        say_native(
            731,
            f"Estimated total single GPU memory usage: {(params + cache + buffers) / 1e6:.3f} MB "
            f"(Parameters: {params / 1e6:.3f} MB. KVCache: {cache / 1e6:.3f} MB. Temporary "
            f"buffer: {buffers / 1e6:.3f} MB). The actual usage might be slightly larger than the "
            "estimated number.",
        )


def check_shards(path: Path) -> None:
    """Compare sizes, as the loader does. Hashes are only looked at when a model is fetched."""
    index = path / "tensor-cache.json"
    if not index.is_file():
        raise InternalError(f"Check failed: (!fs.fail()) is false: Cannot open {index}")
    for record in json.loads(index.read_text())["records"]:
        file = path / record["dataPath"]
        if not file.is_file():
            raise InternalError(f"Check failed: (!fs.fail()) is false: Cannot open {file}")
        size = file.stat().st_size
        if size != record["nbytes"]:
            raise InternalError(
                f"ValueError: Error when loading parameters from {file.name}: Check failed: "
                f"this->nbytes == raw_data_buffer->length() ({record['nbytes']} vs. {size}) : "
                "ValueError: Encountered an corrupted parameter shard. It means it is not "
                "downloaded completely or downloading is interrupted. Please try to download again."
            )


def fail(how: str) -> None:
    """Fail in the thread that loads."""
    if how == "oom":
        raise InternalError(
            "ROCM HIP Error: hipMalloc(&ret, nbytes) failed with error: out of memory"
        )
    if how == "unknown":
        raise InternalError(
            "Check failed: (state == expected) is false: nobody has seen this before"
        )
    if how == "silent":
        threading.Event().wait()
    if how == "segfault":
        crash()
    if how == "gpu-fault":
        say(
            "Memory access fault by GPU node-1 (Agent handle: 0x55d0) on address 0x7f0000000000. "
            "Reason: Page not present or supervisor privilege."
        )
        os.abort()


def crash() -> None:
    say("!!!!!!! TVM FFI encountered a Segfault !!!!!!!")
    os.kill(os.getpid(), signal.SIGSEGV)
