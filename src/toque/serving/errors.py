"""Errors of a request, in the form that clients of the OpenAI protocol read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_TYPES: Final = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP's code.
        message: What was found, what is allowed, what to do.
        param: The field of the request it is about.
        code: The protocol's own word, for programs.
        headers: Sent along.
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
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def record(self) -> dict[str, Any]:
        """The body of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def queue_full() -> RequestError:
    """All places are taken, and as many wait as may."""
    return RequestError(
        429,
        "As many requests wait as this server lets wait. Try again in a moment.",
        code="rate_limit_exceeded",
        headers={"Retry-After": "1"},
    )


def stopping() -> RequestError:
    """The server ends; what it had accepted before is still answered."""
    return RequestError(
        503,
        "This server is stopping and takes no more requests.",
        code="service_unavailable",
        headers={"Retry-After": "5"},
    )


def out_of_time(seconds: float) -> RequestError:
    """The answer was not whole in time; asking again at once would end the same way."""
    return RequestError(
        504,
        f"The answer was not whole after {seconds:g} seconds, the most this server gives one "
        "request. Ask for fewer tokens or texts.",
        code="timeout",
        headers={"x-should-retry": "false"},
    )


def failed() -> RequestError:
    """A mistake of ours, or the machine ran out of memory; the log says which."""
    return RequestError(
        500, "The server could not write this answer; its log says why.", code="internal_error"
    )
