"""Shards: groups of blocks, parsed, tokenised and written by workers.

A shard depends on its group and the settings alone; `shard.json` marks it as whole for a later
start. Workers are processes of this machine or actors of a Ray cluster: one process reads the
sources and sends them blocks, so memory is bounded by their number.
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

from toque.data.prepare.data_report import Excerpt
from toque.data.prepare.duplicates import NEAR, first_of_kind
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
from toque.storage.atomic import atomic_folder, disk_faults, save_array, sha256_of, sync_folder
from toque.storage.json_files import read_json

if TYPE_CHECKING:
    from types import ModuleType

Engine = Literal["local", "ray"]
Groups = Iterator[tuple[int, list[Block]]]
SIDECAR = "shard.json"
NOT_READ = "bytes of the sources not read, max_examples was reached"
_SMALL = 4 << 20  # below this many plain bytes, one process is done before others have started
_OPEN_FILES = 16  # files read in turn at the same time; the next is opened when one ends
_BYTES_AN_EXAMPLE = 2048  # a guess, for groups so small that a small run reads little
_AHEAD = 1  # groups queued beyond one per process: enough to keep them busy, few enough for memory
_QUEUED = 2  # groups sent to an actor of Ray at a time: one in progress and one queued


class ShardResult(msgspec.Struct):
    """A shard's sidecar: enough to finalize a store without reading the group again."""

    fingerprint: str
    group: int
    rows: int
    records: int
    blocks: list[BlockCounts]
    dropped: dict[str, int]  # records without target, over a limit, below the quality
    notes: dict[str, int]
    unknown: dict[str, int]
    lost_characters: dict[str, int]
    columns: dict[str, str]
    files: list[StoreFile]
    excerpts: list[Excerpt] = []  # a few dropped records as they were, for the report
    content: str = ""  # hash of the blocks it was made from, and of their readers
    tokenizer: str = ""  # hash of the tokenizer's folder, which may be learnt anew


@dataclass(frozen=True)
class ShardWriter:
    """Writes the shards of one `prepare`; every worker gets a copy."""

    store: Path
    fingerprint: str  # fingerprint of the plan; shards with another one are written again
    readers: Mapping[tuple[int, str], RecordReader]  # readers by source index and file name
    settings: PrepareSettings
    loaded: Codec | None = None  # the tokenizer, else loaded from the store

    @cached_property
    def codec(self) -> Codec:
        """The tokenizer."""
        return self.loaded or load_codec(self.store / "tokenizer")

    @cached_property
    def tokenizer(self) -> str:
        """Hash of the tokenizer's folder in the store."""
        return hash_of_folder(self.store / "tokenizer")

    @cached_property
    def _talks(self) -> bool:
        """True if the store has conversations; there may be as many readers as files."""
        names = (reader.recorded_name for reader in self.readers.values())
        return any(name.startswith(CONVERSATIONS) for name in names)

    def content_of(self, blocks: Sequence[Block]) -> str:
        """Hash of what a group holds and of how it is read; with `fingerprint` all of its shard."""
        content = xxhash.xxh3_128()
        for block in blocks:
            reader = self.readers[block.source, block.path].recorded_name
            place = (block.source, block.path, block.first_line, block.last, reader)
            content.update(msgspec.json.encode((*place, len(block.payload))))
            content.update(block.payload)
        return content.hexdigest()

    def write(self, group: int, blocks: list[Block]) -> ShardResult:
        """Write shard number `group` and return its counts."""
        builder = ShardBuilder(self.codec, self.settings, talks=self._talks)
        for block in blocks:
            builder.read(block, self.readers[block.source, block.path])
        rows = builder.rows()
        folder = shard_folder(self.store, group)
        with disk_faults(self.store, f"writing {folder.name}"), atomic_folder(folder) as writer:
            for name, array in rows.items():
                save_array(writer.folder / f"{name}.npy", array)
            n_rows = len(rows["prompt_ends"])
            place = f"shards/{folder.name}"
            result = ShardResult(
                fingerprint=self.fingerprint,
                group=group,
                rows=n_rows,
                columns={
                    name: str(array.dtype)
                    for name, array in sorted(rows.items())
                    if not name.endswith(("_tokens", "_ends")) and name != NEAR
                },
                files=[
                    file_entry(writer.folder / f"{name}.npy", f"{place}/{name}.npy", n_rows)
                    for name in sorted(rows)
                ],
                content=self.content_of(blocks),
                tokenizer=self.tokenizer,
                **builder.counts(),
            )
            writer.put(SIDECAR, msgspec.json.encode(result, order="deterministic"))
        sync_folder(folder)
        return result

    def missing(self) -> str:
        """Folder of the shared file system that this machine lacks; "" if it has all."""
        folder = self.store / "tokenizer"
        return "" if folder.is_dir() else str(folder)


@dataclass
class ShardWriting:
    """The shards of one store: reuse those of an earlier start, write the others, stop early.

    With `max_examples`, files take turns, one block each, and reading ends at the first group after
    which the groups in their order hold enough distinct examples to train on (of all, where no
    source is held out whole); later ones are discarded.
    """

    writer: ShardWriter
    files: Sequence[SourceFile]  # files to read, in order
    not_read: int = 0  # bytes left unread once `max_examples` were found
    _results: dict[int, ShardResult] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)
    _needed: int | None = None  # groups that hold enough examples, once known
    _rows: int = 0  # of the groups before `_next`, the first that is not here
    _next: int = 0
    _counted: int = 0  # groups whose distinct rows are in `_distinct`
    _distinct: int = 0
    _seen: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(1, np.uint64))
    """Rows of the counted groups, each by its record's key and task in a number; 0 is first."""

    def write(
        self, progress: ProgressSink, *, workers: int | None, engine: Engine
    ) -> list[ShardResult]:
        """Every shard the store needs, in group order."""
        total = sum(file.plain_bytes for file in self.files)
        wanted = self.writer.settings.max_examples
        if workers is None and engine == "local":
            # The one process that reads feeds no more than 16.
            workers = 1 if total <= _SMALL else min(16, len(os.sched_getaffinity(0)))
        most = source_files.GROUP_BYTES
        if wanted is None:
            coming = grouped(chain.from_iterable(map(blocks_of, self.files)), most=most)
        else:
            most = min(most, max(1 << 20, wanted * _BYTES_AN_EXAMPLE))
            first = [f for f in self.files if self.writer.settings.holds_out(f.source)]
            rest = [f for f in self.files if f not in first]
            held_out = chain.from_iterable(map(blocks_of, first))  # whole, whatever is enough
            coming = grouped(chain(held_out, in_turns(rest)), most=most)
        write_shards = _write_on_ray if engine == "ray" else _write_here
        with closing(write_shards(self.writer, self._to_do(coming), workers)) as written:
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

    def _to_do(self, coming: Groups) -> Groups:
        """The groups that no earlier start has finished, as long as more are needed."""
        while self._needed is None and (group := next(coming, None)) is not None:
            number, blocks = group
            self._sizes[number] = sum(len(block.payload) for block in blocks)
            if (kept := self._kept(number, blocks)) is not None:
                self._take(kept)
            else:
                yield group

    def _take(self, result: ShardResult) -> None:
        self._results[result.group] = result
        wanted = self.writer.settings.max_examples
        if wanted is None or self._needed is not None:
            return
        while (reached := self._results.get(self._next)) is not None:
            self._rows += reached.rows
            self._next += 1
            # Counting distinct ones reads columns, so wait until the plain sum suffices.
            if self._rows >= wanted and self._different() >= wanted:
                self._needed = self._next
                return

    def _different(self) -> int:
        """Count the rows among those of the first groups that are no exact duplicates.

        Rows of sources that are held out whole are read first, and not counted. Each group's
        columns are read once.
        """
        settings = self.writer.settings
        if settings.dedup == "none" and settings.held_out_from is None:
            return self._rows
        for number in range(self._counted, self._next):
            shard = [self._results[number]]
            names = ("record_key", "task", "starts_record", "source")
            key, task, starts, source = (read_column(self.writer.store, shard, n) for n in names)
            counted = source < (settings.held_out_from or np.inf)
            if settings.dedup != "none":
                counted &= first_of_kind(key, task, np.cumsum(starts, dtype=np.int64))
                kinds = mixed(key ^ mixed(task.astype(np.uint64)))
                is_new = self._seen[np.searchsorted(self._seen, kinds, side="right") - 1] != kinds
                counted &= is_new
                new = np.unique(kinds[is_new])
                self._seen = np.insert(self._seen, np.searchsorted(self._seen, new), new)
            self._distinct += int(counted.sum())
        self._counted = self._next
        return self._distinct

    def _kept(self, number: int, blocks: list[Block]) -> ShardResult | None:
        """The shard of an earlier start, if it is whole and of these blocks."""
        writer = self.writer
        result = read_json(shard_folder(writer.store, number) / SIDECAR, ShardResult)
        if result is None or result.fingerprint != writer.fingerprint:
            return None
        if result.tokenizer != writer.tokenizer:
            return None
        with suppress(DataError):
            check_files(writer.store, result.files, verify=True)
            return result if result.content == writer.content_of(blocks) else None
        return None


def in_turns(files: Sequence[SourceFile]) -> Iterator[Block]:
    """A block of each file in turn, so that the first few come from many files."""
    waiting = deque(files)
    reading: deque[Iterator[Block]] = deque()
    while waiting or reading:
        while waiting and len(reading) < _OPEN_FILES:
            reading.append(blocks_of(waiting.popleft()))
        stream = reading.popleft()
        if (block := next(stream, None)) is not None:
            yield block
            reading.append(stream)


def grouped(blocks: Iterator[Block], *, most: int) -> Groups:
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


def shard_folder(store: Path, group: int) -> Path:
    """Folder of a shard."""
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


def file_entry(path: Path, name: str, n_rows: int) -> StoreFile:
    """The manifest's entry of a file."""
    return StoreFile(name, path.stat().st_size, sha256_of(path), n_rows)


def has_one_thread() -> bool:
    """True if this process certainly has no other thread, of Python or of any library."""
    threads = Path("/proc/self/task")
    return sys.platform == "linux" and threads.is_dir() and len(list(threads.iterdir())) == 1


def _write_here(
    writer: ShardWriter, groups: Groups, workers: int | None
) -> Generator[ShardResult, None, None]:
    """Shards as they are finished, in any order."""
    if workers is None or workers <= 1:
        for number, blocks in groups:
            yield writer.write(number, blocks)
        return
    pool: ProcessPoolExecutor | None = None
    running: set[Future[ShardResult]] = set()
    before = set(active_children())

    def finished(*, left: int) -> Iterator[ShardResult]:
        nonlocal running
        while len(running) > left:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)

    try:
        with one_tokenizer_thread():  # or every worker would start one per core
            for number, blocks in groups:
                pool = pool or _pool(writer, workers)
                running.add(pool.submit(_write, number, blocks))
                yield from finished(left=workers + _AHEAD - 1)
            yield from finished(left=0)
    except BrokenProcessPool as error:
        raise DataError(
            "A worker process ended, most likely killed by the system for want of memory. Run the "
            "same command again: finished shards are kept. With less memory, use fewer workers. "
            '(A Python script that calls prepare needs `if __name__ == "__main__":` around it.)'
        ) from error
    except (KeyboardInterrupt, GeneratorExit):
        # Ctrl-C is answered now: a shard under way may take a minute, and is written again.
        for worker in set(active_children()) - before:
            worker.kill()
        raise
    finally:
        # Also on an error: running shards are finished, queued ones cancelled.
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _pool(writer: ShardWriter, workers: int) -> ProcessPoolExecutor:
    """The workers; made after the first group is read, when libraries have their threads."""
    # A fork starts at once, with the tokenizer loaded. A lock that another thread holds during a
    # fork stays locked, so with several threads workers are spawned.
    forked = has_one_thread()
    context = get_context("fork" if forked else "spawn")
    # All are forked at the first task, before the pool starts a thread of its own.
    given = writer if forked else replace(writer, loaded=None)
    return ProcessPoolExecutor(workers, context, initializer=_start, initargs=(given,))


_writer: ShardWriter | None = None


def _start(writer: ShardWriter) -> None:
    global _writer  # noqa: PLW0603 - a pool's worker has no other place for its tools
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _writer = writer


def _write(number: int, blocks: list[Block]) -> ShardResult:
    assert _writer is not None
    return _writer.write(number, blocks)


def _end_with_parent() -> None:
    """Exit when the main process is gone: if it is killed, it does not close its queue."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _write_on_ray(
    writer: ShardWriter, groups: Groups, workers: int | None
) -> Generator[ShardResult, None, None]:
    """Shards as they are finished, in any order, by `workers` actors of one core each, or by all.

    Joins the cluster of RAY_ADDRESS or of this machine, or starts one. The store's folder, the
    readers' code and the tokenizer must lie under the same paths on every node.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "data.engine is ray, and Ray is not installed. Install it with "
            "`pip install 'toque[ray]'`, or prepare on this machine with data.engine=local."
        ) from error
    ours = not ray.is_initialized()
    if ours:
        # By default Ray reports usage figures and serves a dashboard.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = {"log_to_driver": False, "logging_level": "error"}
        try:
            ray.init(address="auto", **options)
        except ConnectionError:  # there is no cluster to join
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
            f"The Ray cluster failed while preparing: {str(error).splitlines()[0]}. Run the same "
            "command again: finished shards are kept."
        ) from error
    finally:
        if ours:
            ray.shutdown()


def _write_by_actors(
    ray: ModuleType, writer: ShardWriter, groups: Groups, workers: int
) -> Iterator[ShardResult]:
    job = (writer.store, writer.fingerprint, writer.readers, writer.settings)
    remote: Any = ray.remote(num_cpus=1)(ShardWriter)
    actors = [remote.remote(*job) for _ in range(workers)]
    for lacking in ray.get([actor.missing.remote() for actor in actors]):
        if lacking:
            raise DataError(
                f"A node of the Ray cluster does not see {lacking}. data.engine=ray needs a "
                "data.store on a file system that every node has under the same path; point it "
                "there, or prepare with data.engine=local."
            )
    free = [actor for actor in actors for _ in range(_QUEUED)]
    running: dict[Any, Any] = {}

    def finished() -> Iterator[ShardResult]:
        for reference in ray.wait(list(running), num_returns=1)[0]:
            free.append(running.pop(reference))
            yield ray.get(reference)

    try:
        for number, blocks in groups:
            actor = free.pop(0)
            running[actor.write.remote(number, blocks)] = actor
            while not free:
                yield from finished()
        while running:
            yield from finished()
    finally:
        for actor in actors:
            ray.kill(actor)
