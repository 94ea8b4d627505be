"""Served models, and their batch: one thread computes, and all requests share its steps.

The event loop holds the queue and sends the thread rounds of steps, in which models and adapters
take turns. A round begins by freeing rows of clients that went away and filling free rows from the
queue; it ends when a text begins or ends, when somebody asks, or after ROUND_SECONDS.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from transformers import PreTrainedModel

from toque.data.tokenizer.chat import ChatTemplate, prompt_ids
from toque.data.tokenizer.codec import Codec, FamilyKind
from toque.models.families import family_of, max_positions
from toque.models.generation.constraints import HeldVocabulary
from toque.models.generation.engine import precision_here
from toque.models.generation.kv_cache import PREFILL_TOKENS
from toque.models.generation.live_rows import LiveRows, NewToken, Order
from toque.models.generation.options import Precision
from toque.models.generation.packed_products import Packs, with_packed_products
from toque.models.loading.provenance import Provenance
from toque.models.lora.adapter_files import use_adapter
from toque.models.lora.frozen import computing
from toque.serving.server import RequestError

T = TypeVar("T")
_log = logging.getLogger("toque.serving")

ROUND_SECONDS: Final = 0.1
"""Between two pieces of a text that go to its client. An event costs about a millisecond of both
cores, the client's work on the same machine included; a reader does not see the difference."""
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
UNLIMITED_TOKENS: Final = 2048  # longest prompt, and answer, where positions have no end (T5)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One name that can be asked: a model, or one adapter on a base that several share."""

    name: str
    model: PreTrainedModel
    codec: Codec
    record: Provenance
    asked: Callable[[str], str]  # what a person types -> the prompt that the model was trained on
    adapter: str | None = None  # name of the adapter inside `model`; None for the model alone
    base: str | None = None  # served name of the model that the adapter lies on
    chat: ChatTemplate | None = None  # of a model that was trained to converse
    created: int = field(default_factory=lambda: int(time.time()))  # in seconds since 1970

    @property
    def description(self) -> dict[str, object]:
        """The model as /v1/models lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "toque",
            "parent": self.base,
            "max_model_len": self.context_tokens,
        }

    @cached_property
    def is_encoder_decoder(self) -> bool:
        """True where prompts are read on a side of their own."""
        return family_of(self.model.config).is_encoder_decoder

    @cached_property
    def context_tokens(self) -> int:
        """Tokens of the longest prompt; of prompt and answer together where one row holds both."""
        return max_positions(self.model.config) or UNLIMITED_TOKENS

    @cached_property
    def vocabulary(self) -> HeldVocabulary:
        """The vocabulary for texts that are held to a form; ConfigError where that cannot be."""
        return HeldVocabulary(self.codec)

    def prompt_ids(self, prompt: str) -> list[int]:
        """A prompt as it is, in no template: a conversation is asked by `chat`."""
        kind: FamilyKind = "encoder-decoder" if self.is_encoder_decoder else "decoder"
        return prompt_ids(self.codec, prompt, kind, self.record.form, raw=True)

    def most_tokens(self, prompt: Sequence[int], most: int | None, *, param: str) -> int:
        """Tokens of the longest answer to a prompt, of at most `most` (None: as it was trained).

        An empty or too long prompt, or one of other ids, is a RequestError about the field `param`.
        """
        limit, vocabulary = self.context_tokens, self.model.config.vocab_size
        wrong, code = "", None
        if not prompt:
            wrong = f"{param} holds no tokens, and a model needs one to begin from."
        elif not all(0 <= token < vocabulary for token in prompt):
            wrong = f"{param} holds other ids than the model's, which are 0 to {vocabulary - 1:,}."
        elif len(prompt) > limit:
            code = "context_length_exceeded"
            wrong = (
                f"This model's maximum context length is {limit:,} tokens, and the prompt has "
                f"{len(prompt):,}. Shorten the prompt."
            )
        if wrong:
            raise RequestError(400, wrong, param=param, code=code)
        wanted = self.record.max_new_tokens if most is None else most
        # The last new token is never read back, so it needs no position.
        return min(wanted, limit if self.is_encoder_decoder else limit - len(prompt) + 1)


class ServedModels(dict[str, ServedModel]):
    """The models of a server by their names, in the order they were given."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        super().__init__((model.name, model) for model in models)

    def named(self, name: str) -> ServedModel:
        """The model of a request; RequestError 404 where none has this name."""
        if name not in self:
            raise RequestError(
                404,
                f"The model {name[:100]!r} does not exist here. There are: {', '.join(self)}.",
                param="model",
                code="model_not_found",
            )
        return self[name]


@dataclass(frozen=True, eq=False)
class Ticket:
    """A request's place in the batch."""

    served: ServedModel
    orders: Sequence[Order]
    news: asyncio.Queue[list[NewToken] | RequestError] = field(default_factory=asyncio.Queue)
    """The tokens of each round; the error, where the batch could not go on."""


class Batcher:
    """Writes for all requests, between `start` and `close`; the event loop calls its methods.

    At most `rows` orders are written at a time, over all models, and `queue` wait beside them;
    `precision` is that of their products.
    """

    def __init__(
        self, models: ServedModels, *, rows: int, queue: int, precision: Precision = "float32"
    ) -> None:
        self.rows, self.queue = rows, queue
        self._precision = precision
        self.metrics = _Metrics(self)
        self._active: dict[PreTrainedModel, str | None] = {}
        self._models = models
        self._packs: Packs = {}
        self._rows: dict[str, LiveRows | None] = {}  # None after a failure
        for name, served in models.items():
            self._activate(served)
            with computing(served.model):
                self._rows[name] = self._made(served)
        self._waiting: deque[tuple[Order, Ticket]] = deque()
        self._read: set[Order] = set()  # of which the prompt is all that is asked for
        self._live: dict[Order, Ticket] = {}
        self._leaving: set[Order] = set()
        self._changed = asyncio.Event()
        self._is_wanted = False  # read by the thread, whose round ends then
        self._thread = ThreadPoolExecutor(1, "toque-batch")
        self._rounds: asyncio.Task[None] | None = None

    @property
    def n_waiting(self) -> int:
        """Orders in the queue, those among them of which the prompt alone will be read."""
        return len(self._waiting) + len(self._read)

    @property
    def n_live(self) -> int:
        """Orders being written."""
        return len(self._live)

    def start(self) -> None:
        """Begin to compute for the event loop that runs now."""
        self._rounds = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """End the thread after the step it is in; what is unfinished is left."""
        if self._rounds is not None:
            self._rounds.cancel()
        self._is_wanted = True
        self._thread.shutdown(cancel_futures=True)

    @contextmanager
    def ticket(self, served: ServedModel, orders: Sequence[Order]) -> Iterator[Ticket]:
        """Queue the orders of one request, and free their places in the end.

        RequestError 429 where there is no room now, 400 where there never is.
        """
        if len(orders) > (most := self.rows + self.queue):
            raise RequestError(
                400,
                f"The request asks for {len(orders)} texts, and this server writes and queues "
                f"{most} at a time. Ask for fewer.",
            )
        if len(orders) > self.rows - self.n_live + self.queue - self.n_waiting:
            raise RequestError(
                429,
                "As many requests wait as this server lets wait. Try again in a moment.",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        ticket = Ticket(served, orders)
        self._waiting.extend((order, ticket) for order in orders if order.most_tokens)
        self._read.update(order for order in orders if not order.most_tokens)
        self._wake()
        try:
            yield ticket
        finally:
            self.cancel(orders)

    def cancel(self, orders: Collection[Order]) -> None:
        """Free the places of orders; nothing where they have ended."""
        self._waiting = deque(place for place in self._waiting if place[0] not in orders)
        self._read.difference_update(orders)
        if live := self._live.keys() & orders:
            self._leaving |= live
            for order in live:
                del self._live[order]
            self._wake()

    def read(self, served: ServedModel, order: Order) -> list[NewToken]:
        """The tokens of an order's prompt, see `LiveRows.read`; not in the event loop."""

        def call() -> list[NewToken]:
            with computing(served.model):
                return self._rows_of(served).read(order)

        return self.run(served, call)

    def run(self, served: ServedModel, work: Callable[[], T]) -> T:
        """Call `work` between two steps, with the model's adapter active; not in the event loop."""

        def call() -> T:
            self._activate(served)
            return work()

        self._is_wanted = True
        return self._thread.submit(call).result()

    def _wake(self) -> None:
        self._is_wanted = True
        self._changed.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting or self._live or self._leaving:
                joining, leaving, self._leaving = self._joining(), self._leaving, set()
                self._is_wanted = False
                steps = partial(self._round, joining, leaving)
                self._deliver(*await loop.run_in_executor(self._thread, steps))

    def _joining(self) -> dict[str, list[Order]]:
        """Take from the queue what has room now, at most one prefill's worth of prompt tokens."""
        tokens = 0
        joining: dict[str, list[Order]] = {}
        while self._waiting and self.n_live < self.rows and tokens < PREFILL_TOKENS:
            order, ticket = self._waiting.popleft()
            self._live[order] = ticket
            joining.setdefault(ticket.served.name, []).append(order)
            tokens += len(order.prompt)
        return joining

    def _deliver(self, news: Sequence[NewToken], failed: Collection[str]) -> None:
        """Hand over what a round wrote, and give up what models that failed were writing."""
        by_ticket: defaultdict[Ticket, list[NewToken]] = defaultdict(list)
        for new in news:
            if new.order in self._live:  # else its client has gone
                by_ticket[self._live[new.order]].append(new)
                if new.end is not None:
                    del self._live[new.order]
        for ticket, own in by_ticket.items():
            ticket.news.put_nowait(own)
        for ticket in {one for one in self._live.values() if one.served.name in failed}:
            ticket.news.put_nowait(failure())
            self.cancel(ticket.orders)

    def _round(
        self, joining: dict[str, list[Order]], leaving: Collection[Order]
    ) -> tuple[list[NewToken], set[str]]:
        """Steps of all rows, in the thread: the tokens, and the models that failed."""
        news: list[NewToken] = []
        failed: set[str] = set()
        end = time.monotonic() + ROUND_SECONDS
        for name, served in self._models.items():
            if leaving or name in joining:
                with self._surviving(name, failed):
                    rows = self._rows_of(served) if name in joining else self._rows[name]
                    if rows is not None:
                        for order in leaving:
                            rows.drop(order)
                        if name in joining:
                            rows.admit(joining[name])
        is_urgent = bool(joining)  # whose first tokens are due
        while True:
            is_live = False
            for name, rows in self._rows.items():
                if rows is not None and rows.orders:
                    with self._surviving(name, failed):
                        new = rows.step()
                        is_live, is_urgent = True, is_urgent or any(one.end for one in new)
                        news += new
            if not is_live or is_urgent or self._is_wanted or time.monotonic() >= end:
                return news, failed

    @contextmanager
    def _surviving(self, name: str, failed: set[str]) -> Iterator[None]:
        """Work of one model; whatever fails in it, the others go on."""
        try:
            self._activate(self._models[name])
            with computing(self._models[name].model):
                yield
        except Exception:  # noqa: BLE001  # memory, the model, a mistake of ours
            _log.exception("writing with %s failed", name)
            self._rows[name] = None  # may be in any state
            failed.add(name)

    def _rows_of(self, served: ServedModel) -> LiveRows:
        """Rows of a model whose adapter is active; new ones, which stay, after a failure."""
        rows = self._rows[served.name]
        if rows is None:
            rows = self._rows[served.name] = self._made(served)
        return rows

    def _made(self, served: ServedModel) -> LiveRows:
        """Rows of a model whose adapter is active."""
        return LiveRows(
            with_packed_products(
                served.model, precision_here(self._precision, served.model), self._packs
            ),
            rows=self.rows,
            columns=served.context_tokens + (0 if served.is_encoder_decoder else 1),
            eos_id=served.codec.end_ids,
            pad_id=served.codec.pad_id,
        )

    def _activate(self, served: ServedModel) -> None:
        """Make a model's adapter the active one of its base, where the base has any."""
        has_adapters = hasattr(served.model, "peft_config")
        if has_adapters and self._active.get(served.model, "") != served.adapter:
            use_adapter(served.model, served.adapter)
            self._active[served.model] = served.adapter


class _Metrics:
    """Counts and times of requests and of a batcher's queue and rows, for Prometheus."""

    def __init__(self, batcher: Batcher) -> None:
        registry = self._registry = CollectorRegistry()
        count: Any = partial(Counter, registry=registry)
        time_of: Any = partial(Histogram, registry=registry)
        gauge: Any = partial(Gauge, registry=registry)
        by_answer = ("path", "status")
        self._answers = count("toque_requests", "Answered requests by path and status.", by_answer)
        self.prompt_tokens = count("toque_prompt_tokens", "Tokens of prompts.", ("model",))
        self.tokens = count("toque_tokens", "Tokens written.", ("model",))
        self.gone = count("toque_clients_gone", "Requests whose client went away.")
        since = "From a request's arrival to its"
        first, last = f"{since} first token.", f"{since} last token."
        self.first_token = time_of("toque_first_token_seconds", first, buckets=_BUCKETS)
        self.seconds = time_of("toque_request_seconds", last, buckets=_BUCKETS)
        between = "Mean of a text, from its first token to its last; one value a text."
        name = "toque_time_per_output_token_seconds"
        self.token_seconds = time_of(name, between, buckets=_TOKEN_BUCKETS)
        gauge("toque_waiting_texts", "Texts in the queue.").set_function(lambda: batcher.n_waiting)
        gauge("toque_live_texts", "Texts being written.").set_function(lambda: batcher.n_live)

    def count_answer(self, path: str, status: int) -> None:
        self._answers.labels(path, status).inc()

    def page(self) -> bytes:
        return generate_latest(self._registry)


def failure() -> RequestError:
    """A mistake of ours, or the machine ran out of memory; the log says which."""
    return RequestError(
        500, "The server could not write this answer; its log says why.", code="internal_error"
    )
