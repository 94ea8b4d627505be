"""Near-duplicates over all shards of a store, with little more memory than a few columns.

Signatures lie in the shards while a store is made; here they are joined into one file and their
band keys written to another, 400 bytes a record in all, both removed in the end. The keys are read
a band at a time, of the signatures only the pages of candidates are mapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

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
from toque.storage.atomic import PARTIAL

NEAR = "near"
"""Name of the signatures among a shard's arrays; no part of a finished store."""
_KEY_BYTES = 8


def clusters_of(store: Path, folders: Sequence[Path]) -> Clusters:
    """Clusters of all records, in the order of the shards' `folders`."""
    counts = [len(_signatures(folder, mmap=True)) for folder in folders]
    n_records = sum(counts)
    if not n_records:
        return Clusters(np.zeros(0, np.int64), 0)
    with ExitStack() as stack:
        joined = stack.enter_context(_scratch(store / f"{NEAR}{PARTIAL}"))
        keys = stack.enter_context(_scratch(store / f"{NEAR}-keys{PARTIAL}"))
        at = 0
        for folder, count in zip(folders, counts, strict=True):
            rows = _signatures(folder, mmap=False)
            joined.write(rows.tobytes())
            for band, part in enumerate(band_keys(rows)):
                keys.seek((band * n_records + at) * _KEY_BYTES)
                keys.write(part.tobytes())
            at += count
        joined.flush()
        found = np.memmap(joined.name, np.uint16, "r", shape=(n_records, HASHES))
        return find_clusters(found, _bands(keys, n_records))


def remove_signatures(folder: Path) -> None:
    """Take a shard's signatures away; the store is whole without them."""
    (folder / f"{NEAR}.npy").unlink(missing_ok=True)


def _signatures(folder: Path, *, mmap: bool) -> Signatures:
    found: Signatures = np.load(
        folder / f"{NEAR}.npy", mmap_mode="r" if mmap else None, allow_pickle=False
    )
    return found


def _bands(keys: BinaryIO, n_records: int) -> Iterator[U64]:
    for band in range(BANDS):
        keys.seek(band * n_records * _KEY_BYTES)
        yield np.frombuffer(keys.read(n_records * _KEY_BYTES), np.uint64)


@contextmanager
def _scratch(path: Path) -> Iterator[BinaryIO]:
    """A file to write and read that is gone afterwards."""
    try:
        with path.open("w+b") as file:
            yield file
    finally:
        path.unlink(missing_ok=True)
