"""Shard workers: who parses, cleans, tokenises and writes the groups of blocks.

A shard depends on its group and the settings alone: not on the worker, the number of workers, or
earlier shards. `shard.json` is written with it and marks it as whole for a later start.

Workers are processes of this machine or actors of a Ray cluster. In either case one process reads
the sources and sends blocks, so memory is bounded by the number of workers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, connection, get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from toque.data.prepare.duplicates import NEAR
from toque.data.prepare.prepare_settings import PrepareSettings
from toque.data.prepare.row_statistics import Excerpt
from toque.data.prepare.shard_builder import BlockCounts, ShardBuilder
from toque.data.store.store_manifest import StoreFile
from toque.data.tokenizer.codec import Codec, load_codec
from toque.data.tokenizer.tokenizer_training import one_tokenizer_thread
from toque.errors import ConfigError, DataError, ToqueError
from toque.sources.records import Block, RecordReader
from toque.storage.atomic import atomic_folder, disk_faults, save_array, sync_folder
from toque.storage.checksums import sha256_of

if TYPE_CHECKING:
    from types import ModuleType


Groups = Iterator[tuple[int, list[Block]]]
SIDECAR = "shard.json"
_AHEAD = 1
"""Groups queued beyond one per process: enough to keep them busy, few enough for memory."""
_QUEUED = 2
"""Groups sent to an actor of Ray at a time: one in progress and one queued."""


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
    files: list[StoreFile]
    excerpts: list[Excerpt] = []
    """A few dropped records as they were, for the report."""
    content: str = ""
    """Hash of the blocks it was made from, and of their readers."""


@dataclass(frozen=True)
class Job:
    """Job of one `prepare`: what all groups share, sent to each worker once."""

    store: Path
    fingerprint: str
    readers: Mapping[tuple[int, str], RecordReader]
    """Readers by source index and file name."""
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


def file_entry(path: Path, name: str, n_rows: int) -> StoreFile:
    """The manifest's entry of a file that the store will hold under `name`."""
    return StoreFile(name, path.stat().st_size, sha256_of(path), n_rows)


@dataclass(frozen=True)
class ForkedState:
    """State that a forked worker inherits."""

    codec: Codec


def usable_cores() -> int:
    """CPU cores this process may use, at most 16: the one reading process feeds no more."""
    return min(16, len(os.sched_getaffinity(0)))


def has_one_thread() -> bool:
    """True if this process certainly has no other thread, of Python or of any library."""
    threads = Path("/proc/self/task")
    return sys.platform == "linux" and threads.is_dir() and len(list(threads.iterdir())) == 1


def write_shards(
    job: Job, groups: Groups, *, workers: int, inherited: ForkedState
) -> Generator[ShardResult, None, None]:
    """Shards as they are finished, in any order.

    Raises:
        DataError: a worker was killed; finished shards are kept.
    """
    if workers <= 1:
        worker = ShardWorker(job, inherited.codec)
        for number, blocks in groups:
            yield worker.write_shard(number, blocks)
        return
    try:
        with one_tokenizer_thread():  # or every worker would start one per core
            yield from _write_in_processes(job, groups, workers, inherited)
    except BrokenProcessPool as error:
        raise DataError(
            "A worker process ended, most likely killed by the system for want of memory. Run the "
            "same command again: finished shards are kept. With less memory, use fewer workers. "
            '(A Python script that calls prepare needs `if __name__ == "__main__":` around it.)'
        ) from error


def _write_in_processes(
    job: Job, groups: Groups, workers: int, inherited: ForkedState
) -> Iterator[ShardResult]:
    pool: ProcessPoolExecutor | None = None
    running: set[Future[ShardResult]] = set()
    before = set(active_children())

    def finished(*, left: int) -> Iterator[ShardResult]:
        nonlocal running
        while len(running) > left:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)

    try:
        for number, blocks in groups:
            pool = pool or _pool(job, workers, inherited)
            running.add(pool.submit(_write, number, blocks))
            yield from finished(left=workers + _AHEAD - 1)
        yield from finished(left=0)
    except (KeyboardInterrupt, GeneratorExit):
        # Ctrl-C is answered now: a shard under way may take a minute, and is written again.
        for worker in set(active_children()) - before:
            worker.kill()
        raise
    finally:
        # Also on an error: running shards are finished, queued ones cancelled.
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _pool(job: Job, workers: int, inherited: ForkedState) -> ProcessPoolExecutor:
    """The workers; made after the first group is read, when libraries have their threads."""
    # A fork starts at once, with the tokenizer loaded. A lock that another thread holds during a
    # fork stays locked, so with several threads workers are spawned.
    forked = has_one_thread()
    context = get_context("fork" if forked else "spawn")
    # All are forked at the first task, before the pool starts a thread of its own.
    given = (job, inherited if forked else None)
    return ProcessPoolExecutor(workers, context, initializer=_start, initargs=given)


_worker: ShardWorker | None = None


def _start(job: Job, inherited: ForkedState | None) -> None:
    """Initialise this worker process."""
    global _worker  # noqa: PLW0603 - a pool's worker has no other place for its tools
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = ShardWorker(job, inherited.codec if inherited else None)


def _write(number: int, blocks: list[Block]) -> ShardResult:
    assert _worker is not None
    return _worker.write_shard(number, blocks)


def _end_with_parent() -> None:
    """Exit when the main process is gone: if it is killed, it does not close its queue."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


class RayShardWorker(ShardWorker):
    """A Ray actor that writes shards."""

    def missing(self) -> str:
        """Folder of the shared file system that this node lacks; "" if it has all."""
        folder = self.job.store / "tokenizer"
        return "" if folder.is_dir() else str(folder)


def write_shards_on_ray(
    job: Job, groups: Groups, *, workers: int | None
) -> Generator[ShardResult, None, None]:
    """Shards as they are finished, in any order, by `workers` actors of one core each.

    Joins the cluster that RAY_ADDRESS names, or one that this machine belongs to, or starts one
    here. `workers` None takes all of its cores. The store's folder, the readers' code and the
    tokenizer must lie under the same paths on every node: a shared file system.

    Raises:
        ConfigError: ray is not installed.
        DataError: a node cannot access the store's folder, or was lost.
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
        _join(ray, workers)
    try:
        workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        yield from _write_on_ray(ray, job, groups, workers)
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


def _write_on_ray(ray: ModuleType, job: Job, groups: Groups, workers: int) -> Iterator[ShardResult]:
    remote: Any = ray.remote(num_cpus=1)(RayShardWorker)
    actors = [remote.remote(job) for _ in range(workers)]
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
            running[actor.write_shard.remote(number, blocks)] = actor
            while not free:
                yield from finished()
        while running:
            yield from finished()
    finally:
        for actor in actors:
            ray.kill(actor)


def _join(ray: ModuleType, workers: int | None) -> None:
    # By default Ray reports usage figures and serves a dashboard.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {"log_to_driver": False, "include_dashboard": False, "logging_level": "error"}
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="error")
    except ConnectionError:  # there is no cluster to join
        ray.init(num_cpus=workers, **options)
