"""From one look at the models to the next: what is worth a line to the user. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexinfer.local.events import Activity
from flexinfer.local.gateway import ModelStatus

AT_REST = frozenset({"zero", "parked"})
ON_THE_WAY = frozenset({"queued", "starting"})


@dataclass
class _Seen:
    state: str
    progress: str | None
    reason: str | None
    asked_at: float | None  # since when it is on its way


class Activities:
    """Remembers the last look. Times are seconds of one clock that never goes back."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._looked_at: float | None = None

    def update(self, models: Sequence[ModelStatus], now: float) -> list[Activity]:
        """What has happened since the last look. Models at rest in the first look are no news."""
        news: list[Activity] = []
        for model in models:
            before = self._seen.get(model.name)
            asked_at = before.asked_at if before is not None else None
            if model.state in ON_THE_WAY and asked_at is None:
                asked_at = now
            if model.state == "serving" and asked_at is None and before is not None:
                # It was asked for and became ready between two looks.
                asked_at = self._looked_at if before.state in AT_REST else None
            if self._is_news(before, model):
                took = now - asked_at if model.state == "serving" and asked_at is not None else None
                failed = model.state == "failed"
                news.append(
                    Activity(
                        model.name,
                        model.state,
                        progress=model.progress if model.state in ON_THE_WAY else None,
                        took_s=took,
                        reason=model.reason if failed else None,
                        message=model.message if failed else None,
                    )
                )
            if model.state not in ON_THE_WAY:
                asked_at = None
            self._seen[model.name] = _Seen(model.state, model.progress, model.reason, asked_at)
        for name in self._seen.keys() - {model.name for model in models}:
            del self._seen[name]
        self._looked_at = now
        return news

    @staticmethod
    def _is_news(before: _Seen | None, model: ModelStatus) -> bool:
        if before is None:
            return model.state not in AT_REST
        if before.state != model.state:
            return True
        if model.state in ON_THE_WAY:
            return before.progress != model.progress
        return model.state == "failed" and before.reason != model.reason
