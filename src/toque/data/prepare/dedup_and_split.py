"""Deduplication and split of all rows of a store.

Every choice depends only on the keys of the rows and their order in the sources. The split of a row
depends on its key alone, so new recipes do not move other recipes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toque.data.array_types import Bools, Ints
from toque.data.prepare.data_report import BEYOND
from toque.data.prepare.duplicates import U64, mark_changes
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.store.token_store import LEFT_OUT, SPLIT_CODES
from toque.keyed_random import mixed

Codes = NDArray[np.uint8]
_SPLIT_SALT = np.uint64(0x746F7175655F7370)
_MAX_THRESHOLD = 2.0**64 - 2048  # largest float64 that fits into a uint64


@dataclass(frozen=True)
class RowKeys:
    """Bookkeeping columns of all rows of a store, in row order."""

    key: U64
    title_key: U64
    record_key: U64
    task: Codes
    starts_record: Codes
    first_alike: Ints | None = None
    """[records] First record in each record's near-duplicate cluster. None without `dedup=near`.
    """
    held_out: Bools | None = None
    """[rows] True if the row's source is held out. None if a fraction of all rows is held out.
    """
    has_pairs: bool = False
    """True if every record is a preference pair of two rows."""


@dataclass(frozen=True)
class Division:
    """Split of each row, with counts."""

    split: Codes
    dropped: dict[str, int]  # number of dropped records by reason
    records: int  # records with at least one row in use
    # Number of validation rows with a key that is also in train. 0 unless there is a bug.
    leaked_bodies: int
    leaked_titles: int  # number of validation rows with a title that is also in train


def dedup_and_split(columns: RowKeys, settings: PrepareSettings) -> Division:
    """Drop duplicates, drop rows beyond `max_examples`, and split the rest."""
    records = np.cumsum(columns.starts_record, dtype=np.int64) - 1
    in_use, dropped = _drop_rows(columns, settings, records)

    split = np.full(len(records), LEFT_OUT, np.uint8)
    if columns.held_out is None:
        split[in_use] = _split_by_key(columns.key[in_use], settings.validation_fraction)
    else:
        split[in_use] = np.take([*SPLIT_CODES.values()], columns.held_out[in_use])

    train = split == SPLIT_CODES["train"]
    validation = split == SPLIT_CODES["validation"]
    has_title = validation & (columns.title_key != 0)
    leaked_bodies = np.isin(columns.key[validation], columns.key[train])
    leaked_titles = np.isin(columns.title_key[has_title], columns.title_key[train])
    return Division(
        split=split,
        dropped=dropped,
        records=_count_records(records, in_use),
        leaked_bodies=int(leaked_bodies.sum()),
        leaked_titles=int(leaked_titles.sum()),
    )


def _drop_rows(
    columns: RowKeys, settings: PrepareSettings, records: Ints
) -> tuple[Bools, dict[str, int]]:
    """Drop duplicates and rows beyond `max_examples`.

    Args:
        columns: Keys of the rows.
        settings: Settings for deduplication and `max_examples`.
        records: Index of each row's record, [rows].

    Returns:
        Whether a row is in use, [rows], and the number of dropped records by reason.
    """
    held_out = columns.held_out
    if held_out is None:
        held_out = np.zeros(len(records), np.bool_)
    # Held-out records come before equal training records, which would teach the held-out text.
    rank = records - len(records) * held_out
    in_use = np.ones(len(records), np.bool_)
    dropped: dict[str, int] = {}

    def drop(reason: str, is_dropped: Bools) -> None:
        """Take rows out of use, and count the records that have no row left."""
        n_before = _count_records(records, in_use)
        in_use[is_dropped] = False
        if n := n_before - _count_records(records, in_use):
            dropped[reason] = n

    if settings.dedup != "none":
        is_first = mark_first_records(columns.record_key, columns.task, rank)
        drop("duplicate", ~is_first)
    if columns.first_alike is not None:
        cluster = columns.first_alike[records]
        best_rank = np.full(len(records), len(records))
        np.minimum.at(best_rank, cluster, rank)
        drop("near duplicate", best_rank[cluster] != rank)
    if settings.max_examples is not None:
        # The limit applies to training rows only.
        n_so_far = np.cumsum(in_use & ~held_out)
        is_beyond = (n_so_far > settings.max_examples) & ~held_out
        if columns.has_pairs:
            is_beyond = is_beyond.reshape(-1, 2).any(axis=1).repeat(2)
        drop(BEYOND, is_beyond)
    return in_use, dropped


def mark_first_records(record_key: U64, task: Codes, records: Ints) -> Bools:
    """Mark the rows of the first record of each pair of record key and task, bool [rows]."""
    if not len(records):
        return np.ones(0, np.bool_)
    order = np.lexsort((records, task, record_key))
    sorted_records = records[order]
    starts_pair = mark_changes(record_key[order]) | mark_changes(task[order])
    first_of_pair = sorted_records[starts_pair]
    pair = np.cumsum(starts_pair) - 1
    is_first = np.empty(len(order), np.bool_)
    is_first[order] = sorted_records == first_of_pair[pair]
    return is_first


def _split_by_key(keys: U64, validation_fraction: float) -> Codes:
    """Choose the split of each row at random by its key."""
    draws = mixed(keys ^ _SPLIT_SALT)
    threshold = np.uint64(min(validation_fraction * 2.0**64, _MAX_THRESHOLD))
    held_out = draws < threshold
    if not len(draws) or (draws == draws[0]).all():
        held_out[:] = False  # copies of a single recipe must be on the same side
    elif validation_fraction > 0:
        # Both splits get at least one recipe, even if there are only a few.
        held_out |= draws == draws.min()
        held_out &= draws != draws.max()
    codes = np.where(held_out, SPLIT_CODES["validation"], SPLIT_CODES["train"])
    return codes.astype(np.uint8)


def _count_records(records: Ints, in_use: Bools) -> int:
    """Count the distinct records of the rows in use. `records` is ascending."""
    return int((np.diff(records[in_use], prepend=-1) != 0).sum())
