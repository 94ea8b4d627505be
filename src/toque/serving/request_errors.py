"""Errors that a server returns to its client, in the format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

_TYPES: Final = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
"""OpenAI's type of an error by its status. Other statuses have the type "invalid_request_error"."""


class RequestError(Exception):
    """Error of a request that was refused or failed.

    Args:
        status: HTTP status.
        message: Message for the user of the client.
        param: Field of the request that has the error.
        code: OpenAI's code for the error.
        headers: Additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.record = {
            "error": {
                "message": message,
                "type": _TYPES.get(status, "invalid_request_error"),
                "param": param,
                "code": code,
            }
        }
        """Body of the response."""


def error_response(error: RequestError) -> JSONResponse:
    """Create the response for an error."""
    return JSONResponse(error.record, status_code=error.status, headers=error.headers)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answer a request with a wrong path or method. `error` is Starlette's HTTPException."""
    assert isinstance(error, HTTPException)  # Starlette's type of a handler is wider
    path = request.scope["path"][:100]
    if error.status_code == 404:
        message = f"{path} does not exist on this server."
    elif error.status_code == 405:
        message = f"{path} does not support {request.method}."
    else:
        message = str(error.detail)
    headers = dict(error.headers or {})
    return error_response(
        RequestError(error.status_code, message, code="invalid_url", headers=headers)
    )


def internal_error() -> RequestError:
    """Create the error of a failure of the server. The log has the cause."""
    return RequestError(
        500,
        "The server failed to answer. See the server's log for the cause.",
        code="internal_error",
    )
