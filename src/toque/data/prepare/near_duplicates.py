"""Near-duplicate clusters over all shards of a store, in the memory of a few columns.

While a store is made, the signatures lie in its shards. They are concatenated into one scratch file
and their band keys written to another, 400 bytes a record in all. Keys are read one band at a time,
and only the pages of candidates are read from the mapped signatures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np

from toque.data.prepare.minhash import (
    BANDS,
    HASHES,
    U64,
    Clusters,
    Signatures,
    band_keys,
    find_clusters,
)

NEAR = "near"
"""Name of the signatures among a shard's arrays; removed from a finished store."""
_KEY_BYTES = 8


def clusters_of(store: Path, folders: Sequence[Path]) -> Clusters:
    """Clusters of all records, in the order of the shards' `folders`."""
    counts = [len(_signatures(folder, mmap=True)) for folder in folders]
    n_records = sum(counts)
    if not n_records:
        return Clusters(np.zeros(0, np.int64), 0)
    with TemporaryFile(dir=store) as joined, TemporaryFile(dir=store) as keys:
        at = 0
        for folder, count in zip(folders, counts, strict=True):
            rows = _signatures(folder, mmap=False)
            joined.write(rows.tobytes())
            for band, part in enumerate(band_keys(rows)):
                keys.seek((band * n_records + at) * _KEY_BYTES)
                keys.write(part.tobytes())
            at += count
        joined.flush()
        found = np.memmap(joined, np.uint16, "r", shape=(n_records, HASHES))
        return find_clusters(found, _bands(keys, n_records))


def _signatures(folder: Path, *, mmap: bool) -> Signatures:
    found: Signatures = np.load(
        folder / f"{NEAR}.npy", mmap_mode="r" if mmap else None, allow_pickle=False
    )
    return found


def _bands(keys: IO[bytes], n_records: int) -> Iterator[U64]:
    for band in range(BANDS):
        keys.seek(band * n_records * _KEY_BYTES)
        yield np.frombuffer(keys.read(n_records * _KEY_BYTES), np.uint64)
