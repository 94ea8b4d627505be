"""One shard: parse, clean, tokenise and write a group of blocks. Runs in worker processes.

A shard depends on its group and the settings alone: not on the worker, their number, or what was
done before. `shard.json` is written with it and tells a later start that it is whole.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from toque.data.prepare.near_duplicates import NEAR
from toque.data.prepare.settings import PrepareSettings
from toque.data.prepare.shard_builder import BlockCounts, ShardBuilder
from toque.data.store.manifest import FileEntry
from toque.data.tokenizer.codec import Codec, load_codec
from toque.errors import ConfigError
from toque.sources.excerpts import Excerpt
from toque.sources.records import Block, DoesTasks, RecordReader
from toque.storage.atomic import atomic_folder, disk_faults, save_array, sync_folder
from toque.storage.checksums import sha256_of

_RECORDED = {
    "toque.cooking.formats": "toque.cooking.schemas",
    "toque.data.text": "toque.sources.plain_text",
    "toque.data.token_files": "toque.sources.token_arrays",
}
"""Readers as stores record them -> where they are now: a store's fingerprint holds the name."""
SIDECAR = "shard.json"


class ShardResult(msgspec.Struct):
    """A shard's sidecar: enough to finish a store without reading the group again."""

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


@dataclass(frozen=True)
class Job:
    """What every group of one `prepare` shares; travels to a worker once."""

    store: Path
    fingerprint: str
    readers: tuple[str, ...]
    """By source index."""
    settings: PrepareSettings


class ShardWorker:
    """A worker's tools for one job: the codec and the readers, made once."""

    def __init__(self, job: Job, codec: Codec | None = None) -> None:
        self.job = job
        self.codec = codec or load_codec(job.store / "tokenizer")
        tasks = job.settings.tasks
        self.readers = [load_reader(reader, tasks) for reader in job.readers]

    def write_shard(self, group: int, blocks: list[Block]) -> ShardResult:
        """Write shard number `group` and return its counts.

        Raises:
            DataError: the disk is full, or an example is over its limit and the settings say
                that this is an error.
            ConfigError: the settings ask to split pairs.
        """
        group_rows = ShardBuilder(self.codec, self.job.settings)
        for block in blocks:
            group_rows.read(block, self.readers[block.source])
        rows = group_rows.rows()
        folder = shard_folder(self.job.store, group)
        with disk_faults(self.job.store, f"writing {folder.name}"), atomic_folder(folder) as writer:
            for name, array in rows.items():
                save_array(writer.folder / f"{name}.npy", array)
            n_rows = len(rows["prompt_ends"])
            files = [_entry(writer.folder / f"{name}.npy", folder, n_rows) for name in sorted(rows)]
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
                **group_rows.counts(),
            )
            (writer.folder / SIDECAR).write_bytes(
                msgspec.json.encode(result, order="deterministic")
            )
        sync_folder(folder)
        return result


def shard_folder(store: Path, group: int) -> Path:
    """Folder of shard number `group`."""
    return store / "shards" / f"{group:05d}"


def load_reader(spec: str, tasks: tuple[str, ...]) -> RecordReader:
    """The reader named "module:attribute".

    Raises:
        ConfigError: no such module or attribute, or it reads nothing.
    """
    module, _, attribute = spec.partition(":")
    module = _RECORDED.get(module, module)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'The reader "{spec}" cannot be loaded: {error}. It is named "module:attribute".'
        ) from error
    reader = found if hasattr(found, "examples") else found(tasks)
    return reader.for_tasks(tasks) if isinstance(reader, DoesTasks) else cast(RecordReader, reader)


def _entry(path: Path, folder: Path, n_rows: int) -> FileEntry:
    name = f"shards/{folder.name}/{path.name}"
    return FileEntry(name, path.stat().st_size, sha256_of(path), n_rows)
