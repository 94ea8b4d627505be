"""Memorisation: the longest run of tokens that a text shares word for word with a training example.

The held-out texts of the same prompts, which nobody copied, share runs with the training examples,
too: a model's runs mean something beside theirs alone. One pass over the store, without
an index: where an example has a hash of `RUN` tokens that the texts have, too, the tokens are
compared, and such places that follow each other are one longer run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from toque.data.store.token_store import TokenStore
from toque.evaluation.ngram_metrics import I64, U64, HashedTokens, grams, n_grams
from toque.keyed_random import mixed
from toque.reporter import Count, uncounted

if TYPE_CHECKING:
    from toque.evaluation.text_samples import Sample

RUN: Final = 8
"""Tokens of the shortest run that is looked for.

Nearly every recipe that a person wrote shares as many with another ("oven to 350 degrees F"), so
that each text has a figure; with fewer, most places of a store would be compared.
"""
LONG: Final = 50  # tokens of a run that tells of memory (Carlini et al. 2023, section 3)
MOST_TOKENS: Final = 1 << 28  # of a larger store every second example is read, or every third ...
_AT_ONCE: Final = 1 << 17  # tokens read at once: their hashes stay in a core's cache
_MOST_PAIRS: Final = 1 << 20  # places of an example and of a text that are compared at once


@dataclass(frozen=True)
class SharedRun:
    """The longest run that a text shares with a training example."""

    tokens: int  # without those that repeat the prompt; 0 where there is no run
    length: int  # tokens of the text
    example: int | None  # its row in the store, the first of several


@dataclass(frozen=True)
class Memorisation:
    """Runs that written texts, and the references of the same prompts, share with the store."""

    texts: Sequence[SharedRun]
    references: Sequence[SharedRun]
    n_read: int  # training examples that were read
    n_examples: int  # training examples

    def record(self) -> dict[str, Any]:
        """The content of `memorisation` in evaluation.json."""
        return {
            "examples": self.n_examples,
            "examples_read": self.n_read,
            "shortest_run": RUN,
            "long_run": LONG,
            "texts": _summary(self.texts),
            "references": _summary(self.references),
        }

    def __str__(self) -> str:
        """The sentence for people; "" without a text."""
        n, all_read = len(self.texts), self.n_read == self.n_examples
        ours, theirs = (
            max((r.tokens for r in s), default=0) for s in (self.texts, self.references)
        )
        said = (
            f"Of {n:,} text{'s' * (n > 1)} the longest run shared with a training example has "
            f"{ours} tokens"
        )
        said += f"; that of the held-out texts of the same prompts {theirs}" * bool(theirs)
        said += "" if all_read else f" ({self.n_read:,} of {self.n_examples:,} examples were read)"
        return f"{said}." if n else ""


def _summary(runs: Sequence[SharedRun]) -> dict[str, Any]:
    """Figures of the runs, in tokens; the longest one's example; each text's run and length."""
    if not runs:
        return {"n": 0}
    tokens, longest = np.array([run.tokens for run in runs]), max(runs, key=lambda run: run.tokens)
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


def memorisation_of(
    samples: Sequence[Sample], store: TokenStore, on_progress: Count = uncounted
) -> Memorisation | None:
    """Compare texts and their references with the store's training examples; None without any.

    Those of fewer than `RUN` tokens are left out.
    """
    codec = store.codec()

    def ids_of(texts: Iterable[str | None]) -> list[list[int]]:
        return [codec.encode(codec.normalise(text or "")) for text in texts]

    prompts = ids_of(s.asked or s.prompt for s in samples)
    written, references = (
        [
            (ids, prompt)
            for ids, prompt in zip(ids_of(texts), prompts, strict=True)
            if len(ids) >= RUN
        ]
        for texts in ((s.text for s in samples), (s.reference for s in samples))
    )
    if not (written or references):
        return None
    finder = RunFinder(*zip(*written, *references, strict=True))
    n_texts, rows = len(written), store.rows("train")
    lengths = store.prompt_lengths[rows].astype(np.int64) + store.target_lengths[rows]
    step = max(1, math.ceil(int(lengths.sum()) / MOST_TOKENS))
    read, done = rows[::step], 0
    part = np.cumsum(lengths[::step]) // _AT_ONCE
    for some in np.split(read, np.flatnonzero(np.diff(part)) + 1):
        prompts_of, targets = store.sides(some)
        examples = prompts_of.followed_by(targets)
        finder.compare(examples.joined().astype(np.uint64), examples.lengths, some)
        done += len(some)
        on_progress(done, len(read))
    return Memorisation(finder.found[:n_texts], finder.found[n_texts:], len(read), len(rows))


class RunFinder:
    """Keeps the longest run that each of some texts shares with the examples it is compared with.

    A text has `RUN` tokens or more. Tokens in a run of `RUN` that its prompt has, too, are no part
    of a run's length.
    """

    def __init__(self, texts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> None:
        ids, self._counts = joined(texts)
        self._n = len(ids)
        self._text = np.repeat(np.arange(len(texts)), self._counts)  # [tokens] whose it is
        hashes, places = _runs(ids, self._counts)
        theirs, of = grams(HashedTokens(*joined(prompts)), RUN)
        salt = mixed(np.arange(len(texts), dtype=np.uint64))  # the same run of another prompt
        again = places[np.isin(hashes ^ salt[self._text[places]], theirs ^ salt[of])]
        repeats = np.zeros(self._n + 1, np.int64)
        repeats[again[:, None] + np.arange(1, RUN + 1)] = 1
        self._repeats = repeats.cumsum()  # [tokens + 1] tokens before a place that repeat a prompt
        self._hashes, first, which = np.unique(hashes, return_index=True, return_inverse=True)
        windows = sliding_window_view(ids, RUN)
        self._windows = windows[places[first]]  # [different runs, RUN] the tokens of each
        same = (windows[places] == self._windows[which]).all(axis=1)  # no other of equal hash
        # All places of each run: run * tokens + place, ascending.
        self._keys = np.sort((which * self._n + places)[same])
        self._begins = np.searchsorted(self._keys, np.arange(len(first) + 1) * self._n)
        bits = min(24, len(first).bit_length() + 6)
        self._shift = np.uint64(64 - bits)
        self._may_be = np.zeros(1 << bits, np.bool_)  # by the first bits of a hash
        self._may_be[self._hashes >> self._shift] = True
        self._best = np.zeros(len(texts), np.int64)
        self._example = np.full(len(texts), -1, np.int64)

    @property
    def found(self) -> list[SharedRun]:
        """The longest run of each text so far."""
        each = zip(self._best.tolist(), self._counts.tolist(), self._example.tolist(), strict=True)
        return [SharedRun(run, n, row if row >= 0 else None) for run, n, row in each]

    def compare(self, ids: U64, counts: I64, rows: I64) -> None:
        """Compare the texts with examples of `counts` tokens, which stand one after the other."""
        hashes, places = _runs(ids, counts)
        near = np.flatnonzero(self._may_be[hashes >> self._shift])
        if not len(near):
            return
        at, which = places[near], np.searchsorted(self._hashes, hashes[near])
        which = which.clip(max=len(self._hashes) - 1)
        same = (sliding_window_view(ids, RUN)[at] == self._windows[which]).all(axis=1)
        at, which = at[same], which[same]
        # A run is at most as long as the stretch of places where any text has the tokens; one that
        # betters no text with these tokens is not looked at. In a large store that is nearly all.
        sizes = np.diff(np.flatnonzero(np.diff(at, prepend=-2) != 1), append=len(at))
        best = self._best[self._text[self._keys % self._n]]
        least = np.minimum.reduceat(best, self._begins[:-1])
        kept = np.repeat(sizes + RUN - 1, sizes) > least[which]
        row = np.searchsorted(np.cumsum(counts), at[kept], side="right")
        self._pair(at[kept], which[kept], rows[row])

    def _pair(self, at: I64, which: I64, row: I64) -> None:
        """Pair places of examples with those of the same run in the texts."""
        total, spans = int((self._begins[which + 1] - self._begins[which]).sum()), [(0, self._n)]
        if total > _MOST_PAIRS:  # between examples, else text by text
            cut = int(
                np.searchsorted(row, row[len(row) // 2]) or np.searchsorted(row, row[0], "right")
            )
            if cut < len(row):
                self._pair(at[:cut], which[:cut], row[:cut])
                self._pair(at[cut:], which[cut:], row[cut:])
                return
            ends = np.cumsum(self._counts).tolist()
            spans = list(pairwise([0, *ends]))
        for span in spans:
            low, high = (np.searchsorted(self._keys, which * self._n + end) for end in span)
            n = high - low
            hit = np.repeat(np.arange(len(at)), n)
            key = np.arange(len(hit)) + np.repeat(low - (np.cumsum(n) - n), n)
            self._take(at[hit], self._keys[key] % self._n, row[hit])

    def _take(self, at: I64, places: I64, row: I64) -> None:
        """Join pairs that follow each other, both by one token, and keep each text's longest."""
        order = np.lexsort((at, at - places))
        at, places, row = at[order], places[order], row[order]
        follows = (np.diff(at, prepend=-2) == 1) & (np.diff(places, prepend=-2) == 1)
        heads = np.flatnonzero(~follows)
        begin, row = places[heads], row[heads]
        end = begin + np.diff(heads, append=len(at)) + RUN - 1
        tokens = end - begin - (self._repeats[end] - self._repeats[begin])
        text = self._text[begin]
        order = np.lexsort((row, -tokens, text))
        longest = order[np.flatnonzero(np.diff(text[order], prepend=-1))]
        better = longest[tokens[longest] > self._best[text[longest]]]
        self._best[text[better]], self._example[text[better]] = tokens[better], row[better]


def joined(texts: Sequence[Sequence[int]]) -> tuple[U64, I64]:
    """The ids of some texts, one after the other, and the number of each."""
    counts = np.array([len(ids) for ids in texts], np.int64)
    return np.fromiter((i for ids in texts for i in ids), np.uint64, int(counts.sum())), counts


def _runs(ids: U64, counts: I64) -> tuple[U64, I64]:
    """Hash of each run of `RUN` tokens within one text, and the place of its first token."""
    hashes, text = grams(HashedTokens(ids, counts), RUN)
    runs = n_grams(counts, RUN)
    before = (np.cumsum(counts) - counts) - (np.cumsum(runs) - runs)
    return hashes, np.arange(len(hashes)) + before[text]
