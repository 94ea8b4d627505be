"""Deduplication and split of all rows of a store.

The rows' keys and their order in the sources determine every choice. The split of a row depends on
its key alone, so new recipes do not move other recipes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toque.data.prepare.data_report import BEYOND
from toque.data.prepare.duplicates import U64, mark_changes
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.store.token_store import LEFT_OUT, SPLIT_CODES
from toque.keyed_random import mixed

_SPLIT_SALT = np.uint64(0x746F7175655F7370)


@dataclass(frozen=True)
class RowKeys:
    """Bookkeeping columns of all rows in row order."""

    key: U64
    title_key: U64
    record_key: U64
    task: NDArray[np.uint8]
    starts_record: NDArray[np.uint8]
    first_alike: NDArray[np.int64] | None = None
    """[records] first record of each near-duplicate cluster. None without `dedup=near`."""
    held_out: NDArray[np.bool_] | None = None
    """[rows] rows of sources that are held out. None if a share of all rows is held out."""


@dataclass(frozen=True)
class Division:
    """Split of each row, with counts."""

    split: NDArray[np.uint8]
    dropped: dict[str, int]  # dropped records by reason
    records: int  # records with at least one row in use
    leaked_bodies: (
        int  # validation rows with a key that is also in train; 0 unless there is a bug
    )
    leaked_titles: int  # validation rows with a title that is also in train


def divide(columns: RowKeys, settings: PrepareSettings) -> Division:
    """Drop duplicates, drop rows beyond `max_examples`, and split the rest.

    A held-out record counts before equal training records, because they would teach its text.
    """
    records = np.cumsum(columns.starts_record, dtype=np.int64) - 1
    rank = (
        records
        if columns.held_out is None
        else records - len(records) * columns.held_out
    )
    in_use = np.ones(len(records), np.bool_)
    dropped: dict[str, int] = {}

    def drop_others(reason: str, passes: NDArray[np.bool_]) -> None:
        n_before = _count_records(records, in_use)
        in_use[~passes] = False
        if n := n_before - _count_records(records, in_use):
            dropped[reason] = n

    if settings.dedup != "none":
        drop_others("duplicate", first_of_kind(columns.record_key, columns.task, rank))
    if columns.first_alike is not None:
        cluster = columns.first_alike[records]
        best_rank = np.full(len(records), len(records))
        np.minimum.at(best_rank, cluster, rank)
        drop_others("near duplicate", best_rank[cluster] == rank)
    if settings.max_examples is not None:
        is_counted = in_use if columns.held_out is None else in_use & ~columns.held_out
        is_within = np.cumsum(is_counted) <= settings.max_examples
        drop_others(BEYOND, (is_counted < in_use) | is_within)

    split = np.full(len(records), LEFT_OUT, np.uint8)
    if columns.held_out is None:
        split[in_use] = _split_by_key(columns.key[in_use], settings.validation_fraction)
    else:
        split[in_use] = np.take([*SPLIT_CODES.values()], columns.held_out[in_use])
    train = split == SPLIT_CODES["train"]
    validation = split == SPLIT_CODES["validation"]
    has_title = validation & (columns.title_key != 0)
    return Division(
        split=split,
        dropped=dropped,
        records=_count_records(records, in_use),
        leaked_bodies=int(np.isin(columns.key[validation], columns.key[train]).sum()),
        leaked_titles=int(
            np.isin(columns.title_key[has_title], columns.title_key[train]).sum()
        ),
    )


def first_of_kind(
    record_key: U64, task: NDArray[np.uint8], records: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Mark the rows [rows] of the first record of each kind, which is a record key and a task."""
    if not len(records):
        return np.ones(0, np.bool_)
    order = np.lexsort((records, task, record_key))
    sorted_records = records[order]
    starts_kind = mark_changes(record_key[order]) | mark_changes(task[order])
    first = sorted_records[np.flatnonzero(starts_kind)][np.cumsum(starts_kind) - 1]
    is_first = np.empty(len(order), np.bool_)
    is_first[order] = sorted_records == first
    return is_first


def _split_by_key(keys: U64, validation_fraction: float) -> NDArray[np.uint8]:
    draws = mixed(keys ^ _SPLIT_SALT)
    held_out = draws < np.uint64(min(validation_fraction * 2.0**64, 2.0**64 - 2048))
    if not len(draws) or (draws == draws[0]).all():
        held_out[:] = False  # copies of a single recipe must be on the same side
    elif validation_fraction > 0:
        # Both splits get a recipe, even of a handful.
        held_out |= draws == draws.min()
        held_out &= draws != draws.max()
    return np.where(held_out, SPLIT_CODES["validation"], SPLIT_CODES["train"]).astype(
        np.uint8
    )


def _count_records(records: NDArray[np.int64], in_use: NDArray[np.bool_]) -> int:
    """Count the distinct records of the rows in use. `records` is ascending."""
    return int((np.diff(records[in_use], prepend=-1) != 0).sum())
