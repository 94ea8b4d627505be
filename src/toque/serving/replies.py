"""Reply: one request's texts on their way to its client, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toque.models.generation.live_rows import Order
from toque.serving.answers import Answers, usage_of
from toque.serving.batcher import Batcher
from toque.serving.errors import RequestError, out_of_time
from toque.serving.gate import answer_to
from toque.serving.metrics import Metrics
from toque.serving.served import ServedModel
from toque.serving.writing import Piece, Writing


class Reply(Response):
    """The answer to one request, written while it is sent.

    Args:
        batcher: Writes the texts.
        served: The model that was asked for.
        orders: One a text.
        form: Of the endpoint.
        stops: Strings that end a text.
        stream: Send every piece as it comes.
        with_usage: End a stream with what it cost.
        prompt_tokens: What is charged for prompts.
        seconds: Longest time.
        metrics: Is told.
    """

    def __init__(
        self,
        batcher: Batcher,
        served: ServedModel,
        orders: Sequence[Order],
        *,
        form: Answers,
        stops: Sequence[str],
        stream: bool,
        with_usage: bool,
        prompt_tokens: int,
        seconds: float,
        metrics: Metrics,
    ) -> None:
        self._writing = Writing(batcher, served, orders, stops)
        self._form, self._stream, self._with_usage = form, stream, with_usage
        self._prompt_tokens, self._seconds, self._metrics = prompt_tokens, seconds, metrics
        self._began = time.monotonic()
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write and send; stop at once when the client goes away."""
        self._scope, self._receive, self._send, self._has_begun = scope, receive, send, False
        error: RequestError | None = None
        try:
            async with asyncio.timeout(self._seconds):
                await _unless_gone(receive, self._written())
        except ClientDisconnect:
            self._metrics.gone.inc()
            return
        except TimeoutError:
            error = out_of_time(self._seconds)
        except RequestError as refused:
            error = refused
        if error is None:
            return
        if not self._has_begun:
            await answer_to(error)(scope, receive, send)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # a client that reads nothing is left
                    await self._events([error.record()], last=True)

    async def _written(self) -> None:
        served, orders = self._writing.served, self._writing.orders
        async with self._writing:
            self._metrics.prompt_tokens.labels(served.name).inc(self._prompt_tokens)
            try:
                await (self._streamed(len(orders)) if self._stream else self._at_once(len(orders)))
            finally:
                self._metrics.tokens.labels(served.name).inc(self._writing.n_tokens)
        self._metrics.seconds.observe(time.monotonic() - self._began)

    async def _pieces(self) -> AsyncIterator[list[Piece]]:
        first = True
        async for pieces in self._writing.pieces():
            if first:
                self._metrics.first_token.observe(time.monotonic() - self._began)
                first = False
            yield pieces

    @property
    def _usage(self) -> dict[str, Any]:
        return usage_of(self._prompt_tokens, self._writing.n_tokens)

    async def _at_once(self, n: int) -> None:
        texts: list[list[Piece]] = [[] for _ in range(n)]
        async for pieces in self._pieces():
            for piece in pieces:
                texts[piece.index].append(piece)
        body = msgspec.json.encode(self._form.whole(texts, self._usage))
        self._has_begun = True
        answer = Response(body, media_type="application/json")
        await answer(self._scope, self._receive, self._send)

    async def _streamed(self, n: int) -> None:
        events = self._form.opening(n)
        async for pieces in self._pieces():
            events += [self._form.part(piece) for piece in pieces if _says_something(piece)]
            if events:
                await self._events(events)
                events = []
        if self._with_usage:
            events.append(self._form.closing(self._usage))
        await self._events(events, last=True)

    async def _events(self, events: Sequence[dict[str, Any]], *, last: bool = False) -> None:
        if not self._has_begun:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            start = {"type": "http.response.start", "status": 200, "headers": headers}
            self._has_begun = True
            await self._send(start)
        parts = [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events]
        if last:
            parts.append(b"data: [DONE]\n\n")
        body = {"type": "http.response.body", "body": b"".join(parts), "more_body": not last}
        await self._send(body)


def _says_something(piece: Piece) -> bool:
    return bool(
        piece.text or piece.end or any(told.new.logprob is not None for told in piece.tokens)
    )


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, or give it up when the client goes away.

    Raises:
        ClientDisconnect: it did.
    """
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        doing.result()
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
