"""Ollama's `ollama serve`: everything that is particular to it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import aiohttp

from flexinfer.api.base import wire_name
from flexinfer.api.blocks import OllamaBlock
from flexinfer.api.notices import Notice
from flexinfer.api.ollamatag import OllamaTag
from flexinfer.engines import executables
from flexinfer.engines.backend import Backend
from flexinfer.engines.environment import add_user_env, is_secret
from flexinfer.engines.errors import (
    EngineConfigError,
    EngineNotFound,
    EngineStartError,
    ExitStatus,
)
from flexinfer.engines.gpus import Devices
from flexinfer.engines.http import http_status
from flexinfer.engines.launch import StopPolicy
from flexinfer.engines.ollama_prepare import Preparation
from flexinfer.engines.ollama_server import (
    NO_TIMEOUT,
    STOP,
    last_error,
    make_store,
    own_home,
    port_taken,
    private_store,
    serve_env,
)
from flexinfer.engines.ollama_store import store_and_tag
from flexinfer.engines.spec import EngineSpec, Executable, LaunchPlan, RequestRules

VARIABLE = "FLEXINFER_OLLAMA"
PROGRAM = "ollama"

# A runner that is busy on all processors may keep its server from them.
_BUSY_LIMIT_CPU_S = 300.0
_BUSY_LIMIT_GPU_S = 60.0
_ITS_END_S = 1.0

# Which variable says what a field says.
_VARIABLES: Mapping[str, str] = {
    "context_length": "OLLAMA_CONTEXT_LENGTH",
    "num_parallel": "OLLAMA_NUM_PARALLEL",
    "flash_attention": "OLLAMA_FLASH_ATTENTION",
    "kv_cache_type": "OLLAMA_KV_CACHE_TYPE",
    "gpu_overhead": "OLLAMA_GPU_OVERHEAD",
}
# Variables of the user's that would break what is promised elsewhere, with the reason.
_RESERVED: Mapping[str, str] = {
    "OLLAMA_HOST": "nobody could talk to the engine",
    "OLLAMA_AUTH": "nobody could talk to the engine",
    "OLLAMA_KEEP_ALIVE": "the model stays loaded for as long as its replica lives",
    "OLLAMA_MAX_LOADED_MODELS": "a replica serves one model",
    "OLLAMA_NOPRUNE": "a store that others use too must not be cleaned up",
    "OLLAMA_VULKAN": "Ray assigns the GPUs",
    "OLLAMA_LOAD_TIMEOUT": "coldStartTimeoutSeconds bounds the start",
}
_READY = re.compile(r"Listening on .+ \(version")
_OUT_OF_MEMORY = re.compile(r"((?:cudaMalloc failed|hipMalloc failed|allocating .+ MiB).+)")
_NO_GENERATE = "does not support generate"


class Ollama(Backend):
    """The backend `ollama`."""

    name: ClassVar[str] = "ollama"
    stop: ClassVar[StopPolicy] = STOP
    # Both belong to Ollama's own API; wherever a version takes them in others as well, they unload
    # the model, or load it again with other settings.
    requests: ClassVar[RequestRules] = RequestRules(
        drop_fields=frozenset({"keep_alive", "options"})
    )

    def find_executable(self, environ: Mapping[str, str]) -> Executable:
        """Find Ollama: the variable, then PATH."""
        found = executables.named_or_on_path(VARIABLE, PROGRAM, environ)
        if found is None:
            raise EngineNotFound(f"no {PROGRAM}: {VARIABLE} is not set, and it is not on PATH")
        return found

    async def prepare(
        self,
        spec: EngineSpec,
        weights: Path,
        executable: Executable,
        environ: Mapping[str, str],
        progress: Callable[[str], None],
    ) -> Path:
        """See `Backend.prepare`. `weights` is a GGUF file, or a manifest that may be still to come.

        Returns the manifest of the model to serve. Raises `EngineConfigError` as well, for a
        Modelfile that is none.
        """
        preparation = Preparation(spec, _block(spec), executable, environ, progress)
        return await preparation.run(weights)

    def plan(
        self,
        spec: EngineSpec,
        weights: Path,
        devices: Devices,
        port: int,
        executable: Executable,
        environ: Mapping[str, str],
    ) -> LaunchPlan:
        """See `Backend.plan`. `weights` is what `prepare` has returned."""
        block = _block(spec)
        store, _ = _model(weights)
        private = private_store(environ, spec.namespace)
        make_store(private)
        env = serve_env(environ, executable, devices, store, port)
        # Nothing is written to the user's home, and it need not be writable.
        env["HOME"] = str(own_home(private))
        env["OLLAMA_KEEP_ALIVE"] = "-1"
        env["OLLAMA_MAX_LOADED_MODELS"] = "1"
        env["OLLAMA_LOAD_TIMEOUT"] = "0"  # none: ours runs
        for field, variable in _VARIABLES.items():
            value = getattr(block, field)
            if isinstance(value, bool):
                env[variable] = "1" if value else "0"
            elif field == "gpu_overhead" and value is not None:
                env[variable] = str(int(value.value))
            elif value is not None:
                env[variable] = str(value)
        # OLLAMA_MODELS has been obeyed: models are looked for there.
        given = {name: value for name, value in spec.env.items() if name != "OLLAMA_MODELS"}
        notices = [
            spec.notice("EnvironmentIgnored", reason, "spec.ollama.env")
            for reason in add_user_env(env, given, _not_the_users)
        ]
        notices += _unfit(env, spec)
        if devices.pretended:
            gpus = ",".join(map(str, devices.ids))
            text = f"this machine has no GPU {gpus}: Ollama runs on the CPU"
            notices.append(spec.notice("PretendedGpu", text))
        on_gpu = bool(devices.ids) and not devices.pretended
        return LaunchPlan(
            argv=(str(executable.path), "serve"),
            env=env,
            cwd=private,
            model=weights,
            port=port,
            warnings=tuple(notices),
            secrets=tuple(name for name in env if is_secret(name)),
            busy_limit_s=_BUSY_LIMIT_GPU_S if on_gpu else _BUSY_LIMIT_CPU_S,
        )

    def parallel(self, spec: EngineSpec) -> int:
        """Return how many requests the runner takes at once."""
        said = spec.env.get("OLLAMA_NUM_PARALLEL", "")
        if said.isdecimal() and int(said) > 0:
            return int(said)
        return _block(spec).num_parallel or 1

    def request_model(self, spec: EngineSpec, weights: Path) -> str:
        """Return the whole name of the model in its store."""
        return str(_model(weights)[1])

    def fatal_line(self, line: str) -> str | None:
        """See `Backend.fatal_line`: what it cannot go on with, it exits with."""
        return None

    def ready_line(self, line: str) -> bool:
        """See `Backend.ready_line`."""
        return _READY.search(line) is not None

    def explain(self, plan: LaunchPlan, status: ExitStatus, lines: Sequence[str]) -> str:
        """See `Backend.explain`."""
        if port_taken(lines):
            return f"port {plan.port} of {plan.host} is taken by another program"
        if reason := last_error(lines):
            return reason
        if status.signal == signal.SIGKILL:
            return "ollama was killed by SIGKILL (the kernel does so when memory runs out)"
        return f"ollama ended: {status}"

    def port_taken(self, lines: Sequence[str]) -> bool:
        """See `Backend.port_taken`."""
        return port_taken(lines)

    async def is_ready(self, client: aiohttp.ClientSession, base_url: str) -> bool:
        """Whether its API answers; no model is loaded then."""
        return await http_status(client, f"{base_url}/api/version") == 200

    async def load(self, client: aiohttp.ClientSession, plan: LaunchPlan) -> None:
        """See `Backend.load`. The request is held open: its end would be the load's."""
        name = str(_model(plan.model)[1])
        try:
            status, answer = await _touch(client, plan.url, name)
        except (aiohttp.ClientError, OSError) as error:
            # It has ended, or is just ending: that is a better reason, if it comes at once.
            await asyncio.sleep(_ITS_END_S)
            raise EngineStartError(f"it broke off while loading: {error!r}") from error
        if status != 200:
            raise EngineStartError(f"Ollama does not load the model: {_why(answer)}")

    async def is_alive(self, client: aiohttp.ClientSession, base_url: str) -> bool:
        """Whether its model is loaded, or can be again within the caller's time.

        /api/ps goes on to list a model whose runner is dead. A request without a prompt asks the
        runner; a dead one is replaced by it, as it would be by any user's request.
        """
        try:
            async with client.get(f"{base_url}/api/ps") as response:
                loaded = (await response.json())["models"]
                names = [str(model["model"]) for model in loaded]
            return bool(names) and (await _touch(client, base_url, names[0]))[0] == 200
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError):
            return False


async def _touch(client: aiohttp.ClientSession, url: str, name: str) -> tuple[int, str]:
    """Have a model loaded if it is not; return status and body of the answer."""
    body = {"model": name, "keep_alive": -1, "stream": False}
    status, answer = await _post(client, f"{url}/api/generate", body)
    if status == 400 and _NO_GENERATE in answer:
        # A model for embeddings only. Without an input it is loaded, and nothing else.
        body = {"model": name, "keep_alive": -1, "input": ""}
        status, answer = await _post(client, f"{url}/api/embed", body)
    return status, answer


async def _post(
    client: aiohttp.ClientSession, url: str, body: Mapping[str, object]
) -> tuple[int, str]:
    async with client.post(url, json=body, timeout=NO_TIMEOUT) as response:
        return response.status, await response.text()


def _why(answer: str) -> str:
    """Return the reason in an answer, the important part of it first."""
    try:
        text = str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        text = answer.strip()[:500] or "no reason given"
    if match := _OUT_OF_MEMORY.search(text):
        return f"not enough GPU memory: {match[1]}"
    return text


def _block(spec: EngineSpec) -> OllamaBlock:
    if not isinstance(spec.block, OllamaBlock):
        raise EngineConfigError(f"{spec.name}: the settings are not those of {Ollama.name}")
    return spec.block


def _model(weights: Path) -> tuple[Path, OllamaTag]:
    found = store_and_tag(weights)
    if found is None:
        raise EngineConfigError(f"{weights} is no model in a store of Ollama: prepare it first")
    return found


def _not_the_users(name: str) -> str | None:
    reason = _RESERVED.get(name)
    return None if reason is None else f"{name} is set by FlexInfer: {reason}"


def _unfit(env: Mapping[str, str], spec: EngineSpec) -> list[Notice]:
    kind = env.get("OLLAMA_KV_CACHE_TYPE", "f16")
    if kind == "f16" or env.get("OLLAMA_FLASH_ATTENTION") not in ("0", "false"):
        return []
    field = f"spec.ollama.{wire_name('kv_cache_type')}"
    text = f"Ollama takes a KV cache of {kind} only with flash attention, which is off: f16 is used"
    return [spec.notice("SettingIgnored", text, field)]
