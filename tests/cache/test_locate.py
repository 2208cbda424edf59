from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flexinfer.api import read_manifests
from flexinfer.cache import (
    AmbiguousModel,
    IncompleteWeights,
    ModelNotFound,
    PathEscapes,
    Stores,
    Weights,
    demo_directory,
    locate,
)
from tests.cache.conftest import hub_snapshot, make_cache, write

Find = Callable[..., Weights]
DEMO = "SmolLM2-135M-Instruct.Q4_1.gguf"


class TestOrder:
    """Each place in turn: remove the one that is found, and the next one is."""

    def test_a_cache_goes_before_everything(self, tmp_path: Path, find: Find) -> None:
        root, claim = tmp_path / "models", tmp_path / "claim"
        first = write(claim / "dir" / "m.gguf")
        second = write(tmp_path / "node-a" / "default" / "m" / "m.gguf")
        third = write(root / "m" / "m.gguf")
        caches = [
            make_cache("ref", existingClaimName="c", modelPath="dir"),
            make_cache("m"),
        ]
        known = {"claims": {"c": claim}, "roots": [root], "caches": caches}
        assert find("m", cache_ref="ref", **known).path == first
        assert find("m", **known).path == second
        second.unlink()
        assert find("m", **known).path == third

    def test_a_cache_without_weights_here_is_not_the_end(self, tmp_path: Path, find: Find) -> None:
        file = write(tmp_path / "models" / "m.gguf")
        cache = make_cache("ref", existingClaimName="elsewhere")
        found = find("m.gguf", cache_ref="ref", caches=[cache], roots=[tmp_path / "models"])
        assert found.path == file

    def test_a_copy_of_a_claim_in_a_models_directory_is_found(
        self, tmp_path: Path, find: Find
    ) -> None:
        file = write(tmp_path / "models" / "dir" / "m.gguf")
        cache = make_cache("ref", existingClaimName="elsewhere", modelPath="dir")
        found = find("m", cache_ref="ref", caches=[cache], roots=[tmp_path / "models"])
        assert found.path == file

    def test_models_directories_are_tried_in_order(self, tmp_path: Path, find: Find) -> None:
        roots = [tmp_path / "a", tmp_path / "b"]
        second = write(roots[1] / "m.gguf")
        assert find("m.gguf", roots=roots).path == second
        first = write(roots[0] / "m.gguf")
        assert find("m.gguf", roots=roots).path == first

    def test_a_models_directory_goes_before_the_hubs_cache(
        self, tmp_path: Path, find: Find
    ) -> None:
        hub_snapshot(tmp_path / "hub", "org/repo", "a.gguf")
        mine = write(tmp_path / "models" / "org" / "repo" / "b.gguf")
        assert find("org/repo", roots=[tmp_path / "models"]).path == mine


class TestCaches:
    @pytest.mark.parametrize("by", ["name", "path"])
    def test_is_found_by_its_name_or_path(self, tmp_path: Path, find: Find, by: str) -> None:
        cache = make_cache("name", modelPath="path")
        file = write(tmp_path / "node-a" / "default" / "path" / "m.gguf")
        assert find(by, caches=[cache]).path == file

    def test_of_another_namespace_is_not_looked_at(self, tmp_path: Path, find: Find) -> None:
        write(tmp_path / "node-a" / "other" / "m" / "m.gguf")
        cache = make_cache("m", namespace="other")
        with pytest.raises(ModelNotFound):
            find("m", caches=[cache])
        assert find("m", caches=[cache], namespace="other").path.name == "m.gguf"

    def test_two_that_fit_must_be_told_apart(self, tmp_path: Path, find: Find) -> None:
        caches = [make_cache("m"), make_cache("b", modelPath="m")]
        with pytest.raises(AmbiguousModel, match=r"modelCacheRef.*: b, m") as caught:
            find("m", caches=caches)
        assert caught.value.choices == ("b", "m")
        file = write(tmp_path / "node-a" / "default" / "m" / "m.gguf")
        assert find("m", caches=caches, cache_ref="b").path == file

    def test_that_does_not_exist_is_named(self, find: Find) -> None:
        with pytest.raises(ModelNotFound, match=r"ModelCache nope .*namespace default"):
            find("m", cache_ref="nope")

    def test_node_local_lies_in_the_first_store_that_has_it(
        self, tmp_path: Path, find: Find
    ) -> None:
        file = write(tmp_path / "node-b" / "default" / "m" / "m.gguf")
        assert find("m", caches=[make_cache("m")]).path == file

    def test_memory_lies_in_ram(self, tmp_path: Path, find: Find) -> None:
        file = write(tmp_path / "shm" / "default" / "m" / "m.gguf")
        assert find("m", caches=[make_cache("m", storageStrategy="Memory")]).path == file

    def test_in_a_pod_the_namespace_is_no_part_of_the_path(
        self, tmp_path: Path, find: Find, stores: Stores
    ) -> None:
        file = write(tmp_path / "shm" / "m" / "m.gguf")
        cache = make_cache("m", storageStrategy="Memory")
        pod = replace(stores, by_namespace=False)
        assert find("m", caches=[cache], stores=pod).path == file

    def test_shared_is_below_the_directory_of_its_claim(self, tmp_path: Path, find: Find) -> None:
        file = write(tmp_path / "nfs" / "dir" / "m.gguf")
        cache = make_cache("m", existingClaimName="c", modelPath="dir")
        found = find("m", caches=[cache], claims={"c": tmp_path / "nfs"})
        assert (found.path, found.claim) == (file, tmp_path / "nfs")

    def test_a_claim_that_nobody_named_is_looked_for_where_pods_have_it(
        self, tmp_path: Path, find: Find
    ) -> None:
        cache = make_cache("m", existingClaimName="c")
        with pytest.raises(ModelNotFound, match="--claim c=DIR"):
            find("m", caches=[cache])
        file = write(tmp_path / "mnt-claims" / "c" / "m" / "m.gguf")
        assert find("m", caches=[cache]).path == file

    def test_a_source_that_is_here_already_serves(self, tmp_path: Path, find: Find) -> None:
        file = write(tmp_path / "somewhere" / "m.gguf")
        by_file = make_cache("m", source=f"file://{tmp_path}/somewhere")
        by_claim = make_cache("m", source="pvc://c/somewhere")
        assert find("m", caches=[by_file]).path == file
        assert find("m", caches=[by_claim], claims={"c": tmp_path}).path == file

    def test_the_samples_cache_of_ram(self, tmp_path: Path, stores: Stores) -> None:
        sample = Path(__file__).parents[2] / "crds" / "samples" / "qwen3-8b-ram.yaml"
        manifests = read_manifests([sample])
        (model,) = manifests.models
        write(tmp_path / "shm" / "default" / "qwen3-8b-ram" / "mlc-chat-config.json")
        found = locate(
            model.spec.model,
            cache_ref=model.spec.model_cache_ref,
            caches=manifests.caches,
            backend=model.spec.backend,
            stores=stores,
        )
        assert found.path == tmp_path / "shm" / "default" / "qwen3-8b-ram"


class TestHub:
    def test_a_repository_in_the_users_cache_serves(self, tmp_path: Path, find: Find) -> None:
        snapshot = hub_snapshot(tmp_path / "hub", "org/repo", "m.gguf", "config.json")
        assert find("org/repo").path == snapshot / "m.gguf"
        assert find("org/repo", backend="vllm").path == snapshot

    def test_a_file_of_it_can_be_named(self, tmp_path: Path, find: Find) -> None:
        snapshot = hub_snapshot(tmp_path / "hub", "org/repo", "a.gguf", "q/b.gguf")
        assert find("org/repo/q/b.gguf").path == snapshot / "q" / "b.gguf"
        cache = make_cache("m", source="HF://org/repo/a.gguf")
        assert find("m", caches=[cache]).path == snapshot / "a.gguf"

    def test_a_revision_can_be_named(self, tmp_path: Path, find: Find) -> None:
        hub_snapshot(tmp_path / "hub", "org/repo", "a.gguf")
        other = hub_snapshot(tmp_path / "hub2", "org/repo", "a.gguf", revision="1" * 40)
        cache = make_cache("m", source="HF://org/repo", revision="1" * 40)
        assert find("m", caches=[cache], hub_cache=tmp_path / "hub2").path == other / "a.gguf"
        with pytest.raises(ModelNotFound, match=f"org/repo@{'1' * 40}"):
            find("m", caches=[cache])

    def test_one_that_is_not_there_says_that_nothing_is_fetched(
        self, tmp_path: Path, find: Find
    ) -> None:
        with pytest.raises(ModelNotFound) as caught:
            find("org/repo", roots=[tmp_path / "models"])
        assert "does not fetch" in caught.value.hint
        assert f"{tmp_path}/models/org/repo" in caught.value.hint
        assert any("huggingface://org/repo" in line for line in caught.value.tried)

    def test_so_does_an_ollama_tag_for_another_engine(self, find: Find) -> None:
        with pytest.raises(ModelNotFound, match="does not fetch"):
            find("llama3:8b")


class TestEscapes:
    """A manifest is written by somebody else than the owner of the machine."""

    @pytest.mark.parametrize("model", ["../secret.gguf", "a/../../secret.gguf"])
    def test_dots(self, tmp_path: Path, find: Find, model: str) -> None:
        write(tmp_path / "secret.gguf")
        (tmp_path / "models" / "a").mkdir(parents=True)
        with pytest.raises(PathEscapes):
            find(model, roots=[tmp_path / "models"])

    def test_it_is_not_even_told_whether_the_file_exists(self, tmp_path: Path, find: Find) -> None:
        with pytest.raises(PathEscapes):
            find("../nothing", roots=[tmp_path / "models"])

    @pytest.mark.parametrize("linked", ["file", "directory", "file in a directory"])
    def test_links(self, tmp_path: Path, find: Find, linked: str) -> None:
        secret = write(tmp_path / "secret" / "m.gguf")
        claim = tmp_path / "claim"
        claim.mkdir()
        if linked == "file":
            (claim / "m").symlink_to(secret)
        elif linked == "directory":
            (claim / "m").symlink_to(secret.parent)
        else:
            (claim / "m").mkdir()
            (claim / "m" / "m.gguf").symlink_to(secret)
        with pytest.raises(PathEscapes) as caught:
            find("m", caches=[make_cache("m", existingClaimName="c")], claims={"c": claim})
        assert caught.value.target in (secret, secret.parent)

    def test_a_link_into_a_models_directory_is_the_owners_own(
        self, tmp_path: Path, find: Find
    ) -> None:
        write(tmp_path / "disk" / "m.gguf")
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "m.gguf").symlink_to(tmp_path / "disk" / "m.gguf")
        with pytest.raises(PathEscapes):
            find("m.gguf", roots=[tmp_path / "models"])
        assert find("m.gguf", roots=[tmp_path / "models", tmp_path / "disk"])

    def test_links_within_a_root_are_fine(self, tmp_path: Path, find: Find) -> None:
        write(tmp_path / "models" / "real" / "m.gguf")
        (tmp_path / "models" / "m").symlink_to("real")
        assert find("m", roots=[tmp_path / "models"]).path == tmp_path / "models" / "m" / "m.gguf"


class TestNotFound:
    def test_every_place_is_named_in_order(self, tmp_path: Path, find: Find) -> None:
        (tmp_path / "a" / "m").mkdir(parents=True)
        write(tmp_path / "b" / "m" / "readme.txt")
        roots = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
        with pytest.raises(ModelNotFound) as caught:
            find("m", roots=roots, caches=[make_cache("m", source="file:///nowhere/m")])
        lines = caught.value.tried
        assert [line.partition(" (")[0] for line in lines[:6]] == [
            str(tmp_path / "node-a" / "default" / "m"),
            str(tmp_path / "node-b" / "default" / "m"),
            "/nowhere/m",
            *(str(root / "m") for root in roots),
        ]
        assert "empty directory" in lines[3]
        assert "no GGUF in it" in lines[4]
        assert "not there" in lines[5]
        assert all(line in str(caught.value) for line in lines)

    def test_an_absolute_path_is_only_looked_for_there(self, tmp_path: Path, find: Find) -> None:
        with pytest.raises(ModelNotFound) as caught:
            find(f"{tmp_path}/m.gguf", roots=[tmp_path])
        assert len(caught.value.tried) == 1

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_a_place_that_must_not_be_read_says_so(self, tmp_path: Path, find: Find) -> None:
        write(tmp_path / "models" / "m" / "m.gguf")
        (tmp_path / "models" / "m").chmod(0)
        try:
            with pytest.raises(ModelNotFound, match="Permission denied"):
                find("m", roots=[tmp_path / "models"])
        finally:
            (tmp_path / "models" / "m").chmod(0o755)

    def test_a_link_that_leads_to_itself_is_no_crash(self, tmp_path: Path, find: Find) -> None:
        (tmp_path / "m").symlink_to(tmp_path / "m")
        for model in ("m", f"{tmp_path}/m"):
            with pytest.raises(ModelNotFound):
                find(model, roots=[tmp_path])

    def test_a_name_that_no_file_can_have_is_no_crash(self, tmp_path: Path, find: Find) -> None:
        with pytest.raises(ModelNotFound, match="too long"):
            find("x" * 300, roots=[tmp_path])


class TestVersion:
    def test_it_changes_with_the_file_and_only_then(self, tmp_path: Path, find: Find) -> None:
        file = write(tmp_path / "m.gguf")
        before = find(str(file)).version
        assert find(str(file)).version == before
        write(tmp_path / "other.gguf")
        assert find(str(file)).version == before
        write(file, "other")
        assert find(str(file)).version != before

    def test_the_same_size_at_another_time_is_another_version(
        self, tmp_path: Path, find: Find
    ) -> None:
        file = write(tmp_path / "m.gguf")
        os.utime(file, ns=(1, 1))
        before = find(str(file)).version
        os.utime(file, ns=(1, 2))
        assert find(str(file)).version != before

    def test_of_a_directory_it_is_of_all_files_that_matter(
        self, tmp_path: Path, find: Find
    ) -> None:
        write(tmp_path / "m" / "config.json")
        before = find(f"{tmp_path}/m", backend="vllm").version
        write(tmp_path / "m" / ".cache" / "x")
        write(tmp_path / "m" / "__pycache__" / "x")
        write(tmp_path / "m" / "x.incomplete")
        assert find(f"{tmp_path}/m", backend="vllm").version == before
        write(tmp_path / "m" / "a" / "model.safetensors")
        assert find(f"{tmp_path}/m", backend="vllm").version != before

    def test_another_shard_of_a_split_model_is_another_version(
        self, tmp_path: Path, find: Find
    ) -> None:
        for number in (1, 2):
            write(tmp_path / "m" / f"m-0000{number}-of-00002.gguf")
        before = find(f"{tmp_path}/m").version
        write(tmp_path / "m" / "m-00002-of-00002.gguf", "other")
        assert find(f"{tmp_path}/m").version != before

    def test_a_link_that_leads_nowhere_is_no_crash(self, tmp_path: Path, find: Find) -> None:
        write(tmp_path / "m" / "config.json")
        (tmp_path / "m" / "gone").symlink_to(tmp_path / "nothing")
        assert find(f"{tmp_path}/m", backend="vllm").version


def test_shards_that_an_index_names_must_be_there(tmp_path: Path, find: Find) -> None:
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    write(tmp_path / "m" / "model.safetensors.index.json", index)
    write(tmp_path / "m" / "model-1.safetensors")
    with pytest.raises(IncompleteWeights, match=r"missing: model-2\.safetensors"):
        find(f"{tmp_path}/m", backend="vllm")
    write(tmp_path / "m" / "model-2.safetensors")
    assert find(f"{tmp_path}/m", backend="vllm").path == tmp_path / "m"


def test_shards_whose_names_are_none(tmp_path: Path, find: Find) -> None:
    write(tmp_path / "m/model.safetensors.index.json", '{"weight_map": {"a": "\\ud800"}}')
    with pytest.raises(IncompleteWeights, match=r"missing: \\ud800$"):
        find(f"{tmp_path}/m", backend="vllm")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', "[" * 99999])
def test_an_index_that_cannot_be_read_is_left_to_the_engine(
    tmp_path: Path, find: Find, text: str
) -> None:
    write(tmp_path / "m" / "model.safetensors.index.json", text)
    assert find(f"{tmp_path}/m", backend="vllm").path == tmp_path / "m"


@pytest.mark.skipif(demo_directory() is None, reason="the demo's weights are not installed")
class TestDemo:
    def test_its_weights_are_found_without_any_setting(self) -> None:
        found = locate(DEMO, backend="llama-cpp")
        assert found.path.name == DEMO
        assert found.path.is_file()

    def test_the_sample_names_them(self) -> None:
        sample = Path(__file__).parents[2] / "crds" / "samples" / "smollm2.yaml"
        (model,) = read_manifests([sample]).models
        assert model.spec.model == DEMO

    def test_a_users_own_file_of_that_name_goes_first(self, tmp_path: Path, find: Find) -> None:
        mine = write(tmp_path / DEMO)
        assert find(DEMO, roots=[tmp_path]).path == mine


def test_without_the_demos_wheel_there_is_no_such_place(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound) as caught:
        find(DEMO)
    assert caught.value.tried == ()
