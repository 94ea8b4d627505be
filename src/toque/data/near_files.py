"""Near-duplicates over all shards of a store, with little more memory than a few columns.

Signatures lie in the shards while a store is made; here they are joined into two files of
640 bytes a record in all, mapped rather than held, and removed in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from toque.data.files import PARTIAL
from toque.data.near import BANDS, HASHES, Clusters, band_keys, find_clusters

NEAR = "near"
"""Name of the signatures among a shard's arrays; no part of a finished store."""
_ROWS = 1 << 16
_Number = TypeVar("_Number", bound=np.generic)


def clusters_of(store: Path, folders: Sequence[Path]) -> Clusters:
    """Clusters of all records, in the order of the shards' `folders`."""
    parts = [np.load(f / f"{NEAR}.npy", mmap_mode="r", allow_pickle=False) for f in folders]
    n_records = sum(map(len, parts))
    if not n_records:
        return Clusters(np.zeros(0, np.int64), 0)
    with (
        _scratch(store / f"{NEAR}{PARTIAL}", np.uint16, (n_records, HASHES)) as found,
        _scratch(store / f"{NEAR}-keys{PARTIAL}", np.uint64, (BANDS, n_records)) as keys,
    ):
        at = 0
        for part in parts:
            for begin in range(0, len(part), _ROWS):
                rows = np.asarray(part[begin : begin + _ROWS])
                found[at : at + len(rows)] = rows
                keys[:, at : at + len(rows)] = band_keys(rows)
                at += len(rows)
        return find_clusters(found, keys)


def remove_signatures(folder: Path) -> None:
    """Take a shard's signatures away; the store is whole without them."""
    (folder / f"{NEAR}.npy").unlink(missing_ok=True)


@contextmanager
def _scratch(path: Path, kind: type[_Number], shape: tuple[int, ...]) -> Iterator[NDArray[_Number]]:
    """A mapped array in a file that is gone afterwards.

    The space is written before it is mapped: a full disk must be an error here, not a SIGBUS when
    a page is touched.
    """
    dtype = np.dtype(kind)
    n_bytes = dtype.itemsize * int(np.prod(shape))
    try:
        with path.open("wb") as file:
            zeros = bytes(min(n_bytes, 1 << 22))
            for at in range(0, n_bytes, len(zeros)):
                file.write(zeros[: n_bytes - at])
        yield np.memmap(path, dtype, "r+", shape=shape)
    finally:
        path.unlink(missing_ok=True)
