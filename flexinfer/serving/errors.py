"""What a request can fail with before an engine answers, as OpenAI error objects.

RequestError
|-- BadRequest              400, 413, 415: the client's fault
|-- Unauthorized            401
|-- NotFound                404: no such model or path
|-- Busy                    429: the model is up and its queue is full
`-- Unavailable             503: the model is parked, failed, or did not come up in time
    `-- Gone                503: its engine or its replica ended under the request
"""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """A refusal. `code` is for programs, `message` says what was wrong and what to do."""

    status = 500
    type = "server_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        if status is not None:
            self.status = status

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's API words it: `{"error": {message, type, param, code}}`."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class BadRequest(RequestError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(RequestError):
    status = 401
    type = "invalid_request_error"


class NotFound(RequestError):
    status = 404
    type = "invalid_request_error"


class Busy(RequestError):
    status = 429
    type = "rate_limit_error"


class Unavailable(RequestError):
    status = 503
    type = "service_unavailable_error"


class Gone(Unavailable):
    pass
