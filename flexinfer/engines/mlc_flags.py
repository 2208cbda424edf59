"""From the fields of `spec.mlcllm` to the arguments of `mlc_llm serve`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flexinfer.api.base import wire_name
from flexinfer.api.blocks import MlcLlmBlock, MlcOverrides
from flexinfer.api.notices import Notice
from flexinfer.engines.errors import EngineConfigError
from flexinfer.engines.gpus import Devices
from flexinfer.engines.memory.vram import least_vram
from flexinfer.engines.mlc_weights import INDEX, OLD_INDEX, MlcWeights
from flexinfer.engines.spec import EngineSpec

# Flags of MLC that have a field: said twice, the second would silently replace the first.
_FIELDS: Mapping[str, str] = {
    "--mode": "mode",
    "--model-lib": "modelLibPath",
    "--overrides": "overrides.raw",
    "--speculative-mode": "speculativeMode",
    "--additional-models": "additionalModels",
    "--prefix-cache-mode": "prefixCacheMode",
    "--prefill-mode": "prefillMode",
    "--embedding-model": "embeddingModel",
    "--embedding-model-lib": "embeddingModelLib",
}
# Where it listens is decided here, and with a key nobody could talk to it.
_OURS = frozenset({"--host", "--port", "--api-key"})
_DEVICE = "--device"
_OTHERS = frozenset(
    {
        _DEVICE,
        "--enable-debug",
        "--enable-tracing",
        "--allow-credentials",
        "--allow-origins",
        "--allow-methods",
        "--allow-headers",
    }
)
# What a compiled library was made with, and what MLC therefore takes from it alone.
_COMPILED = (
    "tensor_parallel_shards",
    "pipeline_parallel_stages",
    "sliding_window_size",
    "attention_sink_size",
    "opt",
)
# MLC reads these in its overrides and then uses the flags of the same names.
_FLAGS_ONLY = {"prefix_cache_mode": "prefixCacheMode", "prefill_mode": "prefillMode"}
_HUB = ("HF://", "http://", "https://")


def raw_overrides(overrides: MlcOverrides) -> list[tuple[str, str | None]]:
    """Return the pairs of `overrides.raw`, a value None where there is no equals sign."""
    pairs = [item.strip() for item in (overrides.raw or "").split(";")]
    split = [item.partition("=") for item in pairs if item]
    return [(name, value if equals else None) for name, equals, value in split]


def said_overrides(overrides: MlcOverrides) -> dict[str, str]:
    """Return what the user overrides, by MLC's names; `raw` goes before the other fields."""
    fields = [name for name in type(overrides).model_fields if name != "raw"]
    said = {name: str(value) for name in fields if (value := getattr(overrides, name)) is not None}
    said.update({name: value for name, value in raw_overrides(overrides) if value is not None})
    return said


class MlcFlags:
    """Collects the arguments of one start, and what could not be put into them."""

    def __init__(
        self, spec: EngineSpec, block: MlcLlmBlock, weights: MlcWeights, devices: Devices
    ) -> None:
        self.argv: list[str] = []
        self.notices: list[Notice] = []
        self._spec = spec
        self._block = block
        self._weights = weights
        self._devices = devices
        self._said = said_overrides(block.overrides)
        self._check_extra()
        self.on_gpu = bool(devices.ids) and not devices.pretended

    def notice(self, reason: str, message: str, field: str | None = None) -> None:
        """Note something about a field, named as below `spec.mlcllm`."""
        path = None if field is None else f"spec.mlcllm.{field}"
        self.notices.append(self._spec.notice(reason, message, path))

    # -- the parts of the command line

    def add_device(self) -> None:
        """Add the device: behind the mask, an engine's GPUs are 0 to n-1."""
        if any(self._flag_of(word) == _DEVICE for word in self._block.extra_args):
            self.notice(
                "DeviceOverridden",
                "--device goes before the GPU that Ray assigned; another model may be on it",
                "extraArgs",
            )
            self.on_gpu = bool(self._devices.ids)
            return
        if self._devices.pretended and self._devices.ids:
            ids = ",".join(map(str, self._devices.ids))
            message = f"this machine has no GPU {ids}: MLC runs on the CPU"
            self.notices.append(self._spec.notice("PretendedGpu", message))
        # A name with its number makes MLC look at this one device only, and is part of what tells
        # compiled libraries apart.
        self.argv += [_DEVICE, "rocm:0" if self.on_gpu else "cpu"]

    def add_block(self) -> None:
        """Add every field of the block but `env`, `jit_policy` and `extra_args`.

        Raises `EngineConfigError` for files that are not there and ids of a hub.
        """
        block = self._block
        self.argv += ["--mode", block.mode]
        if block.model_lib_path is not None:
            self.argv += ["--model-lib", self._file(block.model_lib_path, "modelLibPath")]
        for flag, value in (
            ("--speculative-mode", block.speculative_mode),
            ("--prefix-cache-mode", block.prefix_cache_mode),
            ("--prefill-mode", block.prefill_mode),
        ):
            if value is not None:
                self.argv += [flag, value]
        if block.embedding_model is not None and block.embedding_model_lib is not None:
            self.argv += ["--embedding-model", self._model(block.embedding_model, "embeddingModel")]
            library = self._file(block.embedding_model_lib, "embeddingModelLib")
            self.argv += ["--embedding-model-lib", library]
        if block.additional_models:
            self.argv += ["--additional-models", *map(self._additional, block.additional_models)]
        overrides = self._overrides()
        if overrides:
            self.argv += ["--overrides", ";".join(overrides)]
        if self._weights.old_index_only:
            self.notice(
                "OldWeightsIndex",
                f"{self._weights.directory} has {OLD_INDEX} only; MLC from September 2025 on wants "
                f"it under the name {INDEX} and does not load without",
            )

    def add_extra(self) -> None:
        """Add the user's own arguments."""
        self.argv += self._block.extra_args

    # -- overrides

    def _overrides(self) -> list[str]:
        overrides, said = self._block.overrides, self._said
        pairs = [
            f"{name}={value}"
            for name in type(overrides).model_fields
            if name != "raw" and (value := getattr(overrides, name)) is not None
        ]
        pairs += self._share_of_memory()
        if self._block.model_lib_path is None:
            pairs += self._shards()
        else:
            self._ignored_with_library()
        self._parallel_notices()
        for name, field in _FLAGS_ONLY.items():
            if name in said:
                message = f"MLC does not use the override {name}: set {field} instead"
                self.notice("SettingIgnored", message, "overrides.raw")
        if (
            self._weights.float32
            and self._block.mode == "server"
            and "max_total_seq_length" not in said
        ):
            self.notice(
                "KVCacheUnderestimated",
                f"MLC sizes the KV cache as if its numbers took two bytes, and with "
                f"{self._weights.quantization} they take four: mode server may run out of GPU "
                "memory; set overrides.maxTotalSeqLength",
                "overrides.maxTotalSeqLength",
            )
        raw = raw_overrides(overrides)
        return pairs + [name if value is None else f"{name}={value}" for name, value in raw]

    def _share_of_memory(self) -> Iterable[str]:
        """gpuMemoryBytes as `gpu_memory_utilization`: bytes through the GPU's total memory."""
        wanted = self._block.gpu_memory_bytes
        if wanted is None or "gpu_memory_utilization" in self._said:
            return
        smallest = least_vram(self._devices)
        if not smallest:
            self.notice(
                "GPUMemoryUnknown",
                "the size of the GPU's memory is not known here, so MLC uses its own share of it",
                "gpuMemoryBytes",
            )
            return
        if wanted > smallest:
            self.notice(
                "GPUMemoryExceeded",
                f"{wanted} bytes are more than the GPU has ({smallest}): MLC may use all of it",
                "gpuMemoryBytes",
            )
        yield f"gpu_memory_utilization={min(1.0, wanted / smallest):.4f}"

    def _shards(self) -> Iterable[str]:
        """One shard a GPU, where MLC compiles and the user has not said it."""
        if not self.on_gpu or "tensor_parallel_shards" in self._said:
            return
        stages = self._stages()
        shards = max(1, len(self._devices.ids) // stages)
        if shards != self._weights.shards:
            yield f"tensor_parallel_shards={shards}"

    def _stages(self) -> int:
        return _number(self._said.get("pipeline_parallel_stages")) or self._weights.stages

    def _parallel_notices(self) -> None:
        """Compare the GPUs of the model with those over which it is spread."""
        gpus = len(self._devices.ids)
        if not self.on_gpu:
            return
        field = "overrides.tensorParallelShards"
        if self._block.model_lib_path is not None:
            spread, by = self._weights.shards * self._weights.stages, "its mlc-chat-config.json"
            if spread != gpus:
                self.notice(
                    "GpuCountOfLibrary",
                    f"the model has {gpus} GPUs, and {by} is made for {spread}: with modelLibPath "
                    "the compiled library decides",
                    "modelLibPath",
                )
        else:
            said = _number(self._said.get("tensor_parallel_shards"))
            shards = said or max(1, gpus // self._stages())
            spread = shards * self._stages()
            if spread > gpus:
                raise EngineConfigError(
                    f"spec.mlcllm.{field}: {shards} shards in {self._stages()} stages need "
                    f"{spread} GPUs, and resources give {gpus}"
                )
            if spread < gpus:
                self.notice("GpusIdle", f"MLC uses {spread} of the model's {gpus} GPUs", field)
        if spread > 1 and any(gpu.gfx == "gfx1100" for gpu in self._devices.gpus):
            self.notice(
                "TensorParallelOnGfx1100",
                "RCCL has failed on two RX 7900 XTX (seen with ROCm 7.2): if the model does not "
                "load, give it one GPU",
                "overrides.tensorParallelShards",
            )

    def _ignored_with_library(self) -> None:
        for name in _COMPILED:
            if name in self._said:
                named = name in MlcOverrides.model_fields
                field = f"overrides.{wire_name(name)}" if named else "overrides.raw"
                message = f"with modelLibPath MLC takes {name} from the compiled library"
                self.notice("SettingIgnored", message, field)

    # -- paths

    def _file(self, path: str, field: str) -> str:
        found = self._weights.directory / path
        if not found.is_file():
            raise EngineConfigError(f"spec.mlcllm.{field}: {found} is not a file")
        return str(found)

    def _model(self, path: str, field: str) -> str:
        if path.startswith(_HUB):
            raise EngineConfigError(
                f"spec.mlcllm.{field}: {path} would be fetched by the engine in its start; give "
                "the directory of the weights"
            )
        found = self._weights.directory / path
        if not found.is_dir():
            raise EngineConfigError(f"spec.mlcllm.{field}: {found} is not a directory")
        return str(found)

    def _additional(self, text: str) -> str:
        path, comma, library = text.partition(",")
        model = self._model(path, "additionalModels")
        return f"{model},{self._file(library, 'additionalModels')}" if comma else model

    # -- extraArgs

    def _check_extra(self) -> None:
        for word in self._block.extra_args:
            flag = self._flag_of(word)
            if flag is None:
                continue
            if flag in _OURS:
                raise EngineConfigError(f"spec.mlcllm.extraArgs: {word} is set by FlexInfer")
            if flag in _FIELDS:
                raise EngineConfigError(
                    f"spec.mlcllm.extraArgs: {word} has a field: spec.mlcllm.{_FIELDS[flag]}"
                )

    @staticmethod
    def _flag_of(word: str) -> str | None:
        """The flag that MLC takes a word for: it accepts every clear beginning of one."""
        name = word.partition("=")[0]
        if not name.startswith("--") or name == "--":
            return None
        known = {*_FIELDS, *_OURS, *_OTHERS}
        if name in known:
            return name
        begun = [flag for flag in known if flag.startswith(name)]
        return begun[0] if len(begun) == 1 else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None
