"""The autoscaling policies: application level, called by the Serve controller at every tick.

The gateway's application brings the gateways' reports and lets the scheduler decide; each model's
application tells what Ray knows of it and returns its target. A model's target can thus change in
the tick in which another's does. No policy here does I/O or waits.

Ray pickles a policy's module by value (seen in 2.60): what is shared must be reached through
another module, or every policy has a copy of its own.
"""

from __future__ import annotations

import logging
from typing import Any

from flexinfer.serving import registry
from flexinfer.serving.args import MODEL_DEPLOYMENT
from flexinfer.serving.reports import decode, merge

_log = logging.getLogger("ray.serve")

_Contexts = dict[Any, Any]
_Decisions = tuple[dict[Any, int], dict[Any, dict[str, Any]]]


class GatewayPolicy:
    """Keeps the gateway's own size, and runs the scheduler on what it reports."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def __call__(self, contexts: _Contexts) -> _Decisions:
        targets = {}
        for deployment, context in contexts.items():
            self._listen(context.raw_metrics)
            targets[deployment] = max(1, context.capacity_adjusted_min_replicas)
        self._decide()
        return targets, {}

    def _listen(self, raw_metrics: dict[str, dict[Any, Any]]) -> None:
        stats: dict[Any, dict[str, float]] = {}
        for name, series_by_replica in raw_metrics.items():
            for replica, series in series_by_replica.items():
                if series:
                    stats.setdefault(replica, {})[name] = series[-1].value
        if any("|" in name for values in stats.values() for name in values):
            registry.REGISTRY.report(merge(decode(values) for values in stats.values()))

    def _decide(self) -> None:
        for name, target in registry.REGISTRY.decide().items():
            text = f"{target.replicas} ({target.reason}: {target.message})"
            if self._reasons.get(name, "").split(":")[0] != text.split(":")[0]:
                _log.info("flexinfer: target of %s is %s", name, text)
            self._reasons[name] = text


class ModelPolicy:
    """Returns what the scheduler decided for one model.

    It takes nothing but the model's name: a policy's arguments are part of an application's code
    version, so a change of them would restart the engine.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def __call__(self, contexts: _Contexts) -> _Decisions:
        targets = {}
        for deployment, context in contexts.items():
            if context.deployment_name != MODEL_DEPLOYMENT:
                targets[deployment] = 0
                continue
            registry.REGISTRY.model(
                self._model,
                target=context.target_num_replicas,
                running=context.current_num_replicas,
                ongoing=context.total_num_requests,
            )
            targets[deployment] = registry.REGISTRY.target(self._model)
        return targets, {}
