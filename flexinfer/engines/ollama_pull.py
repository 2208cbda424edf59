"""`POST /api/pull`: a model's download by Ollama itself, watched."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from flexinfer.api.ollamatag import OllamaTag
from flexinfer.engines.errors import EngineStartError
from flexinfer.engines.ollama_server import Server

STALL_S = 60.0
# What it has loaded it reads once more, and says nothing meanwhile.
_SLOWEST_READ = 20e6  # bytes/s
_PARTS_WRITTEN_S = 2.0


async def pull(
    server: Server,
    store: Path,
    tag: OllamaTag,
    progress: Callable[[str], None],
    *,
    stall_s: float = STALL_S,
) -> None:
    """Have `tag` pulled into the server's store. What is there of an earlier try is gone on from.

    Raises `EngineStartError`: the registry has no such model or cannot be reached, what came is
    damaged, or nothing has come for `stall_s`. Cancelling ends the download, not what it has got.
    """
    body = {"model": str(tag), "insecure": _on_loopback(tag.host), "stream": True}
    state = _State(tag, progress)
    try:
        async with (
            asyncio.timeout(stall_s) as limit,
            server.client.post(f"{server.url}/api/pull", json=body) as response,
        ):
            loop = asyncio.get_running_loop()
            async for line in response.content:
                if state.take(line):
                    limit.reschedule(loop.time() + stall_s + state.silence_s)
            if not state.succeeded:
                raise _error(tag, state.error or f"HTTP {response.status}, {state.said}", store)
    except TimeoutError:
        await _parts_written(store)
        raise EngineStartError(
            f"the download of {tag.short} stands still at: {state.said}; nothing has come for "
            f"{stall_s:g} s. The next start goes on from there"
        ) from None
    except aiohttp.ClientError as error:
        raise EngineStartError(
            f"Ollama ended while it pulled {tag.short} ({error or type(error).__name__}), at: "
            f"{state.said}"
        ) from error
    except asyncio.CancelledError:
        # The connection is closed, so the download ends and notes how far it is; a server that is
        # ended at once would not get round to that.
        await _parts_written(store)
        raise


class _State:
    """What the server has said so far."""

    def __init__(self, tag: OllamaTag, progress: Callable[[str], None]) -> None:
        self.said = "asking the registry"
        self.error: str | None = None
        self.succeeded = False
        self.silence_s = 0.0
        self._tag = tag
        self._progress = progress
        self._sizes: dict[str, tuple[int, int]] = {}
        self._last: tuple[object, ...] = ()

    def take(self, line: bytes) -> bool:
        """Take in a line, and return whether anything has moved since the last one."""
        try:
            event = json.loads(line)
        except ValueError:
            return False
        if not isinstance(event, Mapping):
            return False
        if event.get("error"):
            self.error = str(event["error"])
            return True
        status = str(event.get("status", ""))
        self.succeeded = self.succeeded or status == "success"
        digest, total = event.get("digest"), event.get("total")
        if isinstance(digest, str) and type(total) is int and total > 0:
            self._sizes[digest] = (_whole(event.get("completed")), total)
            said = _amount(self._sizes)
        else:
            said = status
        if status.startswith("verifying"):
            self.silence_s = sum(total for _, total in self._sizes.values()) / _SLOWEST_READ
        if said and said != self.said:
            self.said = said
            self._progress(f"pulling {self._tag.short}: {said}")
        now = (status, tuple(self._sizes.items()))
        moved, self._last = now != self._last, now
        return moved


def _whole(value: Any) -> int:
    return value if type(value) is int else 0


def _amount(sizes: Mapping[str, tuple[int, int]]) -> str:
    done, total = (sum(column) for column in zip(*sizes.values(), strict=True))
    return amount(done, total)


def amount(done: int, total: int) -> str:
    """Return how much of something is done, such as `34 %, 1.2 of 4.7 GB`."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
    unit, name = next((unit, name) for unit, name in units if total >= unit or unit == 1)
    return f"{100 * done // max(total, 1)} %, {done / unit:.1f} of {total / unit:.1f} {name}"


_ADVICE: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), advice)
    for pattern, advice in (
        (
            r"file does not exist|not found|\b404\b",
            "{host} has no model {tag}. Check its name; if a file is meant, put it into a models "
            "directory; a repository of Hugging Face is written hf.co/ORG/REPO:QUANTISATION",
        ),
        (
            r"unauthorized|access denied|\b40[13]\b",
            "{host} does not give {tag} to everybody ({error}): sign in with `ollama signin` as "
            "the user that serves, or pull it into a store of your own",
        ),
        (
            r"digest mismatch",
            "what came of {tag} is damaged and was removed ({error}); the next start pulls it anew",
        ),
        (r"no space left", "{store} is full: {tag} cannot be pulled ({error})"),
        (
            r"dial tcp|no such host|connection refused|connection reset|i/o timeout|unreachable|"
            r"tls: |x509|max retries|\bEOF\b",
            "cannot pull {tag} from {host}: {error}. The next start goes on from there; weights "
            "that are on this machine can be named by their path",
        ),
    )
)


def _error(tag: OllamaTag, error: str, store: Path) -> EngineStartError:
    for pattern, advice in _ADVICE:
        if pattern.search(error):
            text = advice.format(host=tag.host, tag=tag.short, error=error, store=store)
            return EngineStartError(text)
    return EngineStartError(f"cannot pull {tag.short}: {error}")


def _on_loopback(host: str) -> bool:
    """Whether a registry may be asked without TLS: on this machine nobody is in between."""
    name = host.rpartition(":")[0] or host
    if name == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return False


async def _parts_written(store: Path) -> None:
    """Wait until each part of a download that was cut has noted how far it is, or for 2 s."""
    end = time.monotonic() + _PARTS_WRITTEN_S
    while time.monotonic() < end:
        notes = await asyncio.to_thread(lambda: list(store.glob("blobs/*-partial-*")))
        if all([await asyncio.to_thread(_noted, note) for note in notes]):
            return
        await asyncio.sleep(0.05)


def _noted(note: Path) -> bool:
    """Whether a part says how far it is: it does so when it ends, in a file of its own."""
    data = note.with_name(note.name.rpartition("-")[0])
    try:
        part = json.loads(note.read_bytes())
        whole = part["Completed"] == part["Size"]
        return whole or note.stat().st_mtime_ns >= data.stat().st_mtime_ns
    except FileNotFoundError:
        return True  # the blob is whole
    except (OSError, ValueError, KeyError, TypeError):
        return False  # just being written
