"""From a resource to the command line of `vllm serve`, and from its output to reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_plans import CPU, install, plan, value, vllm_spec

from flexinfer.api.blocks import VllmBlock
from flexinfer.engines.backend import backend_for
from flexinfer.engines.errors import EngineConfigError, EngineNotFound
from flexinfer.engines.gpus import Devices
from flexinfer.engines.spec import Executable
from flexinfer.engines.vllm import Vllm
from flexinfer.engines.vllm_build import Build, build_of, flags_of

#: Flags of 0.32 that have a field, as its arg_utils.py names them; -tp and -q stand beside two.
ENGINE_FLAGS = [
    *("--served-model-name", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size"),
    *("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"),
    *("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--dtype", "--quantization", "-q"),
    *("--kv-cache-dtype", "--load-format", "--tokenizer", "--enforce-eager"),
    *("--trust-remote-code", "--enable-prefix-caching", "--enable-chunked-prefill"),
    *("--block-size", "--attention-backend", "--reasoning-parser", "--speculative-config"),
    *("--enable-lora", "--max-lora-rank", "--cpu-offload-gb", "--runner", "--convert"),
]
FRONTEND = [
    *("host", "port", "lora_modules", "chat_template", "tool_call_parser"),
    *("enable_auto_tool_choice", "allowed_origins", "disable_access_log_for_endpoints"),
]
ONE_GPU = Devices((1,), hip_ids=(1,))
TWO_GPUS = Devices((2, 3), hip_ids=(2, 3))

EVERYTHING: dict[str, Any] = {
    "tensorParallelSize": 1,
    "pipelineParallelSize": 2,
    "maxModelLen": 4096,
    "maxNumSeqs": 8,
    "maxNumBatchedTokens": 512,
    "gpuMemoryUtilization": "0.85",
    "kvCacheMemoryBytes": "1500Mi",
    "dtype": "bfloat16",
    "quantization": "awq",
    "kvCacheDtype": "fp8",
    "loadFormat": "safetensors",
    "tokenizer": "/models/tokenizer",
    "enforceEager": True,
    "trustRemoteCode": True,
    "enablePrefixCaching": False,
    "enableChunkedPrefill": True,
    "blockSize": 32,
    "attentionBackend": "TRITON_ATTN",
    "chatTemplate": "/models/chat.jinja",
    "toolCallParser": "hermes",
    "enableAutoToolChoice": True,
    "reasoningParser": "qwen3",
    "speculativeConfig": '{"method": "ngram", "num_speculative_tokens": 4}',
    "enableLora": True,
    "loraModules": ["one=/models/one", "two=/models/two"],
    "maxLoraRank": 32,
    "cpuOffloadGB": 2.5,
    "runner": "generate",
    "convert": "none",
    "env": {"MINE": "1"},
    "extraArgs": ["--seed", "7"],
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    return path


@pytest.fixture
def rocm(tmp_path: Path) -> Executable:
    return install(tmp_path / "rocm", "0.32.0+rocm721", ENGINE_FLAGS, FRONTEND)


@pytest.fixture
def cpu(tmp_path: Path) -> Executable:
    return install(tmp_path / "cpu", "0.32.0+cpu", ENGINE_FLAGS, FRONTEND)


# -- the command line


def test_the_smallest_plan(rocm: Executable, weights: Path) -> None:
    made = plan(rocm, weights, devices=ONE_GPU)
    assert made.argv == (
        *(str(rocm.path), "serve", str(weights), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", "4000", "--tensor-parallel-size", "1"),
        *("--allowed-origins", "[]", "--disable-access-log-for-endpoints", "/health,/metrics"),
    )
    assert made.url == "http://127.0.0.1:4000"
    assert made.model == weights
    assert made.warnings == ()
    assert made.python == rocm.python is not None


def test_every_setting_at_once(rocm: Executable, weights: Path) -> None:
    block = {name: text for name, text in EVERYTHING.items() if name != "env"}
    made = plan(rocm, weights, devices=TWO_GPUS, env=EVERYTHING["env"], **block)
    assert made.argv[9:] == (
        *("--tensor-parallel-size", "1", "--pipeline-parallel-size", "2"),
        *("--max-model-len", "4096", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"),
        *("--gpu-memory-utilization", "0.85", "--kv-cache-memory-bytes", "1572864000"),
        *("--dtype", "bfloat16", "--quantization", "awq", "--kv-cache-dtype", "fp8"),
        *("--load-format", "safetensors", "--tokenizer", "/models/tokenizer"),
        *("--enforce-eager", "--trust-remote-code", "--no-enable-prefix-caching"),
        *("--enable-chunked-prefill", "--block-size", "32"),
        *("--attention-backend", "TRITON_ATTN", "--chat-template", "/models/chat.jinja"),
        *("--tool-call-parser", "hermes", "--enable-auto-tool-choice"),
        *("--reasoning-parser", "qwen3"),
        *("--speculative-config", EVERYTHING["speculativeConfig"]),
        *("--enable-lora", "--max-lora-rank", "32", "--cpu-offload-gb", "2.5"),
        *("--runner", "generate", "--convert", "none"),
        *("--lora-modules", "one=/models/one", "two=/models/two"),
        *("--allowed-origins", "[]", "--disable-access-log-for-endpoints", "/health,/metrics"),
        *("--seed", "7"),
    )
    assert made.env["MINE"] == "1"
    assert made.warnings == ()


def test_every_field_of_the_block_reaches_the_plan(rocm: Executable, weights: Path) -> None:
    """Each alone changes the plan, so that a new field cannot be forgotten."""
    fields = {info.alias or name for name, info in VllmBlock.model_fields.items()}
    assert fields == EVERYTHING.keys()
    together = {"enableAutoToolChoice": "toolCallParser", "loraModules": "enableLora"}
    for name, text in EVERYTHING.items():
        base: dict[str, Any] = {}
        if name in together:
            base[together[name]] = EVERYTHING[together[name]]
        one = {name: 2 if name == "tensorParallelSize" else text}
        # With two GPUs both sizes of 2 are meaningful; pipelines of 2 leave 1 for the tensors.
        less = plan(rocm, weights, devices=TWO_GPUS, **base)
        if name == "tensorParallelSize":
            less = plan(rocm, weights, devices=TWO_GPUS, tensorParallelSize=1)
        more = plan(rocm, weights, devices=TWO_GPUS, **base, **one)
        assert (less.argv, less.env) != (more.argv, more.env), name


def test_what_is_off_is_off_or_unsaid(rocm: Executable, weights: Path) -> None:
    made = plan(
        rocm,
        weights,
        devices=ONE_GPU,
        enableLora=False,
        trustRemoteCode=False,
        enforceEager=False,
        enableChunkedPrefill=False,
    )
    assert "--no-enforce-eager" in made.argv
    assert "--no-enable-chunked-prefill" in made.argv
    assert not [word for word in made.argv if "lora" in word or "remote" in word]


def test_extra_arguments_come_last_and_go_before_ours(rocm: Executable, weights: Path) -> None:
    extra = ["--allowed_origins", '["*"]', "--max-num-seqs", "3"]
    made = plan(rocm, weights, devices=ONE_GPU, maxNumSeqs=9, extraArgs=extra)
    assert made.argv[-4:] == tuple(extra)
    assert "--allowed-origins" not in made.argv


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "1"],
        ["--port=1"],
        ["--host", "0.0.0.0"],
        ["--served_model_name", "other"],
        ["--served-model", "other"],
        ["--model=other"],
        ["--api-key", "k"],
        ["--api_k", "k"],
        ["--uds", "/tmp/s"],
        ["--ho", "0.0.0.0"],
        ["--ud=/tmp/s"],
        ["-dpe"],
        ["--ssl-keyfile=k"],
        ["--config", "more.yaml"],
        ["--headless"],
    ],
)
def test_extra_arguments_that_are_ours(rocm: Executable, weights: Path, words: list[str]) -> None:
    with pytest.raises(EngineConfigError, match=r"extraArgs: --.+ is set by FlexInfer"):
        plan(rocm, weights, devices=ONE_GPU, extraArgs=words)


def test_extra_arguments_that_only_look_like_ours(rocm: Executable, weights: Path) -> None:
    words = ["--model-impl", "vllm", "--config-format", "hf", "--h11-max-header-count", "9"]
    assert plan(rocm, weights, devices=ONE_GPU, extraArgs=words).argv[-6:] == tuple(words)


def test_a_flag_that_the_build_lacks_becomes_a_warning(tmp_path: Path, weights: Path) -> None:
    missing = ("--attention-backend", "--kv-cache-memory-bytes", "--runner")
    old = install(
        tmp_path / "old",
        "0.9.0+rocm",
        [flag for flag in ENGINE_FLAGS if flag not in missing],
        [name for name in FRONTEND if name != "disable_access_log_for_endpoints"],
    )
    made = plan(
        old,
        weights,
        devices=ONE_GPU,
        attentionBackend="X",
        kvCacheMemoryBytes="1Gi",
        runner="auto",
        maxNumSeqs=2,
    )
    assert not set(missing) & set(made.argv)
    assert "--disable-access-log-for-endpoints" not in made.argv
    assert value(made, "--max-num-seqs") == "2"
    assert [notice.field for notice in made.warnings] == [
        "spec.vllm.kvCacheMemoryBytes",
        "spec.vllm.attentionBackend",
        "spec.vllm.runner",
    ]
    assert {notice.reason for notice in made.warnings} == {"SettingIgnored"}
    assert "0.9.0+rocm" in made.warnings[0].message


def test_a_speculative_config_that_is_no_object(rocm: Executable, weights: Path) -> None:
    for text in ("ngram", "[1]", "{"):
        with pytest.raises(EngineConfigError, match="speculativeConfig is no JSON object"):
            plan(rocm, weights, devices=ONE_GPU, speculativeConfig=text)


# -- GPUs


def test_all_gpus_share_each_layer(rocm: Executable, weights: Path) -> None:
    made = plan(rocm, weights, devices=TWO_GPUS)
    assert value(made, "--tensor-parallel-size") == "2"
    assert made.env["HIP_VISIBLE_DEVICES"] == "2,3"
    staged = plan(rocm, weights, devices=TWO_GPUS, pipelineParallelSize=2)
    assert value(staged, "--tensor-parallel-size") == "1"
    twice = plan(rocm, weights, devices=TWO_GPUS, extraArgs=["-dp", "2"])
    assert value(twice, "--tensor-parallel-size") == "1"


def test_sizes_among_the_extra_arguments_count(rocm: Executable, weights: Path) -> None:
    made = plan(rocm, weights, devices=TWO_GPUS, extraArgs=["--tensor_parallel_size=2"])
    assert "--tensor-parallel-size" not in made.argv
    made = plan(rocm, weights, devices=TWO_GPUS, extraArgs=["-pp", "2"])
    assert value(made, "--tensor-parallel-size") == "1"


def test_more_gpus_than_there_are(rocm: Executable, weights: Path) -> None:
    # What the fields say was checked with the manifest; extraArgs were not.
    for block in (
        {"extraArgs": ["-tp", "4"]},
        {"tensorParallelSize": 2, "extraArgs": ["--data-parallel-size", "2"]},
    ):
        with pytest.raises(EngineConfigError, match=r"GPUs are wanted .* resources gives 2"):
            plan(rocm, weights, devices=TWO_GPUS, **block)


def test_gpus_that_would_stay_idle(rocm: Executable, weights: Path) -> None:
    made = plan(rocm, weights, devices=TWO_GPUS, tensorParallelSize=1)
    assert [notice.reason for notice in made.warnings] == ["GpusIdle"]


def test_a_pretended_gpu_means_the_cpu_and_a_warning(cpu: Executable, weights: Path) -> None:
    pretended = Devices((0, 1), pretended=True)
    made = plan(cpu, weights, devices=pretended, gpuMemoryUtilization="0.9")
    assert [notice.reason for notice in made.warnings] == ["PretendedGpu"]
    assert value(made, "--tensor-parallel-size") == "1"
    assert made.env["HIP_VISIBLE_DEVICES"] == "0,1"
    # Nine tenths of a GPU are not nine tenths of the RAM.
    assert int(made.env["VLLM_CPU_KVCACHE_SPACE"]) >= 1


def test_builds_and_devices_that_do_not_fit(
    cpu: Executable, rocm: Executable, weights: Path
) -> None:
    with pytest.raises(EngineConfigError, match=r"0\.32\.0\+cpu\) is a build for CPUs; GPU 1"):
        plan(cpu, weights, devices=ONE_GPU)
    with pytest.raises(EngineConfigError, match=r"build for GPUs .*: the model asks for no GPU"):
        plan(rocm, weights)
    with pytest.raises(EngineConfigError, match=r"build for GPUs .*: this machine has no GPU 0"):
        plan(rocm, weights, devices=Devices((0,), pretended=True))
    forced = plan(rocm, weights, env={"VLLM_TARGET_DEVICE": "cpu"})
    assert forced.env["VLLM_TARGET_DEVICE"] == "cpu"


def test_device_ids_of_the_users_choice(rocm: Executable, weights: Path) -> None:
    made = plan(rocm, weights, devices=ONE_GPU, extraArgs=["--device-ids", "0"])
    assert [notice.reason for notice in made.warnings] == ["DeviceOverridden"]


# -- environment


def test_environment_of_the_engine(rocm: Executable, weights: Path) -> None:
    inherited = {
        "VLLM_PORT": "tcp://10.0.0.1:8000",
        "VLLM_API_KEY": "hush",
        "VLLM_USE_MODELSCOPE": "1",
        "HF_TOKEN": "hush",
        "CUDA_VISIBLE_DEVICES": "0",
        "ROCR_VISIBLE_DEVICES": "0",
        "HF_HUB_OFFLINE": "0",
        "LOCAL_RANK": "3",
        "MASTER_PORT": "1",
        "HF_HOME": "/hf",
    }
    user = {
        "CUDA_VISIBLE_DEVICES": "3",
        "VLLM_API_KEY": "k",
        "MY_TOKEN": "t",
        "VLLM_ROCM_USE_AITER": "1",
    }
    made = plan(rocm, weights, devices=ONE_GPU, environ=inherited, env=user)
    assert "hush" not in made.env.values()
    assert made.env["HF_HOME"] == "/hf"
    ours = {name: text for name, text in made.env.items() if name.startswith("VLLM_")}
    assert ours == {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
        "VLLM_CACHE_ROOT": str(made.cwd / "vllm"),
        "VLLM_ROCM_USE_AITER": "1",
    }
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        assert made.env[name] == "1"
    # Two masks that differ make vLLM raise, and ROCR's renumbers before HIP's counts.
    masks = [name for name in made.env if "VISIBLE" in name or "ORDINAL" in name]
    assert masks == ["HIP_VISIBLE_DEVICES"]
    assert made.env["HIP_VISIBLE_DEVICES"] == "1"
    assert not {"LOCAL_RANK", "MASTER_PORT"} & made.env.keys()
    assert [notice.reason for notice in made.warnings] == ["EnvironmentIgnored"] * 2
    assert made.secrets == ("MY_TOKEN",)
    assert made.env["PYTHONFAULTHANDLER"] == "1"


def test_compiled_code_goes_into_the_compile_cache(rocm: Executable, weights: Path) -> None:
    made = plan(rocm, weights, devices=ONE_GPU)
    cache = made.cwd
    assert cache.is_dir() and cache.is_relative_to(weights.parent / "compiled/default")
    for name in (
        "VLLM_CACHE_ROOT",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "MIOPEN_USER_DB_PATH",
        "MIOPEN_CUSTOM_CACHE_DIR",
    ):
        assert Path(made.env[name]).is_relative_to(cache), name


def test_it_does_not_run_where_the_weights_are(cpu: Executable, weights: Path) -> None:
    # Its children are `python -c`, which imports from there before anything else.
    assert plan(cpu, weights).cwd != weights


# -- the KV cache on a CPU


def test_the_cache_on_a_cpu_is_not_a_share_of_all_memory(cpu: Executable, weights: Path) -> None:
    assert int(plan(cpu, weights).env["VLLM_CPU_KVCACHE_SPACE"]) in range(1, 5)
    said = plan(cpu, weights, env={"VLLM_CPU_KVCACHE_SPACE": "2"})
    assert said.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    for block in (
        {"kvCacheMemoryBytes": "1Gi"},
        {"gpuMemoryUtilization": "0.1"},
        {"extraArgs": ["--kv-cache-memory-bytes=1G"]},
        {"extraArgs": ["--gpu-memory-utilization", "0.1"]},
    ):
        assert "VLLM_CPU_KVCACHE_SPACE" not in plan(cpu, weights, **block).env


def test_no_such_cache_on_a_gpu(rocm: Executable, weights: Path) -> None:
    assert "VLLM_CPU_KVCACHE_SPACE" not in plan(rocm, weights, devices=ONE_GPU).env


# -- the model


def test_weights_that_are_none(cpu: Executable, tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match="none does not exist"):
        plan(cpu, tmp_path / "none")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf/model.gguf").touch()
    with pytest.raises(EngineConfigError, match=r"has no config\.json; it has model\.gguf"):
        plan(cpu, tmp_path / "gguf")


def test_the_block_of_another_backend(cpu: Executable, weights: Path) -> None:
    from engine_helpers import engine_spec

    with pytest.raises(EngineConfigError, match="not those of vllm"):
        Vllm().plan(engine_spec(), weights, CPU, 1, cpu, {})
    with pytest.raises(EngineConfigError, match="not those of vllm"):
        Vllm().parallel(engine_spec())


# -- the installation


def test_flags_are_read_without_running_vllm(rocm: Executable) -> None:
    build = build_of(rocm, {})
    assert build.version == "0.32.0+rocm721"
    assert build.for_cpu is False
    assert build.has("--max-model-len") and build.has("--allowed-origins") and build.has("-tp")
    assert not build.has("--swap-space")


def test_sources_that_look_different_say_nothing(tmp_path: Path) -> None:
    other = install(tmp_path / "other", "1.0", ["--something"], ["else"])
    build = build_of(other, {})
    assert build == Build("1.0", None)
    assert build.has("--anything")
    assert flags_of(tmp_path / "nowhere") is None


def test_a_program_that_cannot_be_looked_into(tmp_path: Path) -> None:
    assert build_of(Executable(Path("/bin/true")), {}) == Build()
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert build_of(Executable(Path("/bin/true"), python=broken), {}) == Build()


def test_found_by_the_variable_or_on_path(rocm: Executable) -> None:
    folder = rocm.path.parent
    for environ in ({"FLEXINFER_VLLM": str(folder)}, {"PATH": str(folder)}):
        found = Vllm().find_executable({"PATH": "", **environ})
        assert (found.path, found.python) == (rocm.path, folder / "python3")
    with pytest.raises(EngineNotFound, match=r"FLEXINFER_VLLM is not set, .* not on PATH"):
        Vllm().find_executable({"PATH": ""})


# -- the rest


@pytest.mark.parametrize(
    ("gpus", "block", "sequences"),
    [
        (1, {}, 256),
        (0, {}, 128),
        (1, {"maxNumSeqs": 4}, 4),
        (1, {"maxNumSeqs": 4, "extraArgs": ["--max-num-seqs=6"]}, 6),
        (1, {"maxNumSeqs": 4, "extraArgs": ["--max_num_seqs", "many"]}, 4),
    ],
)
def test_parallel(gpus: int, block: dict[str, Any], sequences: int) -> None:
    assert Vllm().parallel(vllm_spec(gpus, **block)) == sequences


async def test_by_name() -> None:
    backend = backend_for("vllm")
    assert isinstance(backend, Vllm)
    assert backend.request_model(vllm_spec(name="big"), Path("/m")) == "big"
    weights = Path("/m")
    unused = Executable(Path("/none"))
    assert await backend.prepare(vllm_spec(), weights, unused, {}, print) == weights
    # ROCm's teardown may take 15 s, and memory may be lost when it is cut short.
    assert backend.stop.grace_s >= 20
