"""ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum (Lin 2004): F1 of each pair, by rouge-score-rs.

Its scores are bit for bit those of rouge-score 0.1.2 (the tests compare them). Words are runs of
a-z and 0-9 of the lower-cased text, not stemmed; for Lsum a sentence is a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rouge_score_rs.rouge_scorer import RougeScorer

NAMES: Final = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def rouge_f1(predictions: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """[pairs, 4] F1, a column for each of `NAMES`; text i is scored against reference i.

    >>> rouge_f1(["the cat sat"], ["the cat ran"])[0, 1].item()
    0.5
    """
    scorer = RougeScorer(list(NAMES))  # type: ignore[no-untyped-call]
    rows = []
    for prediction, reference in zip(predictions, references, strict=True):
        scores = scorer.score(reference, prediction)  # type: ignore[no-untyped-call]
        rows.append([scores[name].fmeasure for name in NAMES])
    return np.array(rows, float).reshape(-1, len(NAMES))
