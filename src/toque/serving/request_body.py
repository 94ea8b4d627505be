"""Bodies of JSON requests: reading within limits, and parsing to a checked type."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toque.serving.gate import Limits
from toque.serving.request_errors import RequestError

R = TypeVar("R", bound=BaseModel)

_MAX_ERRORS: Final = 100
"""Maximum number of validation errors to describe. A body of 1 MiB can have half a million errors.
Their description would block the server."""
_MAX_DISCARDED: Final = 32
"""Multiple of `body_bytes` that is read and discarded. A client that is still sending would not
read the response with the error."""


def post_route(
    path: str, kind: type[R], limits: Limits, answer: Callable[[R], Any]
) -> Route:
    """Build a route that answers JSON requests of a kind with JSON.

    Args:
        path: Path of the route.
        kind: Type of the request.
        limits: Limits on the body.
        answer: Function that answers a request. It may block, or be a coroutine function.
    """

    async def respond(http_request: Request) -> Response:
        request = await read_request(kind, http_request, limits)
        if iscoroutinefunction(answer):
            content = await answer(request)
        else:
            content = await run_in_threadpool(answer, request)
        return JSONResponse({} if content is None else content)

    return Route(path, respond, methods=["POST"])


async def read_request(kind: type[R], request: Request, limits: Limits) -> R:
    """Read and parse the body of a JSON request.

    Raises:
        RequestError: See `read_body` and `parse_request`.
    """
    return parse_request(kind, await read_body(request, limits))


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read the body of a JSON request.

    Raises:
        RequestError: The body has another type, is too long, or arrives too slowly.
    """
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        # A web page of another site cannot send JSON, because the browser asks this server first.
        raise RequestError(
            415,
            f"Content-Type must be application/json, not {media_type[:100] or 'empty'}.",
        )
    body = bytearray()
    n_bytes = 0
    headers = {"Connection": "close"}  # the rest of the body is not read
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                n_bytes += len(part)
                if n_bytes <= limits.body_bytes:
                    body += part
                elif n_bytes > _MAX_DISCARDED * limits.body_bytes:
                    break
    except TimeoutError:
        message = f"The body did not arrive within {limits.body_seconds:g} seconds."
        raise RequestError(408, message, headers=headers) from None
    if n_bytes > limits.body_bytes:
        message = f"The body is longer than the limit of {limits.body_bytes:,} bytes."
        raise RequestError(413, message, headers=headers)
    return bytes(body)


def parse_request(kind: type[R], body: bytes) -> R:
    """Parse the JSON of a request.

    Raises:
        RequestError: With status 400, and the first field that has an error.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # A traceback would describe every error, so do not attach too many.
        cause = error if error.error_count() <= _MAX_ERRORS else None
        raise _convert_error(error) from cause


def _convert_error(error: ValidationError) -> RequestError:
    """Convert a validation error to an error about the first wrong field."""
    if error.error_count() > _MAX_ERRORS:
        return RequestError(
            400,
            f"{error.error_count():,} of the body's fields are unknown, missing or of the wrong "
            "type. Send only fields of the OpenAI API.",
        )
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    message = f"{first['msg']}."
    param = None
    if first["loc"]:  # otherwise the error is about the entire body
        param = str(first["loc"][0])[:100]
        message = f"{param}: {message}"
    if first["type"] == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {param}."  # OpenAI's words
    return RequestError(400, message, param=param)
