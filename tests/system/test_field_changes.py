"""The table of docs/fields.md, held against process ids: what is live keeps its engine.

Every field outside the backend's block is changed; of the block, which is *restart* as a whole, a
few. That the arguments that Ray compares differ exactly so for every field is tested without Ray.
"""

from __future__ import annotations

from typing import Any

import pytest
from up_process import MODEL_FILE, Up, manifest, wait_for

from flexinfer.translate.fields import model_fields

pytestmark = pytest.mark.ray

CPU = {"amd.com/gpu": "0"}
LIVE: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 3},
    "minReplicas": {"minReplicas": 1},
    "idleTimeoutSeconds": {"idleTimeoutSeconds": 1000},
    "coldStartTimeoutSeconds": {},  # each step has one of its own
    "drainTimeoutSeconds": {"drainTimeoutSeconds": 50},
    "priority": {"priority": 50},
    "servedModelName": {"servedModelName": "another name"},
    "aliases": {},  # each step has an alias of its own
    "maxOngoingRequests": {"maxOngoingRequests": 5},
    "maxQueuedRequests": {"maxQueuedRequests": 5},
    "resources": {
        "resources": {
            "requests": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi"},
            "limits": {**CPU, "cpu": "2", "memory": "2Gi", "ephemeral-storage": "2Gi"},
        }
    },
    "nodeSelector": {"nodeSelector": {"kubernetes.io/hostname": "elsewhere"}},
    "tolerations": {"tolerations": [{"operator": "Exists"}]},
    "image": {"image": "example/image:1"},
    "healthCheck": {
        "healthCheck": {
            "initialDelaySeconds": 1,
            "periodSeconds": 3,
            "timeoutSeconds": 2,
            "failureThreshold": 5,
        }
    },
    "vramCheck": {"vramCheck": "off"},
}
RESTART: dict[str, dict[str, Any]] = {
    "model": {"model": f"./{MODEL_FILE}"},
    "resources": {"resources": {"limits": {"amd.com/gpu": "1"}}},
    "llamacpp.contextSize": {"llamacpp": {"contextSize": 1024}},
    "llamacpp.parallel": {"llamacpp": {"parallel": 3}},
    "llamacpp.extraArgs": {"llamacpp": {"extraArgs": ["--no-warmup"]}},
    "llamacpp.env": {"llamacpp": {"env": {"FLEXINFER_TEST_FAKE": "1", "OTHER": "1"}}},
}


class Changing:
    """A model whose manifest changes step by step, beside one that must not notice."""

    def __init__(self, up: Up) -> None:
        self.up, self.step = up, 0

    def document(self, **spec: Any) -> dict[str, Any]:
        marks = {"aliases": [f"step-{self.step}"], "coldStartTimeoutSeconds": 1000 + self.step}
        return manifest("changing", **{"fake": {}, **marks, **spec})

    def change(self, **spec: Any) -> None:
        """Write a change, and return when Serve has carried it out and the model answers."""
        self.step += 1
        self.up.write(self.document(**spec))
        alias = f"step-{self.step}"
        wait_for(lambda: alias in self.names(), lambda: f"{alias} is known: {self.names()}")
        wait_for(self.is_deployed, lambda: f"{alias} is deployed: {self.deployed()}")
        answer = self.up.chat(alias)
        assert answer.status_code == 200, answer.text

    def deployed(self) -> dict[str, Any]:
        return self.up.application("changing") or {}

    def is_deployed(self) -> bool:
        application = self.deployed()
        (deployment,) = application["deployed_app_config"]["deployments"]
        settings = deployment["user_config"]
        return bool(
            application["status"] == "RUNNING"
            and settings["cold_start_timeout_s"] == 1000 + self.step
        )

    def names(self) -> list[str]:
        model = self.up.model("changing")
        return list(model["names"]) if model is not None else []


def test_engines_restart_exactly_where_the_table_says(up: Up) -> None:
    changing = Changing(up)
    with up.serving(changing.document(), manifest("neighbour", fake={})):
        assert up.chat("neighbour").status_code == 200
        assert up.chat("changing").status_code == 200
        neighbour, engine = up.engine_pid("neighbour"), up.engine_pid("changing")

        for field, spec in LIVE.items():
            changing.change(**spec)
            assert up.engine_pid("changing") == engine, field
        assert up.model("changing")["queued"] == 0

        for field, spec in RESTART.items():
            before = up.engine_pid("changing")
            changing.change(**spec)
            wait_for(
                lambda before=before: up.engine_pid("changing") not in (None, before),
                f"another engine after a change of {field}",
            )
            assert up.engine_pid("neighbour") == neighbour, field


def test_every_field_is_changed_above() -> None:
    for effect in model_fields():
        top = effect.path.split(".")[0]
        if top in ("mlcllm", "vllm", "ollama", "backend", "modelCacheRef"):
            continue  # other engines, and a cache, whose arguments are compared without Ray
        assert top in LIVE or any(path.split(".")[0] == top for path in RESTART), top
        if effect.cost == "live":
            assert top in LIVE, top
