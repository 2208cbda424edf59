"""From the fields of `spec.vllm` to the arguments of `vllm serve`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import ceil

from flexinfer.api.base import wire_name
from flexinfer.api.blocks import VllmBlock
from flexinfer.api.notices import Notice
from flexinfer.api.quantity import Quantity
from flexinfer.engines.errors import EngineConfigError
from flexinfer.engines.gpus import Devices
from flexinfer.engines.spec import EngineSpec
from flexinfer.engines.vllm_build import Build

_TENSORS = "--tensor-parallel-size"
_STAGES = "--pipeline-parallel-size"
_REPLICAS = "--data-parallel-size"
_DEVICE_IDS = "--device-ids"
_SHORT = {
    "-tp": _TENSORS,
    "-pp": _STAGES,
    "-dp": _REPLICAS,
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-q": "--quantization",
    "-sc": "--speculative-config",
}

# Where it listens and what it serves is decided here. With a key, a certificate or a path of its
# own nobody could talk to it, and without its HTTP server neither. A config file could say all of
# that, and may hold whatever else the fields and extraArgs say.
_OURS = frozenset(
    [
        "--host",
        "--port",
        "--uds",
        "--model",
        "--model-tag",
        "--served-model-name",
        "--api-key",
        "--ssl-keyfile",
        "--ssl-certfile",
        "--ssl-ca-certs",
        "--ssl-cert-reqs",
        "--root-path",
        "--config",
        "--headless",
        "--grpc",
        "--omni",
        "--data-parallel-external-lb",
        "--data-parallel-multi-port-external-lb",
    ]
)
# Fields with a word of their own; all others are called as the flag is.
_ELSEWHERE = frozenset(
    ["env", "extra_args", "tensor_parallel_size", "pipeline_parallel_size", "lora_modules"]
)


def said(words: Sequence[str], flag: str) -> str | None:
    """Return what extraArgs say for `flag` (a long spelling), the last time they do."""
    value = None
    for index, word in enumerate(words):
        name, equals, rest = word.partition("=")
        if _long(name) == flag:
            following = words[index + 1] if index + 1 < len(words) else ""
            value = rest if equals else following
    return value


def number_said(words: Sequence[str], flag: str) -> int | None:
    """Return the positive whole number that extraArgs say for `flag`."""
    text = said(words, flag)
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None


class VllmFlags:
    """Collects the arguments of one start, and what could not be put into them."""

    def __init__(self, spec: EngineSpec, block: VllmBlock, build: Build, devices: Devices) -> None:
        self.argv: list[str] = []
        self.notices: list[Notice] = []
        self.on_gpu = bool(devices.ids) and not devices.pretended
        self._spec = spec
        self._block = block
        self._build = build
        self._devices = devices
        self._check_extra()

    def notice(self, reason: str, message: str, name: str | None = None) -> None:
        """Note something about a field, by its Python name."""
        field = None if name is None else f"spec.vllm.{wire_name(name)}"
        self.notices.append(self._spec.notice(reason, message, field))

    def ours(self, flag: str, value: str) -> None:
        """Add a flag of our own choice if the build knows it and the user has not said it."""
        if self._build.has(flag) and said(self._block.extra_args, flag) is None:
            self.argv += [flag, value]

    def add_parallel(self) -> None:
        """Divide the model among its GPUs: all of them share each layer if nothing else is said.

        Raises `EngineConfigError` where more GPUs are wanted than there are.
        """
        block, extra = self._block, self._block.extra_args
        stages = number_said(extra, _STAGES) or block.pipeline_parallel_size or 1
        replicas = number_said(extra, _REPLICAS) or 1
        tensors = number_said(extra, _TENSORS) or block.tensor_parallel_size
        gpus = len(self._devices.ids)
        if tensors is None:
            tensors = gpus // (stages * replicas) if self.on_gpu else 1
        wanted = max(1, tensors) * stages * replicas
        parts = f"{max(1, tensors)} x {stages}{f' x {replicas}' if replicas > 1 else ''}"
        if self.on_gpu and wanted > gpus:
            raise EngineConfigError(
                f"spec.vllm: {parts} GPUs are wanted (tensor x pipeline parallel"
                f"{' x data parallel' if replicas > 1 else ''}), and resources gives {gpus}"
            )
        if self.on_gpu and wanted < gpus:
            self.notice("GpusIdle", f"of {gpus} GPUs only {parts} are used")
        if said(extra, _TENSORS) is None:
            self.argv += [_TENSORS, str(tensors)]
        if block.pipeline_parallel_size is not None:
            self.argv += [_STAGES, str(block.pipeline_parallel_size)]

    def add_block(self) -> None:
        """Add every field of the block but `env`, `extra_args` and the sizes of `add_parallel`.

        Raises `EngineConfigError` for a speculativeConfig that is no JSON object.
        """
        block = self._block
        if block.speculative_config is not None:
            _check_object(block.speculative_config)
        for name, field in type(block).model_fields.items():
            if name in _ELSEWHERE:
                continue
            value = getattr(block, name)
            if value is None or (value is False and field.default is False):
                continue
            flag = f"--{name.replace('_', '-')}"
            if not self._build.has(flag):
                self._ignored(name, value)
            elif isinstance(value, bool):
                self.argv.append(flag if value else f"--no-{flag[2:]}")
            elif isinstance(value, Quantity):
                self.argv += [flag, str(ceil(value.value))]
            else:
                self.argv += [flag, str(value)]
        if block.lora_modules:
            self.argv += ["--lora-modules", *block.lora_modules]

    def add_extra(self) -> None:
        """Add the user's own arguments at the end."""
        self.argv += self._block.extra_args

    def _check_extra(self) -> None:
        for word in self._block.extra_args:
            name = _long(word.partition("=")[0])
            if not name.startswith("--"):
                continue
            # vLLM takes the beginning of a flag for the flag, if it can be no other's: --ho does.
            short = [flag for flag in _OURS if flag.startswith(name) and len(name) > 2]
            if name in _OURS or (short and name not in (self._build.flags or ())):
                flag = name if name in _OURS else f"{name} ({', '.join(sorted(short))})"
                raise EngineConfigError(f"spec.vllm.extraArgs: {flag} is set by FlexInfer")
        if said(self._block.extra_args, _DEVICE_IDS) is not None:
            self.notice(
                "DeviceOverridden",
                f"{_DEVICE_IDS} goes before the GPUs that Ray assigned",
                "extra_args",
            )

    def _ignored(self, name: str, value: object) -> None:
        self.notice(
            "SettingIgnored",
            f"this vLLM ({self._build.version or 'of unknown version'}) has no flag for "
            f"{wire_name(name)}: {value}",
            name,
        )


def _long(name: str) -> str:
    """Return the spelling that a flag is known by: vLLM reads underscores as dashes."""
    if name.startswith("--"):
        return re.sub("_", "-", name.partition(".")[0])
    return _SHORT.get(name, name)


def _check_object(text: str) -> None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise EngineConfigError(f"spec.vllm.speculativeConfig is no JSON object: {text}")
