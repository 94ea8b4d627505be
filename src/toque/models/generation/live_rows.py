"""Live rows: the answers that a model writes at present, which join and leave while it runs.

Each has its own length and its own way of choosing tokens, and neither of them changes what another
is answered. `engine.generate` writes a list of prompts with them, a server what it is asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from toque.models.families import family_of
from toque.models.forward.compile import compile_disabled
from toque.models.forward.packed import output_head
from toque.models.generation.causal import CausalDecoding
from toque.models.generation.constraints import Constraint
from toque.models.generation.int8_argmax import WORTHWHILE_STEPS, Int8Argmax, supports_int8
from toque.models.generation.sampling import TokenChooser, uniform
from toque.models.generation.t5 import T5Decoding

End = Literal["stop", "length"]
"""Reason for the end of an answer: the end token, or the longest length."""


@dataclass(frozen=True, eq=False)
class Order:
    """One answer to be written."""

    prompt: Sequence[int]
    """Token ids, at least one."""
    most_tokens: int
    """The longest answer, which the caller has bounded by the model's positions."""
    chooser: TokenChooser
    number: int = 0
    """Number that, with the chooser's seed and the position, decides the draws."""
    n_likeliest: int | None = None
    """Tokens to report the probabilities of, beside the chosen one's; None for no probabilities."""
    begun: Sequence[int] = ()
    """The answer's first tokens, where they are known: they are read, and told to nobody."""

    @cached_property
    def alike(self) -> TokenChooser:
        """Equal for orders whose tokens are chosen in the same way."""
        return self.chooser.seedless()


class NewToken(NamedTuple):
    """Token that one step wrote for one order."""

    order: Order
    token: int
    end: End | None
    """Set with the last one; the token of "stop" is the end token, no part of the answer."""
    logprob: float | None
    """Natural logarithm of the token's probability before temperature and filters, where asked."""
    likeliest: Sequence[tuple[int, float]]
    """The likeliest tokens at this place with theirs, best first."""


class LiveRows:
    """The rows that a model writes at present, one an order.

    Args:
        core: Without dropout, in evaluation mode, its matrix products as `packed_products` makes
            them.
        rows: The most rows.
        columns: Tokens of the longest row, prompt included, for models that read both together.
        eos_id: Ends an answer.
        pad_id: As `engine.generate` takes it.
        constraint: Takes away tokens that may not come next; it knows orders by their numbers.
    """

    def __init__(
        self,
        core: PreTrainedModel,
        *,
        rows: int,
        columns: int,
        eos_id: int,
        pad_id: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.core, self.rows, self.eos_id = core, rows, eos_id
        self._constraint = constraint
        family = T5Decoding if family_of(core.config).is_encoder_decoder else CausalDecoding
        with self._generating():
            self._decoding = family(core, rows=rows, columns=columns, pad_id=pad_id)
            self._head = Head(core, rows)
        self._bounds: Int8Argmax | None = None
        self.orders: list[Order] = []
        """Orders of the live rows, one each."""
        self._tokens: list[int] = []
        self._answers: list[list[int]] = []

    @contextmanager
    def _generating(self) -> Iterator[None]:
        with torch.inference_mode(), compile_disabled(self.core):
            yield

    def admit(self, orders: Sequence[Order]) -> None:
        """Prefill the prompts of new rows; with the live ones, at most `rows`."""
        orders = sorted(orders, key=lambda order: -len(order.prompt))  # neighbours of like length
        with self._generating():
            if self._bounds is None and any(map(self._pays_bounds, orders)):
                self._bounds = Int8Argmax(self._head.weight, rows=self.rows)
            self._tokens += self._decoding.admit([order.prompt for order in orders])
        self.orders += orders
        self._answers += [[] for _ in orders]

    def _pays_bounds(self, order: Order) -> bool:
        return (
            self._constraint is None
            and order.chooser.is_greedy
            and order.most_tokens >= WORTHWHILE_STEPS
            and supports_int8(self._head.weight, self._head.bias)
        )

    def _by_bounds(self, order: Order) -> bool:
        return self._bounds is not None and order.chooser.is_greedy and order.n_likeliest is None

    def step(self) -> list[NewToken]:
        """The next token of every row but those that read theirs; rows that end leave."""
        news, over = [], []
        with self._generating():
            hidden = self._decoding.step(torch.tensor(self._tokens, device=self.core.device))
            self._tokens, shares = self._choose(hidden)
            for row, token in enumerate(self._tokens):
                order, answer = self.orders[row], self._answers[row]
                answer.append(token)
                if len(answer) <= len(order.begun):
                    continue
                new = self._new_token(row, shares.get(row))
                news.append(new)
                if new.end is not None:
                    over.append(row)
            for row in reversed(over):
                self._drop(row)
        return news

    def drop(self, order: Order) -> None:
        """Free the row of an order that is no longer wanted; nothing where it has ended."""
        if order in self.orders:
            with self._generating():  # the cache is moved, and inference mode made it
                self._drop(self.orders.index(order))

    def _drop(self, row: int) -> None:
        self._decoding.drop(row)
        self.orders[row], self._tokens[row] = self.orders[-1], self._tokens[-1]
        self._answers[row] = self._answers[-1]
        for column in (self.orders, self._tokens, self._answers):
            column.pop()

    def _choose(
        self, hidden: Tensor
    ) -> tuple[list[int], dict[int, tuple[float, list[tuple[int, float]]]]]:
        """A token a row, and the probabilities that were asked for; alike rows choose together."""
        tokens = [0] * len(self.orders)
        shares: dict[int, tuple[float, list[tuple[int, float]]]] = {}
        by_bounds: list[int] = []
        alike: defaultdict[TokenChooser, list[int]] = defaultdict(list)
        for row, (order, answer) in enumerate(zip(self.orders, self._answers, strict=True)):
            if len(answer) < len(order.begun):
                tokens[row] = order.begun[len(answer)]
            elif self._by_bounds(order):
                by_bounds.append(row)
            else:
                alike[order.alike].append(row)
        if by_bounds and self._bounds is not None:
            chosen = self._bounds(_part(hidden, by_bounds)).tolist()
            for row, token in zip(by_bounds, chosen, strict=True):
                tokens[row] = token
        for chooser, rows in alike.items():
            logits = self._constrained(self._head(_part(hidden, rows)), rows)
            chosen = chooser.at(logits, [self._draw(row) for row in rows]).tolist()
            for row, token in zip(rows, chosen, strict=True):
                tokens[row] = token
            shares |= self._shares(logits, rows, chosen)
        return tokens, shares

    def _constrained(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        if self._constraint is None:
            return logits
        numbers = [self.orders[row].number for row in rows]
        return self._constraint(
            logits, prompts=numbers, answers=[self._answers[row] for row in rows]
        )

    def _draw(self, row: int) -> float:
        order = self.orders[row]
        return uniform(order.chooser.seed, order.number, len(self._answers[row]))

    def _shares(
        self, logits: Tensor, rows: Sequence[int], chosen: Sequence[int]
    ) -> dict[int, tuple[float, list[tuple[int, float]]]]:
        """Log-probability of the chosen token and the likeliest tokens, where requested."""
        found = {}
        for place, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            n = self.orders[row].n_likeliest
            if n is None:
                continue
            logs = logits[place].float().log_softmax(-1)
            best = logs.topk(min(n, len(logs)))
            pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            found[row] = (float(logs[token]), pairs)
        return found

    def _new_token(self, row: int, share: tuple[float, list[tuple[int, float]]] | None) -> NewToken:
        order, answer = self.orders[row], self._answers[row]
        end: End | None = None
        if answer[-1] == self.eos_id:
            end = "stop"
        elif len(answer) >= order.most_tokens:
            end = "length"
        logprob, likeliest = share or (None, [])
        return NewToken(order, answer[-1], end, logprob, likeliest)


def _part(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of [n, D]; all of them without a copy."""
    return hidden if len(rows) == len(hidden) else hidden[rows]


class Head:
    """The output head, which writes its logits into one buffer on a CPU.

    A CPU's allocator takes these megabytes from the system and gives them back every time;
    touching fresh pages cost a third of the product (45 ms against 32 ms for 64 rows of 50,257
    logits).
    """

    def __init__(self, core: PreTrainedModel, rows: int) -> None:
        self.weight, self.bias = output_head(core)
        on_cpu = core.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        self.buffer = self.weight.new_empty(rows, len(self.weight)) if on_cpu else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, D] -> [n, V], good until the next call."""
        if self.buffer is None:
            return F.linear(hidden, self.weight, self.bias)
        logits = torch.mm(hidden, self.weight.T, out=self.buffer[: len(hidden)])
        return logits if self.bias is None else logits.add_(self.bias)
