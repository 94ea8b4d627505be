"""The global pass over all rows: drop duplicates, apply max_examples, assign train or validation.

Every choice is a function of the rows' keys and their order in the sources, so it does not depend
on the order of work. A row's split depends on its own key alone: adding recipes moves no other
recipe. One of a cluster of near-duplicates is kept, so they cannot be in both splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toque.data.prepare.report import BEYOND
from toque.data.prepare.settings import PrepareSettings
from toque.data.store.token_store import LEFT_OUT, SPLIT_CODES
from toque.keyed_random import mixed

Keys = NDArray[np.uint64]
_SPLIT_SALT = np.uint64(0x746F7175655F7370)


@dataclass(frozen=True)
class Columns:
    """The built-in columns of all rows, in row order."""

    key: Keys
    title_key: Keys
    record_key: Keys
    task: NDArray[np.uint8]
    starts_record: NDArray[np.uint8]
    first_alike: NDArray[np.int64] | None = None
    """[records] first record of each record's cluster of near-duplicates; None without `near`."""


@dataclass(frozen=True)
class Division:
    """The split of each row."""

    split: NDArray[np.uint8]
    dropped: dict[str, int]
    """Records dropped here, by reason."""
    records: int
    """Records of which at least one row is used."""
    leaked_bodies: int
    """Validation rows whose key is also in train; 0 by construction, but counted."""
    leaked_titles: int
    """Validation rows whose title is also in train."""


def divide(columns: Columns, settings: PrepareSettings) -> Division:
    """Drop duplicates, keep the first `max_examples` rows, and split them by key."""
    records = np.cumsum(columns.starts_record, dtype=np.int64) - 1
    keep = np.ones(len(records), np.bool_)
    dropped: dict[str, int] = {}

    def drop(reason: str, wanted: NDArray[np.bool_]) -> None:
        n_before = _count(records, keep)
        keep[~wanted] = False
        dropped[reason] = n_before - _count(records, keep)

    if settings.dedup != "none":
        drop("duplicate", first_of_kind(columns.record_key, columns.task, records))
    if columns.first_alike is not None:
        drop("near duplicate", columns.first_alike[records] == records)
    if settings.max_examples is not None:
        drop(BEYOND, np.cumsum(keep) <= settings.max_examples)
    split = np.full(len(records), LEFT_OUT, np.uint8)
    split[keep] = _sides(columns.key[keep], settings.validation_fraction)
    train = split == SPLIT_CODES["train"]
    held_out = split == SPLIT_CODES["validation"]
    titled = held_out & (columns.title_key != 0)
    return Division(
        split=split,
        dropped={reason: n for reason, n in dropped.items() if n},
        records=_count(records, keep),
        leaked_bodies=int(np.isin(columns.key[held_out], columns.key[train]).sum()),
        leaked_titles=int(np.isin(columns.title_key[titled], columns.title_key[train]).sum()),
    )


def first_of_kind(
    record_key: Keys, task: NDArray[np.uint8], records: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether each row is of the first record with its (record_key, task)."""
    if not len(records):
        return np.ones(0, np.bool_)
    order = np.lexsort((records, task, record_key))
    key, kind, record = record_key[order], task[order], records[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (key[1:] != key[:-1]) | (kind[1:] != kind[:-1])
    first = record[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    keep = np.empty(len(order), np.bool_)
    keep[order] = record == first
    return keep


def _sides(keys: Keys, validation_fraction: float) -> NDArray[np.uint8]:
    draws = mixed(keys ^ _SPLIT_SALT)
    held_out = draws < np.uint64(min(validation_fraction * 2.0**64, 2.0**64 - 2048))
    different = len(draws) and bool((draws != draws[0]).any())
    if not different:
        held_out[:] = False  # one recipe, however many copies: there is nothing to hold it out from
    elif validation_fraction > 0:
        # Even a handful of recipes gets both splits.
        held_out |= draws == draws.min()
        held_out &= draws != draws.max()
    return np.where(held_out, SPLIT_CODES["validation"], SPLIT_CODES["train"]).astype(np.uint8)


def _count(records: NDArray[np.int64], keep: NDArray[np.bool_]) -> int:
    """Number of distinct records among the kept rows; `records` ascends."""
    kept = records[keep]
    return int((np.diff(kept, prepend=-1) != 0).sum())
