"""Near-duplicates: records with similar texts, by MinHash.

A text becomes the set of its runs of 3 words, then the 120 smallest hashes of the set, then 20
bands of 6 hashes. Records that share a band are compared.

The fraction of equal entries of two signatures estimates the Jaccard similarity of the two sets
(Broder 1997) with a standard deviation of 0.04 at 0.7. Two records of similarity s share a band
with the probability 1 - (1 - s^6)^20, which is 0.27 at 0.5, 0.92 at 0.7 and 0.998 at 0.8 (Leskovec,
Rajaraman and Ullman, Mining of Massive Datasets, section 3.4). Two records are near-duplicates if
their estimated similarity also reaches `THRESHOLD`. Two copies of a recipe of 130 words reach it if
up to about seven words differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import xxhash
from numpy.typing import NDArray

from toque.data.array_types import Bools, Ints
from toque.keyed_random import mixed

U64 = NDArray[np.uint64]
Signatures = NDArray[np.uint16]
NEAR = "near"  # name of a shard's array of signatures, which a finished store does not need
SHINGLE = 3  # number of words per run
BANDS = 20
BAND = 6  # number of hashes per band
HASHES = BANDS * BAND
THRESHOLD = 0.7  # estimated Jaccard similarity of near-duplicates
ROUNDS = 16
"""Maximum number of comparisons per row of a bucket. Without a limit, a bucket of a million similar
records would take 10^12 comparisons. The remaining rows are counted.
"""
_WORD = re.compile(r"\w+")
_PAIRS_PER_CHUNK = 1 << 16
_WORDS_PER_CHUNK = 1 << 18
# Odd multipliers that mix bits: 2^64 divided by the golden ratio, and a prime of xxHash.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_PRIME = np.uint64(0xC2B2AE3D27D4EB4F)
_DRAWS = mixed(np.arange(1, 2 * HASHES + 1, dtype=np.uint64) * _GOLDEN)
_HIGH_BITS = (_DRAWS >> np.uint64(32)).astype(np.uint32)
_FACTORS = _HIGH_BITS[:HASHES] | np.uint32(1)  # factors must be odd
_OFFSETS = _HIGH_BITS[HASHES:]


def signatures(texts: Sequence[str]) -> Signatures:
    """Compute MinHash signatures, uint16 [texts, HASHES], of the case-folded words of texts."""
    parts = [np.empty((0, HASHES), np.uint16)]
    for word_hashes, lengths in _hash_words(texts):
        shingles = _hash_shingles(word_hashes, lengths)
        parts.append(_min_hashes(shingles, lengths - (SHINGLE - 1)))
    return np.concatenate(parts)


def _hash_words(texts: Sequence[str]) -> Iterator[tuple[U64, Ints]]:
    """Yield the word hashes of texts, concatenated, and the words per text, in chunks."""
    hash_of = cache(
        lambda word: xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))
    )
    hashes: list[int] = []
    lengths: list[int] = []
    for text in map(str.casefold, texts):
        words = _WORD.findall(text) or [text]
        hashes += map(hash_of, words)
        # Every text needs at least one shingle.
        hashes += repeat(0, SHINGLE - len(words))
        lengths.append(max(SHINGLE, len(words)))
        if len(hashes) >= _WORDS_PER_CHUNK:
            yield np.array(hashes, np.uint64), np.array(lengths)
            hashes = []
            lengths = []
    if lengths:
        yield np.array(hashes, np.uint64), np.array(lengths)


def _hash_shingles(words: U64, lengths: Ints) -> NDArray[np.uint32]:
    """Hash every run of 3 words from the texts' concatenated word hashes."""
    joined = words[:-2] * _GOLDEN
    joined = (joined ^ (joined >> np.uint64(29))) + words[1:-1] * _PRIME
    joined = (joined ^ (joined >> np.uint64(31))) + words[2:]
    shingles = (mixed(joined) >> np.uint64(32)).astype(np.uint32)

    # A shingle must not extend into the next text.
    is_inside = np.ones(len(words), np.bool_)
    ends = np.cumsum(lengths)
    is_inside[ends - 1] = False
    is_inside[ends - 2] = False
    return shingles[is_inside[: len(shingles)]]


def _min_hashes(shingles: NDArray[np.uint32], counts: Ints) -> Signatures:
    """Compute the signatures of texts from their concatenated shingles and counts [texts].

    Each entry is the minimum of a different hash function over the shingles of a text.
    """
    starts = np.cumsum(counts) - counts
    minima = np.empty((len(counts), HASHES), np.uint16)
    hashes = np.empty_like(shingles)
    for i, (factor, offset) in enumerate(zip(_FACTORS, _OFFSETS, strict=True)):
        # Multiply-shift hashing is pairwise independent. On keys that are already hashes, such as
        # shingles, it is as good as full randomness (Mitzenmacher and Vadhan 2008).
        np.multiply(shingles, factor, out=hashes)
        np.add(hashes, offset, out=hashes)
        least = np.minimum.reduceat(hashes, starts)
        # 16 bits are enough to compare signatures.
        minima[:, i] = (least ^ (least >> np.uint32(16))).astype(np.uint16)
    return minima


def find_clusters(signatures: Signatures) -> tuple[Ints, int]:
    """Find clusters of near-duplicates.

    Returns:
        The first record of each record's cluster, [records], and the number of rows that were not
        compared with their entire bucket.
    """
    first = np.arange(len(signatures), dtype=np.int64)
    n_unchecked = 0
    for band in range(BANDS):
        keys = np.zeros(len(signatures), np.uint64)
        for column in np.array(signatures[:, band * BAND : (band + 1) * BAND]).T:
            keys = mixed(keys ^ column) + _GOLDEN
        order = np.argsort(keys, kind="stable")
        rows, bucket = _drop_single(order, np.cumsum(mark_changes(keys[order])))
        for _ in range(ROUNDS):
            if not len(rows):
                break
            rows, bucket = _compare_with_heads(signatures, first, rows, bucket)
        n_unchecked += len(rows)
    return first, n_unchecked


def _compare_with_heads(
    signatures: Signatures,
    first: Ints,
    rows: Ints,
    bucket: Ints,
) -> tuple[Ints, Ints]:
    """Compare rows with the first row of their bucket, and unite the clusters of similar rows.

    Args:
        signatures: MinHash signatures, [records].
        first: First record of each record's cluster, [records]. This call changes it.
        rows: Rows to compare, sorted by bucket.
        bucket: Bucket of each row.

    Returns:
        The rows that are not similar to the first row, and their buckets.
    """
    starts = mark_changes(bucket)
    heads = rows[starts][np.cumsum(starts) - 1]
    # Rows in the cluster of their head need no comparison.
    is_in_cluster = first[rows] == first[heads]
    others = np.flatnonzero(~is_in_cluster)
    near = others[_is_near(signatures, rows[others], heads[others])]
    _unite(first, rows[near], heads[near])
    is_in_cluster[near] = True
    return _drop_single(rows[~is_in_cluster], bucket[~is_in_cluster])


def mark_changes(values: NDArray[np.integer]) -> Bools:
    """Mark the values that differ from their predecessor, and the first value."""
    changes = np.ones(len(values), np.bool_)
    changes[1:] = values[1:] != values[:-1]
    return changes


def _drop_single(rows: Ints, bucket: Ints) -> tuple[Ints, Ints]:
    """Drop the buckets with a single row. The rows must be sorted by bucket."""
    is_shared = np.zeros(len(rows), np.bool_)
    is_shared[1:] = bucket[1:] == bucket[:-1]
    is_shared[:-1] |= is_shared[1:].copy()
    return rows[is_shared], bucket[is_shared]


def _is_near(signatures: Signatures, rows: Ints, heads: Ints) -> Bools:
    """Mark the rows with an estimated similarity to their head of at least `THRESHOLD`."""
    is_near = np.zeros(len(rows), np.bool_)
    for start in range(0, len(rows), _PAIRS_PER_CHUNK):
        part = slice(start, start + _PAIRS_PER_CHUNK)
        is_equal = signatures[rows[part]] == signatures[heads[part]]
        is_near[part] = is_equal.mean(axis=-1) >= THRESHOLD
    return is_near


def _unite(first: Ints, a: Ints, b: Ints) -> None:
    """Unite the clusters of the pairs (a[i], b[i]) by a vectorised union-find.

    The root of a cluster is its smallest row.
    """
    while len(a):
        is_apart = first[a] != first[b]
        a = a[is_apart]
        b = b[is_apart]
        larger_root = np.maximum(first[a], first[b])
        np.minimum.at(first, larger_root, np.minimum(first[a], first[b]))
        # Shorten the paths until every row points to its root.
        while not np.array_equal(jumped := first[first], first):
            first[:] = jumped


def cluster_shards(store: Path, folders: Sequence[Path]) -> tuple[Ints, int]:
    """Find the near-duplicates of all shards, in the shards' order.

    A scratch file in the store has the signatures of all records, so that memory does not limit
    their number.

    Returns:
        The first record of each record's cluster, [records], and the number of rows that were not
        compared with their entire bucket; see `find_clusters`.
    """
    n_records = 0
    with TemporaryFile(dir=store) as scratch:
        for folder in folders:
            shard_signatures = np.load(folder / f"{NEAR}.npy", allow_pickle=False)
            scratch.write(shard_signatures.tobytes())
            n_records += len(shard_signatures)
        if not n_records:
            return np.zeros(0, np.int64), 0
        scratch.flush()
        all_signatures = np.memmap(scratch, np.uint16, "r", shape=(n_records, HASHES))
        return find_clusters(all_signatures)
