"""Near-duplicates: records with similar texts, by MinHash.

A text becomes the set of its runs of 3 words, then the 120 smallest hashes of the set, then 20
bands of 6 hashes. Records that share a band are compared.

The share of equal entries of two signatures estimates the Jaccard similarity of the two sets
(Broder 1997) with a standard deviation of 0.04 at 0.7. Two records of similarity s share a band
with the probability 1 - (1 - s^6)^20, which is 0.27 at 0.5, 0.92 at 0.7 and 0.998 at 0.8 (Leskovec,
Rajaraman and Ullman, Mining of Massive Datasets, section 3.4). A pair counts if its estimate also
reaches `THRESHOLD`. A recipe of 130 words stays above it with up to about seven edited words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import xxhash
from numpy.typing import NDArray

from toque.keyed_random import mixed

U64 = NDArray[np.uint64]
Signatures = NDArray[np.uint16]
NEAR = "near"  # name of a shard's array of signatures, which a finished store does not need
SHINGLE = 3  # words per run
BANDS = 20
BAND = 6  # hashes per band
HASHES = BANDS * BAND
THRESHOLD = 0.7  # estimated Jaccard similarity of near-duplicates
ROUNDS = 16
"""Comparisons per row of a bucket. Without a limit, a bucket of a million similar records would
take 10^12 comparisons. The rows that remain are counted."""
_WORD = re.compile(r"\w+")
_PAIRS_PER_CHUNK = 1 << 16
_WORDS_PER_CHUNK = 1 << 18
_DRAWS = mixed(
    np.arange(1, 2 * HASHES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
)
_OFFSETS = (_DRAWS >> np.uint64(32)).astype(np.uint32)[HASHES:]
_FACTORS = (_DRAWS >> np.uint64(32)).astype(np.uint32)[:HASHES] | np.uint32(1)


def signatures(texts: Sequence[str]) -> Signatures:
    """Compute MinHash signatures, uint16 [texts, HASHES], of the case-folded words of texts."""
    hash_of = cache(
        lambda word: xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))
    )
    out = np.empty((len(texts), HASHES), np.uint16)
    start = 0
    while start < len(texts):
        hashes: list[int] = []
        lengths: list[int] = []
        while start + len(lengths) < len(texts) and len(hashes) < _WORDS_PER_CHUNK:
            text = texts[start + len(lengths)].casefold()
            words = _WORD.findall(text) or [text]
            hashes += map(hash_of, words)
            hashes += [0] * (SHINGLE - len(words))
            lengths.append(max(SHINGLE, len(words)))
        stop = start + len(lengths)
        out[start:stop] = _min_hashes(np.array(hashes, np.uint64), np.array(lengths))
        start = stop
    return out


def _min_hashes(words: U64, lengths: NDArray[np.int64]) -> Signatures:
    """Compute the signatures of texts from the concatenated hashes of their words."""
    joined = words[:-2] * np.uint64(0x9E3779B97F4A7C15)
    joined = (joined ^ (joined >> np.uint64(29))) + words[1:-1] * np.uint64(
        0xC2B2AE3D27D4EB4F
    )
    joined = (joined ^ (joined >> np.uint64(31))) + words[2:]
    shingles = (mixed(joined) >> np.uint64(32)).astype(np.uint32)

    # A shingle must not extend into the next text.
    is_inside = np.ones(len(words), np.bool_)
    ends = np.cumsum(lengths)
    is_inside[ends - 1] = is_inside[ends - 2] = False
    shingles = shingles[is_inside[: len(shingles)]]
    n_shingles = lengths - (SHINGLE - 1)
    starts = np.cumsum(n_shingles) - n_shingles

    out = np.empty((len(lengths), HASHES), np.uint16)
    hashes = np.empty_like(shingles)
    for i, (factor, offset) in enumerate(zip(_FACTORS, _OFFSETS, strict=True)):
        # Multiply-shift hashing is pairwise independent. Shingles are hashes, and on random keys it
        # is as good as full randomness (Mitzenmacher and Vadhan 2008).
        np.multiply(shingles, factor, out=hashes)
        np.add(hashes, offset, out=hashes)
        least = np.minimum.reduceat(hashes, starts)
        out[:, i] = (least ^ (least >> np.uint32(16))).astype(np.uint16)
    return out


def find_clusters(signatures: Signatures) -> tuple[NDArray[np.int64], int]:
    """Find clusters of near-duplicates.

    Returns:
        The first record of each record's cluster, [records], and the number of records that were
        not compared with their entire bucket.
    """
    first = np.arange(len(signatures), dtype=np.int64)
    n_unchecked = 0
    for band in range(BANDS):
        keys = np.zeros(len(signatures), np.uint64)
        for column in np.array(signatures[:, band * BAND : (band + 1) * BAND]).T:
            keys = mixed(keys ^ column) + np.uint64(0x9E3779B97F4A7C15)
        order = np.argsort(keys, kind="stable")
        rows, bucket = _drop_single(order, np.cumsum(mark_changes(keys[order])))
        for _ in range(ROUNDS):
            if not len(rows):
                break
            starts = mark_changes(bucket)
            heads = rows[starts][np.cumsum(starts) - 1]
            # Rows in the cluster of their head need no comparison.
            is_in_cluster = first[rows] == first[heads]
            others = np.flatnonzero(~is_in_cluster)
            near = others[_is_near(signatures, rows[others], heads[others])]
            _unite(first, rows[near], heads[near])
            is_in_cluster[near] = True
            rows, bucket = _drop_single(rows[~is_in_cluster], bucket[~is_in_cluster])
        n_unchecked += len(rows)
    return first, n_unchecked


def mark_changes(values: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Mark the values that differ from their predecessor, and the first value."""
    changes = np.ones(len(values), np.bool_)
    changes[1:] = values[1:] != values[:-1]
    return changes


def _drop_single(
    rows: NDArray[np.int64], bucket: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Drop buckets of a single row from rows that are sorted by bucket."""
    is_shared = np.zeros(len(rows), np.bool_)
    is_shared[1:] = bucket[1:] == bucket[:-1]
    is_shared[:-1] |= is_shared[1:].copy()
    return rows[is_shared], bucket[is_shared]


def _is_near(
    signatures: Signatures, rows: NDArray[np.int64], heads: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Mark the rows with an estimated similarity to their head of at least `THRESHOLD`."""
    is_near = np.zeros(len(rows), np.bool_)
    for start in range(0, len(rows), _PAIRS_PER_CHUNK):
        part = slice(start, start + _PAIRS_PER_CHUNK)
        is_equal = signatures[rows[part]] == signatures[heads[part]]
        is_near[part] = is_equal.mean(axis=-1) >= THRESHOLD
    return is_near


def _unite(
    first: NDArray[np.int64], a: NDArray[np.int64], b: NDArray[np.int64]
) -> None:
    """Unite the clusters of pairs by a vectorised union-find with the smallest row as root."""
    while len(a):
        is_apart = first[a] != first[b]
        a, b = a[is_apart], b[is_apart]
        np.minimum.at(
            first, np.maximum(first[a], first[b]), np.minimum(first[a], first[b])
        )
        while not np.array_equal(jumped := first[first], first):
            first[:] = jumped


def clusters_of(store: Path, folders: Sequence[Path]) -> tuple[NDArray[np.int64], int]:
    """Call `find_clusters` on shards in order, with a scratch file of 240 bytes per record."""
    n_records = 0
    with TemporaryFile(dir=store) as scratch:
        for folder in folders:
            rows = np.load(folder / f"{NEAR}.npy", allow_pickle=False)
            scratch.write(rows.tobytes())
            n_records += len(rows)
        if not n_records:
            return np.zeros(0, np.int64), 0
        scratch.flush()
        return find_clusters(
            np.memmap(scratch, np.uint16, "r", shape=(n_records, HASHES))
        )
