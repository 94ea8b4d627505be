"""Batch of answers that a model generates together. Rows join and leave while it runs.

Rows are independent: the length and sampling options of a row do not change another row's answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from toque.models.families import CAUSAL, family_of
from toque.models.forward.loss import capped
from toque.models.forward.packed import decoder_hidden_states, logit_cap, output_head
from toque.models.generation.causal import CausalDecoding
from toque.models.generation.constraints import Constraint, mask_logits
from toque.models.generation.options import GenerationOptions
from toque.models.generation.prefixes import PrefixCache
from toque.models.generation.sampling import (
    WORTHWHILE_STEPS,
    Int8Argmax,
    sample_tokens,
    supports_int8,
    uniform,
)
from toque.models.generation.t5 import T5Decoding
from toque.models.onnx.row_program import RowProgram

End = Literal["stop", "length", "stuck"]
"""Reason for the end of an answer: an end token, the length limit, or no token that fits its form.
"""
TopLogprobs = Sequence[tuple[int, float]]
"""Most likely tokens and their log-probabilities, the most likely first."""
Logprobs = tuple[float | None, TopLogprobs]
"""Log-probability of a token, and of the most likely tokens at its position."""
_NO_LOGPROBS: Final[Logprobs] = (None, ())


@dataclass(frozen=True, eq=False)
class Order:
    """Request for one answer."""

    prompt: Sequence[int]
    """Token ids, at least one."""
    max_tokens: int
    """Maximum length of the answer in tokens, within the model's context length."""
    options: GenerationOptions
    """Sampling options. Their lengths, precision and batch rows are ignored."""
    number: int = 0
    """Index of the prompt. With the seed and the position, it determines the random numbers.
    """
    n_top_logprobs: int | None = None
    """Number of most likely tokens to report with their logprobs; None for no logprobs."""
    prefix: Sequence[int] = ()
    """Fixed first tokens of the answer, which are not reported."""
    constraint: Constraint | None = None
    """Form of the answer."""
    draw: int | None = None
    """Index that determines the random numbers instead of `number`, unless it is None."""


class NewToken(NamedTuple):
    """Token of one step for one order."""

    order: Order
    token: int
    end: End | None
    """Reason for the end, for the last token only. With "stop" the token is not part of the answer.
    """
    logprob: float | None
    """Log-probability of the token in nats, after the masks for form and n-grams, the biases and
    penalties, but before temperature and top-k.
    """
    top_logprobs: TopLogprobs


class Ngrams:
    """N-grams of an answer, and the tokens that would repeat one of them."""

    def __init__(self, n: int | None) -> None:
        self.repeating: Sequence[int] = ()
        """Tokens that would repeat an n-gram if they came next."""
        self._n = n
        self._next_tokens = defaultdict[tuple[int, ...], list[int]](list)

    def add(self, answer: Sequence[int]) -> None:
        """Add the last n-gram of an answer. Call this method after each token."""
        if not self._n or len(answer) < self._n:
            return
        *before, last = answer[-self._n :]
        self._next_tokens[tuple(before)].append(last)
        current = tuple(answer[len(answer) - self._n + 1 :])
        self.repeating = self._next_tokens.get(current, ())


@dataclass(eq=False)
class _Row:
    """Live row: an answer that is being generated."""

    order: Order
    token: int
    """Newest token, which the next step reads."""
    ngrams: Ngrams
    answer: list[int] = field(default_factory=list)
    logprobs: Logprobs = _NO_LOGPROBS
    """Requested logprobs of the newest token."""

    @property
    def needs_only_argmax(self) -> bool:
        """True if the next token is the argmax of unmasked logits, without logprobs."""
        order = self.order
        is_plain = _is_greedy_and_free(order) and order.n_top_logprobs is None
        return is_plain and not self.ngrams.repeating

    def end(self, end_ids: Collection[int]) -> End | None:
        """Return the reason if the newest token ends the answer."""
        constraint = self.order.constraint
        if constraint is not None and constraint.fault:
            return "stuck"
        if self.token in end_ids:
            return "stop"
        return "length" if len(self.answer) >= self.order.max_tokens else None


class LiveRows:
    """Batch of a model in evaluation mode with packed matmuls (`packed_products.py`).

    Args:
        core: Model without its output head.
        rows: Maximum number of rows.
        columns: Length of the longest row, in tokens. For a decoder-only model, it includes the
            prompt.
        eos_id: Token or tokens that end an answer.
        pad_id: Padding token.
        prefix_bytes: Maximum size of the keys and values of finished rows, which are kept for
            prompts that begin with the same tokens. Models with sliding windows keep none.
        open_program: Opens a program that computes the steps while one row is live.
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
        prefix_bytes: int = 0,
        open_program: Callable[[], RowProgram] | None = None,
    ) -> None:
        self._open_program = open_program
        self._program: RowProgram | None = None
        self._is_in_program = False  # the program has the cache of the only row
        self.core = core
        self._max_rows = rows
        self._end_ids = frozenset([eos_id] if isinstance(eos_id, int) else eos_id)
        self._is_encoder_decoder = family_of(core.config).is_encoder_decoder
        decoding = T5Decoding if self._is_encoder_decoder else CausalDecoding
        self._decoding = decoding(core, rows=rows, columns=columns, pad_id=pad_id)
        self._rows: list[_Row] = []
        self.prefixes: PrefixCache | None = None
        if prefix_bytes and isinstance(self._decoding, CausalDecoding):
            if family_of(core.config) != CAUSAL:
                self.prefixes = PrefixCache(prefix_bytes)
            self._decoding.prefixes = self.prefixes

        self._weight, self._bias = output_head(core)
        self._cap = logit_cap(core)
        self._buffer: Tensor | None = None
        if core.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
            self._buffer = self._weight.new_empty(rows, len(self._weight))
        # A cap may round different logits to the same value, which changes the argmax.
        self._supports_argmax = self._cap is None and supports_int8(
            self._weight, self._bias
        )
        self._int8_argmax: Int8Argmax | None = None

    @property
    def orders(self) -> list[Order]:
        """Order of each live row."""
        return [row.order for row in self._rows]

    @torch.inference_mode()
    def admit(self, orders: Sequence[Order]) -> None:
        """Prefill the prompts of new rows. The total must not exceed the maximum number of rows."""
        orders = sorted(orders, key=lambda order: -len(order.prompt))  # less padding
        uses_program = self._open_program is not None and self._max_rows == 1
        if self._supports_argmax and self._int8_argmax is None and not uses_program:
            is_worthwhile = any(
                _is_greedy_and_free(order) and order.max_tokens >= WORTHWHILE_STEPS
                for order in orders
            )
            if is_worthwhile:
                self._int8_argmax = Int8Argmax(self._weight, rows=self._max_rows)
        self._leave_program()
        first_tokens = self._decoding.admit([order.prompt for order in orders])
        for order, token in zip(orders, first_tokens, strict=True):
            ngrams = Ngrams(order.options.no_repeat_ngram_size)
            self._rows.append(_Row(order, token, ngrams))

    @torch.inference_mode()
    def read(self, order: Order) -> list[NewToken]:
        """Compute the logprobs of a prompt's tokens, except the first, for a decoder-only model."""
        ids = order.prompt
        n_top = order.n_top_logprobs
        if n_top is None:
            return [NewToken(order, token, None, *_NO_LOGPROBS) for token in ids]

        tokens = torch.tensor([ids], device=self.core.device)
        positions = torch.arange(len(ids), device=tokens.device)[None]
        hidden = decoder_hidden_states(self.core, tokens, positions)[0, :-1]
        logprobs: list[Logprobs] = [_NO_LOGPROBS]
        for part in torch.split(hidden, self._max_rows):  # the rows of the buffer
            distributions = self._logits(part).float().log_softmax(-1)
            # The tokens after this part belong to the next parts.
            next_tokens = ids[len(logprobs) :]
            for logs, token in zip(distributions, next_tokens, strict=False):
                logprobs.append((float(logs[token]), _most_likely(logs, n_top)))
        return [
            NewToken(order, token, None, *token_logprobs)
            for token, token_logprobs in zip(ids, logprobs, strict=True)
        ]

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """Generate the next token of every row, and drop the rows that end.

        The fixed first tokens of an answer are not returned.
        """
        last_tokens = [row.token for row in self._rows]
        program = self._program_for_step()
        if program is None:
            tokens = torch.tensor(last_tokens, device=self.core.device)
            self._choose_tokens(self._decoding.step(tokens))
        else:
            if not self._is_in_program:
                self._decoding.begin_alone(program)
                self._is_in_program = True
            logits = self._decoding.step_alone(last_tokens[0], program)
            self._choose_tokens(None, logits)

        new_tokens = []
        finished = []
        for index, row in enumerate(self._rows):
            row.answer.append(row.token)
            row.ngrams.add(row.answer)
            if len(row.answer) <= len(row.order.prefix):
                continue
            end = row.end(self._end_ids)
            new_tokens.append(NewToken(row.order, row.token, end, *row.logprobs))
            if end is not None:
                finished.append(index)

        # From the last to the first, because the last row takes the index of a dropped row.
        for index in reversed(finished):
            self._drop(index)
        return new_tokens

    def _program_for_step(self) -> RowProgram | None:
        """Return the program if one row is live. Open it if enough steps may follow."""
        if self._open_program is None or len(self._rows) != 1:
            return None
        if self._program is None:
            (row,) = self._rows
            if row.order.max_tokens - len(row.answer) >= WORTHWHILE_STEPS:
                self._program = self._open_program()
        return self._program

    def _leave_program(self) -> None:
        """Copy the cache of the only live row from the program, if the program has it."""
        if self._is_in_program and self._program is not None:
            self._decoding.end_alone(self._program)
        self._is_in_program = False

    @torch.inference_mode()
    def drop(self, order: Order) -> None:
        """Cancel an order and free its row. Do nothing if the order has ended."""
        orders = self.orders
        if order in orders:
            self._drop(orders.index(order))

    def _drop(self, index: int) -> None:
        """Remove a row. The last live row takes its index."""
        if isinstance(self._decoding, CausalDecoding) and self.prefixes is not None:
            self._leave_program()
            row = self._rows[index]
            # The newest token was not read yet.
            tokens = [*row.order.prompt, *row.answer][:-1]
            self._decoding.keep(index, tokens)
        self._is_in_program = False
        self._decoding.drop(index)
        self._rows[index] = self._rows[-1]
        self._rows.pop()

    def _choose_tokens(
        self, hidden: Tensor | None, only_logits: Tensor | None = None
    ) -> None:
        """Set the next token of every row, and the requested logprobs.

        Rows with equal sampling options are processed together.

        Args:
            hidden: Input of the output head [n, D]; None if the logits are known.
            only_logits: Logits of the only row, [1, V].
        """
        argmax = None if hidden is None else self._int8_argmax
        argmax_indices: list[int] = []
        groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, row in enumerate(self._rows):
            n_tokens = len(row.answer)
            options = row.order.options
            if n_tokens < len(row.order.prefix):
                row.token = row.order.prefix[n_tokens]
            elif argmax is not None and row.needs_only_argmax:
                argmax_indices.append(index)
            else:
                sampling = (options.temperature, options.top_k, options.top_p)
                groups[*sampling, options.min_p].append(index)

        if hidden is not None and argmax is not None and argmax_indices:
            chosen = argmax(_select_rows(hidden, argmax_indices)).tolist()
            for index, token in zip(argmax_indices, chosen, strict=True):
                self._rows[index].token = token
        for indices in groups.values():
            rows = [self._rows[index] for index in indices]
            if hidden is not None:
                logits = self._logits(_select_rows(hidden, indices))
            else:
                assert only_logits is not None, "hidden is None only with logits"
                logits = only_logits
            _mask_forms(logits, rows)
            _change_logits(logits, rows, reads_prompt=not self._is_encoder_decoder)
            _mask_repetitions(logits, rows)
            for row, token in zip(rows, _sample(logits, rows), strict=True):
                row.token = token
            _compute_logprobs(logits, rows)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, [n, D] -> [n, V]. The next call may overwrite them.

        On a CPU, write into one buffer, because allocating new pages takes a third of the matmul's
        time (64 rows, 50,257 tokens: 45 ms, with the buffer 32 ms).
        """
        if self._buffer is None:
            logits = F.linear(hidden, self._weight, self._bias)
        else:
            buffer = self._buffer[: len(hidden)]
            logits = torch.mm(hidden, self._weight.T, out=buffer)
            if self._bias is not None:
                logits.add_(self._bias)
        return capped(logits, self._cap)


def _is_greedy_and_free(order: Order) -> bool:
    """Check for greedy decoding of unchanged logits without a form."""
    options = order.options
    is_free = order.constraint is None and not options.changes_logits
    return options.is_greedy and is_free


def _select_rows(values: Tensor, indices: Sequence[int]) -> Tensor:
    """Select rows in ascending order. Do not copy the tensor if all rows are selected."""
    return values if len(indices) == len(values) else values[indices]


def _mask_forms(logits: Tensor, rows: Sequence[_Row]) -> None:
    """Set logits [n, V] of tokens that do not fit the form of their row to minus infinity."""
    constrained = [
        (index, row.order.constraint, row.answer)
        for index, row in enumerate(rows)
        if row.order.constraint is not None
    ]
    if constrained:
        mask_logits(logits, constrained)


def _change_logits(logits: Tensor, rows: Sequence[_Row], *, reads_prompt: bool) -> None:
    """Add the biases to logits [n, V], and subtract the penalties.

    The repetition penalty also counts the prompt if the decoder reads it.
    """
    for row, values in zip(rows, logits, strict=True):
        options = row.order.options
        if not options.changes_logits:
            continue
        if options.logit_bias:
            biased = list(options.logit_bias)
            values[biased] += values.new_tensor(list(options.logit_bias.values()))
        if options.repetition_penalty != 1.0:
            prompt = row.order.prompt if reads_prompt else ()
            seen = list({*row.answer, *prompt})
            logs, penalty = values[seen], options.repetition_penalty
            values[seen] = torch.where(logs > 0, logs / penalty, logs * penalty)
        if row.answer and (options.presence_penalty or options.frequency_penalty):
            uses = Counter(row.answer)
            counts = values.new_tensor(list(uses.values()))
            penalties = options.presence_penalty + options.frequency_penalty * counts
            values[list(uses)] -= penalties


def _mask_repetitions(logits: Tensor, rows: Sequence[_Row]) -> None:
    """Set logits [n, V] of tokens that would repeat an n-gram to minus infinity.

    A row stays unchanged if its form allows no other token.
    """
    for index, row in enumerate(rows):
        if row.ngrams.repeating:
            masked = logits[index].clone()
            masked[list(row.ngrams.repeating)] = -torch.inf
            if masked.max() > -torch.inf:
                logits[index] = masked


def _sample(logits: Tensor, rows: Sequence[_Row]) -> list[int]:
    """Sample a token per row from logits [n, V]. The rows have equal sampling options."""
    options = rows[0].order.options
    if options.is_greedy:
        return logits.argmax(-1).tolist()
    draws = []
    for row in rows:
        order = row.order
        draw = order.number if order.draw is None else order.draw
        draws.append(uniform(order.options.seed, draw, len(row.answer)))
    return sample_tokens(
        logits,
        draws,
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
    ).tolist()


def _compute_logprobs(logits: Tensor, rows: Sequence[_Row]) -> None:
    """Set the logprobs of the rows that request them, from masked logits [n, V]."""
    indices = [
        index for index, row in enumerate(rows) if row.order.n_top_logprobs is not None
    ]
    if not indices:
        return
    # All rows in one pass, because best-of-n requests the logprobs of every row of a batch.
    distributions = _select_rows(logits, indices).float().log_softmax(-1)
    chosen = [[rows[index].token] for index in indices]
    tokens = torch.tensor(chosen, device=logits.device)
    logprobs = distributions.gather(1, tokens)[:, 0].tolist()
    for index, logprob, logs in zip(indices, logprobs, distributions, strict=True):
        row = rows[index]
        n_top = row.order.n_top_logprobs or 0
        row.logprobs = (logprob, _most_likely(logs, n_top))


def _most_likely(logs: Tensor, n: int) -> TopLogprobs:
    """Return the `n` most likely tokens of log-probabilities [V]. Leave out impossible tokens."""
    if not n:
        return ()
    top = logs.topk(min(n, len(logs)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [(token, logprob) for token, logprob in pairs if logprob > -torch.inf]
