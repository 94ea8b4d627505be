"""Reply to one request: its texts, from the batch to the client, streamed or complete."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toque.data.tokenizer.codec import Codec, TextStream
from toque.errors import ConfigError
from toque.evaluation.best_of import LIKELIHOOD, BestOf
from toque.models.generation.constraints import Constraint
from toque.models.generation.live_rows import NewToken, Order
from toque.models.generation.options import GenerationOptions
from toque.serving.batcher import Batcher, ServedModel, Ticket, internal_error
from toque.serving.gate import Limits
from toque.serving.protocol import Json, Piece, TextRequest, TextToken
from toque.serving.request_errors import RequestError, error_response

_log = logging.getLogger("toque.serving")


class _Text:
    """One text of a request while it is written. A possible stop string waits for its next token.

    If a text begins with its prompt, its tokens include the end token. A client that reads the
    log-probabilities of a prompt (lm-eval) treats the last token as the written token.
    """

    def __init__(
        self, index: int, codec: Codec, stops: Sequence[str], *, echoes: bool
    ) -> None:
        self._index = index
        self._stops = stops
        self._echoes = echoes
        self._codec = codec
        self._stream = TextStream(codec)
        self._pending = ""  # text that may become a stop string
        self._textless: list[TextToken] = []  # tokens of an incomplete character
        self._offset = 0
        self.logprobs: list[float] = []
        """Log-probabilities of the new tokens, including the end token."""
        self.is_over = False

    def add_prompt(self, tokens: Sequence[NewToken], *, is_all: bool) -> Piece:
        """Return the piece of the prompt. Stop strings in a prompt have no effect."""
        text_tokens = [self._read(new, skip_special_tokens=False) for new in tokens]
        text = "".join(token.text for token in text_tokens)
        if is_all:
            text += self._stream.flush()
        self._offset = len(text)
        self.is_over = is_all
        return Piece(self._index, text, text_tokens, 0, "length" if is_all else None)

    def _read(self, new: NewToken, *, skip_special_tokens: bool = True) -> TextToken:
        others = [self._stream.decode_next(token) for token, _ in new.likeliest]
        text = self._stream.feed(new.token, skip_special_tokens=skip_special_tokens)
        return TextToken(self._codec, new, text, others)

    def add_tokens(self, news: Sequence[NewToken]) -> Piece:
        """Return the piece of new tokens."""
        text = ""
        end = None
        tokens: list[TextToken] = []
        for new in news:
            end = new.end
            more = ""
            if new.logprob is not None:
                self.logprobs.append(new.logprob)
            if end != "stop":
                self._textless.append(self._read(new))
                more = self._textless[-1].text
            if end is not None:
                more += self._stream.flush()
                if self._textless:
                    self._textless[-1] = self._textless[-1]._replace(text=more)
            if end == "stop" and self._echoes:
                others = [self._stream.decode_next(token) for token, _ in new.likeliest]
                self._textless.append(TextToken(self._codec, new, "", others))

            complete, is_stopped = self._split_at_stop(more, last=end is not None)
            text += complete
            end = "stop" if is_stopped else end
            if more or end is not None:
                tokens += self._textless
                self._textless.clear()
            if end is not None:
                break

        self.is_over = end is not None
        offset = self._offset
        self._offset += sum(len(token.text) for token in tokens)
        return Piece(self._index, text, tokens, offset, end)

    def _split_at_stop(self, more: str, *, last: bool) -> tuple[str, bool]:
        """Add text, and keep an end that may become a stop string.

        Returns:
            The text to send, and True if a stop string has ended it.
        """
        text = self._pending + more
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            return text[: min(starts)], True

        n_pending = 0
        for stop in () if last else self._stops:
            longest = min(len(text), len(stop) - 1)
            n_pending = max(
                n_pending, *(n for n in range(longest + 1) if text.endswith(stop[:n]))
            )
        n_complete = len(text) - n_pending
        self._pending = text[n_complete:]
        return text[:n_complete], False


class Reply(Response):
    """Answer to one request, which is sent while the batch writes it.

    Raises:
        RequestError: With status 400 if the server cannot answer the request.
    """

    def __init__(
        self,
        batcher: Batcher,
        served: ServedModel,
        prompts: Sequence[Sequence[int]],
        request: TextRequest,
        limits: Limits,
        *,
        constraint: Constraint | None = None,
    ) -> None:
        param = request.prompt_field
        max_tokens = request.requested_tokens
        in_json = constraint is not None
        options = served.record.completed(request.options(), in_json=in_json)
        self._n = request.n or 1
        self._best = _best_of(request, options)
        self._knows_recipes = served.record.knows_recipes

        n = max(self._n, self._best.n)
        if n * len(prompts) > limits.texts:
            if n > 1:
                param = "best_of" if self._best.n > 1 else "n"
            raise RequestError(
                400,
                f"The request asks for {n * len(prompts)} texts, {n} for each of {len(prompts)} "
                f"prompts. One request may ask for {limits.texts}. Send several requests.",
                param=param,
            )
        if request.echoes and served.is_encoder_decoder:
            raise RequestError(
                400,
                "echo must be false, because this model has an encoder for its prompts.",
                param="echo",
            )
        if max_tokens == 0 and not request.echoes:
            raise RequestError(
                400,
                "max_tokens may be 0 only with echo. Send at least 1.",
                param="max_tokens",
            )

        limits_of_answers = [
            served.limit_answer(prompt, max_tokens, param=param) for prompt in prompts
        ]
        n_logprobs = request.n_logprobs
        if self._best.n > 1:
            n_logprobs = n_logprobs or 0  # best_of compares likelihoods
            self._prompt_texts = [served.codec.decode(prompt) for prompt in prompts]
            with _refuse_request("best_by"):
                self._best.check_prompts(
                    self._prompt_texts,
                    in_json=in_json,
                    knows_recipes=self._knows_recipes,
                )
        self._orders = [
            Order(
                prompt,
                limit,
                options,
                i * n + number,
                n_logprobs,
                constraint=constraint and constraint.again(),
            )
            for i, (prompt, limit) in enumerate(
                zip(prompts, limits_of_answers, strict=True)
            )
            for number in range(n)
        ]
        self._batcher = batcher
        self._served = served
        self._request = request
        self._seconds = limits.seconds
        self._head = {
            "id": f"{request.id_prefix}-{uuid.uuid4().hex}",
            "object": request.event_object if request.stream else request.answer_object,
            "created": int(time.time()),
            "model": served.name,
        }
        self._prompt_tokens = sum(map(len, prompts))
        self._n_tokens = 0
        self._began = time.monotonic()
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write and send the texts. Stop immediately when the client disconnects."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._has_begun = False

        try:
            async with asyncio.timeout(self._seconds):
                await _run_while_connected(receive, self._write())
            return
        except ClientDisconnect:
            self._batcher.metrics.gone.inc()
            return
        except TimeoutError:
            error = RequestError(
                504,
                f"The answer was not complete after {self._seconds:g} seconds, the time limit of "
                "this server. Ask for fewer tokens or texts.",
                code="timeout",
                # The same request would fail again.
                headers={"x-should-retry": "false"},
            )
        except RequestError as refusal:
            error = refusal
        except Exception:
            if not self._has_begun:  # the application sends the answer
                raise
            _log.exception("an answer of %s was interrupted", self._served.name)
            error = internal_error()

        if not self._has_begun:
            await error_response(error)(scope, receive, send)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):  # the client may not read
                await self._send_events([error.record], last=True)

    async def _write(self) -> None:
        metrics, name = self._batcher.metrics, self._served.name
        with self._batcher.ticket(self._served, self._orders) as ticket:
            metrics.prompt_tokens.labels(name).inc(self._prompt_tokens)
            try:
                if self._request.stream:
                    await self._stream(ticket)
                else:
                    await self._send_complete(ticket)
            finally:
                metrics.tokens.labels(name).inc(self._n_tokens)
        metrics.seconds.observe(time.monotonic() - self._began)

    async def _pieces(self, ticket: Ticket) -> AsyncIterator[list[Piece]]:
        """Yield pieces of the texts while the batch writes them.

        Raises:
            RequestError: The batch failed, or a text cannot follow its schema.
        """
        codec = self._served.codec
        stops = self._request.stops
        echoes = self._request.echoes
        self._texts = texts = {
            order: _Text(i, codec, stops, echoes=echoes)
            for i, order in enumerate(self._orders)
        }
        async for piece in self._prompts():
            yield [piece]

        is_first = True
        first_times: dict[Order, float] = {}  # time of the first tokens of each text
        steps = Counter[Order]()  # tokens after the first tokens of each text
        while not all(text.is_over for text in texts.values()):
            news = await ticket.news.get()
            if isinstance(news, RequestError):
                raise news
            if is_first:
                self._batcher.metrics.first_token.observe(
                    time.monotonic() - self._began
                )
                is_first = False

            by_order: defaultdict[Order, list[NewToken]] = defaultdict(list)
            for new in news:
                if new.end == "stuck" and new.order.constraint is not None:
                    message = f"The text {new.order.constraint.fault}"
                    raise RequestError(400, message, param="response_format")
                by_order[new.order].append(new)

            pieces = []
            for order, tokens in by_order.items():
                if texts[order].is_over:
                    continue
                steps[order] += len(tokens) if order in first_times else 0
                first_time = first_times.setdefault(order, time.monotonic())
                piece = texts[order].add_tokens(tokens)
                pieces.append(piece)
                # With echo, the tokens include the end token, which does not count.
                self._n_tokens += sum(token.new.end != "stop" for token in piece.tokens)
                if piece.end is not None and steps[order]:
                    seconds_per_token = (time.monotonic() - first_time) / steps[order]
                    self._batcher.metrics.token_seconds.observe(seconds_per_token)
                if piece.end is not None and tokens[-1].end is None:
                    # The batch does not check stop strings.
                    self._batcher.cancel([order])
            if pieces:
                yield pieces

    async def _prompts(self) -> AsyncIterator[Piece]:
        """Yield the prompts that texts begin with, with log-probabilities if requested.

        The batch reads one prompt at a time. Other requests continue between prompts, and the
        reading ends when the client disconnects.
        """
        prompt, tokens = None, list[NewToken]()
        for order in self._orders if self._request.echoes else ():
            if order.prompt is not prompt:  # `n` texts share a prompt
                prompt = order.prompt
                try:
                    tokens = await run_in_threadpool(
                        self._batcher.read, self._served, order
                    )
                except (RuntimeError, MemoryError) as error:
                    _log.exception("reading a prompt with %s failed", self._served.name)
                    raise internal_error() from error
            is_all = order.most_tokens == 0
            add_prompt = partial(self._texts[order].add_prompt, tokens, is_all=is_all)
            piece = await run_in_threadpool(add_prompt)
            if is_all:
                self._batcher.cancel([order])  # the order is complete
            yield piece

    async def _send_complete(self, ticket: Ticket) -> None:
        texts: list[list[Piece]] = [[] for _ in self._orders]
        async for pieces in self._pieces(ticket):
            for piece in pieces:
                texts[piece.index].append(piece)
        complete = [Piece.join(pieces) for pieces in texts]
        if self._best.n > 1:
            choices = await run_in_threadpool(self._choose_best, complete)
        else:
            choices = [
                self._request.choice(piece, is_complete=True) for piece in complete
            ]
        body = msgspec.json.encode(
            {**self._head, "choices": choices, "usage": self._usage}
        )
        self._has_begun = True
        answer = Response(body, media_type="application/json")
        await answer(self._scope, self._receive, self._send)

    def _choose_best(self, pieces: Sequence[Piece]) -> list[Json]:
        """Choose the `n` best texts of each prompt, with their scores. Blocks the thread."""
        best = self._best
        in_json = self._orders[0].constraint is not None
        logprobs = [text.logprobs for text in self._texts.values()]

        choices: list[Json] = []
        for i, prompt in enumerate(self._prompt_texts):
            candidates = slice(i * best.n, (i + 1) * best.n)
            ranked = best.rank(
                prompt,
                [piece.text for piece in pieces[candidates]],
                logprobs[candidates],
                in_json=in_json,
                knows_recipes=self._knows_recipes,
            )
            for number, score in ranked[: self._n]:
                piece = replace(pieces[candidates][number], index=len(choices))
                choice = self._request.choice(piece, is_complete=True)
                choices.append(choice | {"best_of": score.record()})
        return choices

    async def _stream(self, ticket: Ticket) -> None:
        request = self._request
        due = (
            [Piece(i) for i in range(len(self._orders))] if request.opens_texts else []
        )
        async for pieces in self._pieces(ticket):
            due += [piece for piece in pieces if piece.is_visible]
            if due:
                choices = [request.choice(piece, is_complete=False) for piece in due]
                await self._send_events(
                    [{**self._head, "choices": [one]} for one in choices]
                )
                due = []
        usage = [{**self._head, "choices": [], "usage": self._usage}]
        await self._send_events(usage if request.wants_usage else [], last=True)

    @property
    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._n_tokens,
            "total_tokens": self._prompt_tokens + self._n_tokens,
        }

    async def _send_events(self, events: Sequence[Json], *, last: bool = False) -> None:
        if not self._has_begun:
            headers = [
                (b"content-type", b"text/event-stream"),
                (b"cache-control", b"no-cache"),
            ]
            start = {"type": "http.response.start", "status": 200, "headers": headers}
            self._has_begun = True
            await self._send(start)
        parts = [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events]
        if last:
            parts.append(b"data: [DONE]\n\n")
        body = {
            "type": "http.response.body",
            "body": b"".join(parts),
            "more_body": not last,
        }
        await self._send(body)


@contextmanager
def _refuse_request(param: str) -> Iterator[None]:
    """Turn a ConfigError of the block into a RequestError about a field."""
    try:
        yield
    except ConfigError as error:
        raise RequestError(400, str(error), param=param) from error


def _best_of(request: TextRequest, options: GenerationOptions) -> BestOf:
    """Return the requested choice among texts.

    Raises:
        RequestError: The fields of the request contradict each other.
    """
    n = request.best_of or 1
    best_by = request.best_by
    if best_by is None and n > 1:
        best_by = LIKELIHOOD  # OpenAI's default
    with _refuse_request("best_by"):
        best = BestOf(n, best_by)
    with _refuse_request("best_of"):
        best.check(options, n_results=request.n or 1)
        for name, is_set in (("stream", request.stream), ("echo", request.echoes)):
            if is_set and best.n > 1:
                raise ConfigError(
                    f"best_of is {n} and cannot be combined with {name}, because the server "
                    f"compares complete texts. Leave {name} or best_of out."
                )
    return best


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
