from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexinfer.cache import AmbiguousModel, IncompleteWeights, Weights
from flexinfer.cache.gguf import choose
from tests.cache.conftest import make_cache, write

Find = Callable[..., Weights]


def test_a_directory_with_one_model_is_that_model(tmp_path: Path, find: Find) -> None:
    file = write(tmp_path / "m" / "deep" / "m.GGUF")
    write(tmp_path / "m" / "readme.md")
    assert find("m", roots=[tmp_path]).path == file


def test_a_projector_beside_it_is_no_choice(tmp_path: Path, find: Find) -> None:
    file = write(tmp_path / "m" / "m.gguf")
    write(tmp_path / "m" / "mmproj-f16.gguf")
    write(tmp_path / "m" / "m.mmproj-f16.gguf")
    assert find("m", roots=[tmp_path]).path == file


def test_several_are_listed_with_their_sizes(tmp_path: Path, find: Find) -> None:
    write(tmp_path / "m" / "Q4.gguf", "x" * 2**20)
    write(tmp_path / "m" / "Q8.gguf", "x" * 2**24)
    write(tmp_path / "m" / "F16-00001-of-00002.gguf")
    with pytest.raises(AmbiguousModel, match="several GGUF models") as caught:
        find("m", roots=[tmp_path])
    assert caught.value.choices == (
        "F16-00001-of-00002.gguf (incomplete)",
        "Q4.gguf (0.00 GiB)",
        "Q8.gguf (0.02 GiB)",
    )


class TestChoice:
    @pytest.fixture
    def quants(self, tmp_path: Path) -> Path:
        for name in ("m.Q4_K_M.gguf", "m.Q8_0.gguf", "m.F16.gguf"):
            write(tmp_path / "node-a" / "default" / "m" / name)
        return tmp_path / "node-a" / "default" / "m"

    def test_by_the_file_of_the_source(self, quants: Path, find: Find) -> None:
        cache = make_cache("m", source="HF://org/repo/m.Q8_0.gguf")
        assert find("m", caches=[cache]).path == quants / "m.Q8_0.gguf"

    def test_by_the_patterns_of_files(self, quants: Path, find: Find) -> None:
        cache = make_cache("m", files=["*.json", "*Q4_K_M*"])
        assert find("m", caches=[cache]).path == quants / "m.Q4_K_M.gguf"

    def test_by_the_model(self, quants: Path, find: Find) -> None:
        found = find("m.F16.gguf", cache_ref="m", caches=[make_cache("m")])
        assert found.path == quants / "m.F16.gguf"

    def test_a_pattern_that_leaves_several_is_no_choice(self, quants: Path, find: Find) -> None:
        with pytest.raises(AmbiguousModel) as caught:
            find("m", caches=[make_cache("m", files=["*Q*"])])
        assert len(caught.value.choices) == 2

    def test_a_name_with_the_signs_of_a_pattern_is_a_name(self, tmp_path: Path) -> None:
        file = write(tmp_path / "m[1].gguf")
        write(tmp_path / "m1.gguf")
        found = choose(tmp_path, ["m[1].gguf"])
        assert found is not None
        # As a pattern it fits the other one too, and a name that is there exactly goes first.
        assert found.path == file


class TestSplit:
    def test_all_shards_are_one_model_and_the_first_is_loaded(
        self, tmp_path: Path, find: Find
    ) -> None:
        shards = [write(tmp_path / "m" / f"m-0000{i}-of-00003.gguf") for i in (1, 2, 3)]
        assert find("m", roots=[tmp_path]).path == shards[0]

    def test_naming_any_shard_is_naming_the_model(self, tmp_path: Path, find: Find) -> None:
        shards = [write(tmp_path / f"m-0000{i}-of-00002.gguf") for i in (1, 2)]
        assert find(shards[1].name, roots=[tmp_path]).path == shards[0]

    def test_missing_shards_are_named(self, tmp_path: Path, find: Find) -> None:
        write(tmp_path / "m" / "m-00002-of-00003.gguf")
        with pytest.raises(IncompleteWeights) as caught:
            find("m", roots=[tmp_path])
        assert caught.value.missing == ("m-00001-of-00003.gguf", "m-00003-of-00003.gguf")

    def test_two_split_models_are_two_choices(self, tmp_path: Path, find: Find) -> None:
        for stem in ("a", "b"):
            for i in (1, 2):
                write(tmp_path / "m" / f"{stem}-0000{i}-of-00002.gguf")
        with pytest.raises(AmbiguousModel) as caught:
            find("m", roots=[tmp_path])
        assert len(caught.value.choices) == 2


def test_ollama_takes_a_gguf_or_else_the_directory(tmp_path: Path, find: Find) -> None:
    write(tmp_path / "a" / "model.safetensors")
    file = write(tmp_path / "b" / "m.gguf")
    assert find("a", roots=[tmp_path], backend="ollama").path == tmp_path / "a"
    assert find("b", roots=[tmp_path], backend="ollama").path == file


def test_other_backends_take_the_directory(tmp_path: Path, find: Find) -> None:
    write(tmp_path / "m" / "a.gguf")
    write(tmp_path / "m" / "b.gguf")
    assert find("m", roots=[tmp_path], backend="mlc-llm").path == tmp_path / "m"
