"""From a resource to mlc_llm's command line, and from its output to reasons."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from mlc_helpers import XTX_BYTES, gpus, mlc_spec, plan, write_model, write_program

from flexinfer.api import MlcLlmBlock, read_manifests
from flexinfer.api.base import wire_name
from flexinfer.api.blocks import MlcOverrides
from flexinfer.cache.locate import Weights
from flexinfer.cache.userpaths import resolve_block
from flexinfer.engines.backend import backend_for
from flexinfer.engines.errors import EngineConfigError, EngineNotFound, ExitStatus
from flexinfer.engines.gpus import Devices
from flexinfer.engines.mlc import MlcLlm
from flexinfer.engines.spec import EngineSpec, LaunchPlan

SAMPLES = Path(__file__).parents[2] / "crds" / "samples"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return write_program(tmp_path / "bin", sys.executable)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return write_model(tmp_path / "weights")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "lib.so"
    path.touch()
    return path


def reasons(made: LaunchPlan) -> list[str]:
    return [notice.reason for notice in made.warnings]


def value(made: LaunchPlan, flag: str) -> str | None:
    return made.argv[made.argv.index(flag) + 1] if flag in made.argv else None


# -- the command line


def test_the_smallest_plan(program: Path, weights: Path) -> None:
    made = plan(program, weights)
    assert made.argv == (
        *(str(program), "serve", str(weights), "--device", "cpu", "--mode", "local"),
        *("--host", "127.0.0.1", "--port", "20001", "--allow-origins", "[]"),
    )
    assert made.url == "http://127.0.0.1:20001"
    assert made.model == weights
    assert made.warnings == ()
    assert made.python == Path(sys.executable)
    assert made.env["HIP_VISIBLE_DEVICES"] == "-1"
    assert "MLC_JIT_POLICY" not in made.env


REFERENCE = {
    "qwen3-8b-abliterated": (
        *("--device", "rocm:0", "--mode", "server", "--model-lib", "{weights}/lib_rocm_gfx1100.so"),
        "--overrides",
        "max_total_seq_length=32768;prefill_chunk_size=512;gpu_memory_utilization=0.8931",
    ),
    "qwen3-8b-chat": ("--device", "rocm:0", "--mode", "local"),
    "qwen3-8b-split": (
        *("--device", "rocm:0", "--mode", "server", "--model-lib", "{weights}/lib_rocm_gfx1100.so"),
    ),
    "qwen3-32b": ("--device", "rocm:0", "--mode", "local"),
    "qwen2-5-7b": (
        *("--device", "rocm:0", "--mode", "server", "--model-lib", "{weights}/lib_rocm_gfx1100.so"),
        "--overrides",
        "max_num_sequence=2;max_total_seq_length=131072;prefill_chunk_size=2048;"
        "gpu_memory_utilization=0.85",
    ),
}
REFERENCE_NOTICES = {"qwen3-8b-split": ["KVCacheUnderestimated"]}


def reference_models() -> dict[str, Any]:
    models = read_manifests([SAMPLES]).models
    return {model.name: model for model in models if model.spec.backend == "mlc-llm"}


def test_no_example_of_the_reference_is_left_out() -> None:
    assert set(reference_models()) == set(REFERENCE)


@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_plans_of_the_reference(program: Path, tmp_path: Path, name: str) -> None:
    model = reference_models()[name]
    quantization = "q4f32_1" if "q4f32_1" in model.spec.model else "q4f16_1"
    weights = write_model(tmp_path / "models" / model.spec.model, quantization=quantization)
    (weights / "lib_rocm_gfx1100.so").touch()
    spec = EngineSpec.from_spec(name, model.metadata.namespace, model.spec)
    block = resolve_block(spec.block, Weights(weights, "1", root=weights.parent))
    spec = EngineSpec(spec.name, spec.namespace, spec.backend, block, gpus=spec.gpus)
    made = plan(program, weights, spec=spec, devices=gpus(1))
    wanted = [word.format(weights=weights) for word in REFERENCE[name]]
    assert list(made.argv) == [
        *(str(program), "serve", str(weights), *wanted),
        *("--host", "127.0.0.1", "--port", "20001", "--allow-origins", "[]"),
    ]
    assert reasons(made) == REFERENCE_NOTICES.get(name, [])
    assert made.env["HIP_VISIBLE_DEVICES"] == "0"
    policy = {"qwen3-8b-abliterated": "OFF", "qwen2-5-7b": "OFF"}.get(name)
    assert made.env.get("MLC_JIT_POLICY") == policy
    parallel = {"server": 128, "local": 4}[model.spec.block.mode]
    assert MlcLlm().parallel(spec) == (2 if name == "qwen2-5-7b" else parallel)


def every_field(tmp_path: Path) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Every field of the block: a value, and the words of the plan that say it."""
    lib, other = tmp_path / "lib.so", write_model(tmp_path / "other")
    lib.touch()
    return {
        "mode": ("interactive", ("--mode", "interactive")),
        "model_lib_path": (str(lib), ("--model-lib", str(lib))),
        "gpu_memory_bytes": (XTX_BYTES // 2, ("--overrides", "gpu_memory_utilization=0.5000")),
        "jit_policy": ("READONLY", ("MLC_JIT_POLICY=READONLY",)),
        "overrides": ({"maxNumSequence": 3}, ("--overrides", "max_num_sequence=3")),
        "speculative_mode": ("eagle", ("--speculative-mode", "eagle")),
        "additional_models": (
            [f"{other},{lib}", str(other)],
            ("--additional-models", f"{other},{lib}", str(other)),
        ),
        "prefix_cache_mode": ("disable", ("--prefix-cache-mode", "disable")),
        "prefill_mode": ("chunked", ("--prefill-mode", "chunked")),
        "embedding_model": (str(other), ("--embedding-model", str(other))),
        "embedding_model_lib": (str(lib), ("--embedding-model-lib", str(lib))),
        "extra_args": (["--enable-debug"], ("--enable-debug",)),
        "env": ({"MY_VARIABLE": "1"}, ("MY_VARIABLE=1",)),
    }


@pytest.mark.parametrize("name", MlcLlmBlock.model_fields)
def test_every_field_reaches_the_plan(
    program: Path, weights: Path, tmp_path: Path, name: str
) -> None:
    table = every_field(tmp_path)
    # An embedding model and its library go together; everything else stands alone.
    names = {"embedding_model", "embedding_model_lib"} if "embedding" in name else {name}
    block = {wire_name(name): table[name][0] for name in names}
    spec = mlc_spec(1, env=block.pop("env", None), **block)
    made = plan(program, weights, devices=gpus(1), spec=spec)
    words = [*made.argv, *(f"{key}={value}" for key, value in made.env.items())]
    said = table[name][1]
    at = words.index(said[0])
    assert tuple(words[at : at + len(said)]) == said
    bare = plan(program, weights, devices=gpus(1))
    assert (made.argv, made.env) != (bare.argv, bare.env)


OVERRIDES = {
    "max_num_sequence": 2,
    "max_total_seq_length": 4096,
    "prefill_chunk_size": 512,
    "gpu_memory_utilization": "0.9",
    "context_window_size": 2048,
    "sliding_window_size": 1024,
    "attention_sink_size": 4,
    "tensor_parallel_shards": 1,
    "pipeline_parallel_stages": 1,
    "spec_draft_length": 3,
    "raw": "spec_tree_width=2;opt=O3",
}


def test_every_override_reaches_the_plan(program: Path, weights: Path) -> None:
    assert set(OVERRIDES) == set(MlcOverrides.model_fields)
    block = {wire_name(name): value for name, value in OVERRIDES.items()}
    made = plan(program, weights, devices=gpus(1), overrides=block)
    raw = OVERRIDES["raw"]
    pairs = [f"{name}={value}" for name, value in OVERRIDES.items() if name != "raw"]
    assert value(made, "--overrides") == ";".join([*pairs, str(raw)])
    assert made.warnings == ()


def test_what_is_set_twice_is_decided_by_raw(program: Path, weights: Path) -> None:
    overrides = {"maxNumSequence": 2, "raw": " max_num_sequence=8 ; bare;"}
    made = plan(program, weights, overrides=overrides)
    # MLC takes the last one, and says itself what it does not know.
    assert value(made, "--overrides") == "max_num_sequence=2;max_num_sequence=8;bare"
    assert MlcLlm().parallel(mlc_spec(overrides=overrides)) == 8


def test_modes_that_mlc_does_not_read_from_overrides(program: Path, weights: Path) -> None:
    raw = "prefix_cache_mode=disable;prefill_mode=chunked"
    made = plan(program, weights, overrides={"raw": raw})
    assert [(notice.reason, notice.message.rpartition(": ")[2]) for notice in made.warnings] == [
        ("SettingIgnored", "set prefixCacheMode instead"),
        ("SettingIgnored", "set prefillMode instead"),
    ]


@pytest.mark.parametrize("word", ["--port", "--host=0.0.0.0", "--api-key", "--po", "--ho"])
def test_extra_arguments_that_are_ours(program: Path, weights: Path, word: str) -> None:
    with pytest.raises(EngineConfigError, match=f"{word} is set by FlexInfer"):
        plan(program, weights, extraArgs=[word, "1"])


@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("--overrides", "overrides.raw"),
        ("--ov=opt=O0", "overrides.raw"),
        ("--model-lib", "modelLibPath"),
        ("--prefill-mode", "prefillMode"),
    ],
)
def test_extra_arguments_with_a_field(program: Path, weights: Path, word: str, field: str) -> None:
    with pytest.raises(EngineConfigError, match=rf"{word} has a field: spec\.mlcllm\.{field}"):
        plan(program, weights, extraArgs=[word, "1"])


# -- the GPUs and their memory


def test_bytes_become_a_share_of_the_gpu(program: Path, weights: Path) -> None:
    made = plan(program, weights, devices=gpus(1), gpuMemoryBytes=23_000_000_000)
    assert value(made, "--overrides") == "gpu_memory_utilization=0.8931"
    assert made.warnings == ()
    said = {"gpuMemoryUtilization": "0.7"}
    both = plan(program, weights, devices=gpus(1), gpuMemoryBytes=1000, overrides=said)
    assert value(both, "--overrides") == "gpu_memory_utilization=0.7"
    raw = {"raw": "gpu_memory_utilization=0.6"}
    both = plan(program, weights, devices=gpus(1), gpuMemoryBytes=1000, overrides=raw)
    assert value(both, "--overrides") == "gpu_memory_utilization=0.6"


@pytest.mark.parametrize("devices", [gpus(1, None), Devices(), Devices((0,), pretended=True)])
def test_bytes_of_a_gpu_of_unknown_size(program: Path, weights: Path, devices: Devices) -> None:
    made = plan(program, weights, devices=devices, gpuMemoryBytes=23_000_000_000)
    assert "--overrides" not in made.argv
    assert "GPUMemoryUnknown" in reasons(made)


def test_more_bytes_than_the_gpu_has(program: Path, weights: Path) -> None:
    made = plan(program, weights, devices=gpus(1), gpuMemoryBytes=2 * XTX_BYTES)
    assert value(made, "--overrides") == "gpu_memory_utilization=1.0000"
    assert reasons(made) == ["GPUMemoryExceeded"]


def test_pretended_gpus_mean_the_cpu_and_a_warning(program: Path, weights: Path) -> None:
    made = plan(program, weights, devices=Devices((0, 1), pretended=True))
    assert value(made, "--device") == "cpu"
    assert "--overrides" not in made.argv
    assert made.env["HIP_VISIBLE_DEVICES"] == "0,1"
    assert reasons(made) == ["PretendedGpu"]
    assert made.busy_limit_s > plan(program, weights, devices=gpus(1)).busy_limit_s


def test_two_gpus_share_each_layer(program: Path, weights: Path) -> None:
    made = plan(program, weights, devices=gpus(2))
    assert value(made, "--device") == "rocm:0"
    assert value(made, "--overrides") == "tensor_parallel_shards=2"
    assert made.env["HIP_VISIBLE_DEVICES"] == "0,1"
    assert reasons(made) == ["TensorParallelOnGfx1100"]


def test_stages_and_shards_make_the_gpus(program: Path, weights: Path) -> None:
    stages = {"pipelineParallelStages": 2}
    made = plan(program, weights, devices=gpus(4), overrides=stages)
    assert value(made, "--overrides") == "pipeline_parallel_stages=2;tensor_parallel_shards=2"


def test_a_model_made_for_two_gpus_on_one(program: Path, tmp_path: Path) -> None:
    weights = write_model(tmp_path / "two", tensor_parallel_shards=2)
    assert value(plan(program, weights, devices=gpus(1)), "--overrides") == (
        "tensor_parallel_shards=1"
    )
    assert "--overrides" not in plan(program, weights, devices=gpus(2)).argv


def test_shards_that_do_not_match_the_gpus(program: Path, weights: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"2 shards in 1 stages need 2 GPUs, and .* give 1"):
        plan(program, weights, devices=gpus(1), overrides={"tensorParallelShards": 2})
    made = plan(program, weights, devices=gpus(2), overrides={"tensorParallelShards": 1})
    assert reasons(made) == ["GpusIdle"]


def test_what_the_compiled_library_decides(program: Path, weights: Path, library: Path) -> None:
    overrides = {
        "tensorParallelShards": 2,
        "pipelineParallelStages": 1,
        "slidingWindowSize": 512,
        "attentionSinkSize": 4,
        "raw": "opt=O3",
    }
    made = plan(program, weights, devices=gpus(1), modelLibPath=str(library), overrides=overrides)
    ignored = [n.field for n in made.warnings if n.reason == "SettingIgnored"]
    assert ignored == [
        "spec.mlcllm.overrides.tensorParallelShards",
        "spec.mlcllm.overrides.pipelineParallelStages",
        "spec.mlcllm.overrides.slidingWindowSize",
        "spec.mlcllm.overrides.attentionSinkSize",
        "spec.mlcllm.overrides.raw",
    ]
    two = plan(program, weights, devices=gpus(2), modelLibPath=str(library))
    assert "--overrides" not in two.argv
    assert reasons(two) == ["GpuCountOfLibrary"]


def test_a_cache_that_is_larger_than_mlc_thinks(program: Path, tmp_path: Path) -> None:
    weights = write_model(tmp_path / "f32", quantization="q4f32_1")
    assert reasons(plan(program, weights, mode="server")) == ["KVCacheUnderestimated"]
    assert reasons(plan(program, weights, mode="local")) == []
    capped = {"maxTotalSeqLength": 4096}
    assert reasons(plan(program, weights, mode="server", overrides=capped)) == []


def test_a_device_of_the_users_choice(program: Path, weights: Path) -> None:
    made = plan(program, weights, devices=gpus(1), extraArgs=["--device", "vulkan:0"])
    assert made.argv.count("--device") == 1
    assert reasons(made) == ["DeviceOverridden"]


# -- files


def test_a_directory_that_mlc_cannot_load(program: Path, tmp_path: Path) -> None:
    for name, files, words in (
        ("none", None, "does not exist"),
        ("bare", [], "holds no mlc-chat-config.json$"),
        ("hub", ["config.json"], "convert_weight"),
        ("gguf", ["a.gguf"], "a GGUF is for the backends"),
    ):
        directory = tmp_path / name
        for file in files or []:
            directory.mkdir(exist_ok=True)
            (directory / file).touch()
        if files == []:
            directory.mkdir()
        with pytest.raises(EngineConfigError, match=words):
            plan(program, directory)


def test_a_broken_configuration(program: Path, weights: Path) -> None:
    with pytest.raises(EngineConfigError, match="is a file"):
        plan(program, weights / "mlc-chat-config.json")
    (weights / "mlc-chat-config.json").write_text("[]")
    with pytest.raises(EngineConfigError, match="does not hold a JSON object"):
        plan(program, weights)
    for text in ("{", "[" * 99999):
        (weights / "mlc-chat-config.json").write_text(text)
        with pytest.raises(EngineConfigError, match="is not JSON"):
            plan(program, weights)
    (weights / "mlc-chat-config.json").unlink()
    os.mkfifo(weights / "mlc-chat-config.json")
    with pytest.raises(EngineConfigError, match="is not a regular file"):
        plan(program, weights)


def test_the_index_of_the_weights(program: Path, tmp_path: Path) -> None:
    old = write_model(tmp_path / "old", index="ndarray-cache.json")
    assert reasons(plan(program, old)) == ["OldWeightsIndex"]
    write_model(old)
    assert reasons(plan(program, old)) == []
    for name in ("ndarray-cache.json", "tensor-cache.json"):
        (old / name).unlink()
    with pytest.raises(EngineConfigError, match=r"tensor-cache\.json is missing"):
        plan(program, old)


def test_nothing_is_fetched_from_a_hub(program: Path, weights: Path, library: Path) -> None:
    hub = "HF://mlc-ai/Qwen3-0.6B-q4f16_1-MLC"
    with pytest.raises(EngineConfigError, match=r"additionalModels: HF://.* would be fetched"):
        plan(program, weights, additionalModels=[hub])
    with pytest.raises(EngineConfigError, match=r"embeddingModel: HF://.* would be fetched"):
        plan(program, weights, embeddingModel=hub, embeddingModelLib=str(library))
    env = plan(program, weights).env
    assert env["MLC_DOWNLOAD_CACHE_POLICY"] == "READONLY"
    assert env["HF_HUB_OFFLINE"] == env["TRANSFORMERS_OFFLINE"] == "1"


def test_files_that_are_missing(program: Path, weights: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"modelLibPath: .*/lib\.so is not a file"):
        plan(program, weights, modelLibPath="lib.so")
    with pytest.raises(EngineConfigError, match=r"additionalModels: .*/draft is not a directory"):
        plan(program, weights, additionalModels=["draft"])
    draft = write_model(weights / "draft")
    made = plan(program, weights, additionalModels=["draft"])
    assert value(made, "--additional-models") == str(draft)


# -- environment


def test_environment_of_the_engine(program: Path, weights: Path) -> None:
    inherited = {
        "HF_TOKEN": "hush",
        "MLC_JIT_POLICY": "OFF",
        "MLC_LLM_HOME": "/elsewhere",
        "MLC_LIBRARY_PATH": "/opt/mlc",
        "CUDA_VISIBLE_DEVICES": "0",
        "WEB_CONCURRENCY": "4",
    }
    user = {
        "HIP_VISIBLE_DEVICES": "3",
        "MLC_GPU_SIZE_BYTES": "1",
        "WEB_CONCURRENCY": "2",
        "MY_TOKEN": "t",
        "MLC_TEMP_DIR": "/mine",
    }
    made = plan(program, weights, environ=inherited, spec=mlc_spec(env=user))
    for name in ("MLC_JIT_POLICY", "CUDA_VISIBLE_DEVICES", "WEB_CONCURRENCY", "HF_TOKEN"):
        assert name not in made.env
    assert "MLC_GPU_SIZE_BYTES" not in made.env
    assert made.env["MLC_LIBRARY_PATH"] == "/opt/mlc"
    assert made.env["HIP_VISIBLE_DEVICES"] == "-1"
    assert made.env["MLC_TEMP_DIR"] == "/mine"
    assert reasons(made) == ["EnvironmentIgnored"] * 3
    assert "gpuMemoryBytes" in made.warnings[1].message
    assert made.secrets == ("MY_TOKEN",)
    assert "hush" not in repr(made)


def test_compiled_libraries_are_kept(program: Path, weights: Path, tmp_path: Path) -> None:
    made = plan(program, weights, devices=gpus(1))
    home = Path(made.env["MLC_LLM_HOME"])
    assert home.is_dir()
    assert home.is_relative_to(program.parent / "compile" / "default")
    assert "gfx1100" in str(home)
    # A rename within one file system is what makes a library appear whole.
    temporary = Path(made.env["MLC_TEMP_DIR"])
    assert temporary.stat().st_dev == home.stat().st_dev
    assert made.cwd == home
    assert plan(program, weights).env["MLC_LLM_HOME"] != str(home)


# -- the executable


def test_found_by_the_variable_or_on_path(program: Path) -> None:
    backend = MlcLlm()
    for named in (program, program.parent):
        found = backend.find_executable({"FLEXINFER_MLC_LLM": str(named), "PATH": ""})
        assert (found.path, found.found_by) == (program, "FLEXINFER_MLC_LLM")
        assert found.python == Path(sys.executable)
    assert backend.find_executable({"PATH": str(program.parent)}).found_by == "PATH"
    with pytest.raises(EngineNotFound, match=r"FLEXINFER_MLC_LLM is not set.*PATH"):
        backend.find_executable({"PATH": str(program.parent.parent)})


# -- what it says

INSUFFICIENT = (
    "tvm.error.InternalError: Check failed: (output_res.IsOk()) is false: Insufficient GPU memory "
    "error: The available single GPU memory is 20584.716 MB, which is less than the sum of model "
    "weight size (5977.188 MB) and temporary buffer size (15013.765 MB)."
)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            INSUFFICIENT,
            "not enough GPU memory: MLC may use 20584.716 MB, the weights take 5977.188 MB and the "
            "buffers 15013.765 MB; overrides.gpuMemoryUtilization raises the first",
        ),
        (
            "TVMError: ROCM HIP Error: hipMalloc(&ret, nbytes) failed with error: out of memory",
            "not enough GPU memory (hipMalloc): lower overrides.maxTotalSeqLength or "
            "maxNumSequence",
        ),
        (
            "TVMError: ValueError: Error when loading parameters from params_shard_8.bin: Check "
            "failed: ValueError: Encountered an corrupted parameter shard. It means it is not ..",
            "the weights are damaged: params_shard_8.bin does not have the size that the index "
            "says",
        ),
        (
            "RuntimeError: JIT is disabled by MLC_JIT_POLICY=OFF",
            'there is no modelLibPath, and jitPolicy "OFF" forbids to compile one',
        ),
        (
            "RuntimeError: No cached model lib found, and JIT is disabled by "
            "MLC_JIT_POLICY=READONLY",
            "there is no modelLibPath and no library in the compile cache, and jitPolicy "
            '"READONLY" forbids to compile one',
        ),
        (
            "FileNotFoundError: The `model_lib` you passed in is not a file: /m/lib.so.",
            "the model library /m/lib.so is not a file",
        ),
        (
            "!!!!!!! TVM FFI encountered a Segfault !!!!!!!",
            "it crashed inside TVM (SIGSEGV)",
        ),
        (
            "Memory access fault by GPU node-1 (Agent handle: 0x1) on address 0x7f. Reason: x.",
            "a memory access fault on the GPU: node-1 (Agent handle: 0x1) on address 0x7f. "
            "Reason: x.",
        ),
        (
            "Exception in thread Thread-1 (_background_loop):",
            "the thread that loads the model ended with an error",
        ),
        (
            # The name of a thread that runs a foreign function has no part in parentheses.
            "Exception in thread Thread-2:",
            "the thread that loads the model ended with an error",
        ),
        ("ValueError: Device is not found on your local environment: rocm:0", "MLC finds no"),
        (
            "TVMError: ROCM HIP Error: hipModuleLoadData(&(module_[device_id]), data_.c_str()) "
            "failed with error: shared object initialization failed",
            "the model library was compiled for another GPU (shared object initialization failed)",
        ),
        ("INFO:     Uvicorn running on http://127.0.0.1:8000 (Press CTRL+C to quit)", None),
        (
            "[10:00:00] /cpp/serve/config.cc:726: Estimated total single GPU memory usage: 1 MB",
            None,
        ),
        ("[2026-01-01 10:00:00] INFO auto_device.py:79: Found device: rocm:0", None),
    ],
)
def test_fatal_lines(line: str, reason: str | None) -> None:
    found = MlcLlm().fatal_line(line)
    if reason is None:
        assert found is None
    else:
        assert found is not None and found.startswith(reason)


@pytest.fixture
def explain(program: Path, weights: Path) -> Any:
    made = plan(program, weights, overrides={"maxNumSequence": 2})

    def ask(lines: list[str], *, model: Path = weights, **status: int) -> str:
        import dataclasses

        plan = dataclasses.replace(made, model=model)
        return MlcLlm().explain(plan, ExitStatus(**status), lines)

    return ask


def test_a_thread_that_ended_is_explained_by_its_last_words(explain: Any) -> None:
    head = [
        "Exception in thread Thread-1 (_background_loop):",
        "Traceback (most recent call last):",
    ]
    assert explain([*head, INSUFFICIENT]).startswith("not enough GPU memory: MLC may use 20584")
    unknown = [*head, "  File x, line 1, in run", "tvm.error.InternalError: Check failed: x == y"]
    assert explain(unknown) == "mlc_llm failed: InternalError: Check failed: x == y"
    assert explain(head) == "the thread that loads the model ended with an error"


def test_an_index_of_the_old_name_is_explained(explain: Any, weights: Path) -> None:
    path = weights / "tensor-cache.json"
    line = f"tvm.error.InternalError: Check failed: (!fs.fail()) is false: Cannot open {path}"
    assert explain([line]) == (f"cannot open {path}: this version of MLC reads the weights by it")
    path.rename(weights / "ndarray-cache.json")
    assert explain([line]).endswith("; ndarray-cache.json is its old name")


def test_a_command_line_that_it_does_not_know(explain: Any) -> None:
    line = "unrecognized arguments: --max_foo=1"
    assert explain([line], code=2) == "overrides: this mlc_llm does not know max_foo=1"
    line = "argument --max_num_sequence: invalid int value: 'x'"
    assert explain([line], code=2) == "overrides: max_num_sequence: invalid int value: 'x'"
    line = "argument --mode: invalid choice: 'x' (choose from local, interactive, server)"
    assert explain([line], code=2).startswith("the command line: argument --mode: invalid choice")
    assert explain(["hello"], code=2) == "mlc_llm ended: exit code 2"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"signal": 11}, r"crashed \(SIGSEGV\)$"),
        ({"code": 139}, r"crashed \(SIGSEGV\)$"),
        ({"signal": 6}, "aborted"),
        ({"signal": 9}, "memory runs out"),
        ({"signal": 15}, "FlexInfer did not send"),
        ({"code": 143}, "FlexInfer did not send"),
        ({"code": 3}, "exit code 3"),
    ],
)
def test_ends_without_words(explain: Any, status: dict[str, int], words: str) -> None:
    import re

    assert re.search(words, explain(["hello"], **status))


def test_crashes_with_a_known_way_round(explain: Any, tmp_path: Path) -> None:
    qwen3 = write_model(tmp_path / "Qwen3-8B-q4f16_1-MLC")
    segfault = "!!!!!!! TVM FFI encountered a Segfault !!!!!!!"
    assert "q4f32_1" in explain([segfault], model=qwen3, signal=11)
    estimate = "config.cc:726: Estimated total single GPU memory usage: 9000.0 MB"
    assert "maxTotalSeqLength" in explain([estimate, segfault], signal=11)
    fault = "Memory access fault by GPU node-1"
    assert explain([fault], signal=6) == "a memory access fault on the GPU: node-1"


def test_the_port(explain: Any) -> None:
    line = (
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 20001): "
        "address already in use"
    )
    assert MlcLlm().port_taken([line])
    assert not MlcLlm().port_taken(["hello"])
    assert explain([line], code=1) == "port 20001 of 127.0.0.1 is taken by another program"


# -- the rest


@pytest.mark.parametrize(
    ("block", "parallel"),
    [
        ({}, 4),
        ({"mode": "interactive"}, 1),
        ({"mode": "server"}, 128),
        ({"mode": "server", "overrides": {"maxNumSequence": 16}}, 16),
        ({"mode": "local", "overrides": {"raw": "max_num_sequence=6"}}, 6),
        ({"overrides": {"raw": "max_num_sequence=x"}}, 4),
        ({"overrides": {"raw": "max_num_sequence=²"}}, 4),
    ],
)
def test_parallel(block: dict[str, Any], parallel: int) -> None:
    assert MlcLlm().parallel(mlc_spec(**block)) == parallel


def test_the_backend_by_its_name(weights: Path) -> None:
    backend = backend_for("mlc-llm")
    assert isinstance(backend, MlcLlm)
    assert backend.request_model(mlc_spec(), weights) == str(weights)
    relative = Path(os.path.relpath(weights))
    assert backend.request_model(mlc_spec(), relative) == str(relative.absolute())
    assert backend.requests.drop_fields == {"user"}
    assert backend.requests.rename_fields == {"max_completion_tokens": "max_tokens"}
    assert backend.ready_line("INFO:     Application startup complete.")


def test_settings_of_another_backend(program: Path, weights: Path) -> None:
    from engine_helpers import engine_spec

    with pytest.raises(EngineConfigError, match="not those of mlc-llm"):
        plan(program, weights, spec=engine_spec())
