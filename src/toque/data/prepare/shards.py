"""Shards: groups of blocks that workers parse, tokenise and write.

A shard depends only on its group and the settings. `shard.json` marks a complete shard, which a
later start uses again. Workers are local processes or actors of a Ray cluster. A single process
reads the sources and sends blocks to the workers, so the memory depends on their number only.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from multiprocessing import active_children, connection, get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from toque.data.array_types import Bools
from toque.data.prepare.data_report import Excerpt
from toque.data.prepare.dedup_and_split import mark_first_records
from toque.data.prepare.duplicates import NEAR
from toque.data.prepare.shard_builder import BlockCounts, ShardBuilder
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.store.store_manifest import StoreFile
from toque.data.store.token_store import check_files
from toque.data.tokenizer.codec import Codec, load_codec
from toque.data.tokenizer.tokenizer_folder import hash_of_folder
from toque.data.tokenizer.tokenizer_training import one_tokenizer_thread
from toque.errors import ConfigError, DataError, ToqueError
from toque.keyed_random import mixed
from toque.reporter import ProgressSink
from toque.sources import source_files
from toque.sources.conversations import CONVERSATIONS
from toque.sources.records import Block, RecordReader
from toque.sources.source_files import SourceFile, blocks_of
from toque.storage.atomic import (
    atomic_folder,
    disk_faults,
    save_array,
    sha256_of,
    sync_folder,
)
from toque.storage.json_files import read_json

if TYPE_CHECKING:
    from types import ModuleType

Engine = Literal["local", "ray"]
Groups = Iterator[tuple[int, list[Block]]]
SIDECAR = "shard.json"
NOT_READ = "bytes of the sources not read, max_examples was reached"
# Number of plain bytes that a process reads in the time that another process takes to start.
_SMALL_BYTES = 4 << 20
_MAX_PROCESSES = 16  # additional workers would wait for the process that reads
_OPEN_FILES = 16  # files that are read in turn
_MIN_GROUP_BYTES = 1 << 20
# Rough size of an example, to keep the groups of a small run small.
_EXAMPLE_BYTES = 2048
_QUEUED = 1  # groups waiting for a process; more would take memory
_GROUPS_PER_ACTOR = 2  # groups sent to a Ray actor: one in progress and one waiting


class ShardResult(msgspec.Struct):
    """Content of `shard.json`: everything that is needed to complete a store, except the rows."""

    fingerprint: str
    group: int
    rows: int
    records: int
    blocks: list[BlockCounts]
    # Records without a target, over a limit or below the quality.
    dropped: dict[str, int]
    notes: dict[str, int]
    unknown: dict[str, int]
    lost_characters: dict[str, int]
    columns: dict[str, str]
    files: list[StoreFile]
    excerpts: list[Excerpt]  # a few dropped records for the report
    content: str  # hash of the group's blocks and readers
    tokenizer: str  # hash of the tokenizer's folder


@dataclass(frozen=True)
class ShardWriter:
    """Writer of shards, which the workers use."""

    store: Path
    # Hash of the plan. A shard with another fingerprint is written again.
    fingerprint: str
    # Readers by source index and file name.
    readers: Mapping[tuple[int, str], RecordReader]
    settings: PrepareSettings
    loaded: Codec | None = None  # the store's codec, if it is loaded already

    @cached_property
    def codec(self) -> Codec:
        """The store's codec."""
        return self.loaded or load_codec(self.store / "tokenizer")

    @cached_property
    def tokenizer(self) -> str:
        """Hash of the store's tokenizer folder."""
        return hash_of_folder(self.store / "tokenizer")

    @cached_property
    def _has_conversations(self) -> bool:
        """True if a reader returns conversations."""
        names = (reader.recorded_name for reader in self.readers.values())
        return any(name.startswith(CONVERSATIONS) for name in names)

    def content_of(self, blocks: Sequence[Block]) -> str:
        """Hash the blocks of a group, and the names of their readers."""
        content = xxhash.xxh3_128()
        for block in blocks:
            reader = self.readers[block.source, block.path].recorded_name
            place = (block.source, block.path, block.first_line, block.last, reader)
            content.update(msgspec.json.encode((*place, len(block.payload))))
            content.update(block.payload)
        return content.hexdigest()

    def write(self, group: int, blocks: list[Block]) -> ShardResult:
        """Write the shard of a group and return its counts."""
        builder = ShardBuilder(self.codec, self.settings, talks=self._has_conversations)
        for block in blocks:
            builder.add_block(block, self.readers[block.source, block.path])
        arrays, counts = builder.build()

        folder = shard_folder(self.store, group)
        with (
            disk_faults(self.store, f"writing {folder.name}"),
            atomic_folder(folder) as writer,
        ):
            for name, array in arrays.items():
                save_array(writer.folder / f"{name}.npy", array)

            n_rows = len(arrays["prompt_ends"])
            place = f"shards/{folder.name}"
            files = [
                file_entry(writer.folder / f"{name}.npy", f"{place}/{name}.npy", n_rows)
                for name in sorted(arrays)
            ]
            columns = {
                name: str(array.dtype)
                for name, array in sorted(arrays.items())
                if not name.endswith(("_tokens", "_ends")) and name != NEAR
            }
            result = ShardResult(
                fingerprint=self.fingerprint,
                group=group,
                rows=n_rows,
                columns=columns,
                files=files,
                content=self.content_of(blocks),
                tokenizer=self.tokenizer,
                **counts,
            )

            writer.put(SIDECAR, msgspec.json.encode(result, order="deterministic"))
        sync_folder(folder)
        return result

    def find_missing_folder(self) -> str:
        """Return the store's folder if it is missing on this machine, or "" if it exists."""
        folder = self.store / "tokenizer"
        return "" if folder.is_dir() else str(folder)


@dataclass
class ShardWriting:
    """Writing of all shards of a store. Complete shards of an earlier start are used again.

    With `max_examples`, the files take turns, one block each. Reading ends when the first groups
    have enough different examples, not counting held-out sources. Later groups are discarded.
    """

    writer: ShardWriter
    files: Sequence[SourceFile]  # in the order of the sources
    not_read: int = 0  # number of bytes that were not needed for `max_examples`
    _results: dict[int, ShardResult] = field(default_factory=dict)  # results by group
    _sizes: dict[int, int] = field(default_factory=dict)  # bytes by group
    # Number of first groups that have enough examples. None if it is not known yet.
    _n_needed: int | None = None
    _n_complete: int = 0  # number of first groups without a gap
    _n_rows: int = 0  # rows of the complete groups
    _n_counted: int = 0  # number of first groups that `_n_different` counts
    _n_different: int = 0
    _seen: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(1, np.uint64))
    """Sorted hashes of record key and task of the counted rows, after a 0."""

    def write(
        self, progress: ProgressSink, *, workers: int | None, engine: Engine
    ) -> list[ShardResult]:
        """Write the shards that the store needs, and return their results in group order."""
        total = sum(file.plain_bytes for file in self.files)
        if workers is None and engine == "local":
            workers = min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
            if total <= _SMALL_BYTES:
                workers = 1
        groups = self._read_groups()
        write_shards = _write_on_ray if engine == "ray" else _write_locally
        results = write_shards(self.writer, self._unfinished_groups(groups), workers)
        with closing(results):
            for result in results:
                self._add_result(result)
                done = sum(self._sizes[number] for number in self._results)
                rows = sum(r.rows for r in self._results.values())
                progress(done, max(total, done), f"{rows:,} examples")

        if self._n_needed is None:
            return [self._results[number] for number in sorted(self._results)]
        # Another group exists if one was read, or if one can be read.
        if self._n_needed in self._sizes or next(groups, None) is not None:
            needed_bytes = sum(self._sizes[n] for n in range(self._n_needed))
            self.not_read = max(1, total - needed_bytes)
        return [self._results[number] for number in range(self._n_needed)]

    def _read_groups(self) -> Groups:
        """Read the blocks in groups. With `max_examples`, read held-out sources first."""
        settings = self.writer.settings
        max_bytes = source_files.GROUP_BYTES
        if settings.max_examples is None:
            blocks = chain.from_iterable(map(blocks_of, self.files))
            return group_blocks(blocks, max_bytes=max_bytes)
        wanted_bytes = settings.max_examples * _EXAMPLE_BYTES
        max_bytes = min(max_bytes, max(_MIN_GROUP_BYTES, wanted_bytes))
        held_out = [file for file in self.files if settings.holds_out(file.source)]
        train = [file for file in self.files if not settings.holds_out(file.source)]
        held_out_blocks = chain.from_iterable(map(blocks_of, held_out))
        return group_blocks(
            chain(held_out_blocks, in_turns(train)), max_bytes=max_bytes
        )

    def _unfinished_groups(self, groups: Groups) -> Groups:
        """Yield groups without a complete shard, until there are enough examples.

        Add the results of complete shards.
        """
        while self._n_needed is None and (group := next(groups, None)) is not None:
            number, blocks = group
            self._sizes[number] = sum(len(block.payload) for block in blocks)
            if (result := self._read_complete(number, blocks)) is not None:
                self._add_result(result)
            else:
                yield group

    def _add_result(self, result: ShardResult) -> None:
        """Add the result of a shard, and check if there are enough examples."""
        self._results[result.group] = result
        max_examples = self.writer.settings.max_examples
        if max_examples is None or self._n_needed is not None:
            return
        while (following := self._results.get(self._n_complete)) is not None:
            self._n_rows += following.rows
            self._n_complete += 1
            # Counting distinct rows reads columns, so count all rows first.
            if self._n_rows >= max_examples and self._count_different() >= max_examples:
                self._n_needed = self._n_complete
                return

    def _count_different(self) -> int:
        """Count the distinct rows of the complete groups, without held-out sources.

        Each group is read once: its count is added to the count of the groups before it.
        """
        settings = self.writer.settings
        if settings.dedup == "none" and settings.held_out_from is None:
            return self._n_rows
        for number in range(self._n_counted, self._n_complete):
            shard = [self._results[number]]
            source = read_column(self.writer.store, shard, "source")
            counts = source < (settings.held_out_from or np.inf)
            if settings.dedup != "none":
                counts &= self._add_unseen(shard)
            self._n_different += int(counts.sum())
        self._n_counted = self._n_complete
        return self._n_different

    def _add_unseen(self, shard: Sequence[ShardResult]) -> Bools:
        """Add the record keys and tasks of a shard to `_seen`.

        Return a mask of the first row of each key and task that no earlier group has.
        """
        names = ("record_key", "task", "starts_record")
        key, task, starts = (read_column(self.writer.store, shard, n) for n in names)
        is_first = mark_first_records(key, task, np.cumsum(starts, dtype=np.int64))
        hashes = mixed(key ^ mixed(task.astype(np.uint64)))
        # The 0 at the start of `_seen` makes every index valid.
        nearest = np.searchsorted(self._seen, hashes, side="right") - 1
        is_new: Bools = self._seen[nearest] != hashes
        new = np.unique(hashes[is_new])
        self._seen = np.insert(self._seen, np.searchsorted(self._seen, new), new)
        return is_first & is_new

    def _read_complete(self, number: int, blocks: list[Block]) -> ShardResult | None:
        """Read an earlier start's shard. Return None if it is incomplete or has other blocks."""
        writer = self.writer
        result = read_json(shard_folder(writer.store, number) / SIDECAR, ShardResult)
        if (
            result is None
            or result.fingerprint != writer.fingerprint
            or result.tokenizer != writer.tokenizer
        ):
            return None
        with suppress(DataError):  # a file is missing or damaged
            check_files(writer.store, result.files, verify=True)
            if result.content == writer.content_of(blocks):
                return result
        return None


def in_turns(files: Sequence[SourceFile]) -> Iterator[Block]:
    """Yield a block of each file in turn, so that the first blocks are from many files."""
    waiting = deque(files)
    reading: deque[Iterator[Block]] = deque()
    while waiting or reading:
        while waiting and len(reading) < _OPEN_FILES:
            reading.append(blocks_of(waiting.popleft()))
        stream = reading.popleft()
        if (block := next(stream, None)) is not None:
            yield block
            reading.append(stream)


def group_blocks(blocks: Iterator[Block], *, max_bytes: int) -> Groups:
    """Yield numbered groups of blocks of at most `max_bytes`. A larger block is its own group."""
    number = 0
    size = 0
    group: list[Block] = []
    for block in blocks:
        if group and size + len(block.payload) > max_bytes:
            yield number, group
            number += 1
            size = 0
            group = []
        group.append(block)
        size += len(block.payload)
    if group:
        yield number, group


def shard_folder(store: Path, group: int) -> Path:
    """Return the folder of a group's shard."""
    return store / "shards" / f"{group:05d}"


def read_column(store: Path, shards: Sequence[ShardResult], name: str) -> NDArray[Any]:
    """Read a column of several shards, with NaN for shards without the column."""
    parts: list[NDArray[Any]] = []
    for shard in shards:
        path = shard_folder(store, shard.group) / f"{name}.npy"
        if name in shard.columns:
            parts.append(np.load(path, allow_pickle=False))
        else:
            parts.append(np.full(shard.rows, np.nan, np.float32))
    return np.concatenate(parts)


def file_entry(path: Path, name: str, n_rows: int) -> StoreFile:
    """Make the manifest's entry of a file."""
    return StoreFile(name, path.stat().st_size, sha256_of(path), n_rows)


def has_one_thread() -> bool:
    """Check if this process certainly has no other thread, either of Python or of a library."""
    threads = Path("/proc/self/task")
    if sys.platform != "linux" or not threads.is_dir():
        return False
    return len(list(threads.iterdir())) == 1


def _write_locally(
    writer: ShardWriter, groups: Groups, workers: int | None
) -> Generator[ShardResult, None, None]:
    """Write shards in local processes, and yield their results in any order."""
    if workers is None or workers <= 1:
        for number, blocks in groups:
            yield writer.write(number, blocks)
        return
    pool: ProcessPoolExecutor | None = None
    running: set[Future[ShardResult]] = set()
    other_children = set(active_children())

    def wait_until(n_running: int) -> Iterator[ShardResult]:
        """Yield results until at most `n_running` tasks are running."""
        nonlocal running
        while len(running) > n_running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)

    try:
        # Otherwise every worker would start a thread per core.
        with one_tokenizer_thread():
            for number, blocks in groups:
                pool = pool or _start_pool(writer, workers)
                running.add(pool.submit(_write_shard, number, blocks))
                yield from wait_until(workers + _QUEUED - 1)
            yield from wait_until(0)
    except BrokenProcessPool as error:
        raise DataError(
            "A worker process ended unexpectedly, probably because the system killed it for lack "
            "of memory. Run the same command again with fewer workers, which need less memory. The "
            "finished shards are kept. "
            '(A Python script that calls prepare needs `if __name__ == "__main__":`.)'
        ) from error
    except (KeyboardInterrupt, GeneratorExit):
        # Do not wait for running shards, which may take a minute. They are written again later.
        for worker in set(active_children()) - other_children:
            worker.kill()
        raise
    finally:
        # After an error, finish running shards and cancel waiting ones.
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_pool(writer: ShardWriter, workers: int) -> ProcessPoolExecutor:
    """Start the workers. Call it after the first group was read, which starts library threads."""
    # Forked workers start immediately and have the tokenizer. But if this process has several
    # threads, one may hold a lock, which would never be released in the fork.
    can_fork = has_one_thread()
    context = get_context("fork" if can_fork else "spawn")
    if not can_fork:
        writer = replace(writer, loaded=None)
    # The pool forks all workers at the first task, before it starts its own thread.
    return ProcessPoolExecutor(
        workers, context, initializer=_start_worker, initargs=(writer,)
    )


_writer: ShardWriter | None = None


def _start_worker(writer: ShardWriter) -> None:
    """Initialise a worker process."""
    global _writer  # noqa: PLW0603 - a pool's worker has no other state
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _writer = writer


def _write_shard(number: int, blocks: list[Block]) -> ShardResult:
    assert _writer is not None
    return _writer.write(number, blocks)


def _exit_with_parent() -> None:
    """Exit when the main process has ended. A killed process does not close its queue."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _write_on_ray(
    writer: ShardWriter, groups: Groups, workers: int | None
) -> Generator[ShardResult, None, None]:
    """Write shards in Ray actors, and yield their results in any order.

    Join the cluster of RAY_ADDRESS or of this machine, or start a cluster. Every node must have the
    store and the readers' code under the same paths. `workers` is the number of actors, which use
    one core each. None means all cores.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "data.engine=ray needs Ray, which is not installed. Install it with "
            "`pip install 'toque[ray]'`, or prepare on this machine with data.engine=local."
        ) from error

    starts_ray = not ray.is_initialized()
    if starts_ray:
        # By default, Ray sends usage statistics and serves a dashboard.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = {"log_to_driver": False, "logging_level": "error"}
        try:
            ray.init(address="auto", **options)
        except ConnectionError:  # no cluster is running
            ray.init(num_cpus=workers, include_dashboard=False, **options)

    try:
        workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        yield from _write_by_actors(ray, writer, groups, workers)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ToqueError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise DataError(
            f"The Ray cluster failed during preparation: {str(error).splitlines()[0]}. Run the "
            "same command again to continue. The finished shards are kept."
        ) from error
    finally:
        if starts_ray:
            ray.shutdown()


def _write_by_actors(
    ray: ModuleType, writer: ShardWriter, groups: Groups, workers: int
) -> Iterator[ShardResult]:
    """Write shards in Ray actors of a cluster, and yield their results in any order."""
    arguments = (writer.store, writer.fingerprint, writer.readers, writer.settings)
    remote: Any = ray.remote(num_cpus=1)(ShardWriter)
    actors = [remote.remote(*arguments) for _ in range(workers)]
    for folder in ray.get([actor.find_missing_folder.remote() for actor in actors]):
        if folder:
            raise DataError(
                f"A node of the Ray cluster does not have {folder}. data.engine=ray needs a "
                "data.store on a file system that every node has under the same path. Move the "
                "store there, or prepare with data.engine=local."
            )
    idle = [actor for actor in actors for _ in range(_GROUPS_PER_ACTOR)]
    running: dict[Any, Any] = {}

    def wait_for_one() -> Iterator[ShardResult]:
        for reference in ray.wait(list(running), num_returns=1)[0]:
            idle.append(running.pop(reference))
            yield ray.get(reference)

    try:
        for number, blocks in groups:
            actor = idle.pop(0)
            running[actor.write.remote(number, blocks)] = actor
            while not idle:
                yield from wait_for_one()
        while running:
            yield from wait_for_one()
    finally:
        for actor in actors:
            ray.kill(actor)
