"""The request router of models, which passes on which replicas there are.

Ray pickles a router's module by value (seen in 2.60), so nothing may be shared through this one:
the watchers are in `replicas`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from flexinfer.serving import replicas as watched


class LeaseRouter(RequestRouter):  # type: ignore[misc]  # ray is untyped here
    """Serve calls `update_replicas` with all running replicas, at every change."""

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        super().update_replicas(list(replicas))
        watched.tell(
            self.app_name,
            tuple(
                watched.SeenReplica(
                    id=replica.replica_id.unique_id,
                    node=replica.replica_metadata["node"],
                    host=replica.replica_metadata["host"],
                    port=replica.replica_metadata["port"],
                    key=replica.replica_metadata["key"],
                )
                for replica in replicas
            ),
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Any will do: only `ping` calls come this way."""
        return [candidate_replicas]
