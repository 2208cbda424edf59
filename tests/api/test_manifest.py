"""The manifest reader: what it takes, and that it reports everything that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexinfer.api import ManifestErrors, ManifestProblem, manifest_files, read_manifests

GOOD = """\
apiVersion: ai.flexinfer/v1alpha1
kind: ModelDeployment
metadata:
  name: NAME
spec:
  backend: llama-cpp
  model: weights.gguf
"""


def model(name: str = "m", extra: str = "") -> str:
    """A valid manifest of 7 lines; `extra` lines, indented for spec, follow from line 8."""
    return GOOD.replace("NAME", name) + extra


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def errors(*paths: Path) -> tuple[ManifestProblem, ...]:
    with pytest.raises(ManifestErrors) as caught:
        read_manifests(paths)
    return caught.value.errors


def names(*paths: Path) -> list[str]:
    return [read.name for read in read_manifests(paths).models]


def test_a_file_of_several_documents(tmp_path: Path) -> None:
    cache = (
        "apiVersion: ai.flexinfer/v1alpha1\nkind: ModelCache\nmetadata: {name: c}\n"
        "spec: {source: HF://org/repo}\n"
    )
    path = write(tmp_path, "all.yaml", "---\n".join([model("a"), model("b"), cache]))
    read = read_manifests([path])
    assert [found.name for found in read.models] == ["a", "b"]
    assert [found.name for found in read.caches] == ["c"]
    assert read.files == (path,)


def test_folders_are_read_in_order_and_below(tmp_path: Path) -> None:
    write(tmp_path, "b.yml", model("b"))
    write(tmp_path, "a.yaml", model("a"))
    write(tmp_path, "sub/c.yaml", model("c"))
    write(tmp_path, ".hidden/d.yaml", "[")
    write(tmp_path, ".e.yaml", "[")
    write(tmp_path, "notes.txt", "[")
    (tmp_path / "f.yaml.d").mkdir()
    assert names(tmp_path) == ["a", "b", "c"]


def test_json_and_lists(tmp_path: Path) -> None:
    items = [
        {
            "apiVersion": "ai.flexinfer/v1alpha1",
            "kind": "ModelDeployment",
            "metadata": {"name": name},
            "spec": {"backend": "ollama", "model": "llama3.2:1b"},
        }
        for name in ("a", "b")
    ]
    write(tmp_path, "one.json", json.dumps(items[0]))
    for version, kind in (("v1", "List"), ("ai.flexinfer/v1alpha1", "ModelDeploymentList")):
        text = json.dumps({"apiVersion": version, "kind": kind, "metadata": {}, "items": items[1:]})
        path = write(tmp_path, "list.json", text)
        assert names(tmp_path / "one.json", path) == ["a", "b"]


def test_an_error_in_a_list_has_its_line_and_index(tmp_path: Path) -> None:
    text = "apiVersion: v1\nkind: List\nitems:\n- " + model(extra="  replicas: x\n").replace(
        "\n", "\n  "
    )
    (problem,) = errors(write(tmp_path, "m.yaml", text.rstrip() + "\n"))
    assert (problem.line, problem.field) == (11, "items[0].spec.replicas")


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", model("a"))
    link = tmp_path / "b.yaml"
    link.symlink_to(path)
    assert names(path, tmp_path, tmp_path / "." / "a.yaml", link) == ["a"]
    assert manifest_files([tmp_path, path]) == (path,)


def test_a_named_file_may_have_any_name(tmp_path: Path) -> None:
    assert names(write(tmp_path, "manifest", model("a"))) == ["a"]


def test_an_empty_folder_and_an_empty_file_hold_nothing(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "# later\n")
    read = read_manifests([tmp_path])
    assert (read.models, read.caches, read.notices) == ((), (), ())


def test_documents_of_others_are_skipped_with_a_notice(tmp_path: Path) -> None:
    text = model() + "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: x}\n"
    read = read_manifests([write(tmp_path, "m.yaml", text)])
    assert [found.name for found in read.models] == ["m"]
    (notice,) = read.notices
    assert notice.reason == "DocumentSkipped"
    assert notice.resource == "Namespace/default/x"
    assert "m.yaml:9" in notice.message


# Each row: lines added to spec from line 8 on, or a whole document; then line, field, and words
# that the message must hold.
IN_SPEC = [
    ("  replica: 1\n", 8, "spec.replica", ["unknown field", "did you mean replicas?"]),
    ("  min_replicas: 1\n", 8, "spec.min_replicas", ["did you mean minReplicas?"]),
    ("  nodeSelectors: {}\n", 8, "spec.nodeSelectors", ["did you mean nodeSelector?"]),
    ("  contextSize: 1\n", 8, "spec.contextSize", ["did you mean spec.llamacpp.contextSize?"]),
    ("  qqqq: 1\n", 8, "spec.qqqq", ["allowed: the fields backend, model,"]),
    ('  replicas: "2"\n', 8, "spec.replicas", ['found "2"', "write 2, without quotes"]),
    ("  replicas: two\n", 8, "spec.replicas", ["found two", "a whole number"]),
    ("  replicas: 1.5\n", 8, "spec.replicas", ["found 1.5", "a whole number"]),
    ("  replicas: [1]\n", 8, "spec.replicas", ["found a list"]),
    ("  replicas: -1\n", 8, "spec.replicas", ["0 or more"]),
    ("  priority: 1001\n", 8, "spec.priority", ["found 1001", "at most 1000"]),
    ("  minReplicas: 2\n", 8, "spec.minReplicas", ["at most replicas, which is 1"]),
    ("  servedModelName: 1.5\n", 8, "spec.servedModelName", ['quote it: "1.5"']),
    ("  aliases: a\n", 8, "spec.aliases", ['write it as a list: ["a"]']),
    ("  aliases:\n  - a\n  - 007\n", 10, "spec.aliases[1]", ['quote it: "007"']),
    ("  vramCheck: off\n", 8, "spec.vramCheck", ['found off; quote it: "off"']),
    ("  vramCheck: warning\n", 8, "spec.vramCheck", ["did you mean warn?"]),
    ("  healthCheck: 5\n", 8, "spec.healthCheck", ["a mapping"]),
    (
        "  healthCheck:\n    periodSecond: 5\n",
        9,
        "spec.healthCheck.periodSecond",
        ["did you mean periodSeconds?"],
    ),
    (
        "  nodeSelector:\n    gpu: true\n",
        9,
        "spec.nodeSelector.gpu",
        ['quote it: "true"'],
    ),
    (
        "  nodeSelector:\n    a b: x\n",
        9,
        "spec.nodeSelector[a b]",
        ["found the key a b", "a label name"],
    ),
    (
        "  resources:\n    limits:\n      memory: 16GB\n",
        10,
        "spec.resources.limits.memory",
        ["found 16GB", "did you mean 16G?", "Ki Mi Gi"],
    ),
    (
        "  resources:\n    limits:\n      cpu: 0.5\n",
        10,
        "spec.resources.limits.cpu",
        ['quote it: "0.5"'],
    ),
    (
        "  resources: {limits: {amd.com/gpu: 1500m}}\n",
        8,
        "spec.resources.limits[amd.com/gpu]",
        ["a whole number of GPUs"],
    ),
    (
        "  resources: {limits: {gpu: 1}}\n",
        8,
        "spec.resources.limits.gpu",
        ["did you mean amd.com/gpu?"],
    ),
    ("  vllm: {}\n", 8, "spec.vllm", ["backend is llama-cpp", "llamacpp"]),
    (
        "  llamacpp:\n    nGPULayers: '99'\n",
        9,
        "spec.llamacpp.nGPULayers",
        ["write 99, without quotes", "a whole number, or one of all, auto"],
    ),
    (
        "  llamacpp: {nGPULayers: al}\n",
        8,
        "spec.llamacpp.nGPULayers",
        ["did you mean all?"],
    ),
    (
        "  llamacpp: {flashAttention: yes}\n",
        8,
        "spec.llamacpp.flashAttention",
        ['found yes; quote it: "on"'],
    ),
    ("  llamacpp: {ctxSize: 1}\n", 8, "spec.llamacpp.ctxSize", ["did you mean contextSize?"]),
    ("  llamacpp: {embeddings: 'true'}\n", 8, "spec.llamacpp.embeddings", ["write true, without"]),
    (
        "  llamacpp: {ropeFreqBase: '1.5'}\n",
        8,
        "spec.llamacpp.ropeFreqBase",
        ["write 1.5, without"],
    ),
    (
        "  llamacpp:\n    extraArgs:\n    - --threads\n    - 4\n",
        11,
        "spec.llamacpp.extraArgs[1]",
        ['quote it: "4"'],
    ),
    ("  llamacpp: {env: {A: 1}}\n", 8, "spec.llamacpp.env.A", ['quote it: "1"']),
    ("  llamacpp: {env: [A=1]}\n", 8, "spec.llamacpp.env", ["a mapping"]),
    ("  tolerations: [{key: a, effect: Never}]\n", 8, "spec.tolerations[0].effect", ["NoExecute"]),
    ("  tolerations: [[]]\n", 8, "spec.tolerations[0]", ["a mapping"]),
    ("  replicas: 1\n  replicas: 2\n", 9, "spec.replicas", ["line 8 has the first"]),
]


@pytest.mark.parametrize(("lines", "line", "field", "words"), IN_SPEC)
def test_errors_in_a_spec(
    tmp_path: Path, lines: str, line: int, field: str, words: list[str]
) -> None:
    path = write(tmp_path, "m.yaml", model(extra=lines))
    (problem,) = errors(path)
    assert (problem.file, problem.line, problem.field) == (str(path), line, field)
    text = str(problem)
    assert text.startswith(f"{path}:{line}: {field}: found ")
    assert "\n" not in text
    for word in words:
        assert word in text


def mlc(*lines: str) -> str:
    text = model().replace("llama-cpp", "mlc-llm") + "  mlcllm:\n"
    return text + "".join(f"    {line}\n" for line in lines)


OTHER_BACKENDS = [
    (mlc("jitPolicy: OFF"), 9, "spec.mlcllm.jitPolicy", ['found OFF; quote it: "OFF"']),
    (mlc("jitPolicy: On"), 9, "spec.mlcllm.jitPolicy", ['found On; quote it: "ON"']),
    (mlc("jitPolicy: readonly"), 9, "spec.mlcllm.jitPolicy", ["did you mean READONLY?"]),
    (
        mlc("overrides:", "  gpuMemoryUtilization: 0.85"),
        10,
        "spec.mlcllm.overrides.gpuMemoryUtilization",
        ['quote it: "0.85"'],
    ),
    (
        mlc("overrides: {maxNumSequence: '2'}"),
        9,
        "spec.mlcllm.overrides.maxNumSequence",
        ["write 2, without quotes"],
    ),
    (
        mlc("prefillChunkSize: 512"),
        9,
        "spec.mlcllm.prefillChunkSize",
        ["did you mean spec.mlcllm.overrides.prefillChunkSize?"],
    ),
    (mlc("gpuMemoryBytes: 23e9"), 9, "spec.mlcllm.gpuMemoryBytes", ["found 23e9"]),
    (
        model().replace("llama-cpp", "ollama") + "  ollama: {extraArgs: [a]}\n",
        8,
        "spec.ollama.extraArgs",
        ["use env"],
    ),
    (
        model().replace("llama-cpp", "vllm") + "  vllm: {swapSpace: 4}\n",
        8,
        "spec.vllm.swapSpace",
        ["no swap space"],
    ),
    (model().replace("llama-cpp", "llama.cpp"), 6, "spec.backend", ["did you mean llama-cpp?"]),
    (model().replace("llama-cpp", "tgi"), 6, "spec.backend", ["mlc-llm, ollama, vllm, llama-cpp"]),
    (model().replace("  backend: llama-cpp\n", ""), 5, "spec.backend", ["found nothing", "ollama"]),
    (model().replace("  model: weights.gguf\n", ""), 5, "spec.model", ["it is required"]),
    (model("Qwen2.5_7B"), 4, "metadata.name", ["name: qwen2-5-7b", "servedModelName: Qwen2.5_7B"]),
    (model("flexinfer-keeper"), 4, "metadata.name", ["any name but", "model-flexinfer-keeper"]),
    (model("5"), 4, "metadata.name", ['quote it: "5"']),
    (model().replace("  name: m\n", "  namespace: x\n"), 3, "metadata.name", ["required"]),
    (model().replace("metadata:\n  name: m\n", ""), 1, "metadata", ["a mapping; it is required"]),
    (model().replace("name: m", "nmae: m\n  name: m"), 4, "metadata.nmae", ["did you mean name?"]),
    (model().replace("v1alpha1", "v1"), 1, "apiVersion", ["ai.flexinfer/v1alpha1"]),
    (model().replace("ai.flexinfer/", "flexinfer.ai/"), 1, "apiVersion", ["ai.flexinfer/v1alpha1"]),
    (model().replace("ai.flexinfer/v1alpha1", "v1"), 1, "apiVersion", ["ai.flexinfer/v1alpha1"]),
    (model().replace("apiVersion: ai.flexinfer/v1alpha1\n", ""), 1, "apiVersion", ["nothing"]),
    (model().replace("ModelDeployment", "ModelDeploymnt"), 2, "kind", ["mean ModelDeployment?"]),
    (model().replace("kind: ModelDeployment\n", ""), 1, "kind", ["ModelDeployment, ModelCache"]),
    (model() + "extra: 1\n", 8, "extra", ["unknown field"]),
    ("- a\n", 1, "", ["found a list", "a mapping with apiVersion"]),
    ("just text\n", 1, "", ['found "just text"']),
    ("apiVersion: v1\nkind: List\nitems: 5\n", 3, "items", ["a list"]),
    ("apiVersion: v1\nkind: List\nitem: []\n", 3, "item", ["apiVersion, kind, metadata, items"]),
]


@pytest.mark.parametrize(("text", "line", "field", "words"), OTHER_BACKENDS)
def test_errors_elsewhere(
    tmp_path: Path, text: str, line: int, field: str, words: list[str]
) -> None:
    (problem,) = errors(write(tmp_path, "m.yaml", text))
    assert (problem.line, problem.field) == (line, field)
    for word in words:
        assert word in str(problem)


def test_all_errors_of_a_run_are_listed_in_reading_order(tmp_path: Path) -> None:
    first = write(
        tmp_path,
        "a.yaml",
        model("A", "  replicas: x\n  minReplicas: 1\n  colour: red\n  vllm: {}\n")
        + "---\n"
        + model("b", "  priority: -1\n"),
    )
    second = write(tmp_path, "b.yaml", model("b", "  aliases: [x, 5]\n") + "---\nbroken: [\n")
    missing = tmp_path / "missing.yaml"
    found = [(problem.file, problem.line, problem.field) for problem in errors(tmp_path, missing)]
    assert found == [
        (str(missing), None, ""),
        (str(first), 4, "metadata.name"),
        (str(first), 8, "spec.replicas"),
        (str(first), 10, "spec.colour"),
        (str(first), 11, "spec.vllm"),
        (str(first), 20, "spec.priority"),
        (str(second), 4, "metadata.name"),
        (str(second), 8, "spec.aliases[1]"),
        (str(second), 11, ""),
    ]


def test_the_error_carries_all_files_for_who_follows_them(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "[")
    with pytest.raises(ManifestErrors) as caught:
        read_manifests([tmp_path])
    assert caught.value.files == (path,)
    assert str(caught.value) == "\n".join(map(str, caught.value.errors))


@pytest.mark.parametrize(
    ("second", "field"),
    [
        (model("a"), "metadata.name"),
        (model("b", "  servedModelName: a\n"), "spec.servedModelName"),
        (model("b", "  aliases: [a]\n"), "spec.aliases[0]"),
        (model("b", "  aliases: [c, A/1]\n"), "spec.aliases[1]"),
        (model("b", "  servedModelName: A/1\n"), "spec.servedModelName"),
        (model("x1"), "metadata.name"),
        (model("a").replace("name: a", "name: a\n  namespace: other"), "metadata.name"),
    ],
)
def test_names_collide(tmp_path: Path, second: str, field: str) -> None:
    one = write(tmp_path, "1.yaml", model("a", "  servedModelName: A/1\n  aliases: [x1]\n"))
    two = write(tmp_path, "2.yaml", second)
    (problem,) = errors(tmp_path)
    assert (problem.file, problem.field) == (str(two), field)
    assert f"{one}:" in problem.allowed


def test_a_model_may_repeat_its_own_names(tmp_path: Path) -> None:
    path = write(tmp_path, "m.yaml", model("a", "  servedModelName: a\n  aliases: [a, b, b]\n"))
    assert read_manifests([path]).models[0].names == ("a", "b")


def test_caches_collide_within_a_namespace(tmp_path: Path) -> None:
    cache = (
        "apiVersion: ai.flexinfer/v1alpha1\nkind: ModelCache\n"
        "metadata: {name: c, namespace: ns}\nspec: {source: HF://org/repo}\n"
    )
    apart = cache.replace("ns", "one") + "---\n" + cache.replace("ns", "two")
    assert len(read_manifests([write(tmp_path, "m.yaml", apart)]).caches) == 2
    (problem,) = errors(write(tmp_path, "m.yaml", cache + "---\n" + cache))
    assert problem.field == "metadata.name"


def test_a_model_and_a_cache_may_share_a_name(tmp_path: Path) -> None:
    cache = (
        "apiVersion: ai.flexinfer/v1alpha1\nkind: ModelCache\nmetadata: {name: m}\n"
        "spec: {source: HF://org/repo}\n"
    )
    read = read_manifests([write(tmp_path, "m.yaml", model("m") + "---\n" + cache)])
    assert len(read.models) == len(read.caches) == 1


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    (problem,) = errors(path)
    assert (problem.line, problem.allowed) == (2, "text in UTF-8")


def test_a_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + model("a").replace("\n", "\r\n").encode())
    assert names(path) == ["a"]


def test_a_file_of_another_size(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    with path.open("wb") as stream:
        stream.truncate(9 * 2**20)
    (problem,) = errors(path)
    assert "more than 8 MiB" in problem.found


def test_a_file_that_cannot_be_read() -> None:
    # The kernel refuses to read this one, also to root.
    (problem,) = errors(Path("/proc/self/mem"))
    assert (problem.line, problem.found) == (None, "Input/output error")


def test_a_link_to_nowhere_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").symlink_to(tmp_path / "gone")
    (problem,) = errors(tmp_path)
    assert problem.found == "No such file or directory"
