"""MLC-LLM's `mlc_llm serve`: everything that is particular to it."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import aiohttp

from flexinfer.api.blocks import MlcLlmBlock
from flexinfer.engines import executables, mlc_output
from flexinfer.engines.backend import Backend
from flexinfer.engines.compile_cache import compile_cache
from flexinfer.engines.environment import add_user_env, base_env, is_secret
from flexinfer.engines.errors import (
    EngineConfigError,
    EngineNotFound,
    EnginePortTaken,
    EngineStartError,
    ExitStatus,
)
from flexinfer.engines.gpus import Devices, device_env
from flexinfer.engines.http import http_status
from flexinfer.engines.launch import StopPolicy
from flexinfer.engines.mlc_flags import MlcFlags, said_overrides
from flexinfer.engines.mlc_weights import read_weights
from flexinfer.engines.ports import LOOPBACK
from flexinfer.engines.spec import EngineSpec, Executable, LaunchPlan, RequestRules

VARIABLE = "FLEXINFER_MLC_LLM"
PROGRAM = "mlc_llm"

# What each mode infers for the requests at once. `server` takes what the library was compiled for,
# which is this much unless its maker said otherwise.
_PARALLEL: Mapping[str, int] = {"local": 4, "interactive": 1, "server": 128}

# /metrics is answered between steps, and on a CPU one step may take minutes.
_BUSY_LIMIT_CPU_S = 300.0
_BUSY_LIMIT_GPU_S = 60.0

# Meant for another MLC than this one: what it may compile, where it keeps it, what it may fetch and
# whether it logs, is decided here.
_NOT_INHERITED = (
    "MLC_JIT_POLICY",
    "MLC_LLM_HOME",
    "MLC_TEMP_DIR",
    "MLC_DOWNLOAD_CACHE_POLICY",
    "MLC_LLM_READONLY_WEIGHT_CACHE",
    "MLC_UNSET_LOGGING",
    "MLC_GPU_SIZE_BYTES",
    # More than one worker is refused by uvicorn, after the model has been loaded.
    "WEB_CONCURRENCY",
)
# Weights come from a path. Nothing is fetched while an engine starts.
_OFFLINE: Mapping[str, str] = {
    "MLC_DOWNLOAD_CACHE_POLICY": "READONLY",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}


class MlcLlm(Backend):
    """The backend `mlc-llm`."""

    name: ClassVar[str] = "mlc-llm"
    # On SIGTERM it waits for open connections without a limit and then dies of the signal; while
    # it loads it dies at once. Gateways have ended their requests before, so this is plenty.
    stop: ClassVar[StopPolicy] = StopPolicy(signal.SIGTERM, grace_s=10.0)
    # It takes `user` for the request's id, and two with one id collide. It knows only the old name
    # of the limit, and without one it generates for as long as there is room.
    requests: ClassVar[RequestRules] = RequestRules(
        drop_fields=frozenset({"user"}),
        rename_fields={"max_completion_tokens": "max_tokens"},
    )

    def find_executable(self, environ: Mapping[str, str]) -> Executable:
        """Find mlc_llm: the variable, then PATH."""
        found = executables.named_or_on_path(VARIABLE, PROGRAM, environ)
        if found is None:
            raise EngineNotFound(f"no {PROGRAM}: {VARIABLE} is not set, and it is not on PATH")
        return dataclasses.replace(found, python=executables.interpreter_of(found.path))

    def plan(
        self,
        spec: EngineSpec,
        weights: Path,
        devices: Devices,
        port: int,
        executable: Executable,
        environ: Mapping[str, str],
    ) -> LaunchPlan:
        """See `Backend.plan`. `weights` is a directory with mlc-chat-config.json."""
        block = _block(spec)
        found = read_weights(weights)
        flags = MlcFlags(spec, block, found, devices)
        home, temporary = _homes(
            compile_cache(environ, spec.namespace, self.name, executable, devices)
        )
        env = device_env(base_env(environ), devices)
        for name in _NOT_INHERITED:
            env.pop(name, None)
        env |= _OFFLINE
        env |= {
            "MLC_LLM_HOME": str(home),
            # On one file system with the libraries, so that a finished one appears in one step and
            # no other start finds half of it.
            "MLC_TEMP_DIR": str(temporary),
            "PYTHONUNBUFFERED": "1",
        }
        if block.jit_policy is not None:
            env["MLC_JIT_POLICY"] = block.jit_policy
        for reason in add_user_env(env, spec.env, _not_the_users):
            flags.notice("EnvironmentIgnored", reason, "env")

        flags.argv += [str(executable.path), "serve", self.request_model(spec, weights)]
        flags.add_device()
        flags.add_block()
        flags.argv += ["--host", LOOPBACK, "--port", str(port)]
        flags.argv += ["--allow-origins", "[]"]  # a web page must not reach it by itself
        flags.add_extra()
        return LaunchPlan(
            argv=tuple(flags.argv),
            env=env,
            # Not the weights: it runs `python -m`, which looks for code in this directory first.
            cwd=home,
            model=found.directory,
            port=port,
            warnings=tuple(flags.notices),
            secrets=tuple(name for name in env if is_secret(name)),
            busy_limit_s=_BUSY_LIMIT_GPU_S if flags.on_gpu else _BUSY_LIMIT_CPU_S,
            python=executable.python,
        )

    def parallel(self, spec: EngineSpec) -> int:
        """Return the batch that the overrides set, or that the mode infers."""
        block = _block(spec)
        said = said_overrides(block.overrides).get("max_num_sequence", "")
        return int(said) if said.isdecimal() and int(said) > 0 else _PARALLEL[block.mode]

    def request_model(self, spec: EngineSpec, weights: Path) -> str:
        """Return the directory as the command line has it: that is the model's id."""
        return str(weights.absolute())

    def fatal_line(self, line: str) -> str | None:
        """See `Backend.fatal_line`."""
        return mlc_output.fatal_reason(line)

    def ready_line(self, line: str) -> bool:
        """See `Backend.ready_line`."""
        return mlc_output.says_ready(line)

    def explain(self, plan: LaunchPlan, status: ExitStatus, lines: Sequence[str]) -> str:
        """See `Backend.explain`."""
        return mlc_output.explain(plan.argv, plan.model, status, lines)

    def port_taken(self, lines: Sequence[str]) -> bool:
        """See `Backend.port_taken`."""
        return mlc_output.says_port_taken(lines)

    async def is_ready(self, client: aiohttp.ClientSession, base_url: str) -> bool:
        """Whether it lists its model: it listens only when that is loaded."""
        return await http_status(client, f"{base_url}/v1/models") == 200

    async def load(self, client: aiohttp.ClientSession, plan: LaunchPlan) -> None:
        """Make sure that it is our engine that answers.

        It takes its port only after its load, minutes after that was found free, and ends if it is
        taken then; until that moment, whoever took it answers for it. Raises `EnginePortTaken`.
        """
        try:
            async with client.get(f"{plan.url}/v1/models") as response:
                listed = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineStartError(f"mlc_llm does not answer any more: {error}") from error
        except ValueError:
            listed = None
        if not _lists(listed, str(plan.model)):
            raise EnginePortTaken(f"another program answers on port {plan.port}")

    async def is_alive(self, client: aiohttp.ClientSession, base_url: str) -> bool:
        """Whether the thread that generates answers; /v1/models goes on without it."""
        return await http_status(client, f"{base_url}/metrics") == 200


def _not_the_users(name: str) -> str | None:
    if name == "WEB_CONCURRENCY":
        return f"with {name} MLC's server does not start"
    if name == "MLC_GPU_SIZE_BYTES":
        return f"{name} does nothing since April 2024: use gpuMemoryBytes"
    return None


def _block(spec: EngineSpec) -> MlcLlmBlock:
    if not isinstance(spec.block, MlcLlmBlock):
        raise EngineConfigError(f"{spec.name}: the settings are not those of {MlcLlm.name}")
    return spec.block


def _lists(answer: Any, model: str) -> bool:
    """Whether an answer of /v1/models has a model of this id."""
    data = answer.get("data") if isinstance(answer, dict) else None
    models = data if isinstance(data, list) else []
    return any(isinstance(item, dict) and item.get("id") == model for item in models)


def _homes(cache: Path) -> tuple[Path, Path]:
    """Make the directories of compiled libraries and of compilations that still run."""
    home = cache / "mlc_llm"
    temporary = home / "tmp"
    try:
        temporary.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineConfigError(f"cannot make {temporary}: {error.strerror}") from error
    return home, temporary
