"""Answer that the batch computes while its client is connected, within the time limit."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toque.serving.batcher import Batcher, ServedModel
from toque.serving.gate import Limits
from toque.serving.request_errors import (
    RequestError,
    error_response,
    internal_error,
)

_log = logging.getLogger("toque.serving")


class Answer(Response, ABC):
    """Answer to one request, which is sent while the batch computes it."""

    def __init__(self, batcher: Batcher, served: ServedModel, limits: Limits) -> None:
        self._batcher = batcher
        self._served = served
        self._seconds = limits.seconds
        self._start_time = time.monotonic()
        self.has_started = False
        """True after the head of the answer was sent."""
        self.background = None

    @abstractmethod
    async def generate(self) -> None:
        """Compute and send the answer."""

    async def send_error_event(self, error: RequestError) -> None:
        """Send an error after the head of a stream."""

    async def send_json(self, record: object) -> None:
        """Send the answer as one JSON object."""
        self.has_started = True
        answer = Response(msgspec.json.encode(record), media_type="application/json")
        await answer(self._scope, self._receive, self._send)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute and send the answer. Stop immediately when the client disconnects."""
        self._scope = scope
        self._receive = receive
        self._send = send

        error = await self._run()
        if error is None:
            return
        if not self.has_started:
            await error_response(error)(scope, receive, send)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):  # the client may not read
                await self.send_error_event(error)

    async def _run(self) -> RequestError | None:
        """Compute and send the answer. Return the error for the client, if any."""
        try:
            async with asyncio.timeout(self._seconds):
                await _run_while_connected(self._receive, self.generate())
        except ClientDisconnect:
            self._batcher.metrics.count_lost_client()
        except TimeoutError:
            return RequestError(
                504,
                f"The answer was not complete after {self._seconds:g} seconds, the time limit of "
                "this server. Request fewer tokens or texts.",
                code="timeout",
                # The same request would fail again.
                headers={"x-should-retry": "false"},
            )
        except RequestError as error:
            return error
        except Exception:
            if not self.has_started:  # the application sends the answer
                raise
            _log.exception("an answer of %s was interrupted", self._served.name)
            return internal_error()
        return None


async def _run_while_connected(
    receive: Receive, work: Coroutine[Any, Any, None]
) -> None:
    """Run the work until it ends or the client disconnects.

    Raises:
        ClientDisconnect: The client disconnected, and the work was cancelled.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({working, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        for task in (working, disconnect):
            task.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)
