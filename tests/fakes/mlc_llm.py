#!/usr/bin/env python3
"""A stand-in for MLC-LLM's `mlc_llm`, for machines that cannot have it. Only the standard library.

What it keeps to, as far as anybody outside the process can see: the arguments of `serve` and what
happens to wrong ones, MLC's own variables, the children that it starts, the order of a load and its
lines, that nothing listens before the model is loaded, that a failed load hangs, the dialect of its
HTTP API, and its end on signals. The memory logic in `mlc_llm_engine.py` is MLC's own estimate, on
the numbers of the model's files. Texts are made out of nothing: `t0 t1 t2 ..`, one word a token,
and a prompt has as many tokens as words.

Variables, all for one process:
    FAKE_MLC_GPUS              0      ROCm devices of the machine, before any mask
    FAKE_MLC_GPU_BYTES         25753026560   memory of each device, the CPU's too
    FAKE_MLC_LOAD_S            0      time that the weights take
    FAKE_MLC_COMPILE_S         0      time that a compilation takes
    FAKE_MLC_COMPILE_FAILS            a compilation ends with an error
    FAKE_MLC_FAIL                     how a load fails: `oom` (HIP, while the KV cache is made),
                                      `unknown` (an error that nobody has seen before), `silent`
                                      (nothing is said), `segfault`, `gpu-fault`; the first three
                                      hang as MLC does
    FAKE_MLC_TOKENS_PER_S      200    rate of each sequence; 0: as fast as it goes
    FAKE_MLC_MAX_TOKENS        256    end of a request without max_tokens (MLC itself goes on until
                                      the context is full)
    FAKE_MLC_DIE_AFTER                tokens after which the engine's thread dies
    FAKE_MLC_CRASH_AFTER              tokens after which the process dies of SIGSEGV
    FAKE_MLC_STUBBORN_WORKERS         workers of other shards ignore SIGTERM

Unlike MLC it embeds only where it was given an embedding model, and knows no images, no tools, no
/debug and no /microserving.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parent))

from mlc_llm_engine import Config, ThreadedEngine, number
from mlc_llm_http import serve_http

POLICIES = ("ON", "OFF", "REDO", "READONLY")
KINDS = ("cuda", "rocm", "metal", "vulkan", "opencl", "cpu")
# What a library is compiled for.
SETTINGS = [
    "context_window_size",
    "sliding_window_size",
    "prefill_chunk_size",
    "attention_sink_size",
    "max_batch_size",
    "tensor_parallel_shards",
    "pipeline_parallel_stages",
]

log = logging.getLogger("mlc_llm")


# -- the command line


class Parser(argparse.ArgumentParser):
    """Help on stdout, the message on stderr, exit 2."""

    def error(self, message: str) -> NoReturn:
        print("-" * 25, "Usage", "-" * 25)
        self.print_help()
        print("-" * 25, "Error", "-" * 25, flush=True)
        print(message, file=sys.stderr, flush=True)
        sys.exit(2)


def overrides(text: str) -> argparse.Namespace:
    """`k=v;k=v` is read as a command line `--k=v --k=v` of its own."""
    parser = Parser(description="Engine config override values")
    whole = ["max_num_sequence", "max_total_seq_length", "max_history_size", "spec_draft_length"]
    whole += ["spec_tree_width", "prefix_cache_max_num_recycling_seqs"]
    for name in [*whole, *(name for name in SETTINGS if name != "max_batch_size")]:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--gpu_memory_utilization", type=float)
    for name in ("prefix_cache_mode", "prefill_mode", "opt"):
        parser.add_argument(f"--{name}")
    return parser.parse_args([f"--{pair}" for pair in text.split(";") if pair])


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser("MLC LLM Serve CLI")
    add = parser.add_argument
    add("model")
    add("--device", default="auto")
    add("--model-lib")
    add("--mode", choices=["local", "interactive", "server"], default="local")
    add("--enable-debug", action="store_true")
    add("--additional-models", nargs="*", default=[])
    add("--embedding-model")
    add("--embedding-model-lib")
    speculative = ["disable", "small_draft", "eagle", "medusa"]
    add("--speculative-mode", choices=speculative, default="disable")
    add("--prefix-cache-mode", choices=["disable", "radix"], default="radix")
    add("--prefill-mode", choices=["hybrid", "chunked"], default="hybrid")
    add("--overrides", type=overrides, default="")
    add("--enable-tracing", action="store_true")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--allow-credentials", action="store_true")
    for what in ("origins", "methods", "headers"):
        add(f"--allow-{what}", type=json.loads, default=["*"])
    add("--api-key")
    return parser.parse_args(argv)


# -- what happens when the program is imported


def check_environment() -> Path:
    """Return MLC_LLM_HOME, which is made. Raises ValueError for policies that there are not."""
    home = Path(
        os.environ.get("MLC_LLM_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "mlc_llm"
    )
    for name in ("model_weights", "model_lib"):
        (home / name).mkdir(parents=True, exist_ok=True)
    allowed = '"ON", "OFF", "REDO", "READONLY"'
    for variable in ("MLC_JIT_POLICY", "MLC_DOWNLOAD_CACHE_POLICY"):
        value = os.environ.get(variable, "ON")
        if value not in POLICIES:
            raise ValueError(f"Invalid {variable}. It has to be one of {allowed}but got {value}.")
    return home


# -- devices


def visible(kind: str) -> list[int]:
    """The numbers of the devices of a kind: ROCr's mask first, then HIP's on what that left."""
    if kind == "cpu":
        return [0]
    if kind != "rocm":
        return []
    devices = list(range(int(number("FAKE_MLC_GPUS", 0))))
    hip = os.environ.get("HIP_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES")
    for mask in (os.environ.get("ROCR_VISIBLE_DEVICES"), hip):
        if not mask:
            continue
        chosen = []
        for word in mask.split(","):
            if not word.strip().isdigit() or int(word) >= len(devices):
                break  # the first invalid entry ends the list
            chosen.append(devices[int(word)])
        devices = chosen
    return list(range(len(devices)))


def exists(kind: str, index: int) -> bool:
    """Ask a child, as each of these questions initialises the driver."""
    child = [sys.executable, __file__, "check_device", kind]
    text = subprocess.run(child, capture_output=True, text=True, check=False).stdout
    found = text.removeprefix("check_device:").split(",")
    for word in [word.strip() for word in found if word.strip()]:
        log.info("Found device: %s:%s", kind, word)
    if str(index) in [word.strip() for word in found]:
        return True
    log.info("Not found device: %s:%d", kind, index)
    return False


def detect(hint: str) -> str:
    if hint == "auto":
        there = [kind for kind in KINDS if exists(kind, 0)]  # all of them, one after another
        log.info("Using device: %s:0", there[0])
        return f"{there[0]}:0"
    kind, _, index = hint.partition(":")
    if kind not in KINDS or not (index or "0").isdigit():
        raise ValueError(f"Invalid device name: {hint}")
    if not exists(kind, int(index or 0)):
        raise ValueError(f"Device is not found on your local environment: {hint}")
    return f"{kind}:{int(index or 0)}"


# -- the model and its library


def model_directory(model: str) -> Path:
    if model.startswith("HF://"):
        raise RuntimeError(f"Cannot find cache for {model}, cannot proceed to download")
    path = Path(model)
    if not path.is_dir():
        raise FileNotFoundError(f"Cannot find model {model}, directory does not exist")
    config = path / "mlc-chat-config.json"
    if not config.is_file():
        raise FileNotFoundError(f"Cannot find {config} in the model directory provided")
    return path


def library_of(path: Path, lib: str | None, said: dict[str, Any], device: str, home: Path) -> str:
    """The compiled library of a model: the given one, a cached one, or one that is compiled."""
    if lib is not None:
        if not lib.startswith("mock://") and not Path(lib).is_file():
            raise FileNotFoundError(f"The `model_lib` you passed in is not a file: {lib}.\n")
        log.info("Using library model: %s", lib)
        return lib
    policy = os.environ.get("MLC_JIT_POLICY", "ON")
    log.info("MLC_JIT_POLICY = %s. Can be one of: ON, OFF, REDO, READONLY", policy)
    if policy == "OFF":
        raise RuntimeError("JIT is disabled by MLC_JIT_POLICY=OFF")
    config = json.loads((path / "mlc-chat-config.json").read_text())
    given = {name: said[name] for name in SETTINGS if said.get(name) is not None}
    text = ";".join(f"{name}={value}" for name, value in given.items())
    opt = said.get("opt") or "O2"
    kept = {name: config.pop(name) for name in ("model_type", "quantization")}
    key = {
        "model_config": {**config.pop("model_config", {}), **config, **given},
        "overrides": text,
        "opt": opt,
        "device": device,
        **kept,
    }
    digest = hashlib.md5(json.dumps(key, sort_keys=True, indent=2).encode()).hexdigest()
    suffix = os.environ.get("MLC_DSO_SUFFIX", "so")
    target = home / "model_lib" / f"{digest}.{suffix}"
    if target.is_file() and policy in ("ON", "READONLY"):
        log.info("Using cached model lib: %s", target)
        return str(target)
    if policy == "READONLY":
        raise RuntimeError(
            "No cached model lib found, and JIT is disabled by MLC_JIT_POLICY=READONLY"
        )
    with tempfile.TemporaryDirectory(dir=os.environ.get("MLC_TEMP_DIR")) as folder:
        output = Path(folder) / f"lib.{suffix}"
        command = [sys.executable, __file__, "compile", str(path), "--opt", opt]
        command += ["--overrides", text, "--device", device, "--output", str(output)]
        log.info("Compiling using commands below:")
        log.info("%s", shlex.join(command))
        subprocess.run(command, check=False)
        if not output.is_file():
            raise RuntimeError("Cannot find compilation output, compilation failed")
        shutil.move(output, target)
    log.info("Using compiled model lib: %s", target)
    return str(target)


def compile_model(argv: list[str]) -> None:
    """The child of a compilation. What it writes is what a library knows of itself."""
    parser = Parser("mlc_llm compile")
    parser.add_argument("model")
    for flag in ("--opt", "--overrides", "--device", "--output"):
        parser.add_argument(flag, required=True)
    given = parser.parse_args(argv)
    time.sleep(number("FAKE_MLC_COMPILE_S", 0))
    if os.environ.get("FAKE_MLC_COMPILE_FAILS"):
        raise RuntimeError("no schedule was found for a kernel")
    config = json.loads((Path(given.model) / "mlc-chat-config.json").read_text())
    config = {**config.get("model_config", {}), **config}
    metadata = {name: config[name] for name in SETTINGS if name in config}
    for pair in filter(None, given.overrides.split(";")):
        name, _, value = pair.partition("=")
        metadata[name] = int(value)
    Path(given.output).write_text(json.dumps(metadata))


def metadata_of(path: Path, lib: str) -> dict[str, int]:
    """What a library was compiled with; a foreign file is taken for one of this model."""
    config = json.loads((path / "mlc-chat-config.json").read_text())
    config = {**config.get("model_config", {}), **config}
    own = {name: config[name] for name in SETTINGS if name in config}
    with contextlib.suppress(OSError, ValueError):
        own.update(json.loads(Path(lib).read_text()))
    return own


# -- serve


def serve(argv: list[str], home: Path) -> None:
    given = arguments(argv)
    said = vars(given.overrides)
    said = {**said, "max_batch_size": said["max_num_sequence"]}
    if (given.embedding_model is None) != (given.embedding_model_lib is None):
        raise ValueError("--embedding-model and --embedding-model-lib go together")
    device = detect(given.device)
    models = [(given.model, given.model_lib)]
    for text in given.additional_models:
        path, _, lib = text.partition(",")
        models.append((path, lib or None))
    loaded = []
    for name, lib in models:
        path = model_directory(name)
        library = library_of(path, lib, said, device, home)
        loaded.append((path, metadata_of(path, library), library.startswith("mock://")))
    if given.embedding_model is not None:
        library_of(
            model_directory(given.embedding_model), given.embedding_model_lib, said, device, home
        )
    path, compiled, mock = loaded[0]
    config = Config.infer(path, compiled, said, mode=given.mode, mock=mock)
    engine = ThreadedEngine(config, [sys.executable, __file__, "worker"])
    engine.reload()  # for ever, if the load fails
    serve_http(
        engine,
        host=given.host,
        port=given.port,
        model=given.model,
        api_key=given.api_key,
        embeds=given.embedding_model is not None,
    )


def worker() -> None:
    """The process of another shard. It does not notice when its parent is gone."""
    if os.environ.get("FAKE_MLC_STUBBORN_WORKERS"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def main(argv: list[str]) -> None:
    if argv[:1] == ["check_device"]:
        print("check_device:" + ",".join(map(str, visible(argv[1]))))
        return
    if argv[:1] == ["worker"]:
        worker()
    home = check_environment()
    if "MLC_UNSET_LOGGING" not in os.environ:
        form = "[%(asctime)s] %(levelname)s %(filename)s:%(lineno)d: %(message)s"
        logging.basicConfig(level=logging.INFO, format=form, datefmt="%Y-%m-%d %H:%M:%S")
    parser = Parser("MLC LLM Command Line Interface.")
    parser.add_argument("subcommand", choices=["serve", "compile"])
    command = parser.parse_args(argv[:1]).subcommand
    if command == "compile":
        compile_model(argv[1:])
    else:
        serve(argv[1:], home)


if __name__ == "__main__":
    main(sys.argv[1:])
