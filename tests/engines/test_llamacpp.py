"""From a resource to llama-server's command line, and from its output to reasons."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import FAKE, engine_spec

from flexinfer.api.blocks import LlamaCppBlock
from flexinfer.engines import llamacpp
from flexinfer.engines.backend import backend_for
from flexinfer.engines.errors import EngineConfigError, EngineNotFound, ExitStatus
from flexinfer.engines.gpus import Devices
from flexinfer.engines.llamacpp import LlamaCpp
from flexinfer.engines.llamacpp_build import build_of, parse_devices, parse_help
from flexinfer.engines.llamacpp_flags import _FLAGS, _LAYERS
from flexinfer.engines.spec import EngineSpec, Executable, LaunchPlan

NEW_HELP = """\
-np,   --parallel N                     number of server slots (default: -1, -1 = auto)
-c,    --ctx-size N                     size of the prompt context
-fa,   --flash-attn [on|off|auto]       set Flash Attention use
-ngl,  --gpu-layers, --n-gpu-layers N   max. number of layers to store in VRAM
-fit,  --fit [on|off]                   whether to adjust unset arguments
-dev,  --device <dev1,dev2,..>          devices
-lm,   --load-mode MODE                 model loading mode (default: auto)
--offline                               Offline mode
--ui,  --webui, --no-ui, --no-webui     whether to enable the Web UI
--slots, --no-slots                     expose slots
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max
"""
OLD_HELP = """\
-c,    --ctx-size N             size of the prompt context
-fa,   --flash-attn             enable Flash Attention (default: disabled)
-ngl,  --gpu-layers, --n-gpu-layers N
                                number of layers to store in VRAM
-np,   --parallel N             number of parallel sequences to decode (default: 1)
--mlock                         force system to keep model in RAM
--no-mmap                       do not memory-map model
-dev,  --device <dev1,dev2,..>  comma-separated list of devices to use for offloading
--no-webui                      Disable the Web UI
--slots                         enable slots monitoring endpoint
"""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "models/smol.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """Write a llama-server that prints this help and these devices: `program(help, devices)`."""

    def write(help_text: str = NEW_HELP, devices: str = "") -> Executable:
        (tmp_path / "help").write_text(help_text)
        (tmp_path / "devices").write_text(f"Available devices:\n{devices}")
        path = tmp_path / "llama-server"
        script = f'#!/bin/sh\n[ "$1" = --help ] && cat {tmp_path}/help || cat {tmp_path}/devices\n'
        path.write_text(script)
        path.chmod(0o755)
        return Executable(path)

    return write


def plan(
    executable: Executable,
    weights: Path,
    *,
    devices: Devices | None = None,
    spec: EngineSpec | None = None,
    environ: dict[str, str] | None = None,
    **block: Any,
) -> LaunchPlan:
    devices = devices or Devices()
    spec = spec or engine_spec(gpus=len(devices.ids), **block)
    environ = {"PATH": os.environ["PATH"], **(environ or {})}
    return LlamaCpp().plan(spec, weights, devices, 20001, executable, environ)


def value(made: LaunchPlan, flag: str) -> str | None:
    return made.argv[made.argv.index(flag) + 1] if flag in made.argv else None


# -- the command line


def test_the_smallest_plan(program: Any, weights: Path) -> None:
    executable = program()
    made = plan(executable, weights)
    assert made.argv == (
        str(executable.path),
        *("--host", "127.0.0.1", "--port", "20001"),
        *("--model", str(weights), "--alias", "smol"),
        *("--offline", "--no-ui", "--slots", "--device", "none"),
    )
    assert made.url == "http://127.0.0.1:20001"
    assert made.cwd == weights.parent
    assert made.warnings == ()
    assert made.env["HIP_VISIBLE_DEVICES"] == "-1"


def test_every_field_of_the_block_has_its_flag() -> None:
    special = {"load_mode", "flash_attention", "extra_args", "env"}
    assert set(LlamaCppBlock.model_fields) == {*_FLAGS, *_LAYERS, *special}


def test_files_are_looked_for_beside_the_model(program: Any, weights: Path) -> None:
    executable = program(NEW_HELP + "--mmproj FILE   projector\n--lora FNAME   adapter\n")
    made = plan(executable, weights, mmproj="mmproj.gguf", lora=["a.gguf", "/srv/b.gguf"])
    assert value(made, "--mmproj") == str(weights.parent / "mmproj.gguf")
    assert [word for word in made.argv if word.endswith(("a.gguf", "b.gguf"))] == [
        str(weights.parent / "a.gguf"),
        "/srv/b.gguf",
    ]


def test_a_setting_without_a_flag_is_a_warning(program: Any, weights: Path) -> None:
    made = plan(program(), weights, cacheTypeK="q8_0", jinja=False, embeddings=True)
    assert sorted(notice.field or "" for notice in made.warnings) == [
        "spec.llamacpp.cacheTypeK",
        "spec.llamacpp.embeddings",
        "spec.llamacpp.jinja",
    ]
    notice = made.warnings[0]
    assert notice.reason == "SettingIgnored"
    assert notice.resource == "ModelDeployment/default/smol"
    assert "no flag for cacheTypeK: q8_0" in notice.message


def test_the_words_of_old_builds(program: Any, weights: Path) -> None:
    executable = program(OLD_HELP)
    made = plan(executable, weights, loadMode="mlock", flashAttention="on", nGPULayers="all")
    assert "--load-mode" not in made.argv
    assert "--no-mmap" in made.argv
    assert "--mlock" in made.argv
    assert made.argv[made.argv.index("--flash-attn") + 1].startswith("-")
    assert value(made, "--n-gpu-layers") == "999"
    assert made.warnings == ()
    assert [n.field for n in plan(executable, weights, loadMode="dio").warnings] == [
        "spec.llamacpp.loadMode"
    ]
    assert "--flash-attn" not in plan(executable, weights, flashAttention="off").argv


def test_the_words_of_new_builds(program: Any, weights: Path) -> None:
    made = plan(program(), weights, loadMode="none", flashAttention="off", nGPULayers="all")
    assert value(made, "--load-mode") == "none"
    assert value(made, "--flash-attn") == "off"
    assert value(made, "--n-gpu-layers") == "all"


def test_help_of_removed_flags_does_not_count() -> None:
    flags = parse_help(NEW_HELP)
    assert "--draft-max" not in flags
    assert "--spec-draft-n-max" not in flags
    assert flags["--flash-attn"].startswith("[on|off|auto]")
    assert {"-ui", "--ui", "--no-webui"} & flags.keys() == {"--ui", "--no-webui"}


def test_a_context_of_given_size_needs_no_fitting(program: Any, weights: Path) -> None:
    assert value(plan(program(), weights, contextSize=512), "--fit") == "off"
    assert value(plan(program(), weights), "--fit") is None
    extra = plan(program(), weights, contextSize=512, extraArgs=["--fit", "on"])
    assert extra.argv.count("--fit") == 1


def test_extra_arguments_come_last(program: Any, weights: Path) -> None:
    made = plan(program(), weights, contextSize=512, extraArgs=["--seed", "1"])
    assert made.argv[-2:] == ("--seed", "1")


@pytest.mark.parametrize("flag", ["--port", "--host", "-m", "--api-key", "--alias"])
def test_extra_arguments_that_are_ours(program: Any, weights: Path, flag: str) -> None:
    with pytest.raises(EngineConfigError, match=f"{flag} is set by FlexInfer"):
        plan(program(), weights, extraArgs=[flag, "1"])


# -- the model


def test_a_directory_with_one_model(program: Any, weights: Path) -> None:
    for name in ("mmproj-f16.gguf", "notes.txt"):
        (weights.parent / name).touch()
    assert value(plan(program(), weights.parent), "--model") == str(weights)


def test_a_directory_with_a_model_in_parts(program: Any, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"big-0000{number}-of-00003.gguf").touch()
    found = value(plan(program(), tmp_path), "--model")
    assert found == str(tmp_path / "big-00001-of-00003.gguf")


def test_a_directory_with_two_models(program: Any, weights: Path) -> None:
    (weights.parent / "other.gguf").touch()
    with pytest.raises(EngineConfigError, match=r"found other\.gguf, smol\.gguf"):
        plan(program(), weights.parent)


def test_a_model_that_is_missing(program: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"none\.gguf does not exist"):
        plan(program(), tmp_path / "none.gguf")


# -- devices and environment

VULKAN = """\
  Vulkan0: AMD Radeon RX 7900 XTX (RADV NAVI31) (24560 MiB, 24000 MiB free)
  Vulkan1: AMD Radeon RX 7900 XTX (RADV NAVI31) (24560 MiB, 24000 MiB free)
"""
ROCM = "  ROCm0: AMD Radeon RX 7900 XTX (24560 MiB, 24500 MiB free)\n"


def test_devices_as_the_build_lists_them() -> None:
    assert [device.name for device in parse_devices(VULKAN + ROCM)] == [
        "Vulkan0",
        "Vulkan1",
        "ROCm0",
    ]
    assert parse_devices("Available devices:\n  (none)\n") == []


def test_vulkan_ignores_the_mask_so_the_device_is_named(program: Any, weights: Path) -> None:
    made = plan(program(devices=VULKAN), weights, devices=Devices((1,)))
    assert value(made, "--device") == "Vulkan1"
    assert made.env["HIP_VISIBLE_DEVICES"] == "1"
    assert made.warnings == ()


def test_hip_renumbers_behind_the_mask(program: Any, weights: Path) -> None:
    made = plan(program(devices=ROCM), weights, devices=Devices((1,)))
    assert value(made, "--device") == "ROCm0"
    both = ROCM + ROCM.replace("ROCm0", "ROCm1")
    made = plan(program(devices=both), weights, devices=Devices((2, 3)))
    assert value(made, "--device") == "ROCm0,ROCm1"
    assert made.env["HIP_VISIBLE_DEVICES"] == "2,3"


def test_a_pretended_gpu_means_the_cpu_and_a_warning(program: Any, weights: Path) -> None:
    made = plan(program(), weights, devices=Devices((0,), pretended=True))
    assert value(made, "--device") == "none"
    assert made.env["HIP_VISIBLE_DEVICES"] == "0"
    assert [notice.reason for notice in made.warnings] == ["PretendedGpu"]


def test_a_build_that_sees_no_gpu(program: Any, weights: Path) -> None:
    with pytest.raises(EngineConfigError, match="lists no GPU"):
        plan(program(), weights, devices=Devices((0,)))


def test_a_build_that_sees_too_few(program: Any, weights: Path) -> None:
    with pytest.raises(EngineConfigError, match="lists Vulkan0, Vulkan1; GPU 2 was assigned"):
        plan(program(devices=VULKAN), weights, devices=Devices((2,)))


def test_a_device_of_the_users_choice(program: Any, weights: Path) -> None:
    extra = ["--device", "Vulkan0"]
    made = plan(program(devices=VULKAN), weights, devices=Devices((1,)), extraArgs=extra)
    assert made.argv.count("--device") == 1
    assert [notice.reason for notice in made.warnings] == ["DeviceOverridden"]


def test_weights_in_ram_are_read_not_mapped_on_a_gpu(
    program: Any, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = program(devices=VULKAN)
    on_gpu = Devices((0,))
    monkeypatch.setattr(llamacpp, "_on_tmpfs", lambda path: True)
    assert value(plan(executable, weights, devices=on_gpu), "--load-mode") == "none"
    assert value(plan(executable, weights), "--load-mode") is None
    asked = plan(executable, weights, devices=on_gpu, loadMode="mmap")
    assert value(asked, "--load-mode") == "mmap"
    monkeypatch.setattr(llamacpp, "_on_tmpfs", lambda path: False)
    assert value(plan(executable, weights, devices=on_gpu), "--load-mode") is None


def test_tmpfs_is_told_from_a_disk(tmp_path: Path) -> None:
    assert llamacpp._on_tmpfs(Path("/dev/shm"))
    assert not llamacpp._on_tmpfs(Path("/proc/self/status"))


def test_environment_of_the_engine(program: Any, weights: Path) -> None:
    inherited = {
        "HF_TOKEN": "hush",
        "LLAMA_API_KEY": "hush",
        "LLAMA_ARG_PORT": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "LD_LIBRARY_PATH": "/opt/lib",
    }
    user = {"HIP_VISIBLE_DEVICES": "3", "LLAMA_API_KEY": "k", "MY_TOKEN": "t", "GGML_X": "1"}
    executable = program()
    executable = Executable(executable.path, libraries=Path("/wheel/bin"))
    made = plan(executable, weights, environ=inherited, env=user)
    assert "hush" not in made.env.values()
    assert "LLAMA_ARG_PORT" not in made.env
    assert "CUDA_VISIBLE_DEVICES" not in made.env
    assert made.env["HIP_VISIBLE_DEVICES"] == "-1"
    assert made.env["GGML_X"] == "1"
    assert made.env["LD_LIBRARY_PATH"] == "/wheel/bin:/opt/lib"
    assert [notice.reason for notice in made.warnings] == ["EnvironmentIgnored"] * 2
    assert made.secrets == ("MY_TOKEN",)
    assert "hush" not in repr(made)


# -- the executable


def test_found_by_the_variable(tmp_path: Path) -> None:
    backend = LlamaCpp()
    (tmp_path / "llama-server").touch(0o755)
    for named in (tmp_path, tmp_path / "llama-server"):
        found = backend.find_executable({"FLEXINFER_LLAMA_CPP": str(named), "PATH": ""})
        assert found.path == tmp_path / "llama-server"
        assert found.found_by == "FLEXINFER_LLAMA_CPP"


def test_a_variable_that_names_nothing_is_an_error(tmp_path: Path) -> None:
    backend = LlamaCpp()
    (tmp_path / "plain").touch(0o644)
    for name, words in (("none", "no such program"), ("plain", "not executable")):
        with pytest.raises(EngineNotFound, match=words):
            backend.find_executable({"FLEXINFER_LLAMA_CPP": str(tmp_path / name)})


def test_found_on_path(tmp_path: Path) -> None:
    (tmp_path / "llama-server").touch(0o755)
    found = LlamaCpp().find_executable({"PATH": str(tmp_path)})
    assert found.path == tmp_path / "llama-server"


def test_a_missing_one_names_all_three_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llamacpp, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(EngineNotFound) as missing:
        LlamaCpp().find_executable({"PATH": str(tmp_path)})
    for place in ("FLEXINFER_LLAMA_CPP", "PATH", "demo"):
        assert place in str(missing.value)


def test_a_program_that_is_no_llama_server(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho hello\n")
    other.chmod(0o755)
    with pytest.raises(EngineConfigError, match="it is no llama-server"):
        build_of(other, {})
    other.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    with pytest.raises(EngineConfigError, match=r"failed \(3\): broken"):
        build_of(other, {})
    with pytest.raises(EngineConfigError, match="No such file"):
        build_of(tmp_path / "none", {})


def test_the_fake_passes_for_one() -> None:
    assert build_of(FAKE, dict(os.environ)).first("--load-mode")


# -- what it says


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("error: invalid argument: --x", "llama-server does not know the argument --x"),
        (
            'error while handling argument "-ctk": Unsupported cache type: q99',
            "argument -ctk: Unsupported cache type: q99",
        ),
        (
            "0.00.006 E gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file)",
            "cannot open /m.gguf: No such file",
        ),
        (
            "0.00.024.227 E llama_model_load: error loading model: tensor 'a' data is not within "
            "the file bounds, model is corrupted or incomplete",
            "cannot load the model: tensor 'a' data is not within the file bounds, model is "
            "corrupted or incomplete",
        ),
        ("0.00.7 E srv  llama_server: exiting due to HTTP server error", "HTTP server error"),
        ("0.00.006 I srv    load_model: loading model '/m.gguf'", None),
        ("W common_fit_params: failed to fit params to free device memory: abort", None),
        ("model loaded", None),
    ],
)
def test_fatal_lines(line: str, reason: str | None) -> None:
    assert LlamaCpp().fatal_line(line) == reason


def test_the_most_telling_line_explains(program: Any, weights: Path) -> None:
    made = plan(program(), weights)
    lines = [
        "E llama_model_load: error loading model: llama_model_loader: failed to load model from /m",
        "E gguf_init_from_reader: failed to read magic",
        "E srv  llama_server: exiting due to model loading error",
    ]
    explain = LlamaCpp().explain
    failed = ExitStatus(code=1)
    assert explain(made, failed, lines) == "the file is not GGUF (it is empty or cannot be read)"
    assert "memory runs out" in explain(made, ExitStatus(signal=9), [])
    assert "processor lacks" in explain(made, ExitStatus(signal=4), [])
    assert explain(made, ExitStatus(code=0), ["hello"]) == "llama-server ended: exit code 0"


def test_the_file_explains_where_the_last_lines_are_missing(program: Any, weights: Path) -> None:
    made = plan(program(), weights)
    weights.write_bytes(b"hello")
    lines = ["E srv  llama_server: exiting due to model loading error"]
    explain = LlamaCpp().explain
    assert explain(made, ExitStatus(code=1), lines) == f"{weights} is not a GGUF file"
    weights.unlink()
    assert "No such file" in explain(made, ExitStatus(code=1), [])


# -- the rest


@pytest.mark.parametrize(
    ("block", "slots"),
    [
        ({}, 4),
        ({"parallel": 2}, 2),
        ({"parallel": 2, "extraArgs": ["-np", "8"]}, 8),
        ({"extraArgs": ["--parallel", "-1"]}, 4),
    ],
)
def test_parallel(block: dict[str, Any], slots: int) -> None:
    assert LlamaCpp().parallel(engine_spec(**block)) == slots


def test_backends_by_name() -> None:
    backend = backend_for("llama-cpp")
    assert backend.name == "llama-cpp"
    assert backend.request_model(engine_spec(), Path("/m.gguf")) == "smol"
    assert "x-conversation-id" in backend.requests.drop_headers
    for name in ("mlc-llm", "ollama", "vllm"):
        assert backend_for(name).name == name
    with pytest.raises(EngineConfigError, match="known: llama-cpp"):
        backend_for("tgi")
