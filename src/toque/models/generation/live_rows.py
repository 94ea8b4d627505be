"""Live rows: the answers that a model generates now. Rows join and leave while it runs.

Rows are independent: length and sampling options of a row do not change the answer of another row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from toque.models.families import family_of
from toque.models.forward.loss import capped
from toque.models.forward.packed import decoder_rows, logit_cap, output_head
from toque.models.generation.causal import CausalDecoding
from toque.models.generation.constraints import Constraint, mask_logits
from toque.models.generation.options import GenerationOptions
from toque.models.generation.sampling import (
    WORTHWHILE_STEPS,
    Int8Argmax,
    sampled,
    supports_int8,
    uniform,
)
from toque.models.generation.t5 import T5Decoding

End = Literal["stop", "length", "stuck"]
"""Reason for the end of an answer: an end token, the length limit, or a fault of its form."""
Share = tuple[float | None, Sequence[tuple[int, float]]]
"""Log-probability of the chosen token, and of the most likely tokens, best first."""


@dataclass(frozen=True, eq=False)
class Order:
    """Request for one answer."""

    prompt: Sequence[int]  # token ids, at least one
    most_tokens: int  # maximum length of the answer, within the model's positions
    options: (
        GenerationOptions  # sampling options; lengths, precision and rows are ignored
    )
    # Determines the random numbers, together with the seed and the position.
    number: int = 0
    # Number of alternatives with logprobs; None for no logprobs.
    n_likeliest: int | None = None
    begun: Sequence[
        int
    ] = ()  # first tokens of the answer if they are fixed; not reported
    constraint: Constraint | None = None  # form of the answer


class NewToken(NamedTuple):
    """Token of one step for one order."""

    order: Order
    token: int
    end: End | None
    """Reason, for the last token only. With "stop" the token is not part of the answer."""
    # In nats, after masks of form and n-grams, before temperature and top-k.
    logprob: float | None
    # The most likely tokens and their logprobs, best first.
    likeliest: Sequence[tuple[int, float]]


class Ngrams:
    """N-grams of one answer."""

    def __init__(self, n: int | None) -> None:
        self.repeating: Sequence[int] = ()
        """Tokens that would repeat an n-gram if they came next."""
        self._n = n
        self._next = defaultdict[tuple[int, ...], list[int]](list)

    def add(self, answer: Sequence[int]) -> None:
        """Add the last n-gram of an answer. Call this method after each token."""
        if not self._n or len(answer) < self._n:
            return
        *before, last = answer[-self._n :]
        self._next[tuple(before)].append(last)
        self.repeating = self._next.get(tuple(answer[len(answer) - self._n + 1 :]), ())


class LiveRows:
    """Live rows of a model in evaluation mode with packed products (`packed_products.py`).

    Args:
        core: The model.
        rows: Maximum number of rows.
        columns: Tokens of the longest row. Decoder-only models include the prompt.
        eos_id: Token or tokens that end an answer.
        pad_id: Padding token.
    """

    @torch.inference_mode()
    def __init__(
        self,
        core: PreTrainedModel,
        *,
        rows: int,
        columns: int,
        eos_id: int | Collection[int],
        pad_id: int,
    ) -> None:
        self.core, self.rows = core, rows
        self.end_ids = frozenset([eos_id] if isinstance(eos_id, int) else eos_id)
        family = (
            T5Decoding if family_of(core.config).is_encoder_decoder else CausalDecoding
        )
        self._decoding = family(core, rows=rows, columns=columns, pad_id=pad_id)
        self._weight, self._bias = output_head(core)
        on_cpu = core.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        self._buffer = (
            self._weight.new_empty(rows, len(self._weight)) if on_cpu else None
        )
        self._cap = logit_cap(core)
        self._can_bound = self._cap is None and supports_int8(self._weight, self._bias)
        self._bounds: Int8Argmax | None = None
        self.orders: list[Order] = []  # order of each live row
        self._tokens: list[int] = []
        self._answers: list[list[int]] = []
        self._ngrams: list[Ngrams] = []

    @torch.inference_mode()
    def admit(self, orders: Sequence[Order]) -> None:
        """Prefill the prompts of new rows. The total must not exceed `rows`."""
        orders = sorted(orders, key=lambda order: -len(order.prompt))  # less padding
        greedy = any(
            _is_bounded(o) and o.most_tokens >= WORTHWHILE_STEPS for o in orders
        )
        if greedy and self._bounds is None and self._can_bound:
            self._bounds = Int8Argmax(self._weight, rows=self.rows)
        self._tokens += self._decoding.admit([order.prompt for order in orders])
        self.orders += orders
        self._answers += [[] for _ in orders]
        self._ngrams += [Ngrams(order.options.no_repeat_ngram_size) for order in orders]

    @torch.inference_mode()
    def read(self, order: Order) -> list[NewToken]:
        """Compute the logprobs of a prompt's tokens, except the first, for a decoder-only model."""
        ids, n_likeliest = order.prompt, order.n_likeliest
        shares: list[Share] = [(None, ())]
        if n_likeliest is not None:
            tokens = torch.tensor([ids], device=self.core.device)
            positions = torch.arange(len(ids), device=tokens.device)[None]
            for part in torch.split(
                decoder_rows(self.core, tokens, positions)[0, :-1], self.rows
            ):
                logs = self._logits(part).float().log_softmax(-1)
                for row, token in zip(logs, ids[len(shares) :], strict=False):
                    shares.append((float(row[token]), _likeliest(row, n_likeliest)))
        else:
            shares *= len(ids)
        return [
            NewToken(order, token, None, *share)
            for token, share in zip(ids, shares, strict=True)
        ]

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """Generate the next token of every row, and drop the rows that end.

        Do not return the fixed first tokens of an answer.
        """
        hidden = self._decoding.step(
            torch.tensor(self._tokens, device=self.core.device)
        )
        self._tokens, shares = self._choose(hidden)

        new_tokens = []
        finished = []
        for row, (order, answer, token) in enumerate(
            zip(self.orders, self._answers, self._tokens, strict=True)
        ):
            answer.append(token)
            self._ngrams[row].add(answer)
            if len(answer) <= len(order.begun):
                continue
            end: End | None = None
            if order.constraint is not None and order.constraint.fault:
                end = "stuck"
            elif token in self.end_ids:
                end = "stop"
            elif len(answer) >= order.most_tokens:
                end = "length"
            new_tokens.append(NewToken(order, token, end, *shares.get(row, (None, ()))))
            if end is not None:
                finished.append(row)

        for row in reversed(finished):
            self._drop(row)
        return new_tokens

    @torch.inference_mode()
    def drop(self, order: Order) -> None:
        """Cancel an order and free its row. Do nothing if the order has ended."""
        if order in self.orders:
            self._drop(self.orders.index(order))

    def _drop(self, row: int) -> None:
        self._decoding.drop(row)
        columns: tuple[list[Any], ...] = (
            self.orders,
            self._tokens,
            self._answers,
            self._ngrams,
        )
        for column in columns:
            column[row] = column[-1]
            column.pop()

    def _choose(self, hidden: Tensor) -> tuple[list[int], dict[int, Share]]:
        """Choose a token per row, and compute the requested logprobs.

        Rows with equal sampling options are processed together.
        """
        tokens = [0] * len(self.orders)
        shares: dict[int, Share] = {}
        alike: defaultdict[tuple[object, ...] | None, list[int]] = defaultdict(list)
        for row, (order, answer) in enumerate(
            zip(self.orders, self._answers, strict=True)
        ):
            options = order.options
            if len(answer) < len(order.begun):
                tokens[row] = order.begun[len(answer)]
            elif self._can_bound_row(row):
                alike[None].append(row)
            else:
                alike[options.temperature, options.top_k, options.top_p].append(row)

        for sampling, rows in alike.items():
            part = hidden if len(rows) == len(hidden) else hidden[rows]
            if sampling is None and self._bounds:
                chosen = self._bounds(part).tolist()
            else:
                logits = self._logits(part)
                texts = [
                    (place, constraint, self._answers[row])
                    for place, row in enumerate(rows)
                    if (constraint := self.orders[row].constraint) is not None
                ]
                if texts:
                    mask_logits(logits, texts)
                self._mask_repetitions(logits, rows)
                chosen = self._sample(logits, rows)
                shares |= self._compute_shares(logits, rows, chosen)
            for row, token in zip(rows, chosen, strict=True):
                tokens[row] = token
        return tokens, shares

    def _can_bound_row(self, row: int) -> bool:
        """Return True if the row needs only the argmax of the unmasked logits."""
        order = self.orders[row]
        is_bounded = _is_bounded(order) and order.n_likeliest is None
        return (
            self._bounds is not None and is_bounded and not self._ngrams[row].repeating
        )

    def _mask_repetitions(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Set logits [n, V] of tokens that would repeat an n-gram to minus infinity.

        A row stays unchanged if its form allows no other token.
        """
        for place, row in enumerate(rows):
            if repeating := self._ngrams[row].repeating:
                masked = logits[place].clone()
                masked[list(repeating)] = -torch.inf
                if masked.max() > -torch.inf:
                    logits[place] = masked

    def _compute_shares(
        self, logits: Tensor, rows: Sequence[int], chosen: Sequence[int]
    ) -> dict[int, Share]:
        """Compute the logprobs of the rows that request them."""
        places = [
            p for p, row in enumerate(rows) if self.orders[row].n_likeliest is not None
        ]
        if not places:
            return {}
        # All rows in one pass, because best-of-n requests the logprobs of every row of a batch.
        logs = (
            (logits if len(places) == len(rows) else logits[places])
            .float()
            .log_softmax(-1)
        )
        tokens = torch.tensor([[chosen[place]] for place in places], device=logs.device)
        chosen_logs = logs.gather(1, tokens)[:, 0].tolist()
        return {
            rows[place]: (
                log,
                _likeliest(row, self.orders[rows[place]].n_likeliest or 0),
            )
            for place, log, row in zip(places, chosen_logs, logs, strict=True)
        }

    def _logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, [n, D] -> [n, V]. The next call may overwrite them.

        A CPU uses one buffer, because new pages cost a third of the product (64 rows of 50,257: 45
        ms, with the buffer 32 ms).
        """
        if self._buffer is None:
            return capped(F.linear(hidden, self._weight, self._bias), self._cap)
        logits = torch.mm(hidden, self._weight.T, out=self._buffer[: len(hidden)])
        return capped(
            logits if self._bias is None else logits.add_(self._bias), self._cap
        )

    def _sample(self, logits: Tensor, rows: Sequence[int]) -> list[int]:
        """Sample tokens of rows with equal sampling options."""
        options = self.orders[rows[0]].options
        if options.is_greedy:
            return logits.argmax(-1).tolist()
        draws = [
            uniform(
                self.orders[r].options.seed,
                self.orders[r].number,
                len(self._answers[r]),
            )
            for r in rows
        ]
        return sampled(
            logits, draws, options.temperature, options.top_k, options.top_p
        ).tolist()


def _is_bounded(order: Order) -> bool:
    """Return True for greedy decoding without a form."""
    return order.options.is_greedy and order.constraint is None


def _likeliest(logs: Tensor, n: int) -> Sequence[tuple[int, float]]:
    """Return the `n` most likely tokens of log-probabilities [V], best first."""
    if not n:
        return ()
    best = logs.topk(min(n, len(logs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [pair for pair in pairs if pair[1] > -torch.inf]
