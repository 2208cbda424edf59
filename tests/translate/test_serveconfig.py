from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from flexinfer.api import ModelCache, ModelDeployment, Notice, notices_for, read_manifests
from flexinfer.api.blocks import BLOCK_TYPES
from flexinfer.engines.backend import backend_for
from flexinfer.serving import args as serving
from flexinfer.translate import ServeSettings, render_serve, serve_config, serveconfig

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "crds" / "samples").glob("*.yaml"))

Make = Callable[..., ModelDeployment]
MakeCache = Callable[..., ModelCache]


def application(config: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (app for app in config["applications"] if app["name"] == name)
    return dict(found)


def everything() -> dict[str, Any]:
    manifests = read_manifests([ROOT / "crds" / "samples"])
    settings = ServeSettings(
        claims={"mlc-models-nfs": Path("/nfs"), "unused": Path("/unused")},
        roots=[Path("/models"), Path("/more")],
        nodes={"smollm2": ["b", "a"]},
        weights_versions={"smollm2": "abc"},
        cors_origins=["https://example.org"],
        api_key_file=Path("/key"),
        header_grace_s=1,
        max_body_bytes=1000,
    )
    notices = notices_for(manifests.models, manifests.caches, gpus=2)
    return serve_config(manifests.models, manifests.caches, settings=settings, notices=notices)


def test_ray_accepts_it() -> None:
    config = json.loads(json.dumps(everything()))
    parsed = ServeDeploySchema.model_validate(config)
    # Ray ignores what it does not know, so an unknown key would be a setting without effect.
    assert set(config) <= set(ServeDeploySchema.model_fields)
    for app in config["applications"]:
        assert set(app) <= set(type(parsed.applications[0]).model_fields)
        for deployment in app["deployments"]:
            assert set(deployment) <= set(type(parsed.applications[0].deployments[0]).model_fields)


def test_the_serving_room_accepts_every_part() -> None:
    config = everything()
    gateway, *models = config["applications"]
    serving.GatewayArgs.model_validate(gateway["args"])
    settings = serving.GatewaySettings.model_validate(gateway["deployments"][0]["user_config"])
    assert [known.name for known in settings.models] == [app["name"] for app in models]
    for app in models:
        args = serving.ModelArgs.model_validate(app["args"])
        assert args.name == app["name"]
        for cache in args.caches:
            ModelCache.model_validate({"metadata": {"name": cache.name}, "spec": cache.spec})
        serving.ModelSettings.model_validate(app["deployments"][0]["user_config"])
        # Anything more would restart the engine when it changes.
        assert app["autoscaling_policy"]["policy_kwargs"] == {"model": app["name"]}


def test_it_names_the_applications_as_the_serving_room_does() -> None:
    assert serveconfig.GATEWAY_APP == serving.GATEWAY_APP
    assert serveconfig.GATEWAY_DEPLOYMENT == serving.GATEWAY_DEPLOYMENT
    assert serveconfig.MODEL_DEPLOYMENT == serving.MODEL_DEPLOYMENT


def test_only_the_gateway_has_a_route() -> None:
    routes = {app["name"]: app["route_prefix"] for app in everything()["applications"]}
    assert routes.pop("flexinfer-gateway") == "/"
    assert set(routes.values()) == {None}


def test_the_order_of_the_resources_does_not_matter(model: Make, cache: MakeCache) -> None:
    models = [model(name) for name in ("a", "b", "c")]
    caches = [cache("x"), cache("one.gguf")]
    first = serve_config(models, caches)
    for some in itertools.permutations(models):
        assert serve_config(some, caches[::-1]) == first


def test_no_models_is_a_gateway_alone() -> None:
    (gateway,) = serve_config([])["applications"]
    assert gateway["deployments"][0]["user_config"] == {"models": []}
    assert gateway["args"] == {}


def test_args_hold_nothing_that_is_at_its_default(model: Make) -> None:
    args = application(serve_config([model()]), "one")["args"]
    assert args == {
        "name": "one",
        "namespace": "default",
        "backend": "llama-cpp",
        "model": "one.gguf",
        "gpus": 1,
    }


@pytest.mark.parametrize(
    "written",
    [
        {"llamacpp": {}},
        {"llamacpp": {"embeddings": False, "env": {}, "extraArgs": []}},
        {"resources": {"limits": {"amd.com/gpu": "1"}}},
        {"resources": {"requests": {"nvidia.com/gpu": 1}}},
        {"healthCheck": {"periodSeconds": 10}},
        {"minReplicas": 0},
        {"aliases": ["x"]},
    ],
)
def test_a_manifest_that_means_the_same_engine_has_the_same_args(
    model: Make, written: dict[str, Any]
) -> None:
    plain = application(serve_config([model()]), "one")["args"]
    assert application(serve_config([model(**written)]), "one")["args"] == plain


def test_the_order_of_keys_in_a_block_does_not_matter(model: Make) -> None:
    one = {"env": {"A": "1", "B": "2"}, "parallel": 2, "contextSize": 10}
    other = {"contextSize": 10, "parallel": 2, "env": {"B": "2", "A": "1"}}
    texts = {json.dumps(serve_config([model(llamacpp=block)])) for block in (one, other)}
    assert len(texts) == 1


def test_the_order_of_arguments_does_matter(model: Make) -> None:
    texts = {
        json.dumps(serve_config([model(llamacpp={"extraArgs": extra})]))
        for extra in (["--a", "--b"], ["--b", "--a"])
    }
    assert len(texts) == 2


def test_bounds_of_the_replicas_stay_out_of_args(model: Make) -> None:
    app = application(serve_config([model(replicas=3, minReplicas=1)]), "one")
    autoscaling = app["deployments"][0]["autoscaling_config"]
    assert (autoscaling["min_replicas"], autoscaling["max_replicas"]) == (0, 3)
    assert app["autoscaling_policy"]["policy_kwargs"] == {"model": "one"}
    assert "replicas" not in app["args"]


def test_a_parked_model_keeps_a_valid_config(model: Make) -> None:
    config = serve_config([model(replicas=0)])
    ServeDeploySchema.model_validate(config)
    gateway = application(config, "flexinfer-gateway")["deployments"][0]["user_config"]
    assert gateway["models"][0]["replicas"] == 0
    assert "min_replicas" not in gateway["models"][0]


def test_ray_waits_longer_than_the_drain(model: Make) -> None:
    app = application(serve_config([model(drainTimeoutSeconds=1000)]), "one")
    policies = [backend_for(name).stop for name in BLOCK_TYPES]
    slowest = max(policy.grace_s + policy.leftover_s for policy in policies)
    assert app["deployments"][0]["graceful_shutdown_timeout_s"] > 1000 + slowest
    assert app["deployments"][0]["user_config"]["drain_timeout_s"] == 1000


def test_eligible_nodes_are_sorted_and_an_empty_list_is_not_any(model: Make) -> None:
    settings = ServeSettings(nodes={"one": ["b", "a"], "two": []})
    config = serve_config([model("one"), model("two"), model("three")], settings=settings)
    assert application(config, "one")["args"]["nodes"] == ["a", "b"]
    assert application(config, "two")["args"]["nodes"] == []
    assert "nodes" not in application(config, "three")["args"]


class TestCaches:
    def test_a_model_gets_the_cache_that_it_refers_to(self, model: Make, cache: MakeCache) -> None:
        caches = [cache("weights"), cache("one.gguf"), cache("weights", namespace="other")]
        args = application(serve_config([model(modelCacheRef="weights")], caches), "one")["args"]
        assert args["cache"] == "weights"
        assert args["caches"] == [{"name": "weights", "spec": {"source": "HF://org/repo"}}]

    def test_or_all_that_have_its_name_or_path(self, model: Make, cache: MakeCache) -> None:
        caches = [cache("b", modelPath="one.gguf"), cache("one.gguf"), cache("c")]
        args = application(serve_config([model()], caches), "one")["args"]
        assert [used["name"] for used in args["caches"]] == ["b", "one.gguf"]
        assert "cache" not in args

    def test_a_claim_of_another_cache_is_none_of_its_business(
        self, model: Make, cache: MakeCache
    ) -> None:
        caches = [cache("one.gguf", existingClaimName="nfs", source=None), cache("z")]
        settings = ServeSettings(claims={"nfs": Path("/nfs"), "other": Path("/other")})
        args = application(serve_config([model()], caches, settings=settings), "one")["args"]
        assert args["claims"] == {"nfs": "/nfs"}

    def test_a_claim_may_also_be_the_source(self, model: Make, cache: MakeCache) -> None:
        settings = ServeSettings(claims={"nfs": Path("/nfs")})
        caches = [cache("one.gguf", source="pvc://nfs/x")]
        args = application(serve_config([model()], caches, settings=settings), "one")["args"]
        assert args["claims"] == {"nfs": "/nfs"}


class TestGateway:
    def test_it_knows_names_limits_and_residence(self, model: Make) -> None:
        one = model(
            servedModelName="One/1.0",
            aliases=["uno"],
            maxOngoingRequests=3,
            maxQueuedRequests=4,
            priority=5,
            minReplicas=0,
            idleTimeoutSeconds=6,
            coldStartTimeoutSeconds=7,
            drainTimeoutSeconds=8,
        )
        (known,) = application(serve_config([one]), "flexinfer-gateway")["deployments"][0][
            "user_config"
        ]["models"]
        assert known == {
            "name": "one",
            "namespace": "default",
            "names": ["one", "One/1.0", "uno"],
            "backend": "llama-cpp",
            "model": "one.gguf",
            "gpus": 1,
            "replicas": 1,
            "min_replicas": 0,
            "priority": 5,
            "idle_timeout_s": 6,
            "cold_start_timeout_s": 7,
            "drain_timeout_s": 8,
            "max_ongoing_requests": 3,
            "max_queued_requests": 4,
            "warnings": [],
        }

    def test_it_gets_the_warnings_of_its_models_only(self, model: Make) -> None:
        notices = [
            Notice("Mine", "m", "ModelDeployment/default/one", "spec.model"),
            Notice("NotMine", "m", "ModelDeployment/other/one"),
            Notice("Plain", "p", "ModelDeployment/default/one"),
        ]
        config = serve_config([model()], notices=notices)
        (known,) = config["applications"][0]["deployments"][0]["user_config"]["models"]
        assert known["warnings"] == [
            {"reason": "Mine", "message": "m", "field": "spec.model"},
            {"reason": "Plain", "message": "p"},
        ]

    def test_models_that_come_and_go_never_restart_it(self, model: Make) -> None:
        few, many = serve_config([]), serve_config([model("a"), model("b")])
        apps = [application(config, "flexinfer-gateway") for config in (few, many)]
        for app in apps:
            app["deployments"] = [
                {k: v for k, v in deployment.items() if k != "user_config"}
                for deployment in app["deployments"]
            ]
        assert apps[0] == apps[1]


def test_the_text_reads_back_as_the_config() -> None:
    config = everything()
    text = render_serve(config, command="flexinfer render serve crds/samples")
    assert text.splitlines()[0] == "# Made by: flexinfer render serve crds/samples"
    assert yaml.safe_load(text) == config


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_the_configs_in_the_repository_are_current(sample: Path) -> None:
    manifests = read_manifests([sample])
    config = serve_config(manifests.models, manifests.caches, notices=manifests.notices)
    command = f"flexinfer render serve crds/samples/{sample.name}"
    file = ROOT / "serve_configs" / sample.name
    assert file.read_text() == render_serve(config, command=command), f"{command} > {file}"
    ServeDeploySchema.model_validate(yaml.safe_load(file.read_text()))


def test_there_is_no_config_without_a_sample() -> None:
    made = sorted(path.name for path in (ROOT / "serve_configs").iterdir())
    assert made == [sample.name for sample in SAMPLES]
