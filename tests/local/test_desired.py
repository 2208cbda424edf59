from __future__ import annotations

from pathlib import Path

import pytest
from local_fakes import write_models

from flexinfer.api import ManifestErrors
from flexinfer.engines.gpus import Inventory, NoGpus
from flexinfer.local.desired import Desired, Site, desire
from flexinfer.local.events import Applied
from flexinfer.local.machine import Computer

NO_GPU = Inventory(problem=NoGpus.NO_DRIVER, detail="no driver")


def computer(gpus: int | None = 0) -> Computer:
    return Computer(gpus, NO_GPU, "workstation", "amd64")


def site(gpus: int | None = 0, **more: object) -> Site:
    return Site(computer(gpus), **more)  # type: ignore[arg-type]


def reasons(desired: Desired) -> list[str]:
    return [notice.reason for notice in desired.notices]


def args_of(desired: Desired, name: str) -> dict[str, object]:
    (found,) = (app["args"] for app in desired.config["applications"] if app["name"] == name)
    assert isinstance(found, dict)
    return found


def test_the_same_files_are_the_same_desire(tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a", "b")
    first = desire([path], site())
    path.write_text("# a comment\n" + path.read_text())
    second = desire([path], site())
    assert first.config == second.config
    assert second.difference(first) == Applied()


def test_differences_name_models_only(tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a", "b", "c")
    first = desire([path], site())
    text = path.read_text().replace("name: b", "name: d")
    path.write_text(text.replace("priority: 100", "priority: 7", 1))
    second = desire([path], site())
    assert second.difference(first) == Applied(added=("d",), changed=("a",), removed=("b",))


def test_a_change_of_a_name_in_the_api_is_a_change(tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a")
    first = desire([path], site())
    path.write_text(path.read_text().replace("priority: 100", "aliases: [other]"))
    assert desire([path], site()).difference(first) == Applied(changed=("a",))


def test_other_weights_are_another_engine(tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a")
    here = site(roots=[tmp_path])
    assert "weights_version" not in args_of(desire([path], here), "a")
    weights = tmp_path / "a.gguf"
    weights.write_bytes(b"GGUF" + bytes(60))
    first = args_of(desire([path], here), "a")["weights_version"]
    assert args_of(desire([path], here), "a")["weights_version"] == first
    weights.write_bytes(b"GGUF" + bytes(61))
    assert args_of(desire([path], here), "a")["weights_version"] != first


def test_errors_of_manifests_are_not_swallowed(tmp_path: Path) -> None:
    path = write_models(tmp_path / "a.yaml", "a", "a")
    with pytest.raises(ManifestErrors):
        desire([path], site())
    with pytest.raises(ManifestErrors):
        desire([tmp_path / "nothing.yaml"], site())


def test_no_model_is_a_warning(tmp_path: Path) -> None:
    assert reasons(desire([tmp_path], site())) == ["NoModels"]


SELECTIVE = """\
apiVersion: ai.flexinfer/v1alpha1
kind: ModelDeployment
metadata: {{name: a}}
spec:
  backend: llama-cpp
  model: cache
  nodeSelector: {{{selector}}}
---
apiVersion: ai.flexinfer/v1alpha1
kind: ModelCache
metadata: {{name: cache}}
spec:
  existingClaimName: weights
"""


@pytest.mark.parametrize(
    ("selector", "gpus", "warned"),
    [
        ("kubernetes.io/hostname: workstation", 1, False),
        ("kubernetes.io/hostname: other", 1, True),
        ("kubernetes.io/os: linux", 1, False),
        ("flexinfer.ai/gpu.vendor: AMD", 1, False),
        ("flexinfer.ai/gpu.vendor: AMD", 0, True),
        ("flexinfer.ai/gpu.vendor: NVIDIA", 1, True),
        ("disk: fast", 1, True),
    ],
)
def test_selectors_that_do_not_match_are_warnings(
    tmp_path: Path, selector: str, gpus: int, warned: bool
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(SELECTIVE.format(selector=selector))
    desired = desire([path], site(gpus, claims={"weights": tmp_path}))
    found = [notice for notice in desired.notices if notice.reason == "NodeSelectorMismatch"]
    assert bool(found) is warned
    if found:
        label = selector.partition(":")[0]
        assert found[0].field == f"spec.nodeSelector[{label}]"
        assert found[0].resource == "ModelDeployment/default/a"
        # Shown by the gateway as well.
        gateway = desired.config["applications"][0]["deployments"][0]["user_config"]["models"][0]
        assert "NodeSelectorMismatch" in [warning["reason"] for warning in gateway["warnings"]]


def test_claims_are_asked_for_and_mistyped_ones_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(SELECTIVE.format(selector=""))
    desired = desire([path], site(1, claims={"wieghts": tmp_path}))
    messages = {notice.reason: notice.message for notice in desired.notices}
    assert "--claim weights=DIR" in messages["ClaimUnknown"]
    assert "wieghts" in messages["ClaimUnused"]


def test_models_that_do_not_fit_are_noticed_where_the_gpus_are_known(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(SELECTIVE.format(selector=""))
    assert "NotEnoughGPUs" in reasons(desire([path], site(0, claims={"weights": tmp_path})))
    assert reasons(desire([path], site(None, claims={"weights": tmp_path}))) == []


def test_pretended_gpus_are_said_to_be() -> None:
    assert "2 GPUs pretended; found: no GPU" in str(computer(2))
