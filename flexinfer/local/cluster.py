"""The Ray cluster that an instance serves on: one of its own, or one that runs already."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import httpx

from flexinfer.api import Notice
from flexinfer.local import state
from flexinfer.local.dashboard import Dashboard, token_of
from flexinfer.local.errors import ForeignApplications, LocalError
from flexinfer.local.events import Noticed, Phase, Tell
from flexinfer.local.haproxy import find_haproxy, write_wrapper
from flexinfer.local.ports import LOOPBACK, check_port, is_loopback, plan_ports, url_of
from flexinfer.local.ray_process import RayProcess, write_token
from flexinfer.local.ray_settings import RaySettings


class Cluster(Protocol):
    """Where Serve configs go. `open` before anything else, `close` in any state and again."""

    dashboard: Dashboard
    url: str
    """Base URL of the API."""
    http_host: str
    """What the Serve config says of the ingress' address; so does `http_port`."""
    http_port: int
    log_dir: Path | None

    async def open(self, tell: Tell) -> None:
        """Make it ready for `dashboard.put`. Raises `LocalError`."""

    async def ended(self) -> LocalError:
        """Return, when the cluster has ended by itself, why."""

    async def close(self, *, force: bool = False) -> None:
        """End what was started, or remove what was deployed."""


class OwnCluster:
    """A Ray head of our own, on loopback but for the API."""

    def __init__(self, *, address: str, port: int, gpus: int) -> None:
        """Reserves ports and a state file; starts nothing. `address` is an IP address. Call
        `close` also if `open` was never called.

        Raises `PortTaken` if the API cannot listen there, `LocalError` if Ray cannot anywhere.
        """
        check_port(address, port)
        self.http_port = port
        self.url = url_of(address, port)
        self.log_dir: Path | None = state.log_dir(port)
        self._runtime_dir = state.runtime_dir()
        with state.registering(self._runtime_dir):
            others = state.running(self._runtime_dir)
            taken = [other.ports_base for other in others if other.ports_base is not None]
            ports = plan_ports(taken, avoid=[port])
            work_dir = state.make_work_dir()
            self._state = _state_of_this_process(self.url)
            self._state = replace(
                self._state,
                dashboard=f"http://{LOOPBACK}:{ports.dashboard}",
                log_dir=str(self.log_dir),
                work_dir=str(work_dir),
                ports_base=ports.base,
            )
            state.save(self._state, self._runtime_dir)
        self._work_dir = work_dir
        binary = find_haproxy()
        wrapper = None
        # Serve's own proxy listens where the config says; HAProxy where its wrapper says.
        self.http_host = address
        if binary is not None:
            wrapper = work_dir / "haproxy"
            self.http_host = LOOPBACK
            write_wrapper(wrapper, binary, address, port)
        token_file = work_dir / "token"
        self.dashboard = Dashboard(f"http://{LOOPBACK}:{ports.dashboard}", write_token(token_file))
        self._settings = RaySettings(
            work_dir=work_dir,
            ports=ports,
            gpus=gpus,
            token_file=token_file,
            log_dir=state.log_dir(port),
            haproxy=wrapper,
        )
        self._ray = RayProcess(self._settings)
        self._keep_files = False

    async def open(self, tell: Tell) -> None:
        """Start Ray."""
        if self._settings.haproxy is None:
            message = "there is no HAProxy on this machine: requests go through a slower proxy"
            tell(Noticed(Notice("NoHAProxy", message, "flexinfer up")))
        self._settings.log_dir.mkdir(parents=True, exist_ok=True)
        try:
            await self._ray.start(self.dashboard, tell)
        except LocalError:
            self._keep_files = True
            raise

    async def ended(self) -> LocalError:
        """Return why Ray has ended."""
        await asyncio.shield(self._ray.exited)
        return self._ray.failure("Ray ended")

    async def close(self, *, force: bool = False) -> None:
        """End Ray, its workers and their engines; return when none of them is left."""
        await self._ray.stop(force=force)
        await self.dashboard.__aexit__(None)
        state.remove(self._state, self._runtime_dir)
        self._settings.token_file.unlink(missing_ok=True)
        if not self._keep_files:
            await asyncio.to_thread(state.remove_work_dir, self._work_dir)


class JoinedCluster:
    """A Ray cluster that somebody else runs. Nothing of it but our applications is changed."""

    def __init__(
        self,
        dashboard_url: str,
        *,
        address: str,
        port: int,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`address` and `port` are where the API is to listen if Serve does not run there yet."""
        token = token_of(os.environ if environ is None else environ)
        self.dashboard = Dashboard(dashboard_url, token)
        self.http_host = address
        self.http_port = port
        self.url = url_of(address, port)
        self.log_dir: Path | None = None
        self._host = httpx.URL(dashboard_url).host
        self._was_running = False
        self._may_remove = False
        self._runtime_dir = state.runtime_dir()
        self._state: state.State | None = None

    async def open(self, tell: Tell) -> None:
        """Look what runs there. Raises `ForeignApplications` if a deployment would replace it."""
        tell(Phase(f"joining the Ray cluster of {self.dashboard.url}"))
        serve = await self.dashboard.get()
        foreign = [known.name for known in serve.applications.values() if not known.ours]
        if foreign:
            raise ForeignApplications(sorted(foreign))
        self._was_running = serve.running
        if serve.http_port is not None:
            # Serve takes these once, at its start.
            self.http_host, self.http_port = serve.http_host or LOOPBACK, serve.http_port
        self.url = self._reachable_url()
        self._may_remove = True
        self._state = replace(_state_of_this_process(self.url), dashboard=self.dashboard.url)
        state.save(self._state, self._runtime_dir)

    def _reachable_url(self) -> str:
        host = self.http_host
        try:
            local = is_loopback(host) or host in ("0.0.0.0", "::")
        except ValueError:
            return f"http://{host}:{self.http_port}"
        if local:
            # Of the head, which need not be this machine.
            bare = f"[{self._host}]" if ":" in self._host else self._host
            return f"http://{bare}:{self.http_port}"
        return url_of(host, self.http_port)

    async def ended(self) -> LocalError:
        """Never returns: the cluster is not ours to watch, and may come back."""
        await asyncio.Future()
        raise AssertionError

    async def close(self, *, force: bool = False) -> None:
        """Remove our applications, and Serve if we started it; not if `force`."""
        if self._state is not None:
            state.remove(self._state, self._runtime_dir)
        try:
            if self._may_remove and not force:
                self._may_remove = False
                if self._was_running:
                    options = {"host": self.http_host, "port": self.http_port}
                    await self.dashboard.put({"http_options": options, "applications": []})
                else:
                    await self.dashboard.delete()
        finally:
            await self.dashboard.__aexit__(None)


def _state_of_this_process(url: str) -> state.State:
    pid = os.getpid()
    start_time = state.start_time_of(pid)
    assert start_time is not None, "a process that reads its own entry in /proc"
    return state.State(pid, start_time, url)


def check_key_file(path: Path) -> None:
    """Raises `LocalError` unless `path` is a file with an API key in it."""
    try:
        text = path.read_text()
        mode = path.stat().st_mode
    except OSError as error:
        raise LocalError(f"--api-key-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LocalError(f"--api-key-file {path}: it is not text") from error
    if not text.strip():
        raise LocalError(f"--api-key-file {path}: the file is empty")
    if stat.S_IMODE(mode) & stat.S_IWOTH:
        raise LocalError(f"--api-key-file {path}: everybody may write to it")
