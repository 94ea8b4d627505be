"""Rows of preference pairs. A pair has two adjacent rows: the chosen and the rejected answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toque.data.array_types import Bools, Ints
from toque.data.prepare.data_report import LOST
from toque.data.prepare.token_rows import TokenRows
from toque.data.store.token_store import LEFT_OUT, TokenStore
from toque.sources.preference_pairs import PREFERRED
from toque.sources.records import Example

SAME_TOKENS = "chosen and rejected have the same tokens after the limits"
CUT_PAIRS = "pairs with a cut answer"


def has_pairs(examples: Sequence[Example]) -> bool:
    """Check whether examples are preference pairs. A store has only pairs, or none."""
    return bool(examples) and PREFERRED in examples[0].columns


def mark_complete_pairs(example: Ints) -> Bools:
    """Mark the rows of pairs with two rows, bool [rows].

    Args:
        example: Index of each row's example, [rows]. Examples 2 i and 2 i + 1 are a pair.
    """
    other_answer = example ^ 1
    return np.isin(other_answer, example)


def mark_equal_pairs(targets: TokenRows) -> Bools:
    """Mark the rows of pairs with equal targets, bool [rows]. Every pair must have two rows."""
    rows = targets.split()
    pairs = zip(rows[::2], rows[1::2], strict=True)
    is_equal = np.array([np.array_equal(*pair) for pair in pairs], np.bool_)
    return np.repeat(is_equal, 2)


def count_cut_pairs(store: TokenStore) -> int:
    """Count the pairs in use with an answer that was cut to its limit."""
    column = LOST["target"]
    if not store.has_pairs or column not in store.manifest.columns:
        return 0
    lost = store.column(column).astype(np.float64)
    is_cut = ~np.isnan(lost) & (store.split != LEFT_OUT)
    return int(is_cut.reshape(-1, 2).any(axis=1).sum())
