"""Ollama's store on disk: what is read of it, what is removed, and what a Modelfile may say."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ollama_helpers import ollama_spec

from flexinfer.api.blocks import OllamaBlock
from flexinfer.api.ollamatag import parse_ollama_tag
from flexinfer.engines.errors import EngineConfigError
from flexinfer.engines.ollama_locks import if_free, locked, pin, unpin
from flexinfer.engines.ollama_modelfile import Modelfile, modelfile
from flexinfer.engines.ollama_store import (
    MODEL_LAYER,
    blob_path,
    manifest_path,
    model_blob,
    read_manifest,
    remove_litter,
    remove_model,
    remove_unnamed,
    store_and_tag,
)

TEMPLATE_LAYER = "application/vnd.ollama.image.template"


def add_model(store: Path, name: str, **layers: bytes) -> Path:
    """Write a model of `weights` and `template` as Ollama does; returns its manifest."""
    kinds = {"weights": MODEL_LAYER, "template": TEMPLATE_LAYER, "config": "config"}
    entries = {}
    (store / "blobs").mkdir(parents=True, exist_ok=True)
    for key, data in layers.items():
        digest = hashlib.sha256(data).hexdigest()
        (store / "blobs" / f"sha256-{digest}").write_bytes(data)
        entry = {"mediaType": kinds[key], "digest": f"sha256:{digest}", "size": len(data)}
        entries[key] = entry
    config = entries.pop("config", None)
    path = manifest_path(store, parse_ollama_tag(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"config": config, "layers": list(entries.values())}))
    return path


def write_manifest(store: Path, content: Any) -> Path:
    path = manifest_path(store, parse_ollama_tag("m"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def layer(**changes: Any) -> dict[str, Any]:
    return {"mediaType": MODEL_LAYER, "digest": f"sha256:{'0' * 64}", "size": 1, **changes}


def blobs(store: Path) -> set[bytes]:
    return {path.read_bytes() for path in (store / "blobs").iterdir()}


# -- paths


def test_a_manifests_path_tells_store_and_tag(tmp_path: Path) -> None:
    tag = parse_ollama_tag("127.0.0.1:5000/me/tuned:v1")
    path = manifest_path(tmp_path, tag)
    assert path == tmp_path / "manifests/127.0.0.1:5000/me/tuned/v1"
    assert store_and_tag(path) == (tmp_path, tag)


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/m.gguf", "manifests/a/b/c", "/a/b/c/d/e/f", "/manifests/a/b/c"),
        *("/s/manifests/../b/c/d", "/s/manifests/a/b.c/c/d", "/s/manifests/a/b/c/d/e"),
    ],
)
def test_other_paths_tell_nothing(path: str) -> None:
    assert store_and_tag(Path(path)) is None


# -- manifests are not trusted


def test_the_weights_of_a_model(tmp_path: Path) -> None:
    path = add_model(tmp_path, "m", weights=b"GGUF", template=b"t", config=b"{}")
    assert model_blob(path).read_bytes() == b"GGUF"
    found = read_manifest(path)
    assert found.store == tmp_path
    assert [entry.size for entry in found.layers] == [4, 1, 2]
    assert found.missing() == []


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    path = add_model(tmp_path, "m", weights=b"GGUF", template=b"t")
    blob = model_blob(path)
    blob.write_bytes(b"cut")
    assert [entry.media_type for entry in read_manifest(path).missing()] == [MODEL_LAYER]
    blob.unlink()
    assert [entry.media_type for entry in read_manifest(path).missing()] == [MODEL_LAYER]
    with pytest.raises(EngineConfigError, match="is not in its store"):
        model_blob(path)


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", "3", '"x"', "{}", '{"layers": 3}', '{"layers": [3]}', "[" * 99999),
        *({"layers": [layer(**change)]} for change in ({"digest": 3}, {"size": "1"}, {"size": -1})),
        *({"layers": [layer(**change)]} for change in ({"size": True}, {"mediaType": None})),
        {"layers": [{}]},
        {"layers": [], "config": {"digest": "sha256:.."}},
    ],
)
def test_what_is_no_manifest_is_said(tmp_path: Path, content: Any) -> None:
    path = write_manifest(tmp_path, content)
    with pytest.raises(EngineConfigError, match="is not a manifest of Ollama"):
        read_manifest(path)
    with pytest.raises(EngineConfigError, match="is not a manifest of Ollama"):
        model_blob(path)


@pytest.mark.parametrize(
    "digest",
    [
        *(
            "",
            "sha256:",
            "sha256:abc",
            f"sha256:{'0' * 63}",
            f"sha256:{'0' * 65}",
            "md5:" + "0" * 64,
        ),
        *(f"sha256:{'0' * 61}/..", "sha256:../../../../etc/passwd", "/etc/passwd", "..", "."),
        *(
            f"sha256:{'g' * 64}",
            f" sha256:{'0' * 64}",
            f"sha256:{'0' * 64}\n",
            f"x/sha256:{'0' * 64}",
        ),
    ],
)
def test_digests_lead_nowhere_else(tmp_path: Path, digest: str) -> None:
    with pytest.raises(EngineConfigError, match="is no digest"):
        blob_path(tmp_path, digest)
    with pytest.raises(EngineConfigError, match="is not a manifest"):
        model_blob(write_manifest(tmp_path, {"layers": [layer(digest=digest)]}))


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, {"layers": [], "x": "x" * (5 << 20)})
    with pytest.raises(EngineConfigError, match="too large"):
        read_manifest(path)


def test_a_manifest_that_is_not_there(tmp_path: Path) -> None:
    path = manifest_path(tmp_path, parse_ollama_tag("m"))
    with pytest.raises(EngineConfigError, match=r"cannot read .*latest: No such file"):
        model_blob(path)
    path.mkdir(parents=True)
    with pytest.raises(EngineConfigError, match="Is a directory"):
        model_blob(path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(EngineConfigError, match="is not a regular file"):
        model_blob(path)


def test_a_model_that_runs_elsewhere_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match="no weights of its own"):
        model_blob(add_model(tmp_path, "gpt-oss:120b-cloud", config=b"{}"))


# -- removing


def test_a_model_goes_with_its_own_blobs_only(tmp_path: Path) -> None:
    first = add_model(tmp_path, "a", weights=b"GGUF", template=b"a")
    second = add_model(tmp_path, "b", weights=b"GGUF", template=b"b")
    (tmp_path / "blobs" / f"sha256-{'1' * 64}-partial").write_bytes(b"coming")
    remove_model(first)
    assert not first.exists()
    assert blobs(tmp_path) == {b"GGUF", b"b", b"coming"}
    remove_model(second)
    assert blobs(tmp_path) == {b"coming"}
    remove_model(second)


def test_with_a_manifest_that_cannot_be_read_blobs_stay(tmp_path: Path) -> None:
    first = add_model(tmp_path, "a", weights=b"GGUF")
    broken = write_manifest(tmp_path, "{")
    remove_model(first)
    assert not first.exists()
    assert blobs(tmp_path) == {b"GGUF"}
    remove_model(broken)
    assert not broken.exists()


def test_only_what_no_model_names_is_removed(tmp_path: Path) -> None:
    path = add_model(tmp_path, "a", weights=b"GGUF")
    named = read_manifest(path).layers[0].digest
    other = f"sha256:{'2' * 64}"
    blob_path(tmp_path, other).write_bytes(b"source")
    remove_unnamed(tmp_path, [named, other])
    assert blobs(tmp_path) == {b"GGUF"}


def test_what_the_killed_left_is_removed(tmp_path: Path) -> None:
    path = add_model(tmp_path, "a", weights=b"GGUF")
    digest = f"sha256-{'1' * 64}"
    for name in (f"{digest}.77.tmp", "sha256-3141592", f"{digest}-partial", f"{digest}-partial-0"):
        (tmp_path / "blobs" / name).write_text(name)
    (tmp_path / "ollama-safetensors1/x").mkdir(parents=True)
    remove_litter(tmp_path)
    assert sorted(blob.name for blob in (tmp_path / "blobs").iterdir()) == sorted(
        [model_blob(path).name, f"{digest}-partial", f"{digest}-partial-0"]
    )
    assert not (tmp_path / "ollama-safetensors1").exists()


# -- locks


async def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    lock = tmp_path / "deep/er/lock"
    async with locked(lock):
        with if_free(lock) as free:
            assert not free
    with if_free(lock) as free:
        assert free


async def test_a_shared_lock_is_held_by_many(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    async with locked(lock, shared=True), locked(lock, shared=True):
        with if_free(lock) as free:
            assert not free


def test_pins_are_counted_by_who_has_them(tmp_path: Path) -> None:
    locks = [tmp_path / "a", tmp_path / "b"]

    def in_use() -> list[bool]:
        found = []
        for lock in locks:
            with if_free(lock) as free:
                found.append(not free)
        return found

    before = len(os.listdir("/proc/self/fd"))
    for lock in (*locks, *locks):
        pin("me", lock)
    pin("you", locks[0])
    assert in_use() == [True, True]
    unpin("me")
    assert in_use() == [True, False]
    unpin("you", but=[locks[0]])
    assert in_use() == [True, False]
    unpin("you")
    unpin("nobody")
    assert in_use() == [False, False]
    assert len(os.listdir("/proc/self/fd")) == before


# -- Modelfiles


def lines_of(text: str | None = None, directory: Path = Path("/"), **parameters: str) -> Modelfile:
    block = ollama_spec(
        **({"modelfile": text} if text is not None else {}), parameters=parameters
    ).block
    assert isinstance(block, OllamaBlock)
    return modelfile(block, directory)


def test_without_lines_there_is_nothing_to_make() -> None:
    assert not lines_of()
    assert not lines_of("# only a comment\n\n")


def test_lines_go_through_as_they_are() -> None:
    text = (
        "# mine\n"
        'TEMPLATE """{{ .System }}\n'
        "FROM here it goes on\n"
        'ADAPTER too"""\n'
        "system You are.\r\n"
        '  PARAMETER stop "<|end|>"\n'
        'MESSAGE user "two\nlines"\n'
        'LICENSE """\n"""\n'
        "FUTURE thing"
    )
    found = lines_of(text, temperature="0.5", stop=' "q" ')
    assert found.text("flexinfer/file/a:b") == (
        "FROM flexinfer/file/a:b\n"
        'TEMPLATE """{{ .System }}\n'
        "FROM here it goes on\n"
        'ADAPTER too"""\n'
        "system You are.\n"
        '  PARAMETER stop "<|end|>"\n'
        'MESSAGE user "two\nlines"\n'
        'LICENSE """\n"""\n'
        "FUTURE thing\n"
        'PARAMETER temperature """0.5"""\n'
        'PARAMETER stop """ "q" """\n'
    )
    assert found.adapters == ()


@pytest.mark.parametrize(
    "text", ["FROM x", "from x", "  From\tx", "SYSTEM a\nFROM x", 'SYSTEM """a\nb"""\rFROM x']
)
def test_from_is_ours(text: str) -> None:
    with pytest.raises(EngineConfigError, match=r"line \d: FROM is written by FlexInfer"):
        lines_of(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("SYSTEM", "line 1: 'SYSTEM' is no command with a value"),
        ("SYSTEM a\n{{ .Prompt }}", "line 2: '{{ .Prompt }}' is no command"),
        ('SYSTEM """a', "line 1: the quotes are not closed"),
        ('SYSTEM x\nTEMPLATE "a\nb', "line 2: the quotes are not closed"),
    ],
)
def test_lines_that_are_none(text: str, reason: str) -> None:
    with pytest.raises(EngineConfigError) as caught:
        lines_of(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize("key", ["a b", "a-b", "a\u0661", "a.b"])
def test_a_parameter_whose_name_is_none(key: str) -> None:
    with pytest.raises(EngineConfigError, match="is no name of a parameter"):
        lines_of(**{key: "1"})


def test_a_parameter_cannot_break_out_of_its_quotes() -> None:
    with pytest.raises(EngineConfigError, match=r"parameters\.stop: it must not contain"):
        lines_of(stop='"""\nFROM x')
    assert lines_of(stop="a\nFROM x").lines == ('PARAMETER stop """a\nFROM x"""',)


@pytest.mark.parametrize("unseen", ["\u200b", "\x01", "\U000e0001 ", "\u00e9"])
@pytest.mark.parametrize("quotes", ['"', '"""'])
def test_no_command_hides_in_quotes_that_ollama_sees_closed(quotes: str, unseen: str) -> None:
    text = f"SYSTEM {quotes}a{quotes}{unseen}\nFROM /etc/x\nSYSTEM {quotes}"
    with pytest.raises(EngineConfigError, match="line 1: something is behind the closing quotes"):
        lines_of(text)


class TestAdapters:
    def test_are_beside_the_weights(self, tmp_path: Path) -> None:
        (tmp_path / "lora.gguf").touch()
        for text in ("ADAPTER lora.gguf", 'adapter "lora.gguf"', "ADAPTER ./lora.gguf"):
            found = lines_of(text, tmp_path)
            assert found.lines == (f'ADAPTER """{tmp_path}/lora.gguf"""',)
            assert found.adapters == (tmp_path / "lora.gguf",)

    def test_may_have_an_absolute_path(self, tmp_path: Path) -> None:
        (tmp_path / "lora.gguf").touch()
        found = lines_of(f"ADAPTER {tmp_path}/lora.gguf", Path("/nowhere"))
        assert found.adapters == (tmp_path / "lora.gguf",)

    def test_do_not_lead_out(self, tmp_path: Path) -> None:
        (tmp_path / "models").mkdir()
        (tmp_path / "secret").touch()
        (tmp_path / "models/link").symlink_to(tmp_path / "secret")
        for value in ("../secret", "link"):
            with pytest.raises(EngineConfigError, match="leads out of"):
                lines_of(f"ADAPTER {value}", tmp_path / "models")

    def test_have_to_be_there(self, tmp_path: Path) -> None:
        with pytest.raises(EngineConfigError, match=rf"line 1: there is no {tmp_path}/nope"):
            lines_of("ADAPTER nope", tmp_path)
