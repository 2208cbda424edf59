"""Resources and settings in, Ray Serve's own data out. Pure: no client, no cluster, no clock."""

from flexinfer.translate.environment import (
    VARIABLES,
    Variable,
    missing_variables,
    serve_environment,
)
from flexinfer.translate.serveconfig import (
    ServeSettings,
    caches_of,
    model_args,
    render_serve,
    serve_config,
)

__all__ = [
    "VARIABLES",
    "ServeSettings",
    "Variable",
    "caches_of",
    "missing_variables",
    "model_args",
    "render_serve",
    "serve_config",
    "serve_environment",
]
