"""Span corruption: spans cut out of a text become the target, and the rest the source.

T5's pretraining (Raffel et al. 2020, section 3.1.4 and figure 2), with the counts and the random
segmentation of its reference code: a text of n tokens loses round(n x density) of them in
round(lost / mean length) spans; it begins with a kept span and ends with a lost one.

    text    Fold the eggs into the batter
    source  Fold <extra_id_0> into <extra_id_1> end
    target  <extra_id_0> the eggs <extra_id_1> the batter end

The spans are a function of the text's length and a 64-bit key, nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from toque.config.schema_methods import SpanCorruptionConfig
from toque.data.loader.epoch_plan import InEpoch, Sides, Varied
from toque.data.store.token_column import Ids
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.keyed_random import key_of, shuffle

SHORTEST: Final = 4  # tokens of the shortest example that is corrupted, its end among them
_LOST, _KEPT = 1, 2  # set the two segmentations of a text apart
_CORRUPT: Final = 5  # sets these keys apart from those of the order and of augmentation
_HELD_OUT: Final = key_of(0x7370616E73)  # held-out texts always lose the same spans


@dataclass(frozen=True)
class SpanCorruption:
    """Corrupts a text."""

    density: float  # share of a text's tokens that are lost, in (0, 0.5]
    mean_length: float  # tokens of a lost span on average, at least 1
    sentinels: Sequence[int]  # ids that stand for the spans, in order
    end: int  # closes either side

    @classmethod
    def from_settings(
        cls, section: SpanCorruptionConfig, store: TokenStore, *, encoder: bool
    ) -> Self:
        """The corruption of a run's texts; needs an encoder and enough sentinels."""
        if not encoder:
            raise ConfigError(
                "span_corruption is set, and the model has no encoder to read what is left of a "
                "text. Take a T5 (model.family=t5), or set span_corruption to null: a "
                "decoder-only model is pretrained by predicting every token."
            )
        codec = store.codec()
        spans = cls(section.density, section.mean_length, codec.sentinels(), codec.eos_id)
        longest = int((store.prompt_lengths.astype(int) + store.target_lengths.astype(int)).max())
        if not spans.sentinels or longest > spans.longest_text:
            raise ConfigError(
                f"span_corruption needs a token <extra_id_N> for each of a text's spans: this "
                f"vocabulary has {len(spans.sentinels)} to spare, and the longest text of the "
                f"store has {longest} tokens. Take a T5 tokenizer or trained:N, lower "
                "data.max_target_tokens and prepare again, or raise span_corruption.mean_length."
            )
        return spans

    def in_store(self, store: TokenStore) -> Varied:
        """The examples of a store with other spans cut out in every epoch."""

        def vary(row: int, key: int) -> Sides:
            return self(store.prompt(row), store.target(row), key_of(key, row, _CORRUPT))

        return Varied(vary, encoder=True)

    def held_out(self, store: TokenStore) -> InEpoch:
        """The examples of a store as held-out loss is measured on them."""
        return self.in_store(store).at(_HELD_OUT)

    def __call__(self, prompt: Ids, target: Ids, key: int) -> tuple[Ids, Ids]:
        """The corrupted sides of the text that both are together, by `key`; short ones stay."""
        if len(prompt) + len(target) < SHORTEST:
            return prompt, target
        text = np.concatenate([self._open(prompt), self._open(target)]).astype(np.int64)
        n_lost, n_spans = self._counts(len(text))
        lost = _segments(n_lost, n_spans, key_of(key, _LOST))
        kept = _segments(len(text) - n_lost, n_spans, key_of(key, _KEPT))
        source: list[NDArray[np.int64]] = []
        answer: list[NDArray[np.int64]] = []
        at = 0
        for span, (n_kept, n_cut) in enumerate(zip(kept, lost, strict=True)):
            mark = np.array([self.sentinels[span]], np.int64)
            source += [text[at : at + n_kept], mark]
            answer += [mark, text[at + n_kept : at + n_kept + n_cut]]
            at += n_kept + n_cut
        end = np.array([self.end], np.int64)
        return np.concatenate([*source, end]), np.concatenate([*answer, end])

    def longest(
        self, prompt_lengths: NDArray[np.int64], target_lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Most tokens that source and target of examples of these stored lengths can have."""
        n = prompt_lengths.astype(np.int64) + target_lengths.astype(np.int64)
        # Lost and kept tokens both grow with the text, and end tokens only shorten it.
        lost, spans = self._count(np.maximum(n, 2))
        short = n < SHORTEST
        return (
            np.where(short, prompt_lengths, n - lost + spans + 1),
            np.where(short, target_lengths, lost + spans + 1),
        )

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that the sentinels suffice for."""
        lengths = range(1 << 40)  # spans grow with the text
        return bisect_right(lengths, len(self.sentinels), key=lambda n: self._counts(n)[1]) - 1

    def _open(self, ids: Ids) -> Ids:
        return ids[:-1] if len(ids) and ids[-1] == self.end else ids

    def _counts(self, n: int) -> tuple[int, int]:
        lost, spans = self._count(np.array([max(n, 2)], np.int64))
        return int(lost[0]), int(spans[0])

    def _count(self, n: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lost tokens and spans of texts of n >= 2 tokens."""
        lost = np.clip(np.rint(n * self.density).astype(np.int64), 1, n - 1)
        spans = np.maximum(1, np.rint(lost / self.mean_length).astype(np.int64))
        return lost, np.minimum(spans, np.minimum(lost, n - lost))


def _segments(n: int, parts: int, key: int) -> list[int]:
    """`n` as a sum of `parts` positive numbers, every such sum equally likely."""
    cuts = np.sort(shuffle(n - 1, key=key)[: parts - 1]) + 1
    lengths: list[int] = np.diff(cuts, prepend=0, append=n).tolist()
    return lengths
