"""Process pool that turns groups of blocks into shards, with bounded memory.

Workers are forked if this process has a single thread: they start at once, with the tokenizer
already loaded. Otherwise they are spawned, because a lock held during a fork stays locked.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, connection, get_context, parent_process
from pathlib import Path

from toque.data.prepare.worker import Job, ShardResult, ShardWorker
from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.train import one_tokenizer_thread
from toque.errors import DataError
from toque.sources.records import Block

Groups = Iterator[tuple[int, list[Block]]]
_AHEAD = 1
"""Groups queued beyond one per worker: enough to keep them busy, few enough for memory."""


@dataclass(frozen=True)
class ForkedState:
    """What a forked worker inherits: a codec to use, and a lock to close."""

    codec: Codec
    lock: int
    """Descriptor of the store's lock, which must end with the main process."""


def usable_cores() -> int:
    """CPU cores this process may use, at most 16: the one reading process feeds no more."""
    return min(16, len(os.sched_getaffinity(0)))


def has_one_thread() -> bool:
    """Whether this process certainly has no other thread, of Python or of any library."""
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
    if inherited is not None:
        os.close(inherited.lock)
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
