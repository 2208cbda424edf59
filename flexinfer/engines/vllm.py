"""vLLM's `vllm serve`: everything that is particular to it."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import aiohttp

from flexinfer.api.blocks import VllmBlock
from flexinfer.engines import executables, vllm_output
from flexinfer.engines.backend import Backend
from flexinfer.engines.compile_cache import compile_cache
from flexinfer.engines.environment import NO_USAGE_REPORTS, add_user_env, base_env, is_secret
from flexinfer.engines.errors import EngineConfigError, EngineNotFound, ExitStatus
from flexinfer.engines.gpus import Devices, device_env
from flexinfer.engines.http import http_status
from flexinfer.engines.launch import StopPolicy
from flexinfer.engines.ports import LOOPBACK
from flexinfer.engines.spec import EngineSpec, Executable, LaunchPlan, RequestRules
from flexinfer.engines.vllm_build import Build, build_of
from flexinfer.engines.vllm_cpu import kv_cache_gib
from flexinfer.engines.vllm_flags import VllmFlags, number_said, said

VARIABLE = "FLEXINFER_VLLM"
PROGRAM = "vllm"

KV_ON_CPU = "VLLM_CPU_KVCACHE_SPACE"
TARGET = "VLLM_TARGET_DEVICE"

# What vLLM decides for its HTTP server; more on GPUs of 70 GB and above.
_SEQUENCES_GPU = 256
_SEQUENCES_CPU = 128

# vLLM gives EngineCore 15 s on ROCm, because memory of a GPU may stay taken after SIGKILL. Then it
# kills the rest by itself. What a killed API server leaves behind needs the same time.
_GRACE_S = 30.0
_LEFTOVER_S = 15.0
# While EngineCore loads, the API server waits for it and does not hear SIGTERM at all.
_START_GRACE_S = 3.0

# Meant for other programs of the same kind: torch's launchers tell their workers so who they are.
_NOT_INHERITED = frozenset(
    ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
# Weights come from a path. Nothing is fetched while an engine starts.
_OFFLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}
# Without the second, a worker that crashes in compiled code ends without a word.
_TELLING: Mapping[str, str] = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
# How long a start may take is for coldStartTimeoutSeconds to say; vLLM's own limit is 600 s.
_PATIENT: Mapping[str, str] = {"VLLM_ENGINE_READY_TIMEOUT_S": "86400"}
# All of one engine is on one machine: its processes find each other without the network.
_LOCAL: Mapping[str, str] = {
    "VLLM_HOST_IP": LOOPBACK,
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


class Vllm(Backend):
    """The backend `vllm`."""

    name: ClassVar[str] = "vllm"
    stop: ClassVar[StopPolicy] = StopPolicy(
        signal.SIGTERM,
        grace_s=_GRACE_S,
        leftover_s=_LEFTOVER_S,
        start_grace_s=_START_GRACE_S,
    )
    requests: ClassVar[RequestRules] = RequestRules()

    def find_executable(self, environ: Mapping[str, str]) -> Executable:
        """Find vllm: the variable, then PATH."""
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
        """See `Backend.plan`. `weights` is a directory with config.json, or a GGUF file."""
        block = _block(spec)
        _check_weights(weights)
        cache = compile_cache(environ, spec.namespace, self.name, executable, devices)
        env = device_env(base_env(environ), devices)
        for name in [name for name in env if name.startswith("VLLM_") or name in _NOT_INHERITED]:
            del env[name]  # a Service that is called vllm alone sets eight of them
        env |= NO_USAGE_REPORTS
        env |= _OFFLINE
        env |= _PATIENT
        env |= _LOCAL
        env |= _caches(cache)
        env |= _TELLING
        build = build_of(executable, env)
        flags = VllmFlags(spec, block, build, devices)
        if not flags.on_gpu and _sizes_its_cache(block, devices):
            env[KV_ON_CPU] = str(kv_cache_gib(weights, block))
        for reason in add_user_env(env, spec.env, _not_the_users):
            flags.notice("EnvironmentIgnored", reason, "env")
        _check_device(build, flags, devices, env)

        flags.argv += [str(executable.path), "serve", str(weights.absolute())]
        flags.argv += ["--served-model-name", spec.name, "--host", LOOPBACK, "--port", str(port)]
        flags.add_parallel()
        flags.add_block()
        flags.ours("--allowed-origins", "[]")  # a web page must not reach it by itself
        flags.ours("--disable-access-log-for-endpoints", "/health,/metrics")
        flags.add_extra()
        return LaunchPlan(
            argv=tuple(flags.argv),
            env=env,
            # Not the weights: its children are `python -c`, which looks for code here first.
            cwd=cache,
            model=weights.absolute(),
            port=port,
            warnings=tuple(flags.notices),
            secrets=tuple(name for name in env if is_secret(name)),
            python=executable.python,
        )

    def parallel(self, spec: EngineSpec) -> int:
        """Return the most sequences at once: as said, or as vLLM decides."""
        block = _block(spec)
        given = number_said(block.extra_args, "--max-num-seqs") or block.max_num_seqs
        return given or (_SEQUENCES_GPU if spec.gpus else _SEQUENCES_CPU)

    def request_model(self, spec: EngineSpec, weights: Path) -> str:
        """Return the served name that `plan` gives it; it refuses any other."""
        return spec.name

    def fatal_line(self, line: str) -> str | None:
        """See `Backend.fatal_line`."""
        return vllm_output.fatal_reason(line)

    def ready_line(self, line: str) -> bool:
        """See `Backend.ready_line`."""
        return vllm_output.says_ready(line)

    def explain(self, plan: LaunchPlan, status: ExitStatus, lines: Sequence[str]) -> str:
        """See `Backend.explain`."""
        return vllm_output.explain(status, lines)

    def port_taken(self, lines: Sequence[str]) -> bool:
        """See `Backend.port_taken`: it binds before it loads, so this is known in seconds."""
        return vllm_output.says_port_taken(lines)

    async def is_ready(self, client: aiohttp.ClientSession, base_url: str) -> bool:
        """Whether /health says ok: it listens only when its model is loaded."""
        return await http_status(client, f"{base_url}/health") == 200

    async def is_alive(self, client: aiohttp.ClientSession, base_url: str) -> bool:
        """Whether /health says ok; 503 means that EngineCore is dead."""
        return await http_status(client, f"{base_url}/health") == 200


def _not_the_users(name: str) -> str | None:
    return f"with {name} nobody could talk to the engine" if name == "VLLM_API_KEY" else None


def _block(spec: EngineSpec) -> VllmBlock:
    if not isinstance(spec.block, VllmBlock):
        raise EngineConfigError(f"{spec.name}: the settings are not those of {Vllm.name}")
    return spec.block


def _check_weights(weights: Path) -> None:
    """Raise `EngineConfigError` if vLLM would take a minute to say that there is no model."""
    if weights.is_file():
        return
    if not weights.is_dir():
        raise EngineConfigError(f"the model's directory {weights} does not exist")
    if not any((weights / name).is_file() for name in ("config.json", "params.json")):
        names = sorted(path.name for path in weights.iterdir())
        listed = ", ".join(names[:5]) + (", .." if len(names) > 5 else "")
        raise EngineConfigError(f"{weights} has no config.json; it has {listed or 'nothing'}")


def _caches(cache: Path) -> dict[str, str]:
    """Name the place of compiled code in the variables of everything that vLLM compiles with."""
    return {
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "MIOPEN_USER_DB_PATH": str(cache / "miopen"),
        "MIOPEN_CUSTOM_CACHE_DIR": str(cache / "miopen"),
    }


def _sizes_its_cache(block: VllmBlock, devices: Devices) -> bool:
    """Whether the size of the KV cache on the CPU is left to us. A share of the memory is meant for
    a CPU only where the model asks for no GPU."""
    words = block.extra_args
    if block.kv_cache_memory_bytes or said(words, "--kv-cache-memory-bytes"):
        return False
    share = block.gpu_memory_utilization or said(words, "--gpu-memory-utilization")
    return share is None or bool(devices.ids)


def _check_device(build: Build, flags: VllmFlags, devices: Devices, env: Mapping[str, str]) -> None:
    """Say what the engine runs on. Raises `EngineConfigError` if this build cannot."""
    ids = ",".join(map(str, devices.ids))
    what = f"this vLLM ({build.version})"
    if flags.on_gpu:
        if build.for_cpu:
            raise EngineConfigError(f"{what} is a build for CPUs; GPU {ids} was assigned")
        return
    if build.for_cpu is False and env.get(TARGET) != "cpu":
        why = f"this machine has no GPU {ids}" if devices.ids else "the model asks for no GPU"
        raise EngineConfigError(f"{what} is a build for GPUs and cannot run on the CPU: {why}")
    if devices.ids:
        flags.notice("PretendedGpu", f"this machine has no GPU {ids}: vLLM runs on the CPU")
