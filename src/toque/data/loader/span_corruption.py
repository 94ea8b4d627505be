"""Span corruption: random spans of a text are the target, and the rest of the text is the source.

This is T5's pretraining (Raffel et al. 2020, section 3.1.4 and figure 2) as in the reference code.
From a text of n tokens, round(n x density) tokens are removed in round(removed / mean length)
spans. The first span of a text is kept, and the last span is removed.

    text    Fold the eggs into the batter
    source  Fold <extra_id_0> into <extra_id_1> end
    target  <extra_id_0> the eggs <extra_id_1> the batter end

The spans depend only on the length of the text and on a 64-bit key.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from toque.config.schema_methods import SpanCorruptionConfig
from toque.data.array_types import Ints
from toque.data.loader.epoch_plan import EpochExamples, Sides, Varied
from toque.data.store.token_column import Ids
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.keyed_random import key_of, shuffle

# Tokens of the shortest example that is corrupted, with its end token.
SHORTEST = 4
# Separate the keys of this module from other keys, and of lost spans from other spans.
_CORRUPT = 5
_LOST = 1
_STAYING = 2
# The same spans are removed from held-out texts in every evaluation.
_HELD_OUT = key_of(0x7370616E73)
_MAX_TOKENS = 1 << 40  # more tokens than any text has


@dataclass(frozen=True)
class SpanCorruption:
    """Corruption of texts with fixed settings. Call it with a prompt, a target and a key."""

    density: float  # fraction of the tokens that are removed, in (0, 0.5]
    mean_length: float  # mean number of tokens per removed span, at least 1
    sentinels: Sequence[int]  # ids that replace the spans, in order
    end: int  # end token of both sides

    @classmethod
    def for_store(
        cls, section: SpanCorruptionConfig, store: TokenStore, *, encoder: bool
    ) -> Self:
        """Create the corruption of a store's texts, and check that it is possible.

        Raises:
            ConfigError: The model has no encoder, or the vocabulary has too few sentinels.
        """
        if not encoder:
            raise ConfigError(
                "span_corruption needs a model with an encoder. Use a T5 (model.family=t5), or set "
                "span_corruption to null: a decoder-only model is pretrained by predicting every "
                "token."
            )
        codec = store.codec()
        spans = cls(
            section.density, section.mean_length, codec.sentinels(), codec.eos_id
        )
        prompt_lengths = store.prompt_lengths.astype(int)
        longest = int((prompt_lengths + store.target_lengths.astype(int)).max())
        if not spans.sentinels or longest > spans.longest_text:
            raise ConfigError(
                "span_corruption needs one <extra_id_N> token per span of a text. This vocabulary "
                f"has {len(spans.sentinels)} unused ones, which is not enough for the store's "
                f"longest text ({longest} tokens). Use a T5 tokenizer or trained:N, lower "
                "data.max_target_tokens and prepare the data again, or raise "
                "span_corruption.mean_length."
            )
        return spans

    def in_store(self, store: TokenStore) -> Varied:
        """Corrupt the examples of a store, with different spans in every epoch."""

        def vary(row: int, key: int) -> Sides:
            example_key = key_of(key, row, _CORRUPT)
            return self(store.prompt(row), store.target(row), example_key)

        return Varied(vary, encoder=True)

    def held_out(self, store: TokenStore) -> EpochExamples:
        """Corrupt the examples of a store for the held-out loss, always in the same way."""
        return self.in_store(store).for_epoch(_HELD_OUT)

    def __call__(self, prompt: Ids, target: Ids, key: int) -> tuple[Ids, Ids]:
        """Corrupt the text of a prompt and a target. Return the source and the new target.

        A text of fewer than `SHORTEST` tokens stays as it is.
        """
        if len(prompt) + len(target) < SHORTEST:
            return prompt, target
        text = np.concatenate([self._without_end(prompt), self._without_end(target)])
        text = text.astype(np.int64)
        n_lost, n_spans = self._count_lost_in(len(text))
        lost_lengths = _split_randomly(n_lost, n_spans, key_of(key, _LOST))
        staying_lengths = _split_randomly(
            len(text) - n_lost, n_spans, key_of(key, _STAYING)
        )

        source: list[Ints] = []
        answer: list[Ints] = []
        start = 0
        for span, n_staying in enumerate(staying_lengths):
            sentinel = np.array([self.sentinels[span]], np.int64)
            lost_start = start + n_staying
            lost_end = lost_start + lost_lengths[span]
            source += [text[start:lost_start], sentinel]
            answer += [sentinel, text[lost_start:lost_end]]
            start = lost_end
        end = np.array([self.end], np.int64)
        return np.concatenate([*source, end]), np.concatenate([*answer, end])

    def longest(self, prompt_lengths: Ints, target_lengths: Ints) -> tuple[Ints, Ints]:
        """Compute upper bounds of the source and target lengths from the stored lengths."""
        n = prompt_lengths.astype(np.int64) + target_lengths.astype(np.int64)
        # Both sides grow with the text, so its end tokens, which are removed, only add to a bound.
        lost, spans = self._count_lost(np.maximum(n, 2))
        is_short = n < SHORTEST
        return (
            np.where(is_short, prompt_lengths, n - lost + spans + 1),
            np.where(is_short, target_lengths, lost + spans + 1),
        )

    @property
    def longest_text(self) -> int:
        """Length of the longest text with enough sentinels, in tokens."""

        def count_spans(n: int) -> int:
            return self._count_lost_in(n)[1]

        # The number of spans grows with the length, so a binary search finds the longest text.
        n_sentinels = len(self.sentinels)
        return bisect_right(range(_MAX_TOKENS), n_sentinels, key=count_spans) - 1

    def _without_end(self, ids: Ids) -> Ids:
        return ids[:-1] if len(ids) and ids[-1] == self.end else ids

    def _count_lost_in(self, n: int) -> tuple[int, int]:
        """Count the removed tokens and the spans of a text of `n` tokens."""
        lost, spans = self._count_lost(np.array([max(n, 2)], np.int64))
        return int(lost[0]), int(spans[0])

    def _count_lost(self, n: Ints) -> tuple[Ints, Ints]:
        """Count the removed tokens and the spans of texts with n >= 2 tokens."""
        lost = np.clip(np.rint(n * self.density).astype(np.int64), 1, n - 1)
        spans = np.maximum(1, np.rint(lost / self.mean_length).astype(np.int64))
        # Each span needs a token that is removed, and a token before it that is kept.
        return lost, np.minimum(spans, np.minimum(lost, n - lost))


def _split_randomly(n: int, parts: int, key: int) -> list[int]:
    """Split `n` at random into `parts` positive numbers. Every split is equally likely."""
    cuts = np.sort(shuffle(n - 1, key=key)[: parts - 1]) + 1
    lengths: list[int] = np.diff(cuts, prepend=0, append=n).tolist()
    return lengths
