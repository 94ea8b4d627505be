"""Live rows: the answers that a model writes at present, which join and leave while it runs.

Neither a row's length nor its way of choosing tokens changes what another is answered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from toque.models.families import family_of
from toque.models.forward.loss import capped
from toque.models.forward.packed import decoder_rows, logit_cap, output_head
from toque.models.generation.causal import CausalDecoding
from toque.models.generation.constraints import HeldText, hold
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
"""End of an answer: by an end token, at the longest length, or for its held text's fault."""
Share = tuple[float | None, Sequence[tuple[int, float]]]
"""Log-probability of the chosen token, and of the likeliest ones, best first."""


@dataclass(frozen=True, eq=False)
class Order:
    """One answer to be written."""

    prompt: Sequence[int]  # token ids, at least one
    most_tokens: int  # the longest answer, which the caller has bounded by the model's positions
    options: GenerationOptions  # its choice of tokens; lengths, precision and rows are not read
    number: int = 0  # number that, with the seed and the position, decides the draws
    n_likeliest: int | None = None  # tokens to tell logprobs of besides; None for none at all
    begun: Sequence[int] = ()  # the answer's first tokens, where known: read, and told to nobody
    held: HeldText | None = None  # the form that the answer is held to


class NewToken(NamedTuple):
    """Token that one step wrote for one order."""

    order: Order
    token: int
    end: End | None
    """Set with the last one; the token of "stop" is an end token, not a part of the answer."""
    logprob: float | None  # before temperature and filters, of what form and runs allow; in nats
    likeliest: Sequence[tuple[int, float]]  # the likeliest tokens with theirs, best first


class Runs:
    """The runs of n tokens that one answer holds."""

    def __init__(self, n: int | None) -> None:
        self.barred: Sequence[int] = ()
        """Tokens that would write a run for the second time if they were next."""
        self._n, self._next = n, defaultdict[tuple[int, ...], list[int]](list)

    def add(self, answer: Sequence[int]) -> None:
        """Learn the run that ends an answer; call it after each of its tokens."""
        if not self._n or len(answer) < self._n:
            return
        *before, last = answer[-self._n :]
        self._next[tuple(before)].append(last)
        self.barred = self._next.get(tuple(answer[len(answer) - self._n + 1 :]), ())


class LiveRows:
    """The rows that a model in evaluation mode, as `packed_products` makes it, writes at present.

    `rows` are the most, `columns` the tokens of the longest row, prompt included, for models that
    read both together.
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
        family = T5Decoding if family_of(core.config).is_encoder_decoder else CausalDecoding
        self._decoding = family(core, rows=rows, columns=columns, pad_id=pad_id)
        self._weight, self._bias = output_head(core)
        on_cpu = core.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        self._buffer = self._weight.new_empty(rows, len(self._weight)) if on_cpu else None
        self._cap = logit_cap(core)
        self._can_bound = self._cap is None and supports_int8(self._weight, self._bias)
        self._bounds: Int8Argmax | None = None
        self.orders: list[Order] = []  # orders of the live rows, one each
        self._tokens: list[int] = []
        self._answers: list[list[int]] = []
        self._runs: list[Runs] = []

    @torch.inference_mode()
    def admit(self, orders: Sequence[Order]) -> None:
        """Prefill the prompts of new rows; with the live ones, at most `rows`."""
        orders = sorted(orders, key=lambda order: -len(order.prompt))  # neighbours of like length
        greedy = any(_is_bounded(o) and o.most_tokens >= WORTHWHILE_STEPS for o in orders)
        if greedy and self._bounds is None and self._can_bound:
            self._bounds = Int8Argmax(self._weight, rows=self.rows)
        self._tokens += self._decoding.admit([order.prompt for order in orders])
        self.orders += orders
        self._answers += [[] for _ in orders]
        self._runs += [Runs(order.options.no_repeat_ngram_size) for order in orders]

    @torch.inference_mode()
    def read(self, order: Order) -> list[NewToken]:
        """The tokens of an order's prompt as they would have been written, the first unasked.

        For decoder-only models, of which the prompt is a text like the answer.
        """
        ids, n_likeliest = order.prompt, order.n_likeliest
        shares: list[Share] = [(None, ())]
        if n_likeliest is not None:
            tokens = torch.tensor([ids], device=self.core.device)
            positions = torch.arange(len(ids), device=tokens.device)[None]
            for part in torch.split(decoder_rows(self.core, tokens, positions)[0, :-1], self.rows):
                logs = self._logits(part).float().log_softmax(-1)
                for row, token in zip(logs, ids[len(shares) :], strict=False):
                    shares.append((float(row[token]), _likeliest(row, n_likeliest)))
        else:
            shares *= len(ids)
        return [
            NewToken(order, token, None, *share) for token, share in zip(ids, shares, strict=True)
        ]

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """The next token of every row but those that read theirs; rows that end leave."""
        hidden = self._decoding.step(torch.tensor(self._tokens, device=self.core.device))
        self._tokens, shares = self._choose(hidden)
        news, over = [], []
        for row, (order, answer, token) in enumerate(
            zip(self.orders, self._answers, self._tokens, strict=True)
        ):
            answer.append(token)
            self._runs[row].add(answer)
            if len(answer) <= len(order.begun):
                continue
            is_last = len(answer) >= order.most_tokens
            end: End | None = "stop" if token in self.end_ids else "length" if is_last else None
            end = "stuck" if order.held is not None and order.held.fault else end
            news.append(NewToken(order, token, end, *shares.get(row, (None, ()))))
            if end is not None:
                over.append(row)
        for row in reversed(over):
            self._drop(row)
        return news

    @torch.inference_mode()
    def drop(self, order: Order) -> None:
        """Free the row of an order that is no longer wanted; nothing where it has ended."""
        if order in self.orders:
            self._drop(self.orders.index(order))

    def _drop(self, row: int) -> None:
        self._decoding.drop(row)
        self.orders[row], self._tokens[row] = self.orders[-1], self._tokens[-1]
        self._answers[row], self._runs[row] = self._answers[-1], self._runs[-1]
        for column in (self.orders, self._tokens, self._answers, self._runs):
            column.pop()

    def _choose(self, hidden: Tensor) -> tuple[list[int], dict[int, Share]]:
        """A token a row, and the probabilities that were asked for; alike rows choose together."""
        tokens, shares = [0] * len(self.orders), dict[int, Share]()
        alike: defaultdict[tuple[object, ...] | None, list[int]] = defaultdict(list)
        for row, (order, answer) in enumerate(zip(self.orders, self._answers, strict=True)):
            options = order.options
            if len(answer) < len(order.begun):
                tokens[row] = order.begun[len(answer)]
            elif self._can_bound_row(row):
                alike[None].append(row)
            else:
                alike[options.temperature, options.top_k, options.top_p].append(row)
        for how, rows in alike.items():
            part = hidden if len(rows) == len(hidden) else hidden[rows]
            if how is None and self._bounds:
                chosen = self._bounds(part).tolist()
            else:
                logits = self._logits(part)
                texts = [
                    (place, held, self._answers[row])
                    for place, row in enumerate(rows)
                    if (held := self.orders[row].held) is not None
                ]
                if texts:
                    hold(logits, texts)
                self._bar_runs(logits, rows)
                chosen = self._chosen(logits, rows)
                shares |= self._shares(logits, rows, chosen)
            for row, token in zip(rows, chosen, strict=True):
                tokens[row] = token
        return tokens, shares

    def _can_bound_row(self, row: int) -> bool:
        """True where the largest logit of all is looked for, and no other one."""
        order = self.orders[row]
        is_bounded = _is_bounded(order) and order.n_likeliest is None
        return self._bounds is not None and is_bounded and not self._runs[row].barred

    def _bar_runs(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Write minus infinity into logits [n, V] of tokens that would repeat a run.

        A row keeps its logits where nothing else may be next: a form leaves it no other token.
        """
        for place, row in enumerate(rows):
            if barred := self._runs[row].barred:
                rest = logits[place].clone()
                rest[list(barred)] = -torch.inf
                if rest.max() > -torch.inf:
                    logits[place] = rest

    def _shares(
        self, logits: Tensor, rows: Sequence[int], chosen: Sequence[int]
    ) -> dict[int, Share]:
        """The probabilities of those of the rows that asked for them."""
        told = [p for p, row in enumerate(rows) if self.orders[row].n_likeliest is not None]
        if not told:
            return {}
        # All rows at once: best-of-n asks for those of every row of a batch.
        logs = (logits if len(told) == len(rows) else logits[told]).float().log_softmax(-1)
        tokens = torch.tensor([[chosen[place]] for place in told], device=logs.device)
        own = logs.gather(1, tokens)[:, 0].tolist()
        return {
            rows[place]: (log, _likeliest(row, self.orders[rows[place]].n_likeliest or 0))
            for place, log, row in zip(told, own, logs, strict=True)
        }

    def _logits(self, hidden: Tensor) -> Tensor:
        """The output head, [n, D] -> [n, V], good until the next call.

        On a CPU into one buffer: fresh pages cost a third of the product (64 rows of 50,257: 45 ms,
        32).
        """
        if self._buffer is None:
            return capped(F.linear(hidden, self._weight, self._bias), self._cap)
        logits = torch.mm(hidden, self._weight.T, out=self._buffer[: len(hidden)])
        return capped(logits if self._bias is None else logits.add_(self._bias), self._cap)

    def _chosen(self, logits: Tensor, rows: Sequence[int]) -> list[int]:
        """Tokens of rows that choose in the same way."""
        how = self.orders[rows[0]].options
        if how.is_greedy:
            return logits.argmax(-1).tolist()
        draws = [
            uniform(self.orders[r].options.seed, self.orders[r].number, len(self._answers[r]))
            for r in rows
        ]
        return sampled(logits, draws, how.temperature, how.top_k, how.top_p).tolist()


def _is_bounded(order: Order) -> bool:
    """True where the largest logit of all is what is looked for."""
    return order.options.is_greedy and order.held is None


def _likeliest(logs: Tensor, n: int) -> Sequence[tuple[int, float]]:
    """The `n` likeliest tokens of log-probabilities [V], best first."""
    if not n:
        return ()
    best = logs.topk(min(n, len(logs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [pair for pair in pairs if pair[1] > -torch.inf]
