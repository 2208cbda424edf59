"""Whatever is done to a good manifest, it is read or what is wrong is said; nothing breaks."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer.api import ManifestErrors, read_manifests

SAMPLE = Path(__file__).parents[2] / "crds" / "samples" / "qwen3-8b-abliterated.yaml"
GOOD = next(yaml.safe_load_all(SAMPLE.read_text()))

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "1", "OFF", "16GB", "amd.com/gpu", "..", "/", "\x7f", "\u2028"])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


def paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from paths(inner, (*path, key))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutations") / "m.json"


@settings(deadline=None, max_examples=300)
@given(path=st.sampled_from(list(paths(GOOD))), value=JUNK, extra=st.text(max_size=8))
def test_mutations(file: Path, path: tuple[str, ...], value: Any, extra: str) -> None:
    manifest = copy.deepcopy(GOOD)
    place = manifest
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    place[extra] = value
    file.write_text(json.dumps(manifest, indent=1))
    try:
        read_manifests([file])
    except ManifestErrors as error:
        assert error.errors
        for problem in error.errors:
            assert problem.file == str(file)
            assert problem.allowed
            assert str(problem).isprintable()
