"""Lengths of stored examples as a model computes them, and the packed row that holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from toque.config.schema import TrainConfig
from toque.data.loader.mixture import Mixture
from toque.data.loader.packing import RowShape, choose_shape
from toque.data.loader.span_corruption import SpanCorruption
from toque.data.store.token_store import Split, TokenStore
from toque.errors import ConfigError

CPU_MICRO_BATCH_TOKENS = 4096
"""Tokens computed at once in training; in evaluating, the search for the fastest begins there."""
SHAPE_SAMPLE = 2048
"""Examples whose lengths choose the row; the longest of all are always among them."""


def usual_rows(tokens: int) -> int:
    """Rows of so many tokens computed at once on a CPU, and where the number is not measured."""
    return max(1, CPU_MICRO_BATCH_TOKENS // tokens)


@dataclass(frozen=True)
class ExampleLengths:
    """Tokens each side computes for some store rows, and the row they are packed into."""

    source: np.ndarray
    target: np.ndarray
    encoder: bool

    @classmethod
    def of(
        cls,
        store: TokenStore,
        rows: np.ndarray,
        *,
        encoder: bool,
        spans: SpanCorruption | None = None,
    ) -> Self:
        """Lengths of store rows; a decoder-only model reads both sides joined, less the last token.

        With `spans`, they are the most that corrupting leaves.
        """
        prompt = store.prompt_lengths[rows].astype(np.int64)
        target = store.target_lengths[rows].astype(np.int64)
        if spans is not None:
            prompt, target = spans.longest(prompt, target)
        if encoder:
            return cls(prompt, target, encoder=True)
        return cls(np.zeros_like(prompt), prompt + target - 1, encoder=False)

    def sample(self, mixture: Mixture | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of an even sample of what is drawn, and of the longest example of either side."""
        n = len(self.target) if mixture is None else sum(mixture.draws)
        ids = np.linspace(0, n - 1, min(n, SHAPE_SAMPLE)).astype(np.int64)
        ids = ids if mixture is None else mixture.examples(ids, epoch=0)
        ids = np.unique(np.append(ids, [self.source.argmax(), self.target.argmax()]))
        return self.source[ids], self.target[ids]


def row_shape(
    train: TrainConfig, lengths: ExampleLengths, mixture: Mixture | None = None
) -> RowShape:
    """The packed row that is configured, or the cheapest for what an epoch draws.

    Raises:
        ConfigError: a row holds more tokens than an update.
    """
    batch, asked = train.batch, train.row_tokens
    source, target = lengths.sample(mixture)
    limit = batch.amount if batch.unit == "tokens" else np.inf
    shape = choose_shape(source, target, encoder=lengths.encoder, at_most=limit)
    if isinstance(asked, int):
        ratio = shape.source / shape.target
        source_side = max(int(lengths.source.max()), round(asked * ratio)) if ratio else 0
        shape = RowShape(source_side, asked)
    if shape.tokens > limit:
        raise ConfigError(
            f'train.batch is "{batch}", and one row of this data takes {shape.tokens} tokens. '
            f'Use at least train.batch="{shape.tokens} tokens", or a batch in examples.'
        )
    return shape


def refuse_longer(lengths: ExampleLengths, positions: int | None) -> None:
    """Refuse examples longer than the model has positions; None: it has no limit.

    Raises:
        ConfigError: the longest example does not fit.
    """
    longest = int(lengths.target.max())
    if positions is not None and longest > positions:
        raise ConfigError(
            f"The model has {positions} positions, and the longest example of the store has "
            f"{longest} tokens. Set data.max_prompt_tokens and data.max_target_tokens so that "
            f"together they are at most {positions + 1}, and prepare again."
        )


def refuse_empty(store: TokenStore, split: Split) -> None:
    """Refuse a store without an example to train on, or to hold out.

    Raises:
        ConfigError: with the cause: too few different records, or nothing held out on purpose.
    """
    if getattr(store.manifest.splits, split):
        return
    n, asked = store.manifest.examples, store.manifest.settings.get("validation_fraction")
    if asked == 0:
        raise ConfigError(
            f"The store {store.path} was prepared with data.validation_fraction=0: none of its "
            f"{n:,} examples is held out, so nothing can be evaluated. Prepare it with a share "
            "above 0, e.g. 0.1."
        )
    which = "training" if split == "train" else "held-out"
    raise ConfigError(
        f"The store {store.path} has no {which} example: its {n:,} are of one record, or of "
        "copies of one, and a record is never on both sides of the split. Add to data.sources "
        "(data.max_examples may leave some out) until there are at least two different ones."
    )
