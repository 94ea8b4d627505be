"""How much texts repeat themselves, and how varied they are among each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toque.evaluation.text_metrics.ngram_overlap import distinct_grams, n_grams
from toque.evaluation.text_metrics.token_hashes import U64, grams, mteval_tokens

REPETITION_ORDER = 4


def repetition(texts: Sequence[str]) -> NDArray[np.float64]:
    """[texts] share of a text's runs of four tokens that stand in it a second time or more.

    0 when every run is new; NaN for texts of fewer than four tokens. (rep-4 of Welleck et al.
    2020, over the tokens of mteval-v13a.)

    >>> repetition(["stir and stir and stir and stir and"]).tolist()
    [0.6]
    """
    tokens = mteval_tokens(texts)
    runs = n_grams(tokens.counts, REPETITION_ORDER)
    distinct = distinct_grams(tokens, REPETITION_ORDER)
    share = np.full(len(runs), np.nan)
    np.divide(runs - distinct, runs, out=share, where=runs > 0)
    return share


class Distinct:
    """Distinct-n of a set of texts that arrives in parts (Li et al. 2016).

    The number of different n-grams of all texts together divided by the number of n-grams.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._seen: U64 = np.empty(0, np.uint64)
        self._total = 0

    def add(self, texts: Sequence[str]) -> None:
        """Count these texts too."""
        tokens = mteval_tokens(texts)
        hashes, _ = grams(tokens.hashes, tokens.texts, self.n)
        self._total += len(hashes)
        self._seen = np.union1d(self._seen, hashes)

    @property
    def score(self) -> float | None:
        """From 0 to 1; None when there is no n-gram."""
        return len(self._seen) / self._total if self._total else None
