"""From the fields of `spec.llamacpp` to the flags of one build of llama-server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flexinfer.api.base import wire_name
from flexinfer.api.blocks import LlamaCppBlock
from flexinfer.api.notices import Notice
from flexinfer.engines.errors import EngineConfigError
from flexinfer.engines.llamacpp_build import Build
from flexinfer.engines.spec import EngineSpec


@dataclass(frozen=True)
class _Flag:
    """How one field is said: spellings from new to old, and those that say no to a boolean."""

    yes: tuple[str, ...]
    no: tuple[str, ...] = ()
    is_path: bool = False


_FLAGS: dict[str, _Flag] = {
    "context_size": _Flag(("--ctx-size",)),
    "batch_size": _Flag(("--batch-size",)),
    "ubatch_size": _Flag(("--ubatch-size",)),
    "threads": _Flag(("--threads",)),
    "threads_batch": _Flag(("--threads-batch",)),
    "parallel": _Flag(("--parallel",)),
    "kv_unified": _Flag(("--kv-unified",), ("--no-kv-unified",)),
    "cache_type_k": _Flag(("--cache-type-k",)),
    "cache_type_v": _Flag(("--cache-type-v",)),
    "split_mode": _Flag(("--split-mode",)),
    "tensor_split": _Flag(("--tensor-split",)),
    "main_gpu": _Flag(("--main-gpu",)),
    "n_cpu_moe": _Flag(("--n-cpu-moe",)),
    "embeddings": _Flag(("--embeddings", "--embedding")),
    "reranking": _Flag(("--reranking", "--rerank")),
    "pooling": _Flag(("--pooling",)),
    "mmproj": _Flag(("--mmproj",), is_path=True),
    "chat_template": _Flag(("--chat-template",)),
    "chat_template_file": _Flag(("--chat-template-file",), is_path=True),
    "jinja": _Flag(("--jinja",), ("--no-jinja",)),
    "rope_freq_base": _Flag(("--rope-freq-base",)),
    "rope_freq_scale": _Flag(("--rope-freq-scale",)),
    "reasoning_format": _Flag(("--reasoning-format",)),
    "reasoning_budget": _Flag(("--reasoning-budget",)),
    "lora": _Flag(("--lora",), is_path=True),
    "draft_model": _Flag(("--spec-draft-model", "--model-draft"), is_path=True),
    "draft_max": _Flag(("--spec-draft-n-max", "--draft-max")),
    "draft_min": _Flag(("--spec-draft-n-min", "--draft-min")),
}

_LAYERS: dict[str, tuple[str, ...]] = {
    "n_gpu_layers": ("--n-gpu-layers", "--gpu-layers"),
    "draft_gpu_layers": ("--spec-draft-ngl", "--gpu-layers-draft", "--n-gpu-layers-draft"),
}

# What --load-mode was before it: each mode as the old flags said it, auto being their default.
_OLD_LOAD_MODES: dict[str, tuple[str, ...]] = {
    "auto": (),
    "none": ("--no-mmap",),
    "mmap": (),
    "mlock": ("--no-mmap", "--mlock"),
    "mmap+mlock": ("--mlock",),
    "dio": ("--direct-io",),
}

# Where it listens and what it serves is decided here. With a key, a certificate or a path of its
# own, nobody could talk to it.
_OURS = frozenset(
    [
        "--host",
        "--port",
        "-m",
        "--model",
        "-a",
        "--alias",
        "--api-key",
        "--api-key-file",
        "--api-prefix",
        "--ssl-key-file",
        "--ssl-cert-file",
        "--reuse-port",
        "-mu",
        "--model-url",
        "-dr",
        "--docker-repo",
        "-hf",
        "-hfr",
        "--hf-repo",
        "-hff",
        "--hf-file",
        "--models-dir",
        "--models-preset",
        "--models-max",
        "--models-autoload",
    ]
)


class Flags:
    """Collects the command line of one start, and what could not be put into it."""

    def __init__(self, spec: EngineSpec, block: LlamaCppBlock, build: Build, base: Path) -> None:
        """`base` is the model's own directory, where relative file names start."""
        self.argv: list[str] = []
        self.notices: list[Notice] = []
        self._spec = spec
        self._block = block
        self._build = build
        self._base = base
        self._extra = frozenset(block.extra_args)

    def has(self, *spellings: str) -> bool:
        """Whether the user's extraArgs hold one of these flags; they then decide."""
        return not self._extra.isdisjoint(spellings)

    def ours(self, *spellings: str, value: str | None = None) -> bool:
        """Add a flag of our own choice if the build knows it and the user has not said it."""
        flag = self._build.first(*spellings)
        if flag is None or self.has(*spellings):
            return False
        self.argv += [flag] if value is None else [flag, value]
        return True

    def add_block(self, *, load_mode: str) -> None:
        """Add every field of the block. `load_mode` is what an absent loadMode means here."""
        for name in type(self._block).model_fields:
            if name in ("env", "extra_args"):
                continue
            value = getattr(self._block, name)
            if name == "load_mode":
                self._load_mode(value or load_mode, said=value is not None)
            elif value in (None, []):
                continue
            elif name in _LAYERS:
                self._layers(name, value)
            elif name == "flash_attention":
                self._flash_attention(value)
            else:
                self._plain(name, value)
        if self._block.draft_model is not None:
            self.ours("--spec-type", value="draft-simple")  # a draft model alone does nothing

    def add_extra(self) -> None:
        """Add the user's own arguments. Raises `EngineConfigError` for those that are ours."""
        for word in self._block.extra_args:
            if word in _OURS:
                raise EngineConfigError(f"spec.llamacpp.extraArgs: {word} is set by FlexInfer")
        self.argv += self._block.extra_args

    def notice(self, reason: str, message: str, name: str | None = None) -> None:
        """Note something about a field, by its Python name."""
        field = None if name is None else f"spec.llamacpp.{wire_name(name)}"
        self.notices.append(self._spec.notice(reason, message, field))

    def _plain(self, name: str, value: object) -> None:
        how = _FLAGS[name]
        if value is False:
            # Without a way to say no, no is what the build does anyway.
            flag = self._build.first(*how.no)
            if flag is not None:
                self.argv.append(flag)
            elif how.no and self._build.first(*how.yes) is None:
                self._ignored(name, value)
            return
        flag = self._build.first(*how.yes)
        if flag is None:
            self._ignored(name, value)
        elif value is True:
            self.argv.append(flag)
        else:
            for text in self._texts(value, is_path=how.is_path):
                self.argv += [flag, text]

    def _texts(self, value: object, *, is_path: bool) -> Iterator[str]:
        for item in value if isinstance(value, list) else [value]:
            yield str(self._base / str(item)) if is_path else str(item)

    def _layers(self, name: str, value: int | str) -> None:
        flag = self._build.first(*_LAYERS[name])
        if flag is None:
            self._ignored(name, value)
        elif isinstance(value, int) or self._build.first("--fit"):
            self.argv += [flag, str(value)]
        elif value == "all":
            self.argv += [flag, "999"]  # builds without --fit take only numbers
        else:
            self._ignored(name, value)

    def _flash_attention(self, value: str) -> None:
        flag = self._build.first("--flash-attn")
        if flag is None:
            self._ignored("flash_attention", value)
        elif self._build.flags[flag].startswith("["):
            self.argv += [flag, value]
        elif value == "on":
            self.argv.append(flag)  # once a switch, and off without it
        elif value == "auto":
            self._ignored("flash_attention", value)

    def _load_mode(self, mode: str, *, said: bool) -> None:
        if self._build.first("--load-mode"):
            if said or mode != "auto":
                self.ours("--load-mode", "-lm", value=mode)
            return
        flags = [self._build.first(flag) for flag in _OLD_LOAD_MODES[mode]]
        if None in flags:
            self._ignored("load_mode", mode)
        self.argv += [flag for flag in flags if flag is not None]

    def _ignored(self, name: str, value: object) -> None:
        self.notice(
            "SettingIgnored",
            f"this build of llama-server has no flag for {wire_name(name)}: {value}",
            name,
        )
