"""Served models, and the batch of all requests, which one thread computes.

The event loop owns the queue. It sends rounds of decoding steps to the thread, in which models and
adapters take turns. A round first frees the rows of clients that disconnected, then fills free rows
from the queue. It ends when a text begins or ends, when the event loop needs the thread, or after
ROUND_SECONDS.
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
from typing import Final, TypeVar

from starlette.concurrency import run_in_threadpool
from torch import Tensor
from transformers import PreTrainedModel

from toque.data.tokenizer.chat import ChatTemplate, prompt_ids
from toque.data.tokenizer.codec import Codec, FamilyKind
from toque.hardware.memory import free_bytes
from toque.models.config_values import max_positions
from toque.models.families import family_of
from toque.models.generation.constraints import ConstraintCompiler
from toque.models.generation.embeddings import embed_texts
from toque.models.generation.engine import choose_program, resolve_precision
from toque.models.generation.kv_cache import PREFILL_TOKENS
from toque.models.generation.live_rows import LiveRows, NewToken, Order
from toque.models.generation.options import Precision
from toque.models.generation.packed_products import Packs, with_packed_products
from toque.models.generation.prefixes import PrefixCache
from toque.models.loading.provenance import Provenance
from toque.models.lora.adapter_files import use_adapter
from toque.models.lora.frozen import computing
from toque.serving.batch_metrics import BatchMetrics
from toque.serving.request_errors import RequestError, internal_error

T = TypeVar("T")
_log = logging.getLogger("toque.serving")

ROUND_SECONDS: Final = 0.1
"""Maximum time of a round, i.e. between two pieces of a text that a client receives.

An event costs about a millisecond of both cores, including the client's work on the same machine.
A reader does not notice the delay.
"""
_PREFIX_BYTES: Final = 512 << 20
"""Maximum size of the keys and values of a model's finished texts."""
_PREFIX_SHARE: Final = 1 / 8
"""Maximum share of the free memory for them."""
UNLIMITED_TOKENS: Final = 2048
"""Maximum tokens of a prompt, and of an answer, if the context length is unlimited (as in T5).
"""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Model that requests can name: a model, or an adapter on a base that adapters share."""

    name: str
    model: PreTrainedModel
    codec: Codec
    record: Provenance
    to_prompt: Callable[[str], str]
    """Function that rewrites the user's text as a prompt in the training format."""
    adapter: str | None = None
    """Name of the adapter inside `model`; None for the model without an adapter."""
    base: str | None = None
    """Name under which the adapter's base model is served."""
    chat: ChatTemplate | None = None
    """Chat template, if the model was trained on conversations."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Time of creation, in seconds since 1970."""

    @property
    def description(self) -> dict[str, object]:
        """Entry of the model in /v1/models."""
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
        """True if an encoder reads the prompts."""
        return family_of(self.model.config).is_encoder_decoder

    @cached_property
    def context_tokens(self) -> int:
        """Maximum tokens of a prompt, or of prompt and answer together for a decoder-only model."""
        return max_positions(self.model.config) or UNLIMITED_TOKENS

    @cached_property
    def constraint_compiler(self) -> ConstraintCompiler:
        """Compiler of constraints for the model's vocabulary.

        Raises:
            ConfigError: llguidance does not support the tokenizer.
        """
        return ConstraintCompiler(self.codec)

    def prompt_ids(self, prompt: str) -> list[int]:
        """Tokenize a prompt without a template. For conversations use `chat`."""
        kind: FamilyKind = "encoder-decoder" if self.is_encoder_decoder else "decoder"
        return prompt_ids(self.codec, prompt, kind, self.record.form, raw=True)

    def limit_answer(
        self, prompt: Sequence[int], requested: int | None, *, param: str
    ) -> int:
        """Compute the maximum number of tokens in the answer to a prompt.

        Args:
            prompt: Token ids of the prompt.
            requested: The requested limit, or None for the limit that the model was trained with.
            param: Name of the request field with the prompt.

        Raises:
            RequestError: The prompt is empty or too long, or has unknown ids.
        """
        self.check_prompt(prompt, param)
        tokens = self.record.max_new_tokens if requested is None else requested
        if self.is_encoder_decoder:
            return min(tokens, self.context_tokens)
        # The model never reads the last new token, so this token needs no position.
        return min(tokens, self.context_tokens - len(prompt) + 1)

    def check_ids(self, ids: Iterable[int], param: str, *, advice: str = "") -> None:
        """Raise a RequestError if the vocabulary does not have an id of the field `param`.

        The message ends with the advice.
        """
        vocabulary_size = self.model.config.vocab_size
        if not all(0 <= token < vocabulary_size for token in ids):
            raise RequestError(
                400,
                f"{param} has ids that are not in the vocabulary. Send ids from 0 to "
                f"{vocabulary_size - 1:,}.{advice}",
                param=param,
            )

    def check_prompt(
        self, prompt: Sequence[int], param: str, *, advice: str = ""
    ) -> None:
        """Raise a RequestError if the prompt is empty or too long, or has unknown ids.

        The message about unknown ids ends with the advice.
        """
        if not prompt:
            raise RequestError(
                400, f"{param} is empty. Send at least one token.", param=param
            )
        self.check_ids(prompt, param, advice=advice)
        limit = self.context_tokens
        if len(prompt) > limit:
            raise RequestError(
                400,
                f"This model's maximum context length is {limit:,} tokens, but {param} is "
                f"{len(prompt):,} tokens long. Shorten the text.",
                param=param,
                code="context_length_exceeded",
            )


class ServedModels(dict[str, ServedModel]):
    """Models of a server by name, in the order of the command line."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        super().__init__((model.name, model) for model in models)

    def get_model(self, name: str) -> ServedModel:
        """Look up the model of a request.

        Raises:
            RequestError: With status 404 if the server does not have this model.
        """
        if name not in self:
            raise RequestError(
                404,
                f"The model {name[:100]!r} does not exist. This server has: {', '.join(self)}.",
                param="model",
                code="model_not_found",
            )
        return self[name]


@dataclass(frozen=True, eq=False)
class Ticket:
    """Orders of one request, and the queue of their new tokens."""

    served: ServedModel
    orders: Sequence[Order]
    updates: asyncio.Queue[list[NewToken] | RequestError] = field(
        default_factory=asyncio.Queue
    )
    """Queue of the new tokens of each round, or the error that ended the batch."""


class Batcher:
    """Batch that generates the texts of all requests, from `start` to `close`.

    The event loop calls the methods, except `read_prompt`, `embed`, `run_between_steps` and
    `add`, which block.

    Args:
        models: The served models.
        rows: Maximum number of orders that are generated at the same time, for all models together.
        queue: Maximum number of waiting orders.
        precision: Precision of the matmuls.
    """

    def __init__(
        self,
        models: ServedModels,
        *,
        rows: int,
        queue: int,
        precision: Precision = "float32",
    ) -> None:
        self.rows = rows
        self.queue = queue
        self._precision = precision
        self.metrics = BatchMetrics(self)
        self._active_adapters: dict[PreTrainedModel, str | None] = {}
        self._models = models
        self._packs: defaultdict[PreTrainedModel, Packs] = defaultdict(dict)
        self._rows: dict[str, LiveRows | None] = {}  # None after a failure
        for served in models.values():
            self._add_rows(served)
        self._waiting: deque[tuple[Order, Ticket]] = deque()
        # Orders without new tokens, which request log-probabilities or embeddings of prompts.
        self._prompt_only: dict[Order, Ticket] = {}
        self._live: dict[Order, Ticket] = {}
        self._leaving: set[Order] = set()
        self._changed = asyncio.Event()
        self._must_end_round = False  # the thread reads it after each step
        self._thread = ThreadPoolExecutor(1, "toque-batch")
        self._rounds: asyncio.Task[None] | None = None

    @property
    def n_waiting(self) -> int:
        """Number of orders in the queue, including orders without new tokens."""
        return len(self._waiting) + len(self._prompt_only)

    @property
    def n_live(self) -> int:
        """Number of orders that are being generated."""
        return len(self._live)

    @property
    def prefixes(self) -> list[PrefixCache]:
        """Finished texts of each model, for prompts that begin with them."""
        every = [rows.prefixes for rows in self._rows.values() if rows is not None]
        return [prefixes for prefixes in every if prefixes is not None]

    def start(self) -> None:
        """Start the rounds as a task of the running event loop."""
        self._rounds = asyncio.get_running_loop().create_task(self._run_rounds())

    def close(self) -> None:
        """Stop the thread after its current step, and drop unfinished texts."""
        if self._rounds is not None:
            self._rounds.cancel()
        self._must_end_round = True
        self._thread.shutdown(cancel_futures=True)

    @contextmanager
    def ticket(self, served: ServedModel, orders: Sequence[Order]) -> Iterator[Ticket]:
        """Queue the orders of one request, and remove them at the end of the block.

        Raises:
            RequestError: With status 429 if the queue is full, 400 if the request has too many
                orders for the queue, or 503 if the model was removed meanwhile.
        """
        if self._models.get(served.name) is not served:
            raise RequestError(
                503,
                f"The model {served.name[:100]!r} was closed meanwhile. Open it again.",
                headers={"Retry-After": "1"},
            )
        max_texts = self.rows + self.queue
        if len(orders) > max_texts:
            raise RequestError(
                400,
                f"The request is for {len(orders)} texts, but this server generates and queues at "
                f"most {max_texts} at a time. Request fewer texts.",
            )
        if len(orders) > max_texts - self.n_live - self.n_waiting:
            raise RequestError(
                429,
                "The queue of this server is full. Try again in a moment.",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )

        ticket = Ticket(served, orders)
        for order in orders:
            if order.max_tokens:
                self._waiting.append((order, ticket))
            else:
                self._prompt_only[order] = ticket
        self._wake()
        try:
            yield ticket
        finally:
            self.cancel(orders)

    def cancel(self, orders: Collection[Order]) -> None:
        """Remove orders from the queue and the rows. Finished orders are ignored."""
        self._waiting = deque(
            entry for entry in self._waiting if entry[0] not in orders
        )
        for order in orders:
            self._prompt_only.pop(order, None)
        if live := self._live.keys() & orders:
            self._leaving |= live
            for order in live:
                del self._live[order]
            self._wake()

    def read_prompt(self, served: ServedModel, order: Order) -> list[NewToken]:
        """Return the logprobs of a prompt's tokens; see `LiveRows.read`. Block until then."""

        def read() -> list[NewToken]:
            with computing(served.model):
                return self._rows_of(served).read(order)

        return self.run_between_steps(served, read)

    def embed(self, served: ServedModel, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the embeddings of texts; see `embed_texts`. Block until then."""

        def embed() -> Tensor:
            with computing(served.model):
                core = self._rows_of(served).core
                return embed_texts(core, texts, pad_id=served.codec.pad_id)

        return self.run_between_steps(served, embed)

    def run_between_steps(self, served: ServedModel, work: Callable[[], T]) -> T:
        """Call `work` in the thread, with the model's adapter active. Block until it returns."""

        def activate_and_work() -> T:
            self._activate(served)
            return work()

        return self._call_between_steps(activate_and_work)

    def add(self, served: ServedModel) -> None:
        """Add a model to the served models. Block until the thread has prepared it."""

        def add_between_steps() -> None:
            self._add_rows(served)
            self._models[served.name] = served

        self._call_between_steps(add_between_steps)

    async def remove(self, name: str) -> bool:
        """Remove a model without orders, and free its memory.

        Returns:
            False if the model has orders, so that it was not removed.
        """
        tickets = [*self._live.values(), *self._prompt_only.values()]
        tickets += [ticket for _, ticket in self._waiting]
        if any(ticket.served.name == name for ticket in tickets):
            return False
        served = self._models.pop(name)  # it receives no more orders

        def free() -> None:
            del self._rows[name]
            is_shared = any(
                other.model is served.model for other in self._models.values()
            )
            if not is_shared:
                self._packs.pop(served.model, None)
                self._active_adapters.pop(served.model, None)

        await run_in_threadpool(self._call_between_steps, free)
        return True

    def _call_between_steps(self, work: Callable[[], T]) -> T:
        """Call `work` in the thread. Block until it returns."""
        self._must_end_round = True  # the thread would finish its round first
        return self._thread.submit(work).result()

    def _wake(self) -> None:
        """Start the next round, so that it takes the queue's changes into account."""
        self._must_end_round = True
        self._changed.set()

    async def _run_rounds(self) -> None:
        """Run rounds while there are orders, and wait for orders otherwise."""
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting or self._live or self._leaving:
                joining = self._take_from_queue()
                leaving = self._leaving
                self._leaving = set()
                self._must_end_round = False
                run_round = partial(self._run_round, joining, leaving)
                tokens, failed = await loop.run_in_executor(self._thread, run_round)
                self._deliver(tokens, failed)

    def _take_from_queue(self) -> dict[str, list[Order]]:
        """Take orders for free rows from the queue, by model, up to the tokens of one prefill."""
        n_tokens = 0
        joining: dict[str, list[Order]] = {}
        while self._waiting and self.n_live < self.rows and n_tokens < PREFILL_TOKENS:
            order, ticket = self._waiting.popleft()
            self._live[order] = ticket
            joining.setdefault(ticket.served.name, []).append(order)
            n_tokens += len(order.prompt)
        return joining

    def _deliver(self, new_tokens: Sequence[NewToken], failed: Collection[str]) -> None:
        """Send the new tokens of a round to their tickets, and cancel orders of failed models."""
        by_ticket: defaultdict[Ticket, list[NewToken]] = defaultdict(list)
        for new in new_tokens:
            if new.order in self._live:  # the client has not disconnected
                by_ticket[self._live[new.order]].append(new)
                if new.end is not None:
                    del self._live[new.order]
        for ticket, tokens in by_ticket.items():
            ticket.updates.put_nowait(tokens)
        failed_tickets = {
            ticket for ticket in self._live.values() if ticket.served.name in failed
        }
        for ticket in failed_tickets:
            ticket.updates.put_nowait(internal_error())
            self.cancel(ticket.orders)

    def _run_round(
        self, joining: dict[str, list[Order]], leaving: Collection[Order]
    ) -> tuple[list[NewToken], set[str]]:
        """Run steps of all rows, in the thread.

        Returns:
            The new tokens, and the names of the models that failed.
        """
        failed: set[str] = set()
        end_time = time.monotonic() + ROUND_SECONDS
        for served in [*self._models.values()]:  # the event loop may remove one
            if leaving or served.name in joining:
                with self._isolate_failure(served, failed):
                    self._change_rows(served, joining.get(served.name, ()), leaving)

        new_tokens: list[NewToken] = []
        is_urgent = bool(joining)  # send the first tokens of new texts immediately
        while True:
            step_tokens = self._step_all(failed)
            new_tokens += step_tokens
            is_urgent = is_urgent or any(new.end for new in step_tokens)
            is_over = is_urgent or self._must_end_round or time.monotonic() >= end_time
            if is_over or not step_tokens:
                return new_tokens, failed

    def _change_rows(
        self,
        served: ServedModel,
        joining: Sequence[Order],
        leaving: Collection[Order],
    ) -> None:
        """Free the rows of leaving orders, and admit joining orders, for one active model."""
        rows = self._rows_of(served) if joining else self._rows[served.name]
        if rows is None:  # after a failure, all orders of the model have left
            return
        for order in leaving:
            rows.drop(order)
        if joining:
            rows.admit(joining)

    def _step_all(self, failed: set[str]) -> list[NewToken]:
        """Run one step of every model with live rows. Add failed models to `failed`."""
        new_tokens: list[NewToken] = []
        for name, rows in self._rows.items():
            if rows is not None and rows.orders:
                with self._isolate_failure(self._models[name], failed):
                    new_tokens += rows.step()
        return new_tokens

    @contextmanager
    def _isolate_failure(self, served: ServedModel, failed: set[str]) -> Iterator[None]:
        """Activate a model for the block. An error ends its rows, but not other models' rows."""
        try:
            self._activate(served)
            with computing(served.model):
                yield
        except Exception:  # noqa: BLE001  # out of memory, an error of the model, or our bug
            _log.exception("generating with %s failed", served.name)
            self._rows[served.name] = None  # the rows may be in any state
            failed.add(served.name)

    def _rows_of(self, served: ServedModel) -> LiveRows:
        """Return the rows of the active model. Create them again after a failure."""
        rows = self._rows[served.name]
        if rows is None:
            rows = self._rows[served.name] = self._new_rows(served)
        return rows

    def _add_rows(self, served: ServedModel) -> None:
        """Create the rows of a new model."""
        self._activate(served)
        with computing(served.model):
            self._rows[served.name] = self._new_rows(served)

    def _new_rows(self, served: ServedModel) -> LiveRows:
        """Create the rows of the active model."""
        precision = resolve_precision(self._precision, served.model)
        columns = served.context_tokens
        if not served.is_encoder_decoder:
            columns += 1  # the last new token has no position
        return LiveRows(
            with_packed_products(served.model, precision, self._packs[served.model]),
            rows=self.rows,
            columns=columns,
            eos_id=served.codec.end_ids,
            pad_id=served.codec.pad_id,
            prefix_bytes=min(
                _PREFIX_BYTES, int(_PREFIX_SHARE * free_bytes(served.model.device))
            ),
            open_program=choose_program(self._precision, served.model),
        )

    def _activate(self, served: ServedModel) -> None:
        """Activate the served adapter, or no adapter for a base that adapters share."""
        if not hasattr(served.model, "peft_config"):
            return
        active = self._active_adapters.get(served.model, "")  # "" before the first use
        if active != served.adapter:
            use_adapter(served.model, served.adapter)
            self._active_adapters[served.model] = served.adapter
