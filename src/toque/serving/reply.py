"""Reply: one request's texts from the batch to the bytes its client gets, whole or streamed."""

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
from toque.models.generation.constraints import HeldText
from toque.models.generation.live_rows import NewToken, Order
from toque.models.generation.options import GenerationOptions
from toque.serving.batcher import Batcher, ServedModel, Ticket, failure
from toque.serving.protocol import Json, Piece, TextRequest, TextToken
from toque.serving.server import Limits, RequestError, answer_to

_log = logging.getLogger("toque.serving")


class _Text:
    """One text of a request while it is written; what may become a stop string is held back.

    With a prompt before it the end token is told, too: who reads the log-probabilities of a prompt
    (lm-eval) takes the last token for the one that was written.
    """

    def __init__(self, index: int, codec: Codec, stops: Sequence[str], *, echoes: bool) -> None:
        self._index, self._stops, self._echoes = index, stops, echoes
        self._codec, self._stream = codec, TextStream(codec)
        self._held = ""
        self._textless: list[TextToken] = []  # tokens whose character is not whole yet
        self._offset = 0
        self.logprobs: list[float] = []  # of the tokens so far, the end token among them
        self.is_over = False

    def prompt(self, tokens: Sequence[NewToken], *, is_all: bool) -> Piece:
        """The piece that the prompt makes, in which no stop string is looked for."""
        read = [self._read(new, skip_special_tokens=False) for new in tokens]
        text = "".join(token.text for token in read) + (self._stream.rest() if is_all else "")
        self._offset, self.is_over = len(text), is_all
        return Piece(self._index, text, read, 0, "length" if is_all else None)

    def _read(self, new: NewToken, *, skip_special_tokens: bool = True) -> TextToken:
        others = [self._stream.would_be(token) for token, _ in new.likeliest]
        text = self._stream.feed(new.token, skip_special_tokens=skip_special_tokens)
        return TextToken(self._codec, new, text, others)

    def piece(self, news: Sequence[NewToken]) -> Piece:
        """The piece that some more tokens make."""
        text, end, tokens = "", None, list[TextToken]()
        for new in news:
            end, more = new.end, ""
            if new.logprob is not None:
                self.logprobs.append(new.logprob)
            if end != "stop":
                self._textless.append(self._read(new))
                more = self._textless[-1].text
            if end is not None:
                more += self._stream.rest()
                if self._textless:
                    self._textless[-1] = self._textless[-1]._replace(text=more)
            if end == "stop" and self._echoes:
                others = [self._stream.would_be(token) for token, _ in new.likeliest]
                self._textless.append(TextToken(self._codec, new, "", others))
            certain, stopped = self._certain(more, last=end is not None)
            text += certain
            end = "stop" if stopped else end
            if more or end is not None:
                tokens += self._textless
                self._textless.clear()
            if end is not None:
                break
        self.is_over = end is not None
        offset = self._offset
        self._offset += sum(len(token.text) for token in tokens)
        return Piece(self._index, text, tokens, offset, end)

    def _certain(self, more: str, *, last: bool) -> tuple[str, bool]:
        """The text that is certain now, and True where a stop string came."""
        text = self._held + more
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            return text[: min(places)], True
        held = 0
        for stop in () if last else self._stops:
            longest = min(len(text), len(stop) - 1)
            held = max(held, *(n for n in range(longest + 1) if text.endswith(stop[:n])))
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False


class Reply(Response):
    """The answer to one request, written while it is sent; RequestError 400 where it cannot be."""

    def __init__(
        self,
        batcher: Batcher,
        served: ServedModel,
        prompts: Sequence[Sequence[int]],
        request: TextRequest,
        limits: Limits,
        *,
        held: HeldText | None = None,
    ) -> None:
        param, most = request.prompt_field, request.most_tokens
        options = served.record.completed(request.options(), in_json=held is not None)
        self._n, self._best = request.n or 1, _best_of(request, options)
        self._knows_recipes = served.record.knows_recipes
        n = max(self._n, self._best.n)
        if n * len(prompts) > limits.texts:
            raise RequestError(
                400,
                f"{n} texts for each of {len(prompts)} prompts are more than the {limits.texts} of "
                "one request. Ask several times.",
                param="best_of" if self._best.n > 1 else "n" if n > 1 else param,
            )
        if request.echoes and served.is_encoder_decoder:
            wrong = "echo: this model reads a prompt apart from what it writes; leave it out."
            raise RequestError(400, wrong, param="echo")
        if most == 0 and not request.echoes:
            raise RequestError(
                400, "max_tokens: 0 asks for nothing without echo.", param="max_tokens"
            )
        longest = [served.most_tokens(prompt, most, param=param) for prompt in prompts]
        n_likeliest = request.n_likeliest
        if self._best.n > 1:
            n_likeliest = n_likeliest or 0  # whose likelihoods are compared
            self._asked = [served.codec.decode(prompt) for prompt in prompts]
            with _refused("best_by"):
                self._best.check_prompts(
                    self._asked, in_json=held is not None, knows_recipes=self._knows_recipes
                )
        self._orders = [
            Order(
                prompt,
                limit,
                options,
                i * n + number,
                n_likeliest,
                held=held and held.again(),
            )
            for i, (prompt, limit) in enumerate(zip(prompts, longest, strict=True))
            for number in range(n)
        ]
        self._batcher, self._served, self._request = batcher, served, request
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
        """Write and send; stop at once when the client goes away."""
        self._scope, self._receive, self._send, self._has_begun = scope, receive, send, False
        try:
            async with asyncio.timeout(self._seconds):
                await _unless_gone(receive, self._write())
            return
        except ClientDisconnect:
            self._batcher.metrics.gone.inc()
            return
        except TimeoutError:
            # Asking again at once would end in the same way.
            error = RequestError(
                504,
                f"The answer was not whole after {self._seconds:g} seconds, the most this server "
                "gives one request. Ask for fewer tokens or texts.",
                code="timeout",
                headers={"x-should-retry": "false"},
            )
        except RequestError as refusal:
            error = refusal
        except Exception:
            if not self._has_begun:  # the application answers it
                raise
            _log.exception("an answer of %s broke off", self._served.name)
            error = failure()
        if not self._has_begun:
            await answer_to(error)(scope, receive, send)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):  # a client that reads nothing is left
                await self._send_events([error.record], last=True)

    async def _write(self) -> None:
        metrics, name = self._batcher.metrics, self._served.name
        with self._batcher.ticket(self._served, self._orders) as ticket:
            metrics.prompt_tokens.labels(name).inc(self._prompt_tokens)
            try:
                await (self._stream(ticket) if self._request.stream else self._at_once(ticket))
            finally:
                metrics.tokens.labels(name).inc(self._n_tokens)
        metrics.seconds.observe(time.monotonic() - self._began)

    async def _pieces(self, ticket: Ticket) -> AsyncIterator[list[Piece]]:
        """The pieces of the texts as they are written; RequestError if the batch cannot go on."""
        codec, stops = self._served.codec, self._request.stops
        echoes = self._request.echoes
        self._texts = texts = {
            order: _Text(i, codec, stops, echoes=echoes) for i, order in enumerate(self._orders)
        }
        async for piece in self._prompts():
            yield [piece]
        first = True
        steps, begun = Counter[Order](), dict[Order, float]()  # after each text's first news
        while not all(text.is_over for text in texts.values()):
            news = await ticket.news.get()
            if isinstance(news, RequestError):
                raise news
            if first:
                self._batcher.metrics.first_token.observe(time.monotonic() - self._began)
                first = False
            by_order: defaultdict[Order, list[NewToken]] = defaultdict(list)
            for new in news:
                if new.end == "stuck" and new.order.held is not None:
                    fault = f"The text {new.order.held.fault}"
                    raise RequestError(400, fault, param="response_format")
                by_order[new.order].append(new)
            pieces = []
            for order, own in by_order.items():
                if texts[order].is_over:
                    continue
                steps[order] += len(own) if order in begun else 0
                since = begun.setdefault(order, time.monotonic())
                piece = texts[order].piece(own)
                pieces.append(piece)
                # With an echo the end token is told as well, and is none of the text.
                self._n_tokens += sum(token.new.end != "stop" for token in piece.tokens)
                if piece.end is not None and steps[order]:
                    each = (time.monotonic() - since) / steps[order]
                    self._batcher.metrics.token_seconds.observe(each)
                if piece.end is not None and own[-1].end is None:
                    self._batcher.cancel([order])  # a stop string, which the batch does not know
            if pieces:
                yield pieces

    async def _prompts(self) -> AsyncIterator[Piece]:
        """The prompts that texts begin with, and the probabilities of their tokens if asked for.

        They are read one at a time, so that others are answered in between, and a client that goes
        away ends it.
        """
        prompt, tokens = None, list[NewToken]()
        for order in self._orders if self._request.echoes else ():
            if order.prompt is not prompt:  # `n` texts have one
                prompt = order.prompt
                try:
                    tokens = await run_in_threadpool(self._batcher.read, self._served, order)
                except (RuntimeError, MemoryError) as error:
                    _log.exception("reading a prompt with %s failed", self._served.name)
                    raise failure() from error
            is_all = order.most_tokens == 0
            reading = partial(self._texts[order].prompt, tokens, is_all=is_all)
            piece = await run_in_threadpool(reading)
            if is_all:
                self._batcher.cancel([order])  # its place is free
            yield piece

    async def _at_once(self, ticket: Ticket) -> None:
        texts: list[list[Piece]] = [[] for _ in self._orders]
        async for pieces in self._pieces(ticket):
            for piece in pieces:
                texts[piece.index].append(piece)
        joined = [Piece.joined(pieces) for pieces in texts]
        if self._best.n > 1:
            choices = await run_in_threadpool(self._chosen, joined)
        else:
            choices = [self._request.choice(piece, whole=True) for piece in joined]
        body = msgspec.json.encode({**self._head, "choices": choices, "usage": self._usage})
        self._has_begun = True
        answer = Response(body, media_type="application/json")
        await answer(self._scope, self._receive, self._send)

    def _chosen(self, pieces: Sequence[Piece]) -> list[Json]:
        """The `n` best of each prompt's texts, with how they were judged; not in the event loop."""
        choices, best = list[Json](), self._best
        logprobs = [text.logprobs for text in self._texts.values()]
        for i, prompt in enumerate(self._asked):
            own = slice(i * best.n, (i + 1) * best.n)
            texts, in_json = [piece.text for piece in pieces[own]], self._orders[0].held is not None
            ranked = best.ranked(
                prompt, texts, logprobs[own], in_json=in_json, knows_recipes=self._knows_recipes
            )
            for number, how in ranked[: self._n]:
                piece = replace(pieces[own][number], index=len(choices))
                choice = self._request.choice(piece, whole=True)
                choices.append(choice | {"best_of": how.record()})
        return choices

    async def _stream(self, ticket: Ticket) -> None:
        request = self._request
        due = [Piece(i) for i in range(len(self._orders))] if request.opens_texts else []
        async for pieces in self._pieces(ticket):
            due += [piece for piece in pieces if piece.is_news]
            if due:
                choices = [request.choice(piece, whole=False) for piece in due]
                await self._send_events([{**self._head, "choices": [one]} for one in choices])
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
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            start = {"type": "http.response.start", "status": 200, "headers": headers}
            self._has_begun = True
            await self._send(start)
        parts = [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events]
        if last:
            parts.append(b"data: [DONE]\n\n")
        body = {"type": "http.response.body", "body": b"".join(parts), "more_body": not last}
        await self._send(body)


@contextmanager
def _refused(param: str) -> Iterator[None]:
    """A context in which a ConfigError is the request's, about this field."""
    try:
        yield
    except ConfigError as error:
        raise RequestError(400, str(error), param=param) from error


def _best_of(request: TextRequest, options: GenerationOptions) -> BestOf:
    """The choice that a request asks for; RequestError 400 where it cannot be made."""
    n, by = request.best_of or 1, request.best_by
    with _refused("best_by"):
        best = BestOf(n, LIKELIHOOD if by is None and n > 1 else by)  # as OpenAI says
    with _refused("best_of"):
        best.check(options, wanted=request.n or 1)
        for name, asked in (("stream", request.stream), ("echo", request.echoes)):
            if asked and best.n > 1:
                raise ConfigError(
                    f"best_of is {n}, and which text is the best is known when all are whole: "
                    f"leave {name} or best_of out."
                )
    return best


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work; give it up, and raise ClientDisconnect, when the client goes away."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)
