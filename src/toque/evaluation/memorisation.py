"""Memorisation: the longest run of tokens that a generated text shares with a training example.

The held-out references for the same prompts also share runs with training examples, although no
one copied them. The references' runs are the baseline for the model's runs.

The search is a single pass over the store, without an index. If an example and a text share a hash
of `RUN` tokens, the tokens are compared. Adjacent matches form a longer run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from toque.data.array_types import Bools
from toque.data.store.token_store import TokenStore
from toque.evaluation.ngram_metrics import (
    I64,
    U64,
    HashedTokens,
    count_ngrams,
    hash_ngrams,
)
from toque.keyed_random import mixed
from toque.reporter import Count, uncounted

if TYPE_CHECKING:
    from toque.evaluation.text_samples import Sample

RUN: Final = 8
"""Length of the shortest run that counts, in tokens.

Nearly every recipe written by a person shares eight tokens with another recipe ("oven to 350
degrees F"), so the result per text is a length, not a yes or no. With shorter runs, most positions
of a store would be compared.
"""
LONG: Final = 50
"""Length in tokens from which a run indicates memorisation (Carlini et al. 2023, section 3)."""
MAX_TOKENS: Final = 1 << 28
"""Maximum number of tokens to read. In a larger store, only every n-th example is read."""
_CHUNK_TOKENS: Final = 1 << 17
"""Tokens per comparison. Their hashes fit in a core's cache."""
_MAX_PAIRS: Final = 1 << 20
"""Maximum pairs per comparison. A pair is a position in an example and a position in a text.
"""


@dataclass(frozen=True)
class SharedRun:
    """Longest span that a text shares with a training example."""

    tokens: int
    """Length of the span in tokens, without tokens that repeat the prompt. 0 without a shared span.
    """
    length: int
    """Length of the text in tokens."""
    example: int | None
    """Store row of the first example with the run."""


@dataclass(frozen=True)
class Memorisation:
    """Runs that generated texts and their references share with the training examples."""

    texts: Sequence[SharedRun]
    references: Sequence[SharedRun]
    n_read: int
    """Number of training examples that were compared."""
    n_examples: int
    """Number of training examples in the store."""

    def record(self) -> dict[str, Any]:
        """Return the fields of `memorisation` in evaluation.json."""
        return {
            "examples": self.n_examples,
            "examples_read": self.n_read,
            "shortest_run": RUN,
            "long_run": LONG,
            "texts": _summarise(self.texts),
            "references": _summarise(self.references),
        }

    def __str__(self) -> str:
        n = len(self.texts)
        if n == 0:
            return ""

        longest = max(run.tokens for run in self.texts)
        baseline = max((run.tokens for run in self.references), default=0)
        texts = "text" if n == 1 else "texts"
        sentence = (
            f"Of {n:,} {texts}, the longest span shared with a training example "
            f"has {longest} tokens"
        )
        if baseline:
            sentence += (
                f", compared with {baseline} for the held-out texts of the same prompts"
            )
        if self.n_read < self.n_examples:
            sentence += f" ({self.n_read:,} of {self.n_examples:,} examples were read)"
        return f"{sentence}."


def _summarise(runs: Sequence[SharedRun]) -> dict[str, Any]:
    """Return statistics of the runs of several texts, for evaluation.json."""
    if not runs:
        return {"n": 0}
    tokens = np.array([run.tokens for run in runs])
    longest = max(runs, key=lambda run: run.tokens)
    return {
        "n": len(runs),
        "median": float(np.median(tokens)),
        "p95": round(float(np.percentile(tokens, 95)), 2),
        "largest": longest.tokens,
        "example": longest.example,
        "largest_share": round(max(run.tokens / run.length for run in runs), 4),
        "long_share": round(float((tokens >= LONG).mean()), 4),
        "runs": [[run.tokens, run.length, run.example] for run in runs],
    }


def measure_memorisation(
    samples: Sequence[Sample], store: TokenStore, on_progress: Count = uncounted
) -> Memorisation | None:
    """Compare generated texts and their references with a store's training examples.

    Texts of fewer than `RUN` tokens are left out. Return None if no text remains.
    """
    codec = store.codec()

    def encode(texts: Iterable[str | None]) -> list[list[int]]:
        return [codec.encode(codec.normalise(text or "")) for text in texts]

    prompts = encode(s.asked or s.prompt for s in samples)

    def with_prompts(texts: Iterable[str | None]) -> list[tuple[list[int], list[int]]]:
        pairs = zip(encode(texts), prompts, strict=True)
        return [(ids, prompt) for ids, prompt in pairs if len(ids) >= RUN]

    generated = with_prompts(s.text for s in samples)
    references = with_prompts(s.reference for s in samples)
    if not generated and not references:
        return None

    finder = SharedRunFinder(*zip(*generated, *references, strict=True))
    n_read = _compare_examples(finder, store, on_progress)
    runs = finder.longest_runs()
    return Memorisation(
        runs[: len(generated)],
        runs[len(generated) :],
        n_read,
        len(store.rows("train")),
    )


def _compare_examples(
    finder: SharedRunFinder, store: TokenStore, on_progress: Count
) -> int:
    """Compare a finder's texts with the training examples. Return the number of examples read."""
    rows = store.rows("train")
    lengths = store.prompt_lengths[rows].astype(np.int64) + store.target_lengths[rows]
    step = max(1, math.ceil(int(lengths.sum()) / MAX_TOKENS))
    rows = rows[::step]
    chunk_of_row = np.cumsum(lengths[::step]) // _CHUNK_TOKENS
    n_done = 0
    for chunk in np.split(rows, np.flatnonzero(np.diff(chunk_of_row)) + 1):
        prompts, targets = store.sides(chunk)
        examples = prompts.followed_by(targets)
        ids = examples.joined().astype(np.uint64)
        finder.add_examples(ids, examples.lengths, chunk)
        n_done += len(chunk)
        on_progress(n_done, len(rows))
    return len(rows)


class SharedRunFinder:
    """Finder of the longest run that each text shares with the examples.

    A text has at least `RUN` tokens. If `RUN` tokens of a shared run also occur in the text's
    prompt, these tokens do not count towards the length of the shared run.
    """

    def __init__(
        self, texts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]
    ) -> None:
        ids, self._counts = concatenate(texts)
        self._n = len(ids)
        self._text = np.repeat(np.arange(len(texts)), self._counts)
        """[tokens] Index of the text of each token."""
        hashes, positions = _hash_runs(ids, self._counts)
        self._n_repeated = self._count_repeated(hashes, positions, prompts)

        self._hashes, first, run = np.unique(
            hashes, return_index=True, return_inverse=True
        )
        """[distinct runs] Hash of each run in the texts, ascending."""
        windows = sliding_window_view(ids, RUN)
        self._windows = windows[positions[first]]
        """[distinct runs, RUN] Tokens of each run."""
        is_equal = (windows[positions] == self._windows[run]).all(axis=1)

        # Runs with equal hashes and different tokens are hash collisions, which are ignored.
        self._keys = np.sort((run * self._n + positions)[is_equal])
        """All positions of each run: run * tokens + position, ascending."""
        self._begins = np.searchsorted(self._keys, np.arange(len(first) + 1) * self._n)
        """[distinct runs + 1] Index of each run's first key."""

        bits = min(24, len(first).bit_length() + 6)
        self._shift = np.uint64(64 - bits)
        self._may_match = np.zeros(1 << bits, np.bool_)
        """True for the first bits of a run's hash. This rejects most runs of an example quickly."""
        self._may_match[self._hashes >> self._shift] = True

        self._best = np.zeros(len(texts), np.int64)
        """[texts] Length of the longest run so far, in tokens."""
        self._example = np.full(len(texts), -1, np.int64)
        """[texts] Store row of the example with the longest run, or -1."""

    def _count_repeated(
        self, hashes: U64, positions: I64, prompts: Sequence[Sequence[int]]
    ) -> I64:
        """Count the tokens before each position that repeat their text's prompt, [tokens + 1]."""
        prompt_hashes, prompt = hash_ngrams(HashedTokens(*concatenate(prompts)), RUN)
        # Runs in other texts' prompts do not count, so the text is part of the hash.
        salt = mixed(np.arange(len(prompts), dtype=np.uint64))
        is_repeated = np.isin(
            hashes ^ salt[self._text[positions]], prompt_hashes ^ salt[prompt]
        )
        repeats = np.zeros(self._n + 1, np.int64)
        repeats[positions[is_repeated][:, None] + np.arange(1, RUN + 1)] = 1
        return repeats.cumsum()

    def longest_runs(self) -> list[SharedRun]:
        """Return each text's longest run that is shared with the examples so far."""
        columns = (self._best.tolist(), self._counts.tolist(), self._example.tolist())
        return [
            SharedRun(run, length, example if example >= 0 else None)
            for run, length, example in zip(*columns, strict=True)
        ]

    def add_examples(self, ids: U64, counts: I64, rows: I64) -> None:
        """Search examples for runs of the texts, and update each text's longest run.

        Args:
            ids: Tokens of all examples, concatenated.
            counts: Number of tokens per example.
            rows: Store row per example, ascending.
        """
        # Candidates: the first bits of the hash also occur in a text.
        hashes, positions = _hash_runs(ids, counts)
        candidates = np.flatnonzero(self._may_match[hashes >> self._shift])
        if not len(candidates):
            return
        candidate_at = positions[candidates]
        nearest_run = np.searchsorted(self._hashes, hashes[candidates])
        nearest_run = nearest_run.clip(max=len(self._hashes) - 1)

        # Matches: the tokens are equal.
        windows = sliding_window_view(ids, RUN)[candidate_at]
        is_match = (windows == self._windows[nearest_run]).all(axis=1)
        match_at = candidate_at[is_match]
        match_run = nearest_run[is_match]

        # Record only the matches that may make a text's longest run longer.
        may_improve = self._may_improve(match_at, match_run)
        at = match_at[may_improve]
        example = np.searchsorted(np.cumsum(counts), at, side="right")
        self._record_matches(at, match_run[may_improve], rows[example])

    def _may_improve(self, at: I64, run: I64) -> Bools:
        """Mark the matches that may be a part of a text's new longest run.

        A shared run is at most as long as the stretch of adjacent positions with a match in any
        text. Nearly all stretches in a large store are too short to improve any text.
        """
        first_of_stretch = np.flatnonzero(np.diff(at, prepend=-2) != 1)
        stretches = np.diff(first_of_stretch, append=len(at))
        best = self._best[self._text[self._keys % self._n]]
        to_beat = np.minimum.reduceat(best, self._begins[:-1])
        length_limit = np.repeat(stretches + RUN - 1, stretches)
        may_improve: Bools = length_limit > to_beat[run]
        return may_improve

    def _record_matches(self, at: I64, run: I64, row: I64) -> None:
        """Pair positions in examples with all positions of the same run in the texts. Record them.

        If there are too many pairs, split them by example, then by text.

        Args:
            at: Positions in the examples.
            run: Index of the run at each position.
            row: Store row of the example at each position, ascending.
        """
        n_pairs = int((self._begins[run + 1] - self._begins[run]).sum())
        if n_pairs <= _MAX_PAIRS:
            self._record_span(at, run, row, (0, self._n))
        elif row[0] != row[-1]:
            # Split before the middle example, or after the first if it reaches the middle.
            middle = np.searchsorted(row, row[len(row) // 2])
            cut = int(middle or np.searchsorted(row, row[0], "right"))
            self._record_matches(at[:cut], run[:cut], row[:cut])
            self._record_matches(at[cut:], run[cut:], row[cut:])
        else:
            ends = np.cumsum(self._counts).tolist()
            for span in pairwise([0, *ends]):
                self._record_span(at, run, row, span)

    def _record_span(self, at: I64, run: I64, row: I64, span: tuple[int, int]) -> None:
        """Record the pairs with a position of the texts within a span of tokens."""
        low = np.searchsorted(self._keys, run * self._n + span[0])
        high = np.searchsorted(self._keys, run * self._n + span[1])
        n = high - low
        pair = np.repeat(np.arange(len(at)), n)
        # The concatenated ranges of keys from low to high of each position.
        key = np.arange(len(pair)) + np.repeat(low - (np.cumsum(n) - n), n)
        self._record_longest(at[pair], self._keys[key] % self._n, row[pair])

    def _record_longest(self, at: I64, positions: I64, row: I64) -> None:
        """Join adjacent pairs into longer runs. Record runs that are longer than their text's best.

        Args:
            at: Position in the examples of each pair.
            positions: Position in the texts of each pair.
            row: Store row of the example of each pair.
        """
        # The pairs of a longer run have the same difference in positions.
        order = np.lexsort((at, at - positions))
        at = at[order]
        positions = positions[order]
        row = row[order]
        follows = (np.diff(at, prepend=-2) == 1) & (np.diff(positions, prepend=-2) == 1)
        heads = np.flatnonzero(~follows)
        begin, row = positions[heads], row[heads]
        end = begin + np.diff(heads, append=len(at)) + RUN - 1
        n_repeated = self._n_repeated[end] - self._n_repeated[begin]
        tokens = end - begin - n_repeated

        # Sort by text, then by length, so that the first run of each text is its longest.
        text = self._text[begin]
        order = np.lexsort((row, -tokens, text))
        longest = order[np.flatnonzero(np.diff(text[order], prepend=-1))]
        better = longest[tokens[longest] > self._best[text[longest]]]
        self._best[text[better]] = tokens[better]
        self._example[text[better]] = row[better]


def concatenate(texts: Sequence[Sequence[int]]) -> tuple[U64, I64]:
    """Join the token ids of all texts in one array. Also return the number of tokens per text."""
    counts = np.array([len(ids) for ids in texts], np.int64)
    ids = np.fromiter((i for text in texts for i in text), np.uint64, int(counts.sum()))
    return ids, counts


def _hash_runs(ids: U64, counts: I64) -> tuple[U64, I64]:
    """Hash each run of `RUN` tokens within a text. Also return the position of its first token."""
    hashes, text = hash_ngrams(HashedTokens(ids, counts), RUN)
    # Between a run's index and its position are the last RUN - 1 tokens of each earlier text.
    n_runs = count_ngrams(counts, RUN)
    first_token = np.cumsum(counts) - counts
    first_run = np.cumsum(n_runs) - n_runs
    return hashes, np.arange(len(hashes)) + (first_token - first_run)[text]
