"""What the fields of a ModelDeployment mean, and which values they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from flexinfer.api import (
    HealthCheck,
    LlamaCppBlock,
    MlcLlmBlock,
    ModelDeployment,
    ModelDeploymentSpec,
    ObjectMeta,
    OllamaBlock,
    Resources,
    VllmBlock,
)


def spec(**fields: Any) -> ModelDeploymentSpec:
    return ModelDeploymentSpec.model_validate({"backend": "llama-cpp", "model": "m", **fields})


def deployment(name: str = "m", **fields: Any) -> ModelDeployment:
    return ModelDeployment(metadata=ObjectMeta(name=name), spec=spec(**fields))


def refusals(**fields: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        spec(**fields)
    return [".".join(map(str, line["loc"])) for line in caught.value.errors()]


def test_defaults() -> None:
    plain = spec()
    assert plain.replicas == 1
    assert plain.min_replicas is None
    assert plain.idle_timeout_seconds == 300
    assert plain.cold_start_timeout_seconds == 600
    assert plain.drain_timeout_seconds == 600
    assert plain.priority == 100
    assert plain.max_ongoing_requests is None
    assert plain.max_queued_requests == 200
    assert plain.served_model_name is None
    assert plain.aliases == []
    assert plain.vram_check is None
    assert plain.health_check == HealthCheck(
        initial_delay_seconds=0, period_seconds=10, timeout_seconds=5, failure_threshold=3
    )


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [
        ({}, 1),
        ({"requests": {"cpu": "4"}}, 1),
        ({"requests": {"amd.com/gpu": "0"}}, 0),
        ({"limits": {"nvidia.com/gpu": 0}}, 0),
        ({"requests": {"amd.com/gpu": "1"}, "limits": {"amd.com/gpu": 1}}, 1),
        ({"limits": {"amd.com/gpu": "2"}}, 2),
        ({"requests": {"nvidia.com/gpu": 4}}, 4),
        ({"requests": {"amd.com/gpu": "0", "nvidia.com/gpu": "1"}}, 1),
    ],
)
def test_gpus(resources: dict[str, Any], gpus: int) -> None:
    assert spec(resources=resources).gpus == gpus


@pytest.mark.parametrize(
    ("resources", "vendor"),
    [
        ({}, None),
        ({"limits": {"amd.com/gpu": "0"}}, None),
        ({"limits": {"amd.com/gpu": "1"}}, "amd"),
        ({"requests": {"nvidia.com/gpu": "1"}}, "nvidia"),
    ],
)
def test_gpu_vendor(resources: dict[str, Any], vendor: str | None) -> None:
    assert Resources.model_validate(resources).gpu_vendor == vendor


@pytest.mark.parametrize(
    "resources",
    [
        {"requests": {"amd.com/gpu": "500m"}},
        {"requests": {"amd.com/gpu": "-1"}},
        {"requests": {"amd.com/gpus": "1"}},
        {"requests": {"gpu": "1"}},
        {"requests": {"amd.com/gpu": "1"}, "limits": {"amd.com/gpu": "2"}},
        {"requests": {"amd.com/gpu": "2"}, "limits": {"amd.com/gpu": "1"}},
        {"requests": {"amd.com/gpu": "1", "nvidia.com/gpu": "1"}},
        {"requests": {"amd.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}},
        {"requests": {"cpu": "2"}, "limits": {"cpu": "1500m"}},
        {"requests": {"memory": "1Gi"}, "limits": {"memory": "1G"}},
        {"requests": {"cpu": 0.5}},
        {"requests": []},
        {"request": {}},
    ],
)
def test_resources_that_are_refused(resources: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        spec(resources=resources)


def test_requests_below_limits_are_fine_for_all_but_gpus() -> None:
    amounts = spec(resources={"requests": {"cpu": "4"}, "limits": {"cpu": "8"}}).resources
    assert amounts.requests["cpu"].value == 4
    assert amounts.limits["cpu"] == "8"


@pytest.mark.parametrize(
    ("fields", "effective"),
    [
        ({}, None),
        ({"minReplicas": 0}, 0),
        ({"minReplicas": 2, "replicas": 3}, 2),
        ({"minReplicas": 2, "replicas": 0}, 0),
        ({"replicas": 0}, None),
    ],
)
def test_effective_minimum(fields: dict[str, int], effective: int | None) -> None:
    assert spec(**fields).effective_min_replicas == effective


def test_zero_replicas_park_a_model() -> None:
    assert spec(replicas=0).parked
    assert not spec(replicas=1, minReplicas=0).parked


def test_a_minimum_above_replicas_is_refused() -> None:
    assert refusals(minReplicas=2) == ["minReplicas"]
    assert refusals(minReplicas=3, replicas=2) == ["minReplicas"]


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("llama-cpp", LlamaCppBlock),
        ("vllm", VllmBlock),
        ("mlc-llm", MlcLlmBlock),
        ("ollama", OllamaBlock),
    ],
)
def test_the_block_of_the_backend_or_its_defaults(backend: str, kind: type[BaseModel]) -> None:
    absent = spec(backend=backend)
    assert absent.block == kind()
    assert absent.engine_env == {}
    name = {"llama-cpp": "llamacpp", "mlc-llm": "mlcllm"}.get(backend, backend)
    given = spec(backend=backend, **{name: {"env": {"A": "b"}}})
    assert isinstance(given.block, kind)
    assert given.engine_env == {"A": "b"}


def test_a_block_of_another_backend_is_refused_by_both_names() -> None:
    with pytest.raises(ValidationError) as caught:
        spec(backend="llama-cpp", vllm={}, mlcllm={})
    messages = {line["loc"][0]: line["msg"] for line in caught.value.errors()}
    assert messages.keys() == {"vllm", "mlcllm"}
    assert "llamacpp" in messages["vllm"]
    assert "llama-cpp" in messages["vllm"]


def test_the_same_holds_for_parts_built_in_python() -> None:
    with pytest.raises(ValidationError, match="only llamacpp"):
        ModelDeploymentSpec(backend="llama-cpp", model="m", vllm=VllmBlock())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", "tgi"),
        ("backend", None),
        ("model", ""),
        ("model", 3),
        ("model", "a/../b"),
        ("model", "a\nb"),
        ("replicas", -1),
        ("replicas", "1"),
        ("replicas", 1.0),
        ("replicas", True),
        ("replicas", 2**31),
        ("minReplicas", -1),
        ("idleTimeoutSeconds", -1),
        ("idleTimeoutSeconds", "5m"),
        ("coldStartTimeoutSeconds", 0),
        ("drainTimeoutSeconds", -1),
        ("priority", -1),
        ("priority", 1001),
        ("servedModelName", ""),
        ("servedModelName", 5),
        ("aliases", "one"),
        ("aliases", [""]),
        ("maxOngoingRequests", 0),
        ("maxQueuedRequests", -1),
        ("vramCheck", "never"),
        ("vramCheck", False),
        ("nodeSelector", {"a": True}),
        ("nodeSelector", {"a b": "c"}),
        ("nodeSelector", {"a": "b c"}),
        ("nodeSelector", {"a": "b" * 64}),
        ("nodeSelector", {"/a": "b"}),
        ("healthCheck", {"periodSeconds": 0}),
        ("healthCheck", {"timeoutSeconds": 0}),
        ("healthCheck", {"failureThreshold": 0}),
        ("healthCheck", {"initialDelaySeconds": -1}),
        ("healthCheck", {"initialDelay": 1}),
        ("tolerations", [{"operator": "Equal"}]),
        ("tolerations", [{"key": "a", "operator": "Exists", "value": "b"}]),
        ("tolerations", [{"key": "a", "tolerationSeconds": 5}]),
        ("tolerations", [{"key": "a", "effect": "Never"}]),
        ("min_replica", 1),
    ],
)
def test_refused_values(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        spec(**{field: value})
    assert {line["loc"][0] for line in caught.value.errors()} == {field}


@pytest.mark.parametrize(
    "toleration",
    [
        {"operator": "Exists"},
        {"key": "gpu", "value": "amd", "effect": "NoSchedule"},
        {"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
    ],
)
def test_tolerations(toleration: dict[str, Any]) -> None:
    assert len(spec(tolerations=[toleration]).tolerations) == 1


def test_errors_of_fields_and_of_rules_come_together() -> None:
    assert refusals(replicas=1, minReplicas=2, priority="high", vllm={}, colour="red") == [
        "priority",
        "colour",
        "minReplicas",
        "vllm",
    ]


def test_null_is_a_field_left_out() -> None:
    assert spec(minReplicas=None, replicas=None, llamacpp=None, aliases=None) == spec()


@pytest.mark.parametrize(
    ("backend", "check"),
    [("vllm", "error"), ("mlc-llm", "error"), ("llama-cpp", "warn"), ("ollama", "warn")],
)
def test_vram_check_by_backend(backend: str, check: str) -> None:
    assert spec(backend=backend).effective_vram_check == check
    assert spec(backend=backend, vramCheck="off").effective_vram_check == "off"


def test_names_without_repetition() -> None:
    assert deployment().names == ("m",)
    named = deployment(servedModelName="Org/M-1.5", aliases=["x", "m", "x"])
    assert named.names == ("m", "Org/M-1.5", "x")


@pytest.mark.parametrize(
    "name", ["Qwen", "a.b", "1a", "a" * 51, "", "flexinfer", "flexinfer-gateway", "kubernetes"]
)
def test_illegal_and_reserved_names(name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        deployment(name)
    (line,) = caught.value.errors()
    assert line["loc"] == ("metadata", "name")
    assert "use name: " in line["ctx"]["suggestion"]


@pytest.mark.parametrize(
    ("block", "gpus", "fits"),
    [
        ({}, 1, True),
        ({"tensorParallelSize": 2}, 2, True),
        ({"tensorParallelSize": 2}, 1, False),
        ({"pipelineParallelSize": 2}, 1, False),
        ({"tensorParallelSize": 2, "pipelineParallelSize": 2}, 2, False),
        ({"tensorParallelSize": 2, "pipelineParallelSize": 2}, 4, True),
        ({"tensorParallelSize": 2}, 0, True),
    ],
)
def test_vllm_shards_are_at_most_the_gpus(block: dict[str, int], gpus: int, fits: bool) -> None:
    resources = {"limits": {"amd.com/gpu": gpus}}
    if fits:
        spec(backend="vllm", vllm=block, resources=resources)
    else:
        with pytest.raises(ValidationError, match="at most the GPUs"):
            spec(backend="vllm", vllm=block, resources=resources)


def test_attributes_and_yaml_names_are_equal_in_python() -> None:
    by_name = ModelDeploymentSpec.model_validate(
        {"backend": "llama-cpp", "model": "m", "min_replicas": 0}
    )
    assert by_name == spec(minReplicas=0)
    assert by_name.model_dump(by_alias=True)["minReplicas"] == 0


def test_a_resource_survives_its_own_dump() -> None:
    original = deployment(
        minReplicas=0,
        resources={"limits": {"amd.com/gpu": "0", "memory": "16Gi"}},
        llamacpp={"nGPULayers": "all", "mainGPU": 0, "nCPUMoE": 2},
    )
    dumped = original.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert dumped["spec"]["llamacpp"]["nGPULayers"] == "all"
    assert ModelDeployment.model_validate(dumped, by_alias=True, by_name=False) == original


def test_what_only_an_api_server_sets_is_accepted() -> None:
    read = ModelDeployment.model_validate(
        {
            "apiVersion": "ai.flexinfer/v1alpha1",
            "kind": "ModelDeployment",
            "metadata": {
                "name": "m",
                "uid": "1",
                "resourceVersion": "2",
                "generation": 3,
                "creationTimestamp": None,
                "managedFields": [{"manager": "kubectl"}],
                "annotations": None,
            },
            "spec": {"backend": "vllm", "model": "m"},
            "status": {"phase": "Ready", "anything": [1]},
        }
    )
    assert read.metadata.namespace == "default"


def test_a_resource_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        spec().replicas = 2  # type: ignore[misc]
