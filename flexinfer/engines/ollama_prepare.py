"""From weights to a model in a store: made from files, pulled, or there already.

Names of models that are made say what they are made of, so that whoever comes again finds them:

    flexinfer/file/<path>:<file>          weights as they are: their path; sizes and times
    flexinfer/tag/<name>:<content>        the same model of another store, by links
    flexinfer/ns-<namespace>/<name>:<all> a ModelDeployment's: base, Modelfile, parameters, adapters

Everything in angle brackets but the last names is a hash. A changed file or Modelfile makes another
model; what nobody needs any more of the old ones is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import aiohttp

from flexinfer.api.blocks import OllamaBlock
from flexinfer.api.ollamatag import OllamaTag
from flexinfer.engines import gguf
from flexinfer.engines.errors import EngineConfigError, EngineStartError
from flexinfer.engines.memory.types import MemoryPlanError
from flexinfer.engines.memory.untrusted import regular_file
from flexinfer.engines.ollama_blobs import put_blob, sha256_of
from flexinfer.engines.ollama_locks import if_free, locked, pin, unpin
from flexinfer.engines.ollama_modelfile import Modelfile, modelfile
from flexinfer.engines.ollama_pull import pull
from flexinfer.engines.ollama_server import Server, make_store, private_store, serving
from flexinfer.engines.ollama_store import (
    Manifest,
    manifest_path,
    read_manifest,
    remove_litter,
    remove_model,
    remove_unnamed,
    store_and_tag,
)
from flexinfer.engines.spec import EngineSpec, Executable

_log = logging.getLogger(__name__)

_OURS = "flexinfer"  # the host part of names that no registry knows
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
_CREATE_S = 3600.0  # safetensors have to be converted, which says nothing meanwhile


class Preparation:
    """One call of `Backend.prepare`."""

    def __init__(
        self,
        spec: EngineSpec,
        block: OllamaBlock,
        executable: Executable,
        environ: Mapping[str, str],
        progress: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._block = block
        self._executable = executable
        self._environ = environ
        self._progress = progress
        self._store = private_store(environ, spec.namespace)
        self._notes = self._store / _OURS
        self._who = f"{spec.namespace}/{spec.name}"

    async def run(self, weights: Path) -> Path:
        """Return the manifest of the model to serve. See `Backend.prepare`."""
        try:
            return await self._run(weights)
        except aiohttp.ClientError as error:
            raise EngineStartError(f"Ollama ended while it made the model: {error!r}") from error
        except OSError as error:
            raise EngineStartError(f"cannot make the model in {self._store}: {error}") from error

    async def _run(self, weights: Path) -> Path:
        found = None if await asyncio.to_thread(_is_gguf, weights) else store_and_tag(weights)
        changes = modelfile(self._block, weights.parent)
        if found is None:
            weights = Path(await asyncio.to_thread(os.path.abspath, weights))
            files = await asyncio.to_thread(_files_of, weights)
            make_store(self._store)
            base = await self._of_files(weights, files)
        else:
            store, base = found
            own = store == self._store
            if not own and await asyncio.to_thread(_whole, weights):
                if not changes:
                    return weights
                make_store(self._store)
                base = await self._imported(read_manifest(weights), base)
            else:
                # Not there yet, or what another store has of it is not whole.
                make_store(self._store)
                await self._pulled(base)
        needed = [base]
        if changes:
            needed.append(await self._made(base, changes))
        try:
            await asyncio.to_thread(self._keep_only, needed)
        except OSError as error:  # what is outdated takes room, and nothing else
            _log.warning("cannot clean up %s: %s", self._store, error)
        return manifest_path(self._store, needed[-1])

    # -- bases

    async def _of_files(self, weights: Path, files: Mapping[str, Path]) -> OllamaTag:
        states = {name: await asyncio.to_thread(os.stat, file) for name, file in files.items()}
        state = _hash(*((name, s.st_size, s.st_mtime_ns) for name, s in states.items()))
        tag = OllamaTag(_OURS, "file", _hash(str(weights)), state)
        async with self._alone(tag):
            if not _whole(manifest_path(self._store, tag)):
                for file in files.values():
                    await asyncio.to_thread(_refuse_cut, file)
                digests = {name: await sha256_of(f, self._progress) for name, f in files.items()}
                async with self._adding(), self._serving() as server:
                    for name, file in files.items():
                        await put_blob(server, self._store, file, digests[name], self._progress)
                    await _create(server, tag, digests, self._progress)
                await asyncio.to_thread(self._drop_blobs, digests.values())
            self._pin(tag)
        return tag

    async def _imported(self, manifest: Manifest, name: OllamaTag) -> OllamaTag:
        content = await asyncio.to_thread(manifest.path.read_bytes)
        tag = OllamaTag(_OURS, "tag", _hash(str(name)), _hash(content.hex()))
        target = manifest_path(self._store, tag)
        async with self._alone(tag):
            if not _whole(target):
                async with self._adding(), self._serving() as server:
                    for layer in manifest.layers:
                        file = manifest.blob(layer)
                        await put_blob(server, self._store, file, layer.digest, self._progress)
                    await asyncio.to_thread(_write_whole, target, content)
            self._pin(tag)
        return tag

    async def _pulled(self, tag: OllamaTag) -> None:
        async with self._alone(tag):
            if not _whole(manifest_path(self._store, tag)):
                # Private models of the registry are given to the key of the user, if there is one.
                own = Path(self._environ.get("HOME", "/nonexistent"))
                signed_in = os.access(own / ".ollama" / "id_ed25519", os.R_OK)
                async with (
                    self._adding(),
                    serving(
                        self._executable, self._environ, self._store, own if signed_in else None
                    ) as server,
                ):
                    await pull(server, self._store, tag, self._progress)
                if not _whole(manifest_path(self._store, tag)):
                    raise EngineStartError(f"{tag.short} was pulled, but is not whole in its store")
            self._pin(tag)

    # -- made models

    async def _made(self, base: OllamaTag, changes: Modelfile) -> OllamaTag:
        content = read_manifest(manifest_path(self._store, base))
        states = [os.stat(path) for path in changes.adapters]
        identity = _hash(
            *(layer.digest for layer in content.layers),
            *changes.lines,
            *((state.st_size, state.st_mtime_ns) for state in states),
        )
        tag = OllamaTag(_OURS, f"ns-{self._spec.namespace}", self._spec.name, identity)
        async with self._alone(tag):
            if not _whole(manifest_path(self._store, tag)):
                self._progress("making the model of its Modelfile")
                async with self._adding(), self._serving() as server:
                    with tempfile.TemporaryDirectory(prefix="modelfile-", dir=self._notes) as work:
                        file = Path(work, "Modelfile")
                        text = changes.text(str(base))
                        await asyncio.to_thread(file.write_text, text, encoding="utf-8")
                        try:
                            await server.run("create", str(tag), "-f", str(file), cwd=Path(work))
                        except EngineStartError as error:
                            reason = (
                                f"Ollama refuses spec.ollama's modelfile or parameters: {error}"
                            )
                            raise EngineStartError(
                                reason, log_tail=error.log_tail, exit=error.exit
                            ) from error
            self._pin(tag)
        return tag

    # -- who else is here

    def _lock(self, tag: OllamaTag) -> Path:
        return self._notes / "locks" / f"{_hash(str(tag))}.lock"

    def _used(self, tag: OllamaTag) -> Path:
        return self._notes / "pins" / f"{_hash(str(tag))}.lock"

    def _alone(self, tag: OllamaTag) -> contextlib.AbstractAsyncContextManager[None]:
        """One process makes a model; others of the same come when it is made."""
        text = "waiting for another replica that prepares the same model"
        return locked(self._lock(tag), waiting=lambda: self._progress(text))

    def _adding(self) -> contextlib.AbstractAsyncContextManager[None]:
        """While blobs come in that no manifest names yet, nobody removes blobs."""
        return locked(self._notes / "store.lock", shared=True)

    def _serving(self) -> contextlib.AbstractAsyncContextManager[Server]:
        return serving(self._executable, self._environ, self._store)

    def _pin(self, tag: OllamaTag) -> None:
        pin(self._who, self._used(tag))

    def _drop_blobs(self, digests: Iterable[str]) -> None:
        """Remove what was only needed for a conversion."""
        with if_free(self._notes / "store.lock") as free:
            if free:
                remove_unnamed(self._store, digests)

    def _keep_only(self, needed: list[OllamaTag]) -> None:
        """Remove what was made for this ModelDeployment, or of these weights, and is outdated."""
        unpin(self._who, but=[self._used(tag) for tag in needed])
        own = OllamaTag(_OURS, f"ns-{self._spec.namespace}", self._spec.name, "any")
        families = {tag for tag in needed if tag.host == _OURS} | {own}
        with if_free(self._notes / "store.lock") as free:
            if not free:
                return  # somebody adds to the store: the next start will do it
            remove_litter(self._store)
            for family in families:
                for path in sorted(manifest_path(self._store, family).parent.glob("*")):
                    found = store_and_tag(path)
                    if found is None or found[1] in needed:
                        continue
                    tag = found[1]
                    with if_free(self._lock(tag)) as unmade, if_free(self._used(tag)) as unused:
                        if unmade and unused:
                            remove_model(path)


async def _create(
    server: Server, tag: OllamaTag, files: Mapping[str, str], progress: Callable[[str], None]
) -> None:
    """Make a model of blobs (file name: digest), with the template that Ollama finds in them."""
    body = {"model": str(tag), "files": dict(files), "stream": True}
    error, done = "no answer", False
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(_CREATE_S),
            server.client.post(f"{server.url}/api/create", json=body) as response,
        ):
            error = f"HTTP {response.status}"
            async for line in response.content:
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    error = event.get("error", error)
                    if str(event.get("status")).startswith("converting"):
                        progress(event["status"])
                    done = done or event.get("status") == "success"
    if not done:
        raise EngineStartError(f"Ollama makes no model of these weights: {error}")


def _files_of(weights: Path) -> dict[str, Path]:
    """Return the files to make a model of, by name. Raises `EngineStartError`."""
    if not weights.is_dir():
        shards = _SHARD.search(weights.name)
        if shards is not None and int(shards[1]) > 1:
            raise EngineStartError(
                f"Ollama reads no GGUF in parts, and {weights.name} is one of {int(shards[1])}: "
                "join them with `llama-gguf-split --merge`, or use backend llama-cpp"
            )
        return {"model.gguf": weights}
    found = sorted(weights.glob("*.safetensors"))
    if not found:
        raise EngineStartError(f"{weights} holds neither a GGUF file nor safetensors")
    # As `FROM` with a directory does.
    found += sorted(weights.glob("*.json"))
    found += sorted(weights.glob("tokenizer.model"))
    return {file.name: file for file in found}


def _refuse_cut(file: Path) -> None:
    if file.suffix not in (".safetensors", ".json", ".model") and (fault := gguf.fault(file)):
        raise EngineStartError(fault)


def _whole(path: Path) -> bool:
    try:
        return not read_manifest(path).missing()
    except EngineConfigError:
        return False


def _is_gguf(path: Path) -> bool:
    try:
        with regular_file(path) as (file, _):
            return file.read(4) == b"GGUF"
    except MemoryPlanError:
        return False


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A temporary file beside it would be a manifest to Ollama.
    temporary = path.parents[4] / f"{path.name}.{os.getpid()}.tmp"
    temporary.write_bytes(content)
    os.replace(temporary, path)
