"""Rows in use: duplicates and near-duplicates dropped, `max_examples` applied, splits assigned.

Every choice is a function of the rows' keys and their order in the sources. A row's split depends
on its own key alone: adding recipes moves no other recipe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import xxhash
from numpy.typing import NDArray

from toque.data.prepare.data_report import BEYOND
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.store.token_store import LEFT_OUT, SPLIT_CODES
from toque.keyed_random import mixed

U64 = NDArray[np.uint64]
Signatures = NDArray[np.uint16]
_SPLIT_SALT = np.uint64(0x746F7175655F7370)


@dataclass(frozen=True)
class RowKeys:
    """The built-in columns of all rows, in row order."""

    key: U64
    title_key: U64
    record_key: U64
    task: NDArray[np.uint8]
    starts_record: NDArray[np.uint8]
    first_alike: NDArray[np.int64] | None = None
    """[records] first of the cluster; None without `near`."""
    held_out: NDArray[np.bool_] | None = None
    """[rows] True where the row's source is held out whole; None: a share of all rows is."""


@dataclass(frozen=True)
class Division:
    """The split of each row."""

    split: NDArray[np.uint8]
    dropped: dict[str, int]  # records dropped here, by reason
    records: int  # records of which at least one row is used
    leaked_bodies: int  # validation rows whose key is also in train; 0 by construction, but counted
    leaked_titles: int  # validation rows whose title is also in train


def divide(columns: RowKeys, settings: PrepareSettings) -> Division:
    """Drop duplicates, keep the first `max_examples` rows, and split them by key or source.

    Of duplicates a held-out record is kept before one to train on: the latter would teach it.
    """
    records = np.cumsum(columns.starts_record, dtype=np.int64) - 1
    rank = records if columns.held_out is None else records - len(records) * columns.held_out
    keep = np.ones(len(records), np.bool_)
    dropped: dict[str, int] = {}

    def drop(reason: str, wanted: NDArray[np.bool_]) -> None:
        n_before = _count(records, keep)
        keep[~wanted] = False
        dropped[reason] = n_before - _count(records, keep)

    if settings.dedup != "none":
        drop("duplicate", first_of_kind(columns.record_key, columns.task, rank))
    if columns.first_alike is not None:
        cluster = columns.first_alike[records]
        best = np.full(len(records), len(records))
        np.minimum.at(best, cluster, rank)
        drop("near duplicate", best[cluster] == rank)
    if settings.max_examples is not None:
        counted = keep if columns.held_out is None else keep & ~columns.held_out
        drop(BEYOND, (counted < keep) | (np.cumsum(counted) <= settings.max_examples))
    split = np.full(len(records), LEFT_OUT, np.uint8)
    if columns.held_out is None:
        split[keep] = _sides(columns.key[keep], settings.validation_fraction)
    else:
        split[keep] = np.take([*SPLIT_CODES.values()], columns.held_out[keep])
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
    record_key: U64, task: NDArray[np.uint8], records: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """[rows] True for the rows of the first record with their (record_key, task)."""
    if not len(records):
        return np.ones(0, np.bool_)
    order = np.lexsort((records, task, record_key))
    key, kind, record = record_key[order], task[order], records[order]
    begins = _changes(key) | _changes(kind)
    first = record[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    keep = np.empty(len(order), np.bool_)
    keep[order] = record == first
    return keep


def _sides(keys: U64, validation_fraction: float) -> NDArray[np.uint8]:
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


# MinHash: the words of a text -> runs of 3 words -> 120 smallest hashes -> 20 bands of 6 -> pairs.
#
# The share of equal entries of two signatures estimates the Jaccard similarity of the two sets of
# runs (Broder 1997), with a standard deviation of 0.04 at 0.7. Two records of similarity s share a
# band with probability 1 - (1 - s^6)^20: 0.92 at 0.7, 0.998 at 0.8, 0.27 at 0.5 (Leskovec,
# Rajaraman and Ullman, Mining of Massive Datasets, section 3.4). Sharing one is not enough: a pair
# counts if its estimate reaches `THRESHOLD`. A recipe of 130 words stays above it through about
# seven edited words.

NEAR = "near"  # name of the signatures among a shard's arrays; removed from a finished store
SHINGLE = 3  # words in a run
BANDS, BAND = 20, 6
HASHES = BANDS * BAND
THRESHOLD = 0.7  # estimated Jaccard similarity from which two records are near-duplicates
ROUNDS = 16
"""Members of a bucket that the others are compared with, one after another. Without a bound, a
bucket of a million look-alikes would cost 10^12 comparisons. Rows left over are counted."""

_WORD = re.compile(r"\w+")
_CHUNK = 1 << 16
_DRAWN = mixed(np.arange(1, 2 * HASHES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
_OFFSETS = (_DRAWN >> np.uint64(32)).astype(np.uint32)[HASHES:]
_FACTORS = (_DRAWN >> np.uint64(32)).astype(np.uint32)[:HASHES] | np.uint32(1)


def signatures(texts: Sequence[str]) -> Signatures:
    """MinHash signatures, uint16 [texts, HASHES], of the case-folded words of each text alone."""
    hash_of = cache(lambda word: xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass")))
    out = np.empty((len(texts), HASHES), np.uint16)
    at = 0
    while at < len(texts):
        flat: list[int] = []
        lengths: list[int] = []
        while at + len(lengths) < len(texts) and len(flat) < 1 << 18:
            text = texts[at + len(lengths)].casefold()
            words = _WORD.findall(text) or [text]
            flat += map(hash_of, words)
            flat += [0] * (SHINGLE - len(words))
            lengths.append(max(SHINGLE, len(words)))
        out[at : at + len(lengths)] = _minima(np.array(flat, np.uint64), np.array(lengths))
        at += len(lengths)
    return out


def _minima(words: U64, lengths: NDArray[np.int64]) -> Signatures:
    """Signatures of texts whose word hashes are concatenated in `words`."""
    joined = words[:-2] * np.uint64(0x9E3779B97F4A7C15)
    joined = (joined ^ (joined >> np.uint64(29))) + words[1:-1] * np.uint64(0xC2B2AE3D27D4EB4F)
    joined = (joined ^ (joined >> np.uint64(31))) + words[2:]
    shingles = (mixed(joined) >> np.uint64(32)).astype(np.uint32)
    inside = np.ones(len(words), np.bool_)
    ends = np.cumsum(lengths)
    inside[ends - 1] = inside[ends - 2] = False  # a shingle does not cross into the next text
    shingles = shingles[inside[: len(shingles)]]
    starts = np.cumsum(lengths - (SHINGLE - 1)) - (lengths - (SHINGLE - 1))
    out = np.empty((len(lengths), HASHES), np.uint16)
    hashed = np.empty_like(shingles)
    for i, (factor, offset) in enumerate(zip(_FACTORS, _OFFSETS, strict=True)):
        # Multiply-shift hashing of values that are hashes already: pairwise independent, and on
        # random keys as good as full randomness (Mitzenmacher and Vadhan 2008).
        np.multiply(shingles, factor, out=hashed)
        np.add(hashed, offset, out=hashed)
        least = np.minimum.reduceat(hashed, starts)
        out[:, i] = (least ^ (least >> np.uint32(16))).astype(np.uint16)
    return out


def find_clusters(found: Signatures) -> tuple[NDArray[np.int64], int]:
    """[records] the first of each one's cluster; and records compared with `ROUNDS` others only."""
    first = np.arange(len(found), dtype=np.int64)
    unchecked = 0
    for band in range(BANDS):
        keys = np.zeros(len(found), np.uint64)  # equal where all six entries of the band are
        for column in np.array(found[:, band * BAND : (band + 1) * BAND]).T:
            keys = mixed(keys ^ column) + np.uint64(0x9E3779B97F4A7C15)
        order = np.argsort(keys, kind="stable")
        rows, bucket = _of_several(order, np.cumsum(_changes(keys[order])))
        for _ in range(ROUNDS):
            if not len(rows):
                break
            begins = np.diff(bucket, prepend=-1) != 0
            heads = rows[begins][np.cumsum(begins) - 1]
            # Rows already in the head's cluster need no comparison.
            same = first[rows] == first[heads]
            asked = np.flatnonzero(~same)
            alike = asked[_alike(found, rows[asked], heads[asked])]
            _unite(first, rows[alike], heads[alike])
            same[alike] = True
            rows, bucket = _of_several(rows[~same], bucket[~same])
        unchecked += len(rows)
    return first, unchecked


def _changes(ordered: NDArray[np.unsignedinteger]) -> NDArray[np.bool_]:
    """True where a value is another than the one before it; true for the first."""
    changes = np.ones(len(ordered), np.bool_)
    changes[1:] = ordered[1:] != ordered[:-1]
    return changes


def _of_several(
    rows: NDArray[np.int64], bucket: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and their ascending buckets without the buckets of one row."""
    shared = np.zeros(len(rows), np.bool_)
    shared[1:] = bucket[1:] == bucket[:-1]
    shared[:-1] |= shared[1:].copy()
    return rows[shared], bucket[shared]


def _alike(
    found: Signatures, rows: NDArray[np.int64], heads: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """[rows] True where the estimated similarity, the share of equal entries, suffices."""
    out = np.zeros(len(rows), np.bool_)
    for at in range(0, len(rows), _CHUNK):
        part = slice(at, at + _CHUNK)
        out[part] = (found[rows[part]] == found[heads[part]]).mean(axis=-1) >= THRESHOLD
    return out


def _unite(first: NDArray[np.int64], a: NDArray[np.int64], b: NDArray[np.int64]) -> None:
    """Vectorised union-find: attach each root to the smallest root it meets, until none changes."""
    while len(a):
        apart = first[a] != first[b]
        a, b = a[apart], b[apart]
        np.minimum.at(first, np.maximum(first[a], first[b]), np.minimum(first[a], first[b]))
        while not np.array_equal(jumped := first[first], first):
            first[:] = jumped


def clusters_of(store: Path, folders: Sequence[Path]) -> tuple[NDArray[np.int64], int]:
    """`find_clusters` of shards in order, through one scratch file of 240 bytes a record."""
    n_records = 0
    with TemporaryFile(dir=store) as joined:
        for folder in folders:
            rows = np.load(folder / f"{NEAR}.npy", allow_pickle=False)
            joined.write(rows.tobytes())
            n_records += len(rows)
        if not n_records:
            return np.zeros(0, np.int64), 0
        joined.flush()
        return find_clusters(np.memmap(joined, np.uint16, "r", shape=(n_records, HASHES)))
