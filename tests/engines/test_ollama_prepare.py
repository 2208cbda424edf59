"""Weights become a model in a store, with the fake Ollama and with the real one."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import REPOSITORY, eventually
from ollama_helpers import EMPTY_GGUF, Bench, ollama_spec, tree

from flexinfer.engines import ollama_pull
from flexinfer.engines.errors import EngineConfigError, EngineStartError
from flexinfer.engines.ollama_locks import if_free
from flexinfer.engines.ollama_store import model_blob, read_manifest
from tests.fakes.ollama_registry import Registry


def without_program(ollama: Bench) -> None:
    """Whoever runs this Ollama from now on fails."""
    ollama.program = ollama.directory / "nothing"
    ollama.program.write_text("#!/bin/sh\nexit 1\n")
    ollama.program.chmod(0o755)


# -- files


async def test_a_file_becomes_a_model_and_stays_as_it_is(ollama: Bench) -> None:
    before = ollama.weights.stat()
    made = await ollama.prepare()
    assert made.is_relative_to(ollama.store)
    assert read_manifest(made).missing() == []
    assert ollama.weights.samefile(model_blob(made))
    after = ollama.weights.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_mode, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_mode,
        before.st_ino,
    )
    assert ollama.said[-1].startswith(f"reading {ollama.weights.name}: 100 %, ")
    assert ollama.processes() == []


async def test_again_costs_nothing(ollama: Bench) -> None:
    block = {"modelfile": "SYSTEM Be short.", "parameters": {"temperature": "0"}}
    made = await ollama.prepare(**block)
    before = tree(ollama.store)
    without_program(ollama)
    assert await ollama.prepare(**block) == made
    assert ollama.said == []
    assert tree(ollama.store) == before


async def test_another_modelfile_makes_another_model(ollama: Bench) -> None:
    first = await ollama.prepare(modelfile='SYSTEM """You\nare."""')
    second = await ollama.prepare(modelfile='SYSTEM """You\nwere."""')
    assert first != second
    assert model_blob(second).samefile(ollama.weights)
    # The file is not read again, and what nobody needs any more is gone with its own blobs.
    assert not any(text.startswith("reading") for text in ollama.said)
    assert not first.exists()
    named = {
        layer.digest.replace(":", "-")
        for path in ollama.store.glob("manifests/*/*/*/*")
        for layer in read_manifest(path).layers
    }
    assert {path.name for path in (ollama.store / "blobs").iterdir()} == named
    third = await ollama.prepare(parameters={"temperature": "0.5", "stop": " <|x|> "})
    assert third not in (first, second)
    assert await ollama.prepare() not in (first, second, third)


async def test_models_of_others_stay(ollama: Bench) -> None:
    other = await ollama.prepare(spec=ollama_spec(name="other", modelfile="SYSTEM One."))
    await ollama.prepare(modelfile="SYSTEM Two.")
    await ollama.prepare(modelfile="SYSTEM Three.")
    assert read_manifest(other).missing() == []


_USER = """
import sys
from collections.abc import Iterator
from pathlib import Path
from flexinfer.engines.ollama_locks import pin
for path in sys.argv[1:]:
    pin("somebody", Path(path))
print("pinned", flush=True)
sys.stdin.read()
"""


async def test_what_another_process_uses_stays_until_its_end(ollama: Bench) -> None:
    first = await ollama.prepare(modelfile="SYSTEM One.")
    pins = [str(path) for path in (ollama.store / "flexinfer" / "pins").iterdir()]
    user = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _USER, *pins),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert user.stdout is not None
    assert await user.stdout.readline() == b"pinned\n"
    await ollama.prepare(modelfile="SYSTEM Two.")
    assert first.exists()
    user.kill()
    await user.wait()
    await ollama.prepare(modelfile="SYSTEM Three.")
    assert not first.exists()


async def test_a_changed_file_makes_another_model(ollama: Bench) -> None:
    copy = ollama.directory / "copy.gguf"
    shutil.copy(ollama.weights, copy)
    first = await ollama.prepare(copy)
    # In place: the blob of before has another content now, under its old name.
    with copy.open("ab") as file:
        file.write(b"more")
    second = await ollama.prepare(copy)
    assert second != first
    assert not first.exists()
    assert model_blob(second).read_bytes()[-4:] == b"more"


async def test_a_blob_whose_content_was_changed_is_not_trusted(ollama: Bench) -> None:
    copy = ollama.directory / "copy.gguf"
    shutil.copy(ollama.weights, copy)
    first = await ollama.prepare(copy, spec=ollama_spec(name="other"))
    blob = model_blob(first)
    with copy.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    made = await ollama.prepare()
    assert model_blob(made) == blob
    assert blob.read_bytes() == ollama.weights.read_bytes()


async def test_two_replicas_make_it_once(ollama: Bench) -> None:
    said: list[list[str]] = [[], []]
    spec = ollama_spec(modelfile="SYSTEM One.")
    one, other = await asyncio.gather(
        *(
            ollama.backend.prepare(
                spec, ollama.weights, ollama.executable, ollama.environ, told.append
            )
            for told in said
        )
    )
    assert one == other
    made = [any(text.startswith("reading") for text in told) for told in said]
    assert sorted(made) == [False, True]
    waited = said[made.index(False)]
    assert "waiting for another replica that prepares the same model" in waited


@pytest.fixture
def elsewhere(ollama: Bench) -> Iterator[Path]:
    """A copy of the weights on another file system than the store's."""
    there = Path("/dev/shm", f"flexinfer-test-{os.getpid()}.gguf")
    if not there.parent.is_dir() or there.parent.stat().st_dev == ollama.directory.stat().st_dev:
        pytest.skip("there is no second file system")
    shutil.copy(ollama.weights, there)
    yield there
    there.unlink()


async def test_another_file_system_gets_a_symbolic_link(ollama: Bench, elsewhere: Path) -> None:
    made = await ollama.prepare(elsewhere)
    blob = model_blob(made)
    assert blob.is_symlink() and blob.samefile(elsewhere)
    engine = ollama.engine(made)
    await engine.start(timeout_s=60)
    await engine.check()


async def test_a_link_that_leads_nowhere_any_more_is_seen(ollama: Bench) -> None:
    made = await ollama.prepare()
    blob = model_blob(made)
    blob.unlink()
    blob.symlink_to(ollama.directory / "gone.gguf")
    assert await ollama.prepare() == made
    assert blob.samefile(ollama.weights)


async def test_without_links_it_is_a_copy(ollama: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "symlink", refuse)
    made = await ollama.prepare()
    blob = model_blob(made)
    assert not blob.samefile(ollama.weights)
    assert blob.read_bytes() == ollama.weights.read_bytes()
    assert any(text.startswith("copying") for text in ollama.said)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"hello", "is not a GGUF file"),
        (b"GGUF", "ends within its header"),
    ],
)
async def test_a_file_that_is_no_model(ollama: Bench, content: bytes, reason: str) -> None:
    bad = ollama.directory / "bad.gguf"
    bad.write_bytes(content)
    with pytest.raises(EngineStartError, match=reason):
        await ollama.prepare(bad)


async def test_a_file_that_is_not_there(ollama: Bench) -> None:
    with pytest.raises(EngineStartError, match=r"nothing\.gguf"):
        await ollama.prepare(ollama.directory / "nothing.gguf")


async def test_a_model_in_parts_is_refused(ollama: Bench) -> None:
    part = ollama.directory / "big-00001-of-00002.gguf"
    part.write_bytes(EMPTY_GGUF)
    with pytest.raises(EngineStartError, match=r"big-00001-of-00002\.gguf is one of 2.*--merge"):
        await ollama.prepare(part)


async def test_a_directory_without_weights_is_refused(ollama: Bench) -> None:
    with pytest.raises(EngineStartError, match="neither a GGUF file nor safetensors"):
        await ollama.prepare(ollama.directory)


async def test_a_modelfile_that_is_none_is_said(ollama: Bench) -> None:
    with pytest.raises(EngineStartError, match=r"modelfile or parameters: \(line 2\): command"):
        await ollama.prepare(modelfile="BOGUS line")
    with pytest.raises(EngineConfigError, match="FROM is written by FlexInfer"):
        await ollama.prepare(modelfile="FROM llama3")
    assert ollama.processes() == []


async def test_a_store_that_cannot_be_made(ollama: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "store", Path("/proc/nowhere"))
    with pytest.raises(EngineConfigError, match="FLEXINFER_OLLAMA_STORE names another"):
        await ollama.prepare()


async def test_cancelled_while_it_reads(ollama: Bench) -> None:
    with (ollama.directory / "large.gguf").open("wb") as large:
        large.write(EMPTY_GGUF)
        large.truncate(4 << 30)  # a hole: it costs no disk, and takes seconds to read
    task = asyncio.create_task(ollama.prepare(ollama.directory / "large.gguf"))
    await eventually(lambda: ollama.said)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert ollama.processes() == []
    for lock in (ollama.store / "flexinfer" / "locks").iterdir():
        with if_free(lock) as free:
            assert free


# -- other stores


@pytest.fixture
async def users(ollama: Bench, tmp_path: Path) -> Path:
    """A user's store with a model `mine:1`; returns its manifest."""
    made = await ollama.prepare()
    store = tmp_path / "users"
    target = store / "manifests/registry.ollama.ai/library/mine/1"
    target.parent.mkdir(parents=True)
    shutil.copy(made, target)
    shutil.copytree(ollama.store / "blobs", store / "blobs")
    shutil.rmtree(ollama.store)
    return target


async def test_a_users_model_is_used_where_it_is(ollama: Bench, users: Path) -> None:
    before = tree(users.parents[4])
    without_program(ollama)
    assert await ollama.prepare(users) == users
    assert tree(users.parents[4]) == before
    assert not ollama.store.exists()


async def test_a_users_model_is_changed_in_our_store(ollama: Bench, users: Path) -> None:
    before = tree(users.parents[4])
    made = await ollama.prepare(users, modelfile="SYSTEM One.")
    assert made.is_relative_to(ollama.store)
    assert model_blob(made).samefile(model_blob(users))
    assert tree(users.parents[4]) == before
    without_program(ollama)
    assert await ollama.prepare(users, modelfile="SYSTEM One.") == made


async def test_what_a_user_has_in_part_is_pulled_into_ours(
    ollama: Bench, users: Path, registry: Registry
) -> None:
    registry.add_gguf("library/mine:1", ollama.weights.read_bytes())
    tag = ollama.tag(f"{registry.url_host}/library/mine:1")
    theirs = users.parents[4] / tag.relative_to(ollama.store)
    theirs.parent.mkdir(parents=True)
    shutil.copy(users, theirs)
    model_blob(theirs).unlink()
    before = tree(users.parents[4])
    assert await ollama.prepare(theirs) == tag
    assert read_manifest(tag).missing() == []
    assert tree(users.parents[4]) == before


# -- pulling


async def test_a_tag_is_pulled_once(ollama: Bench, registry: Registry) -> None:
    registry.add_gguf("library/smol:q4", ollama.weights.read_bytes())
    tag = ollama.tag(f"{registry.url_host}/library/smol:q4")
    assert await ollama.prepare(tag) == tag
    assert model_blob(tag).read_bytes() == ollama.weights.read_bytes()
    name = f"{registry.url_host}/library/smol:q4"
    assert ollama.said[0] == f"pulling {name}: pulling manifest"
    assert any(text.startswith(f"pulling {name}: 100 %, ") for text in ollama.said)
    assert f"pulling {name}: verifying sha256 digest" in ollama.said
    without_program(ollama)
    assert await ollama.prepare(tag) == tag
    assert ollama.said == []


async def test_a_pulled_model_can_be_changed(ollama: Bench, registry: Registry) -> None:
    registry.add_gguf("library/smol:q4", ollama.weights.read_bytes())
    tag = ollama.tag(f"{registry.url_host}/library/smol:q4")
    made = await ollama.prepare(tag, modelfile="SYSTEM One.")
    assert made != tag
    assert model_blob(made) == model_blob(tag)
    await ollama.prepare(tag)
    assert tag.exists() and not made.exists()


LARGE = bytes(range(256)) * (3 << 12)  # 3 MiB of no model: nothing in it is looked at


@pytest.fixture
def large(ollama: Bench, registry: Registry) -> Path:
    """A tag whose download stops in the middle."""
    registry.add_gguf("library/large:1", LARGE)
    registry.stop_at = 1 << 20
    return ollama.tag(f"{registry.url_host}/library/large:1")


async def test_a_download_that_stands_still_is_given_up(
    ollama: Bench, registry: Registry, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ollama_pull.pull.__kwdefaults__, "stall_s", 1.5)
    with pytest.raises(EngineStartError, match=r"stands still at: 33 %, 1\.0 of 3\.1 MB"):
        await ollama.prepare(large)
    assert ollama.processes() == []
    await goes_on_from_the_middle(ollama, registry, large)


async def test_a_download_can_be_cancelled(ollama: Bench, registry: Registry, large: Path) -> None:
    task = asyncio.create_task(ollama.prepare(large))
    await asyncio.to_thread(registry.stopped.wait, 30)
    await eventually(lambda: any("33 %" in text for text in ollama.said))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ollama.processes() == []
    await goes_on_from_the_middle(ollama, registry, large)


async def goes_on_from_the_middle(ollama: Bench, registry: Registry, large: Path) -> None:
    registry.go_on.set()
    registry.sent = 0
    assert await ollama.prepare(large) == large
    assert model_blob(large).read_bytes() == LARGE
    assert len(LARGE) - (1 << 20) <= registry.sent < len(LARGE)


async def test_what_came_damaged_is_removed(ollama: Bench, registry: Registry) -> None:
    registry.add_gguf("library/smol:q4", LARGE)
    registry.damage = set(registry.blobs)
    tag = ollama.tag(f"{registry.url_host}/library/smol:q4")
    with pytest.raises(EngineStartError, match=r"damaged and was removed \(digest mismatch"):
        await ollama.prepare(tag)
    registry.damage.clear()
    assert await ollama.prepare(tag) == tag
    assert model_blob(tag).read_bytes() == LARGE


async def test_a_model_that_the_registry_lacks(ollama: Bench, registry: Registry) -> None:
    with pytest.raises(EngineStartError, match=rf"{registry.url_host} has no model .*nope:1"):
        await ollama.prepare(ollama.tag(f"{registry.url_host}/library/nope:1"))


async def test_a_registry_that_fails(ollama: Bench, registry: Registry) -> None:
    registry.status = 500
    with pytest.raises(EngineStartError, match=r"cannot pull .*: pull model manifest: 500"):
        await ollama.prepare(ollama.tag(f"{registry.url_host}/library/smol:1"))


async def test_a_registry_that_is_not_there(ollama: Bench, registry: Registry) -> None:
    tag = ollama.tag(f"{registry.url_host}/library/smol:1")
    registry.stop()
    with pytest.raises(EngineStartError, match=r"cannot pull .* from 127\.0\.0\.1:\d+: .*refused"):
        await ollama.prepare(tag)
    registry.start()


async def test_a_program_that_does_not_start(ollama: Bench, registry: Registry) -> None:
    without_program(ollama)
    with pytest.raises(EngineStartError, match="ollama serve ended: exit code 1"):
        await ollama.prepare()
