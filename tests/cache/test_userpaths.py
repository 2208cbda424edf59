from __future__ import annotations

from pathlib import Path

import pytest

from flexinfer.api import LlamaCppBlock, MlcLlmBlock, OllamaBlock, VllmBlock
from flexinfer.cache import (
    PathEscapes,
    UserPathNotFound,
    Weights,
    resolve_block,
    resolve_user_path,
)
from tests.cache.conftest import write


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    """A model in a claim, as in the first example of the reference."""
    write(tmp_path / "claim" / "m" / "config.json")
    return Weights(tmp_path / "claim" / "m", "v", claim=tmp_path / "claim", root=tmp_path / "claim")


def test_below_the_claim_first_then_below_the_weights(weights: Weights, tmp_path: Path) -> None:
    inside = write(tmp_path / "claim" / "m" / "lib.so")
    assert resolve_user_path("/models/lib.so", weights) == inside
    beside = write(tmp_path / "claim" / "lib.so")
    assert resolve_user_path("/models/lib.so", weights) == beside
    assert resolve_user_path("/models/m/lib.so", weights) == inside


def test_without_a_claim_the_models_own_name_is_its_directory(tmp_path: Path) -> None:
    inside = write(tmp_path / "models" / "m" / "lib.so")
    weights = Weights(tmp_path / "models" / "m", "v", root=tmp_path / "models")
    assert resolve_user_path("/models/m/lib.so", weights) == inside
    assert resolve_user_path("/models/lib.so", weights) == inside


def test_a_claim_can_be_given(tmp_path: Path, weights: Weights) -> None:
    other = write(tmp_path / "other" / "lib.so")
    assert resolve_user_path("/models/lib.so", weights, tmp_path / "other") == other


def test_another_absolute_path_is_what_it_says(tmp_path: Path, weights: Weights) -> None:
    file = write(tmp_path / "templates" / "chat.jinja")
    assert resolve_user_path(str(file), weights) == file


def test_a_relative_path_is_below_the_weights(weights: Weights) -> None:
    assert resolve_user_path("config.json", weights) == weights.path / "config.json"


def test_beside_a_file_it_is_in_the_files_directory(tmp_path: Path) -> None:
    gguf = write(tmp_path / "m.gguf")
    projector = write(tmp_path / "mmproj.gguf")
    weights = Weights(gguf, "v", root=tmp_path)
    assert resolve_user_path("mmproj.gguf", weights) == projector
    assert resolve_user_path("/models/mmproj.gguf", weights) == projector


def test_every_place_is_named(weights: Weights, tmp_path: Path) -> None:
    with pytest.raises(UserPathNotFound) as caught:
        resolve_user_path("/models/m/nope.so", weights)
    assert caught.value.tried == (
        tmp_path / "claim" / "m" / "nope.so",
        tmp_path / "claim" / "m" / "m" / "nope.so",
        tmp_path / "claim" / "m" / "nope.so",
        Path("/models/m/nope.so"),
    )


@pytest.mark.parametrize("path", ["../../secret", "/models/../secret", "/models/link"])
def test_it_stays_in_its_root(weights: Weights, tmp_path: Path, path: str) -> None:
    secret = write(tmp_path / "secret")
    (tmp_path / "claim" / "link").symlink_to(secret)
    with pytest.raises(PathEscapes):
        resolve_user_path(path, weights)


class TestBlocks:
    def test_llamacpp(self, weights: Weights) -> None:
        for name in ("p.gguf", "d.gguf", "t.jinja", "a.gguf"):
            write(weights.path / name)
        block = LlamaCppBlock(
            mmproj="p.gguf",
            draft_model="/models/m/d.gguf",
            chat_template_file="t.jinja",
            lora=["a.gguf"],
            parallel=3,
        )
        found = resolve_block(block, weights)
        assert isinstance(found, LlamaCppBlock)
        assert found.mmproj == str(weights.path / "p.gguf")
        assert found.draft_model == str(weights.path / "d.gguf")
        assert found.chat_template_file == str(weights.path / "t.jinja")
        assert found.lora == [str(weights.path / "a.gguf")]
        assert found.parallel == 3

    def test_mlcllm(self, weights: Weights) -> None:
        lib = write(weights.path / "lib.so")
        draft = write(weights.path / "draft" / "x").parent
        block = MlcLlmBlock(
            model_lib_path="/models/m/lib.so",
            additional_models=["/models/m/draft,/models/m/lib.so", "HF://org/repo"],
        )
        found = resolve_block(block, weights)
        assert isinstance(found, MlcLlmBlock)
        assert found.model_lib_path == str(lib)
        assert found.additional_models == [f"{draft},{lib}", "HF://org/repo"]

    def test_vllm(self, weights: Weights) -> None:
        write(weights.path / "t.jinja")
        write(weights.path / "a" / "x")
        block = VllmBlock(
            chat_template="t.jinja",
            tokenizer="org/repo",
            enable_lora=True,
            lora_modules=["one=/models/m/a", "two=org/adapter"],
        )
        found = resolve_block(block, weights)
        assert isinstance(found, VllmBlock)
        assert found.chat_template == str(weights.path / "t.jinja")
        assert found.tokenizer == "org/repo"
        assert found.lora_modules == [f"one={weights.path / 'a'}", "two=org/adapter"]

    def test_a_block_without_paths_is_the_same(self, weights: Weights) -> None:
        for block in (LlamaCppBlock(), MlcLlmBlock(), VllmBlock(), OllamaBlock()):
            assert resolve_block(block, weights) == block

    def test_a_missing_file_is_named(self, weights: Weights) -> None:
        with pytest.raises(UserPathNotFound, match=r"nope\.so"):
            resolve_block(MlcLlmBlock(model_lib_path="/models/nope.so"), weights)
