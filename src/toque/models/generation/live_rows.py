"""Generation that prompts join and leave while it runs, as a server needs it.

`engine.generate` knows all prompts beforehand; here each has its own length and its own way of
choosing tokens, and neither of them changes what another is answered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toque.models.families import family_of
from toque.models.forward.compile import compile_disabled
from toque.models.generation.causal import CausalDecoding
from toque.models.generation.engine import Head
from toque.models.generation.int8_argmax import Int8Argmax, supports_int8
from toque.models.generation.packed_products import Packs, with_fast_products
from toque.models.generation.sampling import TokenChooser, uniform
from toque.models.generation.t5 import T5Decoding

End = Literal["stop", "length"]
"""Why an answer ended: the end token, or its longest length."""


@dataclass(frozen=True, eq=False)
class Order:
    """One answer to be written."""

    prompt: Sequence[int]
    """Token ids, at least one."""
    most_tokens: int
    """The longest answer, which the caller has bounded by the model's positions."""
    chooser: TokenChooser
    number: int = 0
    """With the chooser's seed and the position, decides the draws."""
    n_likeliest: int | None = None
    """Tokens to report the probabilities of, beside the chosen one's; None for no probabilities."""


class NewToken(NamedTuple):
    """What one step wrote for one order."""

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
        model: Without dropout, in evaluation mode.
        rows: The most rows.
        columns: Tokens of the longest row, prompt included, for models that read both together.
        eos_id: Ends an answer.
        pad_id: As `engine.generate` takes it.
        packs: Packed weights, shared by the rows of all adapters on one base.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int,
        columns: int,
        eos_id: int,
        pad_id: int,
        packs: Packs | None = None,
    ) -> None:
        self.model, self.rows, self.eos_id = model, rows, eos_id
        family = T5Decoding if family_of(model.config).is_encoder_decoder else CausalDecoding
        with self._generating():
            core = with_fast_products(model, packs)
            self._decoding = family(core, rows=rows, columns=columns, pad_id=pad_id)
            self._head = Head(core, rows)
            fits = supports_int8(self._head.weight, self._head.bias)
            self._argmax = Int8Argmax(self._head.weight, rows=rows) if fits else None
        self.orders: list[Order] = []
        """One a live row."""
        self._tokens: list[int] = []
        self._written: list[int] = []

    @contextmanager
    def _generating(self) -> Iterator[None]:
        with torch.inference_mode(), compile_disabled(self.model):
            yield

    def admit(self, orders: Sequence[Order]) -> None:
        """Prefill the prompts of new rows; with the live ones, at most `rows`."""
        orders = sorted(orders, key=lambda order: -len(order.prompt))  # neighbours of like length
        with self._generating():
            self._tokens += self._decoding.admit([order.prompt for order in orders])
        self.orders += orders
        self._written += [0] * len(orders)

    def step(self) -> list[NewToken]:
        """The next token of every row; those that end leave."""
        with self._generating():
            hidden = self._decoding.step(torch.tensor(self._tokens, device=self.model.device))
            found = self._choose(hidden)
            for row, new in enumerate(found):
                self._tokens[row] = new.token
                self._written[row] += 1
            for row in reversed(range(len(found))):
                if found[row].end is not None:
                    self._drop(row)
        return found

    def drop(self, order: Order) -> None:
        """Free the row of an order that is no longer wanted; nothing where it has ended."""
        if order in self.orders:
            with self._generating():  # the cache is moved, and inference mode made it
                self._drop(self.orders.index(order))

    def _drop(self, row: int) -> None:
        self._decoding.drop(row)
        self.orders[row] = self.orders[-1]
        self.orders.pop()
        for column in (self._tokens, self._written):
            column[row] = column[-1]
            column.pop()

    def _choose(self, hidden: Tensor) -> list[NewToken]:
        """One token a row: rows that choose alike choose together."""
        tokens = [0] * len(self.orders)
        shares: dict[int, tuple[float, list[tuple[int, float]]]] = {}
        by_bounds: list[int] = []
        alike: defaultdict[TokenChooser, list[int]] = defaultdict(list)
        for row, order in enumerate(self.orders):
            greedy = order.chooser.strategy == "greedy"
            if greedy and order.n_likeliest is None and self._argmax is not None:
                by_bounds.append(row)
            else:
                alike[order.chooser.seedless()].append(row)
        if by_bounds and self._argmax is not None:
            whole = len(by_bounds) == len(hidden)
            chosen = self._argmax(hidden if whole else hidden[by_bounds]).tolist()
            for row, token in zip(by_bounds, chosen, strict=True):
                tokens[row] = token
        for chooser, rows in alike.items():
            logits = self._head(hidden if len(rows) == len(hidden) else hidden[rows]).float()
            draws = [self._draw(row) for row in rows]
            chosen = chooser.at(logits, draws).tolist()
            for row, token in zip(rows, chosen, strict=True):
                tokens[row] = token
            shares |= self._shares(logits, rows, chosen)
        return [self._new_token(row, token, shares.get(row)) for row, token in enumerate(tokens)]

    def _draw(self, row: int) -> float:
        order = self.orders[row]
        return uniform(order.chooser.seed, order.number, self._written[row])

    def _shares(
        self, logits: Tensor, rows: Sequence[int], chosen: Sequence[int]
    ) -> dict[int, tuple[float, list[tuple[int, float]]]]:
        """Of the rows that asked: the chosen token's log-probability, and the likeliest tokens."""
        found = {}
        for place, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            n = self.orders[row].n_likeliest
            if n is None:
                continue
            logs = logits[place].log_softmax(-1)
            best = logs.topk(min(n, len(logs)))
            pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            found[row] = (float(logs[token]), pairs)
        return found

    def _new_token(
        self, row: int, token: int, share: tuple[float, list[tuple[int, float]]] | None
    ) -> NewToken:
        order = self.orders[row]
        end: End | None = None
        if token == self.eos_id:
            end = "stop"
        elif self._written[row] + 1 >= order.most_tokens:
            end = "length"
        logprob, likeliest = share or (None, [])
        return NewToken(order, token, end, logprob, likeliest)
