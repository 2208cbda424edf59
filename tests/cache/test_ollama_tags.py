"""Ollama tags: which store they are in, what their path is, and when they are not meant."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flexinfer.api.ollamatag import OllamaTag, parse_ollama_tag
from flexinfer.cache import AmbiguousModel, ModelNotFound, Stores, Weights, locate
from flexinfer.cache.places import OLLAMA_STORE_VARIABLE
from flexinfer.engines.ollama_server import STORE_VARIABLE
from flexinfer.engines.ollama_server import private_store as store_of_engine
from tests.cache.conftest import make_cache, write

Find = Callable[..., Weights]
QWEN = "registry.ollama.ai/library/qwen3/8b"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without models, and nothing set that says where others are."""
    for name in ("OLLAMA_MODELS", OLLAMA_STORE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("flexinfer.cache.ollama._SYSTEM_STORE", tmp_path / "system")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def find(find: Find) -> Find:
    return lambda model, **more: find(model, **({"backend": "ollama"} | more))


def private(tmp_path: Path) -> Path:
    # Neither root exists, so none can be written to, and the last one counts.
    return tmp_path / "node-b" / "default" / "ollama" / "manifests"


class TestNames:
    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("qwen3", ("registry.ollama.ai", "library", "qwen3", "latest")),
            ("qwen3:8b", ("registry.ollama.ai", "library", "qwen3", "8b")),
            ("library/qwen3", ("registry.ollama.ai", "library", "qwen3", "latest")),
            ("me/tuned:v1.2", ("registry.ollama.ai", "me", "tuned", "v1.2")),
            ("hf.co/org/repo-GGUF:Q4_K_M", ("hf.co", "org", "repo-GGUF", "Q4_K_M")),
            ("127.0.0.1:5000/library/x", ("127.0.0.1:5000", "library", "x", "latest")),
        ],
    )
    def test_are_completed(self, text: str, parts: tuple[str, ...]) -> None:
        tag = parse_ollama_tag(text)
        assert tag.parts == parts
        assert parse_ollama_tag(str(tag)) == tag
        assert parse_ollama_tag(tag.short) == tag

    @pytest.mark.parametrize(
        "text",
        [
            *("", ":", "a:", ":b", "/a", "a/", "a//b", "//a", "a/b/c/d", "a b", "a:b:c"),
            *("..", "../a", "a/..", "../../etc/passwd", "x/../y", ".", "./a", "a:..", "..:a"),
            *(
                "a\0b",
                "a\nb",
                "ä",
                "a\u0661",
                "-a",
                ".a",
                "a/.b/c",
                "a" * 81,
                "n.s/a",
                "a@sha256:0",
            ),
            *("~/a", "a:/b", "http://a/b/c", "a\\b"),
        ],
    )
    def test_that_are_none(self, text: str) -> None:
        with pytest.raises(ValueError, match="no part of an Ollama tag"):
            parse_ollama_tag(text)

    def test_a_path_of_one_stays_where_it_belongs(self) -> None:
        with pytest.raises(ValueError, match="no part"):
            OllamaTag("..", "..", "..", "etc")
        assert parse_ollama_tag("a..b:c..d").path.parts[-2:] == ("a..b", "c..d")


class TestStores:
    def test_what_is_nowhere_will_be_in_ours(self, tmp_path: Path, find: Find) -> None:
        found = find("qwen3:8b")
        assert found.path == private(tmp_path) / QWEN
        assert not found.path.exists()

    def test_what_the_user_has_is_used(self, home: Path, tmp_path: Path, find: Find) -> None:
        mine = write(home / ".ollama/models/manifests" / QWEN)
        assert find("qwen3:8b").path == mine
        assert find("qwen3").path == private(tmp_path) / QWEN.replace("8b", "latest")
        mine.unlink()
        os.mkfifo(mine)  # is not waited for
        assert find("qwen3:8b").path == private(tmp_path) / QWEN

    def test_the_services_store_comes_after_the_homes(
        self, home: Path, tmp_path: Path, find: Find
    ) -> None:
        service = write(tmp_path / "system/manifests" / QWEN)
        assert find("qwen3:8b").path == service
        mine = write(home / ".ollama/models/manifests" / QWEN)
        assert find("qwen3:8b").path == mine

    def test_a_store_that_is_named_is_the_only_one(
        self, home: Path, tmp_path: Path, find: Find, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(home / ".ollama/models/manifests" / QWEN)
        named = write(tmp_path / "named/manifests" / QWEN)
        monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "named"))
        assert find("qwen3:8b").path == named
        # The manifest's own word goes before that of this process.
        env = {"OLLAMA_MODELS": str(tmp_path / "other")}
        assert find("qwen3:8b", engine_env=env).path == private(tmp_path) / QWEN
        other = write(tmp_path / "other/manifests" / QWEN)
        assert find("qwen3:8b", engine_env=env).path == other

    def test_ours_can_be_named_but_not_by_a_manifest(
        self, tmp_path: Path, find: Find, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        env = {OLLAMA_STORE_VARIABLE: str(tmp_path / "theirs")}
        assert find("qwen3:8b", engine_env=env).path == private(tmp_path) / QWEN
        monkeypatch.setenv(OLLAMA_STORE_VARIABLE, str(tmp_path / "ours"))
        assert find("qwen3:8b").path == tmp_path / "ours/manifests" / QWEN

    def test_ours_is_in_the_first_root_that_can_be_written_to(
        self, tmp_path: Path, find: Find, stores: Stores
    ) -> None:
        (tmp_path / "node-a").mkdir()
        (tmp_path / "node-b").mkdir()
        assert find("m").path.is_relative_to(tmp_path / "node-a/default/ollama/manifests")
        pod = replace(stores, by_namespace=False)
        assert find("m", stores=pod).path.is_relative_to(tmp_path / "node-a/ollama/manifests")

    @pytest.mark.parametrize("named", [True, False])
    def test_engines_make_theirs_in_the_same(
        self, tmp_path: Path, named: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert OLLAMA_STORE_VARIABLE == STORE_VARIABLE
        environ = {STORE_VARIABLE: str(tmp_path)} if named else {}
        ours = Stores().ollama("team", environ)
        assert ours == store_of_engine(environ, "team")
        assert ours == tmp_path if named else ours.parts[-2:] == ("team", "ollama")


class TestVersion:
    def test_a_pull_does_not_change_it(self, find: Find) -> None:
        before = find("qwen3:8b")
        write(before.path, "{}")
        assert find("qwen3:8b") == before
        assert find("qwen3:4b").version != before.version

    def test_a_users_own_pull_does(self, home: Path, find: Find) -> None:
        ours = find("qwen3:8b").version
        mine = write(home / ".ollama/models/manifests" / QWEN, "one")
        first = find("qwen3:8b").version
        assert first != ours
        write(mine, "one")  # the same again, at another time
        assert find("qwen3:8b").version == first
        write(mine, "two")
        assert find("qwen3:8b").version != first


class TestOrder:
    def test_a_file_goes_first(self, tmp_path: Path, find: Find) -> None:
        file = write(tmp_path / "models/qwen3/m.gguf")
        assert find("qwen3", roots=[tmp_path / "models"]).path == file
        assert find(str(file)).path == file

    def test_an_empty_directory_does_not(self, tmp_path: Path, find: Find) -> None:
        (tmp_path / "models/qwen3").mkdir(parents=True)
        found = find("qwen3", roots=[tmp_path / "models"])
        assert found.path.is_relative_to(private(tmp_path))

    @pytest.mark.parametrize("model", ["/srv/nothing", "smol.gguf", "org/repo/smol.GGUF"])
    def test_what_means_a_file_is_no_tag(self, find: Find, model: str) -> None:
        with pytest.raises(ModelNotFound):
            find(model)

    def test_what_is_no_tag_is_said(self, find: Find) -> None:
        with pytest.raises(ModelNotFound, match="'a b' is no part of an Ollama tag"):
            find("a b")

    def test_other_engines_have_no_tags(self, find: Find) -> None:
        for backend in ("llama-cpp", "vllm", "mlc-llm"):
            with pytest.raises(ModelNotFound):
                find("qwen3:8b", backend=backend)

    def test_a_scheme_may_be_written(self, tmp_path: Path, find: Find) -> None:
        assert find("ollama://qwen3:8b").path == private(tmp_path) / QWEN


class TestCaches:
    def test_the_source_of_a_cache_is_a_tag(self, tmp_path: Path, find: Find) -> None:
        cache = make_cache("weights", source="ollama://qwen3:8b")
        assert find("weights", caches=[cache]).path == private(tmp_path) / QWEN
        assert find("anything", caches=[cache], cache_ref="weights").path.name == "8b"

    def test_what_lies_in_the_cache_goes_first(self, tmp_path: Path, find: Find) -> None:
        cache = make_cache("weights", source="ollama://qwen3:8b")
        file = write(tmp_path / "node-a/default/weights/m.gguf")
        assert find("weights", caches=[cache]).path == file

    @pytest.mark.parametrize(
        "spec", [{"source": "HF://org/repo"}, {"existingClaimName": "c"}, {"source": "file:///x/y"}]
    )
    def test_a_cache_of_another_source_is_no_tag(self, find: Find, spec: dict[str, str]) -> None:
        with pytest.raises(ModelNotFound):
            find("qwen3", caches=[make_cache("qwen3", **spec)])

    def test_a_cache_that_is_missing_is_not_guessed_at(self, find: Find) -> None:
        with pytest.raises(ModelNotFound, match="ModelCache nope"):
            find("qwen3:8b", cache_ref="nope")

    def test_two_caches_stay_ambiguous(self, find: Find) -> None:
        caches = [make_cache("m"), make_cache("b", modelPath="m", source="ollama://m")]
        with pytest.raises(AmbiguousModel):
            find("m", caches=caches)

    def test_a_source_that_is_no_tag_is_said(self, find: Find) -> None:
        cache = make_cache("m", source="ollama://a//b")
        with pytest.raises(ModelNotFound, match="no part of an Ollama tag"):
            find("m", caches=[cache])


def test_the_environment_is_that_of_this_process_by_default(
    home: Path, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = write(home / ".ollama/models/manifests" / QWEN)
    assert locate("qwen3:8b", backend="ollama", stores=stores).path == mine
