"""Resources in, a Ray Serve config out. Plain data and deterministic: the same resources and
settings give the same config, in whatever order they come.

One application a ModelDeployment, and one for the gateway. What a change costs follows from where
a value is put:

* `args` of a model's application: all that makes a different engine process. A change restarts it.
* `user_config`, `autoscaling_config`, grace periods: a change keeps the process.

A policy's arguments restart as well (Ray 2.60), so a model's policy gets its name only; bounds and
priority are told to the gateway, which tells the policies.

Values that mean the same are written the same, or a manifest that was only reformatted would
restart its engine: defaults are left out of `args`, and keys are sorted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flexinfer.api import ModelCache, ModelDeployment, Notice, resource_id

GATEWAY_APP = "flexinfer-gateway"
GATEWAY_DEPLOYMENT = "Gateway"
GATEWAY_BUILDER = "flexinfer.serving.app:build_gateway"
GATEWAY_POLICY = "flexinfer.serving.policies:GatewayPolicy"
MODEL_DEPLOYMENT = "ModelServer"
MODEL_BUILDER = "flexinfer.serving.app:build_model"
MODEL_POLICY = "flexinfer.serving.policies:ModelPolicy"

# Ray's limits on requests are not ours: the gateway counts and queues for every model.
_GATEWAY_ONGOING = 10_000
_MODEL_ONGOING = 100
# Between the end of a model's drain and the moment when Ray kills its replica: the engine is asked
# to stop, then killed (vLLM has 30 s, and 15 s for what it leaves); its GPU's memory is awaited.
_STOP_MARGIN_S = 90.0
_GATEWAY_DRAIN_S = 660.0

_CACHE_FIELDS = frozenset(
    {"existing_claim_name", "files", "model_path", "revision", "source", "storage_strategy"}
)

_NO_DELAYS = {
    "metrics_interval_s": 0.1,
    "look_back_period_s": 0.2,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 0.0,
}


@dataclass(frozen=True)
class ServeSettings:
    """What a translation needs to know beside the resources.

    `http_host` and `http_port` are the ingress. `claims` says which directory a claim is, `roots`
    are the directories in which models are looked for, in order. `nodes` gives, by model name, the
    values of the Ray label `flexinfer.ai/node` that it may run on; a model that is not in it may
    run anywhere. `weights_versions` gives, by model name, the fingerprint of weights that could be
    seen. The rest is for the gateway: a value of None leaves its default.
    """

    http_host: str = "127.0.0.1"
    http_port: int = 8000
    claims: Mapping[str, Path] = field(default_factory=dict)
    roots: Sequence[Path] = ()
    nodes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    weights_versions: Mapping[str, str] = field(default_factory=dict)
    cors_origins: Sequence[str] = ()
    api_key_file: Path | None = None
    header_grace_s: float | None = None
    max_body_bytes: int | None = None


def serve_config(
    models: Sequence[ModelDeployment],
    caches: Sequence[ModelCache] = (),
    *,
    settings: ServeSettings | None = None,
    notices: Sequence[Notice] = (),
) -> dict[str, Any]:
    """The config for `PUT /api/serve/applications/` and `serve deploy`.

    Args:
        models: with names that differ, as the manifest reader makes sure.
        caches: of all namespaces; each model's `args` get those that its weights may be in.
        settings: where and how it is served; None for one machine, loopback, port 8000.
        notices: those about one of `models` are shown by the gateway as its warnings.

    Returns:
        Dicts, lists, strings, numbers and booleans only, as Ray's `ServeDeploySchema` takes them.
    """
    settings = settings or ServeSettings()
    models = sorted(models, key=lambda model: model.name)
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": settings.http_host, "port": settings.http_port},
        "applications": [
            _gateway_application(models, settings, notices),
            *(_model_application(model, caches, settings) for model in models),
        ],
    }


def render_serve(config: Mapping[str, Any], *, command: str) -> str:
    """`config` as YAML for people, below one line of comment that says what made it.

    Args:
        config: what `serve_config` gave.
        command: the command that gives this text, such as `flexinfer render serve model.yaml`.
    """
    body = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    return f"# Made by: {command}\n{body}"


def _gateway_application(
    models: Sequence[ModelDeployment], settings: ServeSettings, notices: Sequence[Notice]
) -> dict[str, Any]:
    args = {
        "api_key_file": _text(settings.api_key_file),
        "cors_origins": list(settings.cors_origins),
        "header_grace_s": settings.header_grace_s,
        "max_body_bytes": settings.max_body_bytes,
    }
    return {
        "name": GATEWAY_APP,
        "route_prefix": "/",
        "import_path": GATEWAY_BUILDER,
        "args": _without_empty(args),
        "autoscaling_policy": {"policy_function": GATEWAY_POLICY, "policy_kwargs": {}},
        "deployments": [
            {
                "name": GATEWAY_DEPLOYMENT,
                "user_config": {
                    "models": [_gateway_model(model, settings, notices) for model in models]
                },
                "max_ongoing_requests": _GATEWAY_ONGOING,
                # The number is fixed, but Ray runs policies only for deployments that may scale.
                "autoscaling_config": {
                    "min_replicas": 1,
                    "max_replicas": 1,
                    **_NO_DELAYS,
                },
                "graceful_shutdown_timeout_s": _GATEWAY_DRAIN_S,
                "graceful_shutdown_wait_loop_s": 0.1,
                "health_check_period_s": 2.0,
                "health_check_timeout_s": 30.0,
                "ray_actor_options": {"num_cpus": 0},
            }
        ],
    }


def _gateway_model(
    model: ModelDeployment, settings: ServeSettings, notices: Sequence[Notice]
) -> dict[str, Any]:
    spec, metadata = model.spec, model.metadata
    own = resource_id(model)
    known = {
        "name": model.name,
        "namespace": metadata.namespace,
        "names": list(model.names),
        "backend": spec.backend,
        "model": spec.model,
        **_residence(model, settings),
        "cold_start_timeout_s": float(spec.cold_start_timeout_seconds),
        "drain_timeout_s": float(spec.drain_timeout_seconds),
        "max_ongoing_requests": spec.max_ongoing_requests,
        "max_queued_requests": spec.max_queued_requests,
        "warnings": [
            _without_none(
                {"reason": notice.reason, "message": notice.message, "field": notice.field}
            )
            for notice in notices
            if notice.resource == own
        ],
    }
    return _without_none(known)


def _model_application(
    model: ModelDeployment, caches: Sequence[ModelCache], settings: ServeSettings
) -> dict[str, Any]:
    spec = model.spec
    policy_kwargs = {"model": model.name}
    return {
        "name": model.name,
        "route_prefix": None,
        "import_path": MODEL_BUILDER,
        "args": model_args(model, caches, settings),
        "autoscaling_policy": {"policy_function": MODEL_POLICY, "policy_kwargs": policy_kwargs},
        "deployments": [
            {
                "name": MODEL_DEPLOYMENT,
                "user_config": _model_settings(model),
                "max_ongoing_requests": _MODEL_ONGOING,
                # Ray's bounds only frame the policy, which decides within them. No number to begin
                # with: Ray would go back to it, and stop the engine, whenever a bound changes.
                "autoscaling_config": {
                    "min_replicas": 0,
                    "max_replicas": max(1, spec.replicas),
                    **_NO_DELAYS,
                },
                "graceful_shutdown_timeout_s": spec.drain_timeout_seconds + _STOP_MARGIN_S,
                "graceful_shutdown_wait_loop_s": 0.1,
                "health_check_period_s": 2.0,
                "health_check_timeout_s": 30.0,
            }
        ],
    }


def model_args(
    model: ModelDeployment, caches: Sequence[ModelCache], settings: ServeSettings
) -> dict[str, Any]:
    """The `args` of a model's application: two models with equal `args` are the same engine."""
    spec = model.spec
    used = caches_of(model, caches)
    nodes = settings.nodes.get(model.name)
    args = {
        "name": model.name,
        "namespace": model.metadata.namespace,
        "backend": spec.backend,
        "model": spec.model,
        "block": _sorted(spec.block.model_dump(mode="json", by_alias=True, exclude_defaults=True)),
        "gpus": spec.gpus,
        "nodes": None if nodes is None else sorted(nodes),
        "caches": [{"name": cache.name, "spec": _cache_spec(cache)} for cache in used],
        "cache": spec.model_cache_ref,
        "claims": {
            claim: str(settings.claims[claim])
            for claim in sorted(_claims_of(used))
            if claim in settings.claims
        },
        "roots": [str(root) for root in settings.roots],
        "weights_version": settings.weights_versions.get(model.name),
    }
    kept = {"gpus", "nodes"}
    return {
        key: value
        for key, value in args.items()
        if value is not None and (key in kept or value not in ([], {}))
    }


def caches_of(model: ModelDeployment, caches: Sequence[ModelCache]) -> list[ModelCache]:
    """The caches that `model` may name, sorted: the one of `modelCacheRef`, or all of its namespace
    whose name or `modelPath` equals `model` (more than one is for the search to complain about)."""
    spec = model.spec
    return sorted(
        (
            cache
            for cache in caches
            if cache.metadata.namespace == model.metadata.namespace
            and (
                cache.name == spec.model_cache_ref
                if spec.model_cache_ref is not None
                else spec.model in (cache.name, cache.spec.model_path)
            )
        ),
        key=lambda cache: cache.name,
    )


def _cache_spec(cache: ModelCache) -> dict[str, Any]:
    """What finding the weights needs of a cache: its size or retention restarts no engine."""
    spec: dict[str, Any] = cache.spec.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, include=set(_CACHE_FIELDS)
    )
    return dict(sorted(spec.items()))


def _claims_of(caches: Sequence[ModelCache]) -> set[str]:
    claims = {cache.spec.existing_claim_name for cache in caches}
    claims |= {source.claim for cache in caches if (source := cache.spec.parsed_source) is not None}
    return {claim for claim in claims if claim is not None}


def _residence(model: ModelDeployment, settings: ServeSettings) -> dict[str, Any]:
    """What decides when and where the model is up; values of None mean absent."""
    spec = model.spec
    nodes = settings.nodes.get(model.name)
    return {
        "gpus": spec.gpus,
        "nodes": None if nodes is None else sorted(nodes),
        "replicas": spec.replicas,
        "min_replicas": spec.effective_min_replicas,
        "priority": spec.priority,
        "idle_timeout_s": float(spec.idle_timeout_seconds),
    }


def _model_settings(model: ModelDeployment) -> dict[str, Any]:
    spec = model.spec
    check = spec.health_check
    return {
        "health": {
            "initial_delay_s": float(check.initial_delay_seconds),
            "period_s": float(check.period_seconds),
            "timeout_s": float(check.timeout_seconds),
            "failure_threshold": check.failure_threshold,
        },
        "cold_start_timeout_s": float(spec.cold_start_timeout_seconds),
        "drain_timeout_s": float(spec.drain_timeout_seconds),
        "vram_check": spec.effective_vram_check,
    }


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None and value != []}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _sorted(value: Any) -> Any:
    """`value` with the keys of all dicts sorted; lists keep their order, which has a meaning."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value
