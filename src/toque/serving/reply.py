"""Reply to one request: its texts, from the batch to the client, streamed or complete."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from starlette.concurrency import run_in_threadpool

from toque.data.tokenizer.codec import Codec, TextStream
from toque.errors import ConfigError
from toque.evaluation.best_of import LIKELIHOOD, BestOf
from toque.models.generation.constraints import Constraint
from toque.models.generation.live_rows import End, NewToken, Order
from toque.models.generation.options import GenerationOptions
from toque.serving.answer import Answer
from toque.serving.batcher import Batcher, ServedModel, Ticket
from toque.serving.gate import Limits
from toque.serving.pieces import Piece, TextToken
from toque.serving.protocol import Json, TextRequest, Usage
from toque.serving.request_errors import RequestError, internal_error

_log = logging.getLogger("toque.serving")


class _Text:
    """One text of a request while it is generated.

    If the end of the text may become a stop string, it is sent only when more tokens have arrived.
    If the text begins with its prompt, its tokens include the end token, because a client that
    reads the prompt's log-probabilities (lm-eval) treats the last token as the generated token.
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
        # Tokens that are not sent yet, because their character is incomplete.
        self._unsent_tokens: list[TextToken] = []
        self._offset = 0
        self.logprobs: list[float] = []
        """Log-probabilities of the generated tokens, including the end token."""
        self.is_finished = False
        self.first_time = 0.0
        """Time of the first tokens; 0 before them."""
        self.n_later_tokens = 0
        """Number of tokens after the first round."""

    def add_prompt(self, tokens: Sequence[NewToken], *, is_complete: bool) -> Piece:
        """Decode the prompt, in which stop strings have no effect.

        Args:
            tokens: Tokens of the prompt.
            is_complete: True if no tokens will be generated.
        """
        text_tokens = [self._decode(new, skip_special_tokens=False) for new in tokens]
        text = "".join(token.text for token in text_tokens)
        if is_complete:
            text += self._stream.flush()
        self._offset = len(text)
        self.is_finished = is_complete
        end: End | None = "length" if is_complete else None
        return Piece(self._index, text, text_tokens, 0, end)

    def _decode(self, new: NewToken, *, skip_special_tokens: bool = True) -> TextToken:
        """Decode the next token and the most likely tokens at its position."""
        alternatives = self._decode_alternatives(new)
        text = self._stream.feed(new.token, skip_special_tokens=skip_special_tokens)
        return TextToken(self._codec, new, text, alternatives)

    def _decode_alternatives(self, new: NewToken) -> list[str]:
        return [self._stream.decode_next(token) for token, _ in new.top_logprobs]

    def add_tokens(self, new_tokens: Sequence[NewToken]) -> Piece:
        """Decode new tokens, up to the end of the text or a stop string."""
        text = ""
        end: End | None = None
        tokens: list[TextToken] = []
        for new in new_tokens:
            if new.logprob is not None:
                self.logprobs.append(new.logprob)
            decoded = self._add_token(new)
            complete, is_stopped = self._split_at_stop(
                decoded, is_last=new.end is not None
            )
            text += complete
            end = "stop" if is_stopped else new.end
            if decoded or end is not None:
                tokens += self._unsent_tokens
                self._unsent_tokens.clear()
            if end is not None:
                break

        self.is_finished = end is not None
        offset = self._offset
        self._offset += sum(len(token.text) for token in tokens)
        return Piece(self._index, text, tokens, offset, end)

    def _add_token(self, new: NewToken) -> str:
        """Decode a token, add it to the unsent tokens, and return the text that is now complete."""
        if new.end == "stop":
            return self._add_end_token(new)
        token = self._decode(new)
        if new.end is not None:
            # No token follows, so this token has the rest of the text.
            token = token._replace(text=token.text + self._stream.flush())
        self._unsent_tokens.append(token)
        return token.text

    def _add_end_token(self, new: NewToken) -> str:
        """Return the rest of the text, which belongs to the token before the end token."""
        rest = self._stream.flush()
        if self._unsent_tokens:
            self._unsent_tokens[-1] = self._unsent_tokens[-1]._replace(text=rest)
        if self._echoes:
            alternatives = self._decode_alternatives(new)
            end_token = TextToken(self._codec, new, "", alternatives)
            self._unsent_tokens.append(end_token)
        return rest

    def _split_at_stop(self, new_text: str, *, is_last: bool) -> tuple[str, bool]:
        """Add text, but hold back an end that may become a stop string.

        Returns:
            The text to send, and True if a stop string ended it.
        """
        text = self._pending + new_text
        starts = [text.find(stop) for stop in self._stops if stop in text]
        if starts:
            return text[: min(starts)], True

        n_pending = 0
        if not is_last:
            for stop in self._stops:
                n_pending = max(n_pending, _overlap(text, stop))
        n_complete = len(text) - n_pending
        self._pending = text[n_complete:]
        return text[:n_complete], False


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of a stop string."""
    longest = min(len(text), len(stop) - 1)
    for n in range(longest, 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


class Reply(Answer):
    """Answer to one request, which is sent while the batch generates it.

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
        super().__init__(batcher, served, limits)
        self._request = request
        in_json = constraint is not None
        options = served.record.completed(request.options(), in_json=in_json)
        self._n = request.n_texts
        self._best = _best_of(request, options)
        n_candidates = max(self._n, self._best.n)
        _check_n_texts(request, n_candidates, len(prompts), limits)
        _check_echo(request, served)

        n_logprobs = request.n_logprobs
        if self._best.n > 1:
            n_logprobs = n_logprobs or 0  # best_of compares likelihoods
        self._orders: list[Order] = []
        for prompt in prompts:
            limit = served.limit_answer(
                prompt, request.requested_tokens, param=request.prompt_field
            )
            for _ in range(n_candidates):
                order = Order(
                    prompt,
                    limit,
                    options,
                    len(self._orders),
                    n_logprobs,
                    constraint=None if constraint is None else constraint.copy(),
                )
                self._orders.append(order)

        if self._best.n > 1:
            self._prompt_texts = [served.codec.decode(prompt) for prompt in prompts]
            with _refuse_request("best_by"):
                self._best.check_prompts(
                    self._prompt_texts,
                    in_json=in_json,
                    knows_recipes=served.record.knows_recipes,
                )

        self._form = request.answer_form(served.name)
        self._prompt_tokens = sum(map(len, prompts))
        self._n_tokens = 0

    async def send_error_event(self, error: RequestError) -> None:
        """Send an error as the last event."""
        await self._send_events([self._form.error_event(error)], is_last=True)

    async def generate(self) -> None:
        """Queue the orders, and send their texts."""
        metrics = self._batcher.metrics
        name = self._served.name
        with self._batcher.ticket(self._served, self._orders) as ticket:
            metrics.prompt_tokens.labels(name).inc(self._prompt_tokens)
            try:
                if self._request.stream:
                    await self._stream(ticket)
                else:
                    await self._send_complete(ticket)
            finally:
                metrics.tokens.labels(name).inc(self._n_tokens)
        metrics.seconds.observe(time.monotonic() - self._start_time)

    async def _pieces(self, ticket: Ticket) -> AsyncIterator[list[Piece]]:
        """Yield pieces of the texts while the batch generates them.

        Raises:
            RequestError: The batch failed, or a text cannot follow its schema.
        """
        codec = self._served.codec
        stops = self._request.stops
        echoes = self._request.echoes
        self._texts = {
            order: _Text(i, codec, stops, echoes=echoes)
            for i, order in enumerate(self._orders)
        }
        async for piece in self._prompt_pieces():
            yield [piece]

        is_first = True
        while not all(text.is_finished for text in self._texts.values()):
            update = await ticket.updates.get()
            if isinstance(update, RequestError):
                raise update
            if is_first:
                seconds = time.monotonic() - self._start_time
                self._batcher.metrics.first_token.observe(seconds)
                is_first = False
            pieces = self._add_tokens(update)
            if pieces:
                yield pieces

    def _add_tokens(self, new_tokens: Sequence[NewToken]) -> list[Piece]:
        """Add the tokens of a round to their texts, and return a piece per unfinished text.

        Raises:
            RequestError: A text cannot follow its schema.
        """
        by_order: defaultdict[Order, list[NewToken]] = defaultdict(list)
        for new in new_tokens:
            if new.end == "stuck" and new.order.constraint is not None:
                message = f"The text {new.order.constraint.fault}"
                raise RequestError(400, message, param=self._request.schema_field)
            by_order[new.order].append(new)

        pieces = []
        for order, tokens in by_order.items():
            text = self._texts[order]
            if text.is_finished:
                continue
            if text.first_time:
                text.n_later_tokens += len(tokens)
            else:
                text.first_time = time.monotonic()
            piece = text.add_tokens(tokens)
            pieces.append(piece)
            # With echo, the tokens include the end token, which does not count.
            self._n_tokens += sum(token.new.end != "stop" for token in piece.tokens)
            if piece.end is not None:
                self._finish(order, text, is_stopped=tokens[-1].end is None)
        return pieces

    def _finish(self, order: Order, text: _Text, *, is_stopped: bool) -> None:
        """Report a text's speed. Cancel the order of a text that a stop string ended."""
        if text.n_later_tokens:
            seconds = time.monotonic() - text.first_time
            speed = self._batcher.metrics.token_seconds
            speed.observe(seconds / text.n_later_tokens)
        if is_stopped:  # the batch does not check stop strings
            self._batcher.cancel([order])

    async def _prompt_pieces(self) -> AsyncIterator[Piece]:
        """Yield the prompts if texts begin with them, with log-probabilities if requested.

        The batch reads one prompt at a time. Other requests continue between prompts, and the
        reading ends when the client disconnects.
        """
        if not self._request.echoes:
            return
        prompt = None
        tokens: list[NewToken] = []
        for order in self._orders:
            if order.prompt is not prompt:  # `n` texts share a prompt
                prompt = order.prompt
                try:
                    tokens = await run_in_threadpool(
                        self._batcher.read_prompt, self._served, order
                    )
                except (RuntimeError, MemoryError) as error:
                    _log.exception("reading a prompt with %s failed", self._served.name)
                    raise internal_error() from error
            is_complete = order.max_tokens == 0
            piece = await run_in_threadpool(
                self._texts[order].add_prompt, tokens, is_complete=is_complete
            )
            if is_complete:
                self._batcher.cancel([order])
            yield piece

    async def _send_complete(self, ticket: Ticket) -> None:
        """Send the answer as one JSON object."""
        texts: list[list[Piece]] = [[] for _ in self._orders]
        async for pieces in self._pieces(ticket):
            for piece in pieces:
                texts[piece.index].append(piece)
        complete = [Piece.join(pieces) for pieces in texts]
        if self._best.n > 1:
            choices = await run_in_threadpool(self._choose_best, complete)
        else:
            choices = [self._form.choice(piece) for piece in complete]
        await self.send_json(self._form.complete(choices, self._usage))

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
                knows_recipes=self._served.record.knows_recipes,
            )
            for number, score in ranked[: self._n]:
                piece = replace(pieces[candidates][number], index=len(choices))
                choice = self._form.choice(piece)
                choices.append(choice | {"best_of": score.record()})
        return choices

    async def _stream(self, ticket: Ticket) -> None:
        """Send pieces of the texts as server-sent events."""
        # Sent with the first pieces, so that an early error has its own status.
        events = self._form.first_events(len(self._orders))
        async for pieces in self._pieces(ticket):
            events += [self._form.event(piece) for piece in pieces if piece.is_visible]
            if events:
                await self._send_events(events)
                events = []
        await self._send_events(self._form.last_events(self._usage), is_last=True)

    @property
    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._n_tokens)

    async def _send_events(
        self, events: Sequence[Json], *, is_last: bool = False
    ) -> None:
        """Send events, after the head of the response if they are the first."""
        if not self.has_started:
            headers = [
                (b"content-type", b"text/event-stream"),
                (b"cache-control", b"no-cache"),
            ]
            start = {"type": "http.response.start", "status": 200, "headers": headers}
            self.has_started = True
            await self._send(start)
        parts = [self._form.encode(event) for event in events]
        if is_last:
            parts.append(self._form.end_mark)
        body = {
            "type": "http.response.body",
            "body": b"".join(parts),
            "more_body": not is_last,
        }
        await self._send(body)


@contextmanager
def _refuse_request(param: str) -> Iterator[None]:
    """Turn a ConfigError raised in the block into a RequestError for `param`."""
    try:
        yield
    except ConfigError as error:
        raise RequestError(400, str(error), param=param) from error


def _check_n_texts(
    request: TextRequest, n_candidates: int, n_prompts: int, limits: Limits
) -> None:
    """Raise a RequestError if a request asks for too many texts."""
    n_texts = n_candidates * n_prompts
    if n_texts <= limits.texts:
        return
    param = request.prompt_field
    if n_candidates > 1:
        param = "best_of" if request.n_candidates > 1 else "n"
    raise RequestError(
        400,
        f"The request is for {n_texts} texts, {n_candidates} per prompt for {n_prompts} prompts. "
        f"The limit is {limits.texts}. Send several requests.",
        param=param,
    )


def _check_echo(request: TextRequest, served: ServedModel) -> None:
    """Raise a RequestError if the model cannot return the prompt, or would return nothing."""
    if request.echoes and served.is_encoder_decoder:
        raise RequestError(
            400,
            "echo must be false, because this model has an encoder for its prompts.",
            param="echo",
        )
    if request.requested_tokens == 0 and not request.echoes:
        raise RequestError(
            400,
            "max_tokens may be 0 only with echo. Send at least 1.",
            param="max_tokens",
        )


def _best_of(request: TextRequest, options: GenerationOptions) -> BestOf:
    """Return the number of texts to choose from, and the score that ranks them.

    Raises:
        RequestError: The fields of the request contradict each other.
    """
    n = request.n_candidates
    best_by = request.ranking
    if best_by is None and n > 1:
        best_by = LIKELIHOOD  # OpenAI's default
    with _refuse_request("best_by"):
        best = BestOf(n, best_by)
    with _refuse_request("best_of"):
        best.check(options, n_results=request.n_texts)
        for name, is_set in (("stream", request.stream), ("echo", request.echoes)):
            if is_set and best.n > 1:
                raise ConfigError(
                    f"best_of is {n} and cannot be combined with {name}, because the server "
                    f"compares complete texts. Leave {name} or best_of out."
                )
    return best
