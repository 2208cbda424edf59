"""The protocol that every engine is driven through.

A backend is the one place for an engine's flags, log lines and habits. It holds no state and owns
no process: `process.Engine` does. Nothing in a backend may start an engine or wait for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flexinfer.engines.errors import EngineConfigError, ExitStatus
from flexinfer.engines.gpus import Devices
from flexinfer.engines.launch import StopPolicy
from flexinfer.engines.spec import EngineSpec, Executable, LaunchPlan, RequestRules

if TYPE_CHECKING:
    import aiohttp


class Backend(Protocol):
    """One kind of engine, with what most of them have in common."""

    @property
    def name(self) -> str:
        """The value of `spec.backend`."""

    @property
    def stop(self) -> StopPolicy:
        """How it is asked to end, and how long that may take."""

    @property
    def requests(self) -> RequestRules:
        """What of a client's request must not reach the engine as it is."""

    def find_executable(self, environ: Mapping[str, str]) -> Executable:
        """Find the engine's program. Raises `EngineNotFound`, which names every place tried."""

    async def prepare(
        self,
        spec: EngineSpec,
        weights: Path,
        executable: Executable,
        environ: Mapping[str, str],
        progress: Callable[[str], None],
    ) -> Path:
        """Bring the weights into the form that the engine reads, and return where that is.

        Comes before the start and is not part of it: it may take as long as a download takes, says
        how far it is by `progress`, needs no GPU, and ends by itself when nothing moves any more.
        Doing it again costs next to nothing. Raises `EngineStartError`. Without a method of its own
        an engine reads `weights` as they are.
        """
        return weights

    def plan(
        self,
        spec: EngineSpec,
        weights: Path,
        devices: Devices,
        port: int,
        executable: Executable,
        environ: Mapping[str, str],
    ) -> LaunchPlan:
        """Decide one start. A setting that the engine has no flag for becomes a warning.

        May run the program to ask what it can do, so it blocks: tens of milliseconds the first
        time. Raises `EngineConfigError`.
        """

    def parallel(self, spec: EngineSpec) -> int:
        """Return how many requests the engine works on at once."""

    def request_model(self, spec: EngineSpec, weights: Path) -> str:
        """Return the model name that a request body must carry when it reaches the engine."""

    def fatal_line(self, line: str) -> str | None:
        """Return the reason if a line of output says that the start has failed, else None."""

    def ready_line(self, line: str) -> bool:
        """Whether a line of output says that asking `is_ready` is worth while now."""

    def explain(self, plan: LaunchPlan, status: ExitStatus, lines: Sequence[str]) -> str:
        """Return in one line why the engine ended, from its exit, its last lines and its files.

        With an empty status: why it never will be ready, although its process goes on.
        """

    def port_taken(self, lines: Sequence[str]) -> bool:
        """Whether its last lines say that it could not listen on its port."""

    async def is_ready(self, client: aiohttp.ClientSession, base_url: str) -> bool:
        """Whether it answers requests. Connection errors mean no and are not raised."""

    async def load(self, client: aiohttp.ClientSession, plan: LaunchPlan) -> None:
        """Have the model loaded, by an engine that answers before it has loaded one.

        Called once, after `is_ready`; returns when requests can be served. The caller bounds the
        time and cancels. Raises `EngineStartError`. Without a method of its own an engine is ready
        only when its model is.
        """
        return  # a body: without one this would be abstract

    async def is_alive(self, client: aiohttp.ClientSession, base_url: str) -> bool:
        """Whether an engine that was ready still works, not only its HTTP server.

        The caller bounds the time. Connection errors mean no and are not raised.
        """


def backend_for(name: str) -> Backend:
    """Return the backend of a `spec.backend`. Raises `EngineConfigError` if there is none."""
    from flexinfer.engines.llamacpp import LlamaCpp
    from flexinfer.engines.mlc import MlcLlm
    from flexinfer.engines.ollama import Ollama
    from flexinfer.engines.vllm import Vllm

    for kind in (LlamaCpp, MlcLlm, Ollama, Vllm):
        if kind.name == name:
            return kind()
    raise EngineConfigError(f"unknown backend {name}; known: llama-cpp, mlc-llm, ollama, vllm")
