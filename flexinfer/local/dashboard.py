"""Speak to Ray's dashboard: which applications are deployed, and which should be."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from flexinfer.local.errors import ConfigRefused, DashboardError

_APPLICATIONS = "/api/serve/applications/"
# The first PUT starts Serve: its controller, its proxy, and the interpreters of both.
_TIMEOUT_S = 180.0
OUR_BUILDERS = "flexinfer."


@dataclass(frozen=True)
class Application:
    """A deployed application. `import_path` is None for one that no config describes."""

    name: str
    status: str
    message: str
    import_path: str | None

    @property
    def ours(self) -> bool:
        """Whether FlexInfer has deployed it."""
        return self.import_path is not None and self.import_path.startswith(OUR_BUILDERS)


@dataclass(frozen=True)
class Serve:
    """What Serve is doing. `http_host` and `http_port` are None where it does not run."""

    http_host: str | None = None
    http_port: int | None = None
    applications: Mapping[str, Application] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether Serve has been started on the cluster."""
        return self.http_port is not None


class Dashboard:
    """A client of the dashboard at `url`, with Ray's `token` where it wants one."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url
        headers = {"x-ray-authorization": f"Bearer {token}"} if token else {}
        # A proxy of the environment is for the world outside.
        self._client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=False, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def get(self) -> Serve:
        """What runs. Raises `DashboardError`."""
        answer = await self._request("GET")
        try:
            body = answer.json()
            options = body.get("http_options") or {}
            applications = {
                name: Application(
                    name,
                    status=details["status"],
                    message=details["message"],
                    import_path=(details.get("deployed_app_config") or {}).get("import_path"),
                )
                for name, details in body["applications"].items()
            }
            return Serve(options.get("host"), options.get("port"), applications)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DashboardError(
                f"what answers at {self.url} is not a Ray dashboard ({error!r})"
            ) from error

    async def put(self, config: Mapping[str, Any]) -> None:
        """Make Serve run exactly the applications of `config`. Returns when Serve has taken the
        task on, which is before it is done.

        Raises `ConfigRefused` if the config is wrong, `DashboardError` if anything else is.
        """
        await self._request("PUT", json=config)

    async def delete(self) -> None:
        """Shut Serve down, with all of its applications. Raises `DashboardError`."""
        await self._request("DELETE")

    async def _request(self, method: str, json: Any = None) -> httpx.Response:
        try:
            answer = await self._client.request(method, _APPLICATIONS, json=json)
        except httpx.HTTPError as error:
            message = f"no answer from the Ray dashboard at {self.url}: {_words(error)}"
            raise DashboardError(message) from error
        if answer.status_code in (401, 403):
            raise DashboardError(
                f"the Ray dashboard at {self.url} wants a token: set RAY_AUTH_TOKEN, or "
                "RAY_AUTH_TOKEN_PATH to a file with it"
            )
        if method == "PUT" and answer.status_code == 400:
            raise ConfigRefused(f"Ray refuses the Serve config: {_last_lines(answer.text)}")
        if answer.is_error:
            text = _last_lines(answer.text)
            raise DashboardError(f"the Ray dashboard says {answer.status_code} to {method}: {text}")
        return answer


def dashboard_url(address: str) -> str:
    """The URL that `--address` means: `http://HOST:8265`, `HOST:8265` or `HOST`.

    Raises ValueError for anything else, such as Ray's own `ray://` addresses.
    """
    match = re.fullmatch(r"(?:(https?)://)?(\[[0-9A-Fa-f:]+\]|[^/:\[\]]+)(?::(\d+))?/?", address)
    if match is None or (match[3] and not 0 < int(match[3]) < 65536):
        raise ValueError(f"{address} is not the address of a Ray dashboard, as http://HOST:8265 is")
    port = match[3] or ("443" if match[1] == "https" else "8265")
    return f"{match[1] or 'http'}://{match[2]}:{port}"


def token_of(environ: Mapping[str, str]) -> str | None:
    """Ray's token for a cluster that is joined: where Ray's own tools look for it."""
    if token := environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    named = environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path(os.path.expanduser("~/.ray/auth_token"))
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DashboardError(f"cannot read Ray's token in {path}: {error.strerror}") from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _last_lines(text: str, count: int = 6) -> str:
    """The end of an error text: a traceback says at its end what is wrong."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or "nothing"
