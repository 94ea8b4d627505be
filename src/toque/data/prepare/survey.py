"""Survey of a store's rows for the report: column histograms, sources, examples.

Reads one column at a time: a store of millions of rows needs tens of megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toque.data.prepare.histograms import ColumnReport, SourceRows, column_reports
from toque.data.prepare.worker import ShardResult, read_column, shard_folder
from toque.data.store.token_store import LEFT_OUT, SPLIT_CODES
from toque.data.tokenizer.codec import Codec
from toque.keyed_random import mixed
from toque.sources.excerpts import Excerpt, shortened, spread

SHOWN = 20
"""Kept, and dropped, records shown in the report."""
_SALT = np.uint64(0x746F7175655F6C6B)
_OWN = frozenset({"key", "title_key", "record_key", "source", "task", "starts_record"})
"""Bookkeeping columns, which every store has and no histogram shows."""


@dataclass(frozen=True)
class StoreSurvey:
    """Rows of the shards and the split of each.

    Args:
        store: its folder.
        shards: in group order.
        split: [rows] 0 train, 1 validation, 255 left out.
        codec: turns ids into text.
    """

    store: Path
    shards: Sequence[ShardResult]
    split: NDArray[np.uint8]
    codec: Codec

    def columns(self) -> list[ColumnReport]:
        """Histograms of every measured column over the rows in use."""
        names = sorted({name for shard in self.shards for name in shard.columns} - _OWN)
        used = self.split != LEFT_OUT
        return column_reports(names, lambda name: self._column(name)[used])

    def sources(self, lengths: NDArray[np.int64]) -> list[SourceRows]:
        """Rows and tokens of each source; `lengths`: tokens of each row in use."""
        source = self._column("source").astype(np.int64)
        used = self.split != LEFT_OUT
        n = int(source.max()) + 1 if len(source) else 0
        train, validation = (
            np.bincount(source[self.split == SPLIT_CODES[side]], minlength=n)
            for side in ("train", "validation")
        )
        tokens = np.bincount(source[used], weights=lengths, minlength=n)
        return [SourceRows(i, int(train[i]), int(validation[i]), int(tokens[i])) for i in range(n)]

    def kept(self) -> list[Excerpt]:
        """Kept examples as the model sees them, sampled by a hash of their key."""
        names = {code: name for name, code in SPLIT_CODES.items()}
        rows = self._drawn(self.split != LEFT_OUT)
        return [self._row(row, names[int(self.split[row])]) for row in rows]

    def dropped(self, reasons: Mapping[str, int]) -> list[Excerpt]:
        """Dropped records: by their reader, by a limit, as duplicates.

        Args:
            reasons: why rows were left out, with their counts of records.
        """
        excerpts = [excerpt for shard in self.shards for excerpt in shard.excerpts]
        rows = self._drawn(self.split == LEFT_OUT)
        if rows and reasons:
            keys = self._column("record_key")
            again = np.isin(keys[rows], keys[self.split != LEFT_OUT]).tolist()
            rest = " or ".join(r for r in sorted(reasons) if r != "duplicate") or "duplicate"
            excerpts += [
                self._row(row, "duplicate" if twice and "duplicate" in reasons else rest)
                for row, twice in zip(rows, again, strict=True)
            ]
        return spread(excerpts, SHOWN)

    def _drawn(self, among: NDArray[np.bool_]) -> list[int]:
        rows = np.flatnonzero(among)
        order = mixed(self._column("key")[rows].astype(np.uint64) ^ _SALT)
        drawn: list[int] = rows[np.argsort(order, kind="stable")[:SHOWN]].tolist()
        return drawn

    def _row(self, row: int, reason: str) -> Excerpt:
        ends = np.cumsum([shard.rows for shard in self.shards])
        at = int(np.searchsorted(ends, row, side="right"))
        local = row - int(ends[at]) + self.shards[at].rows
        prompt, target = (self._text(at, local, side) for side in ("prompt", "target"))
        return Excerpt(reason, "", shortened(target), shortened(prompt))

    def _text(self, shard: int, row: int, side: str) -> str:
        folder = shard_folder(self.store, self.shards[shard].group)
        ends = np.load(folder / f"{side}_ends.npy", allow_pickle=False)
        tokens = np.load(folder / f"{side}_tokens.npy", mmap_mode="r", allow_pickle=False)
        return self.codec.decode(tokens[int(ends[row - 1]) if row else 0 : int(ends[row])].tolist())

    def _column(self, name: str) -> NDArray[Any]:
        return read_column(self.store, self.shards, name)
