"""Scheduling of a store's shards: reuse those of an earlier start, write the others, stop early.

With `max_examples`, files take turns, one block each, and reading ends at the first group after
which the groups hold enough distinct examples. That group is determined from the content of the
groups in their order, so the store is the same for every number of workers; groups finished beyond
it are discarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from toque.data.prepare.duplicates import first_of_kind
from toque.data.prepare.shard_workers import (
    SIDECAR,
    ForkedState,
    Job,
    ShardResult,
    read_column,
    shard_folder,
    usable_cores,
    write_shards,
    write_shards_on_ray,
)
from toque.data.store.token_store import check_files
from toque.errors import DataError
from toque.sources import source_files as sources
from toque.sources.records import Block
from toque.sources.source_files import SourceFile, blocks_of, plain_bytes
from toque.storage.json_files import decode_json
from toque.storage.progress import ProgressSink

Engine = Literal["local", "ray"]
NOT_READ = "bytes of the sources not read, max_examples was reached"
_SMALL = 4 << 20
"""Below this many plain bytes, one process is done before others have started."""
_OPEN_FILES = 16
"""Files read in turn at the same time; the next is opened when one ends."""
_BYTES_AN_EXAMPLE = 2048
"""Guess for sizing groups if few examples are wanted, so that a small run reads little."""


@dataclass
class ShardWriting:
    """The shards of one store.

    Args:
        job: the store's; shards with another fingerprint are written again.
        files: to read, in order.
        inherited: state for forked workers.
    """

    job: Job
    files: Sequence[SourceFile]
    inherited: ForkedState
    not_read: int = 0
    """Bytes left unread once `max_examples` were found."""
    _results: dict[int, ShardResult] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)
    _needed: int | None = None
    """Groups that hold enough examples, once known."""

    def write(
        self, progress: ProgressSink, *, workers: int | None, engine: Engine
    ) -> list[ShardResult]:
        """Every shard the store needs, in group order.

        Raises:
            DataError: a source cannot be read, a worker was lost, the disk is full.
            ConfigError: `engine` is ray, and Ray is not installed.
        """
        total = sum(map(plain_bytes, self.files))
        if workers is None and engine == "local":
            workers = 1 if total <= _SMALL else usable_cores()
        coming = self._groups()
        if engine == "ray":
            written = write_shards_on_ray(self.job, self._to_do(coming), workers=workers)
        else:
            written = write_shards(
                self.job, self._to_do(coming), workers=workers or 1, inherited=self.inherited
            )
        with closing(written):  # when interrupted here, its workers end now
            for result in written:
                self._take(result)
                done = sum(self._sizes[number] for number in self._results)
                rows = sum(r.rows for r in self._results.values())
                progress(done, max(total, done), f"{rows:,} examples")
        if self._needed is None:
            return [self._results[number] for number in sorted(self._results)]
        if self._needed in self._sizes or next(coming, None) is not None:
            self.not_read = max(1, total - sum(self._sizes[n] for n in range(self._needed)))
        return [self._results[number] for number in range(self._needed)]

    def _groups(self) -> Iterator[tuple[int, list[Block]]]:
        wanted = self.job.settings.max_examples
        if wanted is None:
            blocks = chain.from_iterable(map(blocks_of, self.files))
            return grouped(blocks, most=sources.GROUP_BYTES)
        size = min(sources.GROUP_BYTES, max(1 << 20, wanted * _BYTES_AN_EXAMPLE))
        return grouped(in_turns(self.files), most=size)

    def _to_do(
        self, coming: Iterator[tuple[int, list[Block]]]
    ) -> Iterator[tuple[int, list[Block]]]:
        while self._needed is None and (group := next(coming, None)) is not None:
            number, blocks = group
            self._sizes[number] = sum(len(block.payload) for block in blocks)
            kept = self._kept(number, blocks)
            if kept is None:
                yield group
            else:
                self._take(kept)

    def _take(self, result: ShardResult) -> None:
        self._results[result.group] = result
        wanted = self.job.settings.max_examples
        if wanted is None or self._needed is not None:
            return
        n_rows, number = 0, 0
        while number in self._results:
            n_rows += self._results[number].rows
            number += 1
            # Counting distinct ones reads columns, so wait until the plain sum suffices.
            if n_rows >= wanted and self._different(number) >= wanted:
                self._needed = number
                return

    def _different(self, n_groups: int) -> int:
        """Rows of the first groups without exact duplicates."""
        shards = [self._results[number] for number in range(n_groups)]
        if self.job.settings.dedup == "none":
            return sum(shard.rows for shard in shards)
        key, task, starts = (
            read_column(self.job.store, shards, name)
            for name in ("record_key", "task", "starts_record")
        )
        return int(first_of_kind(key, task, np.cumsum(starts, dtype=np.int64)).sum())

    def _kept(self, number: int, blocks: list[Block]) -> ShardResult | None:
        """The shard of an earlier start, if it is whole and of these blocks."""
        result = read_sidecar(shard_folder(self.job.store, number) / SIDECAR)
        if result is None or result.fingerprint != self.job.fingerprint:
            return None
        if result.content != self.job.content_of(blocks):
            return None
        try:
            check_files(self.job.store, result.files, verify=True)
        except DataError:
            return None
        return result


def in_turns(files: Sequence[SourceFile]) -> Iterator[Block]:
    """A block of each file in turn, so that the first few come from many files."""
    waiting = deque(files)
    reading: deque[Iterator[Block]] = deque()
    while waiting or reading:
        while waiting and len(reading) < _OPEN_FILES:
            reading.append(blocks_of(waiting.popleft()))
        stream = reading.popleft()
        block = next(stream, None)
        if block is not None:
            yield block
            reading.append(stream)


def grouped(blocks: Iterator[Block], *, most: int) -> Iterator[tuple[int, list[Block]]]:
    """(number, blocks) of at most `most` bytes, or of one larger block."""
    number, size, group = 0, 0, list[Block]()
    for block in blocks:
        if group and size + len(block.payload) > most:
            yield number, group
            number, size, group = number + 1, 0, []
        group.append(block)
        size += len(block.payload)
    if group:
        yield number, group


def read_sidecar(path: Path) -> ShardResult | None:
    """A shard's sidecar; None if it is absent or damaged."""
    try:
        return decode_json(path.read_bytes(), ShardResult)
    except (OSError, msgspec.DecodeError):
        return None
