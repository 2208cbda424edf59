"""Files as blobs of a store: by a link where one will do, else as a copy that Ollama takes in."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from flexinfer.engines.errors import EngineStartError
from flexinfer.engines.ollama_pull import amount
from flexinfer.engines.ollama_server import Server
from flexinfer.engines.ollama_store import blob_path

_CHUNK = 16 << 20
_UPLOAD_CHUNK = 1 << 20


async def sha256_of(file: Path, progress: Callable[[str], None]) -> str:
    """Return `sha256:<digits>` of a file. Cancelling ends it within a chunk.

    Raises `EngineStartError` if it cannot be read, or changes meanwhile.
    """
    digest = hashlib.sha256()
    before = await asyncio.to_thread(_stat, file)
    async for data in _chunks(file, _CHUNK, "reading", progress):
        await asyncio.to_thread(digest.update, data)
    after = await asyncio.to_thread(_stat, file)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise EngineStartError(f"{file} changes while it is read: is it still being copied?")
    return f"sha256:{digest.hexdigest()}"


async def put_blob(
    server: Server, store: Path, file: Path, digest: str, progress: Callable[[str], None]
) -> None:
    """Have `file`, whose digest that is, as a blob of `store`. Raises `EngineStartError`.

    A hard link costs nothing and keeps the content when the file goes. Across file systems it is a
    symbolic link: weights lie where their owner wants them read from. A copy is the last resort,
    for file systems that know no links.
    """
    blob = blob_path(store, digest)
    if blob.exists():
        if await asyncio.to_thread(_same, blob, file):
            return
        # A file that was linked here may have been written to since, in place.
        if await sha256_of(blob, progress) == digest:
            return
    linked = await asyncio.to_thread(_link, file, blob)
    if not linked:
        await _upload(server, file, digest, progress)


def _link(file: Path, blob: Path) -> bool:
    source = file.resolve()
    new = blob.with_name(f"{blob.name}.{os.getpid()}.tmp")
    for link in (os.link, os.symlink):
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
            link(source, new)
            os.replace(new, blob)
            # Two names of one file: the rename has done nothing, and left both.
            new.unlink(missing_ok=True)
            return True
    with contextlib.suppress(OSError):
        blob.unlink(missing_ok=True)  # the wrong content that it may have had
    return False


async def _upload(server: Server, file: Path, digest: str, progress: Callable[[str], None]) -> None:
    url = f"{server.url}/api/blobs/{digest}"
    content = _chunks(file, _UPLOAD_CHUNK, "copying", progress)
    headers = {"Content-Length": str((await asyncio.to_thread(_stat, file)).st_size)}
    async with server.client.post(url, data=content, headers=headers) as response:
        if response.status not in (200, 201):
            text = (await response.text())[:500]
            raise EngineStartError(f"Ollama does not take {file} into {server.url}: {text}")


async def _chunks(
    file: Path, size: int, verb: str, progress: Callable[[str], None]
) -> AsyncIterator[bytes]:
    """Yield a file's content, and say how far that is."""
    try:
        source = await asyncio.to_thread(open, file, "rb")
    except OSError as error:
        raise EngineStartError(f"cannot open {file}: {error.strerror}") from error
    done, last = 0, ""
    with source:
        total = os.fstat(source.fileno()).st_size
        while True:
            try:
                data = await asyncio.to_thread(source.read, size)
            except OSError as error:
                raise EngineStartError(f"cannot read {file}: {error.strerror}") from error
            if not data:
                return
            yield data
            done += len(data)
            text = f"{verb} {file.name}: {amount(done, total)}"
            if text != last:
                progress(last := text)


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise EngineStartError(f"cannot open {file}: {error.strerror}") from error


def _same(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(one, other)
    return False
