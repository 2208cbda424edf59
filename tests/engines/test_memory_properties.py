"""What must hold for every plan and every file, whoever made it."""

from __future__ import annotations

import json
import math
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexinfer.api.blocks import Block, LlamaCppBlock, MlcLlmBlock, MlcOverrides, OllamaBlock
from flexinfer.api.blocks import VllmBlock as Vllm
from flexinfer.engines.memory import MemoryPlan, MemoryPlanError, judge, plan_memory
from flexinfer.engines.memory.safetensors import header
from flexinfer.engines.memory.types import Knob
from flexinfer.engines.memory.untrusted import regular_file
from flexinfer.engines.spec import EngineSpec
from tests.engines.memory_models import QWEN3_8B, XTX, Shape, gguf_model, hf_model, mlc_model

GIB = 2**30
# Heads that can be divided by up to 8.
SHAPE = Shape(1024, 8, 16, 8, 64, 4096, 32000, context=131072)

relaxed = settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    file = gguf_model(base / "m.gguf", SHAPE)
    return {
        "mlc-llm": mlc_model(base / "mlc", SHAPE, "q4f32_1"),
        "vllm": hf_model(base / "hf", SHAPE),
        "llama-cpp": file,
        "ollama": file,
    }


def planned(path: Path, backend: str, block: Block, gpus: int = 1) -> MemoryPlan:
    return plan_memory(EngineSpec("m", "default", backend, block, gpus=gpus), path, vram_bytes=XTX)


def block_with(backend: str, context: int, sequences: int = 4) -> Block:
    if backend == "mlc-llm":
        return MlcLlmBlock(
            overrides=MlcOverrides(max_total_seq_length=context, max_num_sequence=sequences)
        )
    if backend == "vllm":
        return Vllm(max_model_len=context, max_num_seqs=sequences)
    if backend == "llama-cpp":
        return LlamaCppBlock(context_size=context, parallel=sequences)
    return OllamaBlock(context_length=context, num_parallel=sequences)


BACKENDS = ("mlc-llm", "vllm", "llama-cpp", "ollama")
contexts = st.integers(1, 131072)


@pytest.mark.parametrize("backend", BACKENDS)
@relaxed
@given(one=contexts, other=contexts, sequences=st.integers(1, 16))
def test_more_context_never_needs_less(
    models: dict[str, Path], backend: str, one: int, other: int, sequences: int
) -> None:
    small, large = sorted((one, other))
    plans = [
        planned(models[backend], backend, block_with(backend, size, sequences))
        for size in (small, large)
    ]
    assert plans[0].needed_bytes <= plans[1].needed_bytes
    assert plans[0].weights_bytes == plans[1].weights_bytes


@pytest.mark.parametrize("backend", BACKENDS)
@relaxed
@given(context=contexts, one=st.integers(1, 64), other=st.integers(1, 64))
def test_more_sequences_never_need_less(
    models: dict[str, Path], backend: str, context: int, one: int, other: int
) -> None:
    if backend == "llama-cpp":
        # There the context is divided among the slots, and rounded up for each of them.
        context = -(-context // 256) * 256 * 64
        one, other = 1 << (one % 7), 1 << (other % 7)
    few, many = sorted((one, other))
    plans = [
        planned(models[backend], backend, block_with(backend, context, count))
        for count in (few, many)
    ]
    assert plans[0].kv_bytes <= plans[1].kv_bytes
    if backend != "llama-cpp":
        assert plans[0].needed_bytes <= plans[1].needed_bytes


@pytest.mark.parametrize("backend", BACKENDS)
@relaxed
@given(context=contexts, few=st.integers(0, 3), more=st.integers(0, 3))
def test_more_gpus_never_need_more_of_each(
    models: dict[str, Path], backend: str, context: int, few: int, more: int
) -> None:
    few, more = sorted((1 << few, 1 << more))
    plans = []
    for gpus in (few, more):
        block = block_with(backend, context)
        if isinstance(block, MlcLlmBlock):
            shards = block.overrides.model_copy(update={"tensor_parallel_shards": gpus})
            block = block.model_copy(update={"overrides": shards})
        plans.append(planned(models[backend], backend, block, gpus))
    assert len(plans[1].per_gpu) == more
    assert plans[1].needed_bytes <= plans[0].needed_bytes


@pytest.mark.parametrize("backend", BACKENDS)
@relaxed
@given(context=contexts, gpus=st.sampled_from([1, 2]))
def test_sums_are_sums(models: dict[str, Path], backend: str, context: int, gpus: int) -> None:
    plan = planned(models[backend], backend, block_with(backend, context), gpus)
    assert plan.total_bytes == plan.weights_bytes + plan.kv_bytes + plan.buffers_bytes
    assert plan.needed_bytes == max(share.total for share in plan.per_gpu)
    assert all(min(share.weights, share.kv, share.buffers) >= 0 for share in plan.per_gpu)


@pytest.fixture(scope="module")
def large_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("large")
    file = gguf_model(base / "m.gguf", QWEN3_8B, architecture="qwen3")
    return {
        "mlc-llm": mlc_model(base / "mlc", QWEN3_8B, "q4f32_1"),
        "vllm": hf_model(base / "hf", QWEN3_8B),
        "llama-cpp": file,
        "ollama": file,
    }


_BLOCKS: dict[str, list[Block]] = {
    "mlc-llm": [
        MlcLlmBlock(mode="server"),
        MlcLlmBlock(mode="server", overrides=MlcOverrides(max_total_seq_length=65536)),
        MlcLlmBlock(mode="interactive", overrides=MlcOverrides(gpu_memory_utilization="0.95")),
        MlcLlmBlock(overrides=MlcOverrides(raw="max_total_seq_length=60000")),
        MlcLlmBlock(mode="server", overrides=MlcOverrides(raw="gpu_memory_utilization=0.9")),
    ],
    "vllm": [
        Vllm(),
        Vllm(gpu_memory_utilization="0.98"),
        Vllm(gpu_memory_utilization="0.60", max_num_seqs=1024),
        Vllm(extra_args=["--max-model-len", "30000"]),
        Vllm(extra_args=["--gpu-memory-utilization", "0.97"]),
    ],
    "llama-cpp": [
        LlamaCppBlock(),
        LlamaCppBlock(parallel=8, context_size=131072),
        LlamaCppBlock(extra_args=["-c", "65536"]),
    ],
    "ollama": [
        OllamaBlock(num_parallel=4),
        OllamaBlock(context_length=16384),
        OllamaBlock(num_parallel=2, parameters={"num_ctx": "32768"}),
    ],
}


@pytest.mark.parametrize("backend", BACKENDS)
@relaxed
@given(data=st.data(), free=st.integers(1 * GIB, XTX), gpus=st.sampled_from([1, 2]))
def test_what_is_proposed_does_fit(
    large_models: dict[str, Path], backend: str, data: st.DataObject, free: int, gpus: int
) -> None:
    path = large_models[backend]
    block = data.draw(st.sampled_from(_BLOCKS[backend]))
    verdict = judge(planned(path, backend, block, gpus), [free] * gpus, XTX)
    if verdict.fits:
        assert not verdict.proposals
    for proposal in verdict.proposals:
        changed = with_settings(block, proposal.settings)
        assert judge(planned(path, backend, changed, gpus), [free] * gpus, XTX).fits is True
        assert str(proposal).startswith("spec.")
    if verdict.proposals:
        assert str(verdict.proposals[0]) in verdict.message


def with_settings(block: Block, pairs: Sequence[tuple[str, str]]) -> Block:
    """`block` as the manifest's reader makes it when a user writes these settings into it."""
    import yaml

    data = block.model_dump(by_alias=True, exclude_unset=True)
    for field, text in pairs:
        path, _, word = field.partition(" ")
        keys = path.split(".")[2:]
        if word:  # an argument, or one of MLC's own overrides
            old = data["extraArgs"] if keys == ["extraArgs"] else data["overrides"]["raw"]
            if isinstance(old, list):
                old[old.index(word) + 1] = text
            else:
                parts = [part for part in old.split(";") if not part.startswith(f"{word}=")]
                data["overrides"]["raw"] = ";".join([*parts, f"{word}={text}"])
            continue
        place = data
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = yaml.safe_load(text)
    return type(block).model_validate(data)


def test_a_knob_has_room(large_models: dict[str, Path]) -> None:
    for backend, blocks in _BLOCKS.items():
        for block in blocks:
            for knob in planned(large_models[backend], backend, block).knobs:
                assert isinstance(knob, Knob)
                assert knob.low <= knob.high


# Files that nobody vouches for.

_numbers = st.one_of(
    st.integers(-10, 10),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e308, 2**63, -1, 0]),
)
_json = st.recursive(
    st.one_of(st.none(), st.booleans(), _numbers, st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


def spoil(data: Any, draw: Callable[[Any], Any]) -> Any:
    """Replace, add or leave out something, somewhere."""
    place = data
    while isinstance(place, dict | list) and place:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
            place = place[key]
            continue
        if draw(st.booleans()):
            del place[key]
        else:
            place[key] = draw(_json)
        break
    return data


def tolerated(action: Callable[[], MemoryPlan]) -> None:
    """A plan of sane numbers, or `MemoryPlanError`: nothing else may come of any file."""
    try:
        plan = action()
    except MemoryPlanError as error:
        assert 0 < len(str(error)) < 1000
        return
    assert 0 <= plan.total_bytes < 1 << 100
    judge(plan, [XTX], XTX)


@pytest.mark.parametrize("name", ["mlc-chat-config.json", "tensor-cache.json"])
@settings(parent=relaxed, max_examples=40)
@given(data=st.data())
def test_spoilt_files_of_mlc(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    directory = mlc_model(tmp_path_factory.mktemp("m"), SMALL, "q4f16_1")
    content = spoil(json.loads((directory / name).read_text()), data.draw)
    (directory / name).write_text(json.dumps(content))
    tolerated(lambda: planned(directory, "mlc-llm", MlcLlmBlock(mode="server")))


@settings(parent=relaxed, max_examples=40)
@given(data=st.data())
def test_spoilt_configs(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = hf_model(
        tmp_path_factory.mktemp("m"),
        SMALL,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=128,
        quantization_config={"quant_method": "fp8"},
    )
    content = spoil(json.loads((directory / "config.json").read_text()), data.draw)
    (directory / "config.json").write_text(json.dumps(content))
    tolerated(lambda: planned(directory, "vllm", Vllm()))


SMALL = Shape(64, 2, 4, 2, 16, 128, 256, context=2048)


@settings(parent=relaxed, max_examples=40)
@given(data=st.data())
def test_spoilt_headers_of_safetensors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = hf_model(tmp_path_factory.mktemp("m"), SMALL)
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    text = json.dumps(spoil(json.loads(whole[8 : 8 + length]), data.draw)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    tolerated(lambda: planned(directory, "vllm", Vllm()))


@settings(parent=relaxed, max_examples=50)
@given(data=st.data())
def test_spoilt_headers_of_gguf(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = gguf_model(tmp_path_factory.mktemp("m") / "m.gguf", SMALL)
    content = bytearray(path.read_bytes()[:6000])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        junk = data.draw(st.binary(min_size=1, max_size=9))
        content[at : at + len(junk)] = junk
    del content[data.draw(st.integers(0, 6000)) :]
    with path.open("wb") as file:
        file.write(content)
        file.truncate(data.draw(st.sampled_from([len(content), 200_000])))
    tolerated(lambda: planned(path, "llama-cpp", LlamaCppBlock()))


def _safetensors(text: bytes, length: int | None = None, size: int = 0) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(size)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0",
        _safetensors(b""),
        _safetensors(b"{}", 2**63),
        _safetensors(b"{}", 2**64 - 1),
        _safetensors(b"{}", 100_000_000),
        _safetensors(b"[]"),
        _safetensors(b"[" * 1_000_000),
        _safetensors(b'{"a":' * 100_000),
        _safetensors(b"\xff\xfe\xfd"),
        _safetensors(b'{"a": 1' + b"0" * 100_000 + b"}"),
        _safetensors(b'{"a": 1}'),
        _safetensors(b'{"a": {"dtype": "F32", "shape": [2]}}'),
        _safetensors(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
        _safetensors(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', size=4),
        _safetensors(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', size=4),
        _safetensors(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}', size=4),
        _safetensors(b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}', size=4),
        _safetensors(b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', size=4),
        _safetensors(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', size=4),
        _safetensors(
            b'{"a": {"dtype": "X", "shape": ['
            + b"9999999999," * 15
            + b'1], "data_offsets": [0,0]}}'
        ),
    ],
    ids=range(21),
)
def test_files_that_are_no_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(MemoryPlanError):
        list(header(path))


def test_a_header_as_large_as_the_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 40))
        file.truncate((1 << 40) + 8)
    with pytest.raises(MemoryPlanError, match="header would have"):
        list(header(path))


def _gguf(*parts: bytes, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + b"".join(parts)


def _key(text: str, kind: int, *rest: bytes) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data + struct.pack("<I", kind) + b"".join(rest)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"GGML" + bytes(100),
        _gguf(tensors=2**63, pairs=0) + bytes(64),
        _gguf(tensors=0, pairs=2**40) + bytes(64),
        _gguf(_key("a", 9, struct.pack("<IQ", 8, 2**60)), pairs=1) + bytes(64),
        _gguf(_key("a", 9, struct.pack("<IQ", 8, 4_000_000)), pairs=1) + bytes(64),
        _gguf(_key("a", 9, struct.pack("<IQQ", 8, 2, 2**64 - 1)), pairs=1) + bytes(64),
        _gguf(_key("a", 9, struct.pack("<IQ", 4, 2**49)), pairs=1) + bytes(64),
        _gguf(_key("a", 9, struct.pack("<IQ", 9, 3)), pairs=1) + bytes(64),
        _gguf(_key("a", 8, struct.pack("<Q", 2**64 - 1)), pairs=1) + bytes(64),
        _gguf(_key("a", 77), pairs=1) + bytes(64),
        _gguf(struct.pack("<Q", 2**62), pairs=1) + bytes(64),
        b"GGUF" + struct.pack("<IQQ", 50331648, 1, 1) + bytes(64),
    ],
    ids=range(14),
)
def test_files_that_are_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(MemoryPlanError):
        planned(path, "llama-cpp", LlamaCppBlock())


def _special(tmp_path: Path) -> Iterator[Path]:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    yield pipe
    yield Path("/dev/zero")
    yield tmp_path
    yield tmp_path / "absent"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    yield loop


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    for number, target in enumerate(_special(tmp_path)):
        directory = tmp_path / str(number)
        for name in ("config.json", "mlc-chat-config.json", "model.safetensors", "m.gguf"):
            directory.mkdir(exist_ok=True)
            (directory / name).symlink_to(target)
        for backend, block, path in (
            ("vllm", Vllm(), directory),
            ("mlc-llm", MlcLlmBlock(), directory),
            ("llama-cpp", LlamaCppBlock(), directory / "m.gguf"),
            ("ollama", OllamaBlock(), directory / "m.gguf"),
        ):
            with pytest.raises(MemoryPlanError):
                planned(path, backend, block)


def test_what_is_no_file_is_not_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in _special(tmp_path):
        with pytest.raises(MemoryPlanError), regular_file(path):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "../../etc/passwd"},
        {"a": "/etc/passwd"},
        {"a": ".."},
        {"a": ""},
        {"a": 1},
        {},
        [],
        {f"t{i}": f"{i}.safetensors" for i in range(5000)},
        {"a": "absent.safetensors"},
        {"a": "nul\0.safetensors"},
    ],
    ids=range(10),
)
def test_an_index_leads_nowhere_else(tmp_path: Path, weight_map: object) -> None:
    directory = hf_model(tmp_path / "m", SMALL)
    index = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(MemoryPlanError):
        planned(directory, "vllm", Vllm())


def test_a_huge_vocabulary_takes_no_time_worth_naming(tmp_path: Path) -> None:
    """A list of texts is walked over; one that is longer than any vocabulary is refused."""
    texts = b"".join(struct.pack("<Q", 1) + b"x" for _ in range(random.Random(1).randint(10, 20)))
    path = tmp_path / "m.gguf"
    path.write_bytes(
        _gguf(_key("a", 9, struct.pack("<IQ", 8, 5_000_000), texts), pairs=1) + bytes(64)
    )
    with pytest.raises(MemoryPlanError, match="5000000 texts"):
        planned(path, "llama-cpp", LlamaCppBlock())
