"""Ray actors that turn groups of blocks into shards, byte for byte the same as on one machine.

The main process reads the sources and sends blocks; actors parse, tokenise and write. The store's
folder, the readers' code and the tokenizer must be reachable under the same paths from every node:
a shared file system. Every actor is checked for it before the first block is sent.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from toque.data.prepare.process_pool import Groups
from toque.data.prepare.worker import Job, ShardResult, ShardWorker
from toque.errors import ConfigError, DataError, ToqueError

if TYPE_CHECKING:
    from types import ModuleType

_QUEUED = 2
"""Groups sent to an actor at a time: one in progress and one queued."""


class RayShardWorker(ShardWorker):
    """A Ray actor that writes shards."""

    def missing(self) -> str:
        """What this node lacks of the shared file system; "" when nothing."""
        folder = self.job.store / "tokenizer"
        return "" if folder.is_dir() else str(folder)


def write_shards_on_ray(
    job: Job, groups: Groups, *, workers: int | None
) -> Generator[ShardResult, None, None]:
    """Shards as they are finished, in any order, by `workers` actors of one core each.

    Joins the cluster that RAY_ADDRESS names, or one that this machine belongs to, or starts one
    here. `workers` None takes all of its cores.

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
        yield from _write(ray, job, groups, workers)
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


def _write(ray: ModuleType, job: Job, groups: Groups, workers: int) -> Iterator[ShardResult]:
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
    try:
        for number, blocks in groups:
            actor = free.pop(0)
            running[actor.write_shard.remote(number, blocks)] = actor
            while not free:
                yield from _finished(ray, running, free)
        while running:
            yield from _finished(ray, running, free)
    finally:
        for actor in actors:
            ray.kill(actor)


def _finished(ray: ModuleType, running: dict[Any, Any], free: list[Any]) -> Iterator[ShardResult]:
    done, _ = ray.wait(list(running), num_returns=1)
    for reference in done:
        free.append(running.pop(reference))
        yield ray.get(reference)


def _join(ray: ModuleType, workers: int | None) -> None:
    # By default Ray reports usage figures and serves a dashboard.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {"log_to_driver": False, "include_dashboard": False, "logging_level": "error"}
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="error")
    except ConnectionError:  # there is no cluster to join
        ray.init(num_cpus=workers, **options)
