"""`ollama serve` as a process: its environment, and one that lives only while it is needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import aiohttp

from flexinfer.engines.environment import base_env
from flexinfer.engines.errors import EngineConfigError, EnginePortTaken, EngineStartError
from flexinfer.engines.gpus import MASK, Devices, device_env
from flexinfer.engines.http import http_status
from flexinfer.engines.launch import Launch, StopPolicy, new_launch_id
from flexinfer.engines.ports import LOOPBACK, free_port
from flexinfer.engines.spec import Executable

STORE_VARIABLE = "FLEXINFER_OLLAMA_STORE"
NODE_ROOT = Path("/var/lib/flexinfer/models")

# SIGTERM closes every connection at once, kills its runner and exits.
STOP = StopPolicy(grace_s=10.0)
#: No limit of the client's own: the callers bound the time, or watch for a standstill.
NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)

_PORT_TAKEN = re.compile(r"listen tcp .*: bind: address already in use")
_ERROR = re.compile(r"^Error: (.+)")
_READY_S = 60.0
_POLL_S = 0.02
_PORT_ATTEMPTS = 5
_COMMAND_S = 1800.0  # an adapter of gigabytes may have to be read and copied


def serve_env(
    environ: Mapping[str, str], executable: Executable, devices: Devices, store: Path, port: int
) -> dict[str, str]:
    """Return the environment of a server of ours: nothing of another Ollama's settings is left.

    It prunes nothing at its start, fetches and asks nothing, and does not see GPUs but its own.
    """
    env = base_env(environ)
    # LLAMA_ARG_..: newer versions run llama-server, which has a variable for every flag.
    for name in [name for name in env if name.startswith(("OLLAMA_", "LLAMA_"))]:
        del env[name]
    env = masked(env, executable, devices)
    return env | {
        "OLLAMA_HOST": f"{LOOPBACK}:{port}",
        "OLLAMA_MODELS": str(store),
        "OLLAMA_NOPRUNE": "1",
        "OLLAMA_NO_CLOUD": "1",
        "OLLAMA_VULKAN": "0",  # it obeys no mask
    }


def masked(env: Mapping[str, str], executable: Executable, devices: Devices) -> dict[str, str]:
    """Return `env` with the one mask that this build of Ollama understands.

    Builds with a runner of their own (0.17 is one) name each GPU to that runner by its UUID in
    ROCR_VISIBLE_DEVICES (ml/device.go) and leave HIP_VISIBLE_DEVICES as it is, which then counts
    within what ROCR left over: with "1" the runner finds no GPU and Ollama falls back to the CPU.
    There the mask has to be ROCR's own. Builds that run llama-server renumber HIP's mask.
    """
    masked_env = device_env(env, devices)
    if devices.ids and not devices.pretended and not _runs_llama_server(executable.path):
        del masked_env[MASK]
        masked_env["ROCR_VISIBLE_DEVICES"] = devices.mask
    return masked_env


def port_taken(lines: Sequence[str]) -> bool:
    """Whether a server's last lines say that it could not listen on its port."""
    return any(_PORT_TAKEN.search(line) for line in lines)


def last_error(lines: Sequence[str]) -> str | None:
    """Return what a program of Ollama said on its way out, None if nothing."""
    for line in reversed(lines):
        if match := _ERROR.match(line):
            return match[1].strip()
    return None


def private_store(environ: Mapping[str, str], namespace: str) -> Path:
    """Return the store for what is made or pulled here; it need not exist.

    FLEXINFER_OLLAMA_STORE, else `ollama` below the namespace's directory of the node's weights:
    `/var/lib/flexinfer/models` where that is ours to write, else the user's data directory.
    """
    if named := environ.get(STORE_VARIABLE):
        return Path(named).expanduser().absolute()
    root = NODE_ROOT
    if not os.access(root, os.W_OK):
        import platformdirs

        root = platformdirs.user_data_path("flexinfer", appauthor=False) / "models"
    return root / namespace / "ollama"


def make_store(store: Path) -> None:
    """Make the directories of a private store. Raises `EngineConfigError`."""
    try:
        for directory in (store / "blobs", store / "manifests", own_home(store)):
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineConfigError(
            f"cannot make the store for Ollama's models {store}: {error.strerror}; "
            f"{STORE_VARIABLE} names another one"
        ) from error


def own_home(store: Path) -> Path:
    """Return the HOME of our servers: Ollama writes a key into it and does not start without."""
    return store / "flexinfer" / "home"


class Server:
    """A server without a GPU that runs while weights are prepared."""

    def __init__(
        self, executable: Executable, env: Mapping[str, str], client: aiohttp.ClientSession
    ) -> None:
        self.client = client
        self.url = f"http://{env['OLLAMA_HOST']}"
        self.executable = executable
        self._env = env

    async def run(self, *arguments: str, cwd: Path) -> None:
        """Run one command of the same program against it. Raises `EngineStartError`."""
        output = _Output()
        launch = Launch(new_launch_id(), output.feed, name="ollama", stop=STOP)
        try:
            async with asyncio.timeout(_COMMAND_S):
                await launch.spawn([str(self.executable.path), *arguments], self._env, cwd)
                status = await asyncio.shield(launch.exited)
        except TimeoutError:
            raise EngineStartError(
                f"ollama {arguments[0]} took longer than {_COMMAND_S:g} s", log_tail=output.lines()
            ) from None
        finally:
            await _to_the_end(launch)
        if status.code != 0:
            lines = output.lines()
            reason = last_error(lines) or f"ollama {arguments[0]} ended: {status}"
            raise EngineStartError(reason, log_tail=lines, exit=status)


@contextlib.asynccontextmanager
async def serving(
    executable: Executable, environ: Mapping[str, str], store: Path, home: Path | None = None
) -> AsyncIterator[Server]:
    """Run a server on `store` for as long as the context lasts; no process outlives it.

    Raises `EngineStartError`.
    """
    make_store(store)
    for attempt in range(_PORT_ATTEMPTS):
        env = serve_env(environ, executable, Devices(), store, free_port())
        env |= {"HOME": str(home or own_home(store)), "OLLAMA_LLM_LIBRARY": "none"}
        output = _Output()
        launch = Launch(new_launch_id(), output.feed, name="ollama", stop=STOP)
        connector = aiohttp.TCPConnector(force_close=True)
        try:
            async with aiohttp.ClientSession(
                connector=connector, trust_env=False, timeout=NO_TIMEOUT
            ) as client:
                server = Server(executable, env, client)
                try:
                    await launch.spawn([str(executable.path), "serve"], env, store)
                    await _until_ready(launch, server, output)
                except EnginePortTaken:
                    if attempt == _PORT_ATTEMPTS - 1:
                        raise
                    continue
                yield server
                return
        finally:
            await _to_the_end(launch)


async def _until_ready(launch: Launch, server: Server, output: _Output) -> None:
    end = asyncio.get_running_loop().time() + _READY_S
    while True:
        if launch.exited.done():
            lines = output.lines()
            kind = EnginePortTaken if port_taken(lines) else EngineStartError
            reason = last_error(lines) or f"ollama serve ended: {launch.exited.result()}"
            raise kind(reason, log_tail=lines, exit=launch.exited.result())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                if await http_status(server.client, f"{server.url}/api/version") == 200:
                    return
        if asyncio.get_running_loop().time() > end:
            raise EngineStartError(
                f"ollama serve does not answer within {_READY_S:g} s", log_tail=output.lines()
            )
        await asyncio.wait([launch.exited], timeout=_POLL_S)


async def _to_the_end(launch: Launch) -> None:
    """Stop it even if we are cancelled meanwhile: the cancellation goes on when it is gone."""
    stopping = asyncio.get_running_loop().create_task(launch.stop())
    cancelled: asyncio.CancelledError | None = None
    while not stopping.done():
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError as error:
            cancelled = error
    stopping.result()
    if cancelled is not None:
        raise cancelled


class _Output:
    """The last lines of a program."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=40)
        self._partial = b""

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._partial + data).split(b"\n")
        self._partial = rest[-16_384:]
        self._lines.extend(_plain(line) for line in lines)

    def lines(self) -> list[str]:
        rest = [_plain(self._partial)] if self._partial else []
        return [line for line in [*self._lines, *rest] if line.strip()]


def _plain(line: bytes) -> str:
    """Return a line without what moves the cursor of a terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.decode("utf-8", "replace")).strip("\r")


def _runs_llama_server(program: Path) -> bool:
    """Whether this build of Ollama brings the llama-server that newer ones run as their child."""
    place = program.resolve().parent
    libraries = (place / "lib" / "ollama", place.parent / "lib" / "ollama", place)
    return any((directory / "llama-server").exists() for directory in libraries)
