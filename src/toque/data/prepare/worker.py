"""Shard worker: parses, cleans, tokenises and writes one group of blocks.

A shard depends on its group and the settings alone: not on the worker, the number of workers, or
earlier shards. `shard.json` is written with it and marks it as whole for a later start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from toque.data.prepare.near_duplicates import NEAR
from toque.data.prepare.settings import PrepareSettings
from toque.data.prepare.shard_builder import BlockCounts, ShardBuilder
from toque.data.store.manifest import FileEntry
from toque.data.tokenizer.codec import Codec, load_codec
from toque.sources.excerpts import Excerpt
from toque.sources.records import Block, RecordReader
from toque.storage.atomic import atomic_folder, disk_faults, save_array, sync_folder
from toque.storage.checksums import sha256_of

SIDECAR = "shard.json"


class ShardResult(msgspec.Struct):
    """A shard's sidecar: enough to finalize a store without reading the group again."""

    fingerprint: str
    group: int
    rows: int
    records: int
    blocks: list[BlockCounts]
    dropped: dict[str, int]
    """Records dropped after reading: without target, over a limit, below the quality."""
    notes: dict[str, int]
    cut: dict[str, int]
    unknown: dict[str, int]
    lost_characters: dict[str, int]
    columns: dict[str, str]
    files: list[FileEntry]
    excerpts: list[Excerpt] = []
    """A few dropped records as they were, for the report."""
    content: str = ""
    """Hash of the blocks it was made from, and of their readers."""


@dataclass(frozen=True)
class Job:
    """What all groups of one `prepare` share; sent to each worker once."""

    store: Path
    fingerprint: str
    readers: Mapping[tuple[int, str], RecordReader]
    """By source index and file name."""
    settings: PrepareSettings

    def reader_of(self, block: Block) -> RecordReader:
        """The reader of a block's file."""
        return self.readers[block.source, block.path]

    def content_of(self, blocks: Sequence[Block]) -> str:
        """Hash of what a group holds and of how it is read; with `fingerprint` all of its shard."""
        content = xxhash.xxh3_128()
        for block in blocks:
            reader = self.reader_of(block).recorded_name
            place = (block.source, block.path, block.first_line, block.last, reader)
            content.update(msgspec.json.encode((*place, len(block.payload))))
            content.update(block.payload)
        return content.hexdigest()


class ShardWorker:
    """Writes the shards of one job; a codec that is not passed is loaded with the first."""

    def __init__(self, job: Job, codec: Codec | None = None) -> None:
        self.job = job
        self._codec = codec

    def write_shard(self, group: int, blocks: list[Block]) -> ShardResult:
        """Write shard number `group` and return its counts.

        Raises:
            DataError: the disk is full, or an example is over its limit and the settings say
                that this is an error.
            ConfigError: the settings ask to split pairs.
        """
        self._codec = self._codec or load_codec(self.job.store / "tokenizer")
        group_rows = ShardBuilder(self._codec, self.job.settings)
        for block in blocks:
            group_rows.read(block, self.job.reader_of(block))
        rows = group_rows.rows()
        folder = shard_folder(self.job.store, group)
        with disk_faults(self.job.store, f"writing {folder.name}"), atomic_folder(folder) as writer:
            for name, array in rows.items():
                save_array(writer.folder / f"{name}.npy", array)
            n_rows = len(rows["prompt_ends"])
            place = f"shards/{folder.name}"
            files = [
                file_entry(writer.folder / f"{name}.npy", f"{place}/{name}.npy", n_rows)
                for name in sorted(rows)
            ]
            result = ShardResult(
                fingerprint=self.job.fingerprint,
                group=group,
                rows=n_rows,
                columns={
                    name: str(array.dtype)
                    for name, array in sorted(rows.items())
                    if not name.endswith(("_tokens", "_ends")) and name != NEAR
                },
                files=files,
                content=self.job.content_of(blocks),
                **group_rows.counts(),
            )
            writer.put(SIDECAR, msgspec.json.encode(result, order="deterministic"))
        sync_folder(folder)
        return result


def shard_folder(store: Path, group: int) -> Path:
    """Folder of shard number `group`."""
    return store / "shards" / f"{group:05d}"


def read_column(store: Path, shards: Sequence[ShardResult], name: str) -> NDArray[Any]:
    """A column of all rows of these shards, NaN in those that lack it."""
    parts = [
        np.load(shard_folder(store, shard.group) / f"{name}.npy", allow_pickle=False)
        if name in shard.columns
        else np.full(shard.rows, np.nan, np.float32)
        for shard in shards
    ]
    return np.concatenate(parts)


def file_entry(path: Path, name: str, n_rows: int) -> FileEntry:
    """The manifest's entry of a file that the store will hold under `name`."""
    return FileEntry(name, path.stat().st_size, sha256_of(path), n_rows)
