"""The application builders that Serve configs name by import path."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from flexinfer.serving.args import (
    ENTRY_DEPLOYMENT,
    GATEWAY_DEPLOYMENT,
    MODEL_DEPLOYMENT,
    GatewayArgs,
    ModelArgs,
    ModelSettings,
)
from flexinfer.serving.gateway import NODE_LABEL, Gateway
from flexinfer.serving.server import ModelServer


class Entry:
    """The first deployment of a model's application, which never has a replica.

    Every application needs an ingress deployment. Were it the ModelServer, Ray would give each
    engine's replica an HTTP port and a drain period that nobody uses, and refuse its router.
    """

    def __init__(self, server: DeploymentHandle) -> None:
        raise RuntimeError("an entry has no replicas: requests go through the gateway")


def build_model(args: dict[str, Any]) -> Application:
    """One ModelDeployment's application. `args`: `ModelArgs`. Raises pydantic's ValidationError."""
    model = ModelArgs.model_validate(args)
    # Only GPUs are Ray's to count: engines use threads as they like, and a CPU asked for here would
    # keep the node's idle workers from being started ahead.
    actor: dict[str, Any] = {"num_cpus": 0, "num_gpus": model.gpus}
    if model.nodes is not None:
        # Set here and not in the Serve config, where it would bind the build task as well.
        actor["label_selector"] = {NODE_LABEL: f"in({','.join(sorted(model.nodes))})"}
    deployment = serve.deployment(
        name=MODEL_DEPLOYMENT,
        ray_actor_options=actor,
        # A config may leave it out, and Serve then would not call `reconfigure`.
        user_config=ModelSettings().model_dump(mode="json"),
        request_router_config=RequestRouterConfig(
            request_router_class="flexinfer.serving.router:LeaseRouter"
        ),
    )(ModelServer)
    return serve.deployment(
        name=ENTRY_DEPLOYMENT,
        ray_actor_options={"num_cpus": 0},
        autoscaling_config={"min_replicas": 0, "max_replicas": 1},
    )(Entry).bind(deployment.bind(model.model_dump(mode="json")))


def build_gateway(args: dict[str, Any]) -> Application:
    """The gateway's application. `args`: `GatewayArgs`. Raises pydantic's ValidationError."""
    gateway = GatewayArgs.model_validate(args)
    deployment = serve.deployment(
        name=GATEWAY_DEPLOYMENT, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=10_000
    )(serve.ingress()(Gateway))
    return deployment.bind(gateway.model_dump(mode="json"))
