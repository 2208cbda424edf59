"""What the engine blocks share."""

from __future__ import annotations

from pydantic import Field

from flexinfer.api.base import ApiModel
from flexinfer.api.values import Environment

EXTRA_ARGS = "Arguments added at the end of the engine's command line, one list item each."
ENV = "Environment variables of the engine, beside those of the replica."
GPUS_ARE_ASSIGNED = "leave it out: Ray assigns the GPUs; resources says how many"


class EngineBlock(ApiModel):
    """Base of the blocks: every engine can be given environment variables."""

    env: Environment = Field(default_factory=dict, description=ENV)
