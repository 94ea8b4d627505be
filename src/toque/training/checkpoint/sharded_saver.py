"""Sharded saver: every rank writes its own slices, and rank 0 makes one checkpoint of the files.

Each rank writes in a thread while training goes on. What ranks must agree on (whether a save
begins, whether all shards are written, what came of it) they agree on in the training loop, at the
same place; threads exchange nothing. The folder has a temporary name until rank 0 knows every
shard's SHA-256 and has written the manifest over them, so a kill between two ranks' writes leaves
the checkpoint before it.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, final

import psutil
from torch import Tensor, nn

from toque.errors import CheckpointError
from toque.storage.atomic import FileEntry, FolderWriter, sync_file
from toque.training.callbacks import Callbacks
from toque.training.checkpoint.manifest import SHARDED
from toque.training.checkpoint.saved import step_name
from toque.training.checkpoint.saver import (
    SHARE_OF_MEMORY,
    SKIPPED,
    Saves,
    Slot,
    Tensors,
    lower_priority,
)
from toque.training.checkpoint.shard_layout import LAYOUT, CutTensor, joined, shard_name
from toque.training.checkpoint.slices import shard_of
from toque.training.checkpoint.state_tensors import bytes_of, model_tensors, write_tensors
from toque.training.checkpoint.store import CheckpointStore, SaveError, save_error
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.side_by_side import wait_for_all
from toque.training.events import SaveCounts, Saved
from toque.units import Progress


@dataclass(frozen=True)
class _Save:
    """One save whose shards are being written."""

    step: int
    parent: Path
    job: Future[FileEntry | str]
    """This rank's file, or why there is none."""
    cut: Mapping[str, CutTensor]
    writer: FolderWriter
    state: Mapping[str, Any]
    metrics: Mapping[str, float]
    folder: ExitStack
    """Holds the folder's write open, on rank 0."""
    started: float
    blocked_seconds: float | None


@final
@dataclass
class ShardedSaves:
    """The saves of one session; every method is called by all ranks at the same place.

    Args:
        store: where they go; all ranks see its folder.
        callbacks: of this rank; rank 0's are called after each.
        ranks: the processes that share the run.
        background: write while training goes on; otherwise every save is waited for.
    """

    store: CheckpointStore
    callbacks: Callbacks
    ranks: Ranks
    background: bool = False
    counts: SaveCounts = field(default_factory=SaveCounts)
    _pool: ThreadPoolExecutor | None = None
    _slots: dict[Path, Slot] = field(default_factory=dict)
    _under_way: list[_Save] = field(default_factory=list)

    @contextmanager
    def session(self, at: Callable[[], Progress]) -> Iterator[None]:
        """Complete at the end the saves being written; after an error they are given up.

        Ranks that part ways cannot agree on anything, and what was saved before is intact.
        """
        self.counts = SaveCounts()
        try:
            yield
        except BaseException as error:
            self._give_up(error)
            raise
        self.settle(at())
        self._close()

    def settle(self, at: Progress) -> None:
        """Wait for the saves being written, and report them."""
        while self._under_way:
            save = self._under_way.pop(0)
            wait_for_all(self.ranks, save.job)
            self._complete(at, save)

    def tell(self, at: Progress) -> None:
        """Complete the saves whose shards all ranks have written, and report them."""
        while self._under_way:
            written = self.ranks.all_reduce_sum([self._under_way[0].job.done()])[0]
            if written < self.ranks.world_size:
                return
            self._complete(at, self._under_way.pop(0))

    def save(
        self, at: Progress, tensors: Tensors, state: Mapping[str, Any], *, final: bool
    ) -> None:
        """Save the whole state; `final` waits until it is durable.

        Raises:
            SaveError: the final save failed.
        """
        parent = self.store.here
        if self.background and not final:
            self.tell(at)
            if any(save.parent.name == parent.name for save in self._under_way):
                self.counts.skipped += 1
                if self.counts.skipped == 1:
                    self._warn(at, SKIPPED.format(step=at.step))
                return
        else:
            self.settle(at)
        failed = self._begin(at, parent, tensors, state, metrics={}, waited=final)
        if failed is not None and final:
            raise failed

    def save_best(self, at: Progress, model: nn.Module, metrics: dict[str, float]) -> None:
        """Keep the model apart when its loss is among the lowest. Never skipped."""
        if any(save.parent.name == self.store.best_folder.name for save in self._under_way):
            self.settle(at)  # the one before it decides what the lowest are
        own = self.store.is_among_best(at.step, metrics) if self.ranks.is_main else None
        if self.ranks.broadcast(own):
            tensors, state = {"model": model_tensors(model)}, {"progress": asdict(at)}
            self._begin(at, self.store.best_folder, tensors, state, metrics=metrics)

    def _begin(
        self,
        at: Progress,
        parent: Path,
        tensors: Tensors,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float],
        waited: bool = False,
    ) -> SaveError | None:
        """Have every rank write its shard; why the save failed, if it is known to have."""
        started, ranks = time.perf_counter(), self.ranks
        shard = shard_of(tensors, rank=ranks.rank, world_size=ranks.world_size)
        needed = int(ranks.all_reduce_sum([bytes_of(shard.tensors)])[0])
        folder = ExitStack()
        place = ranks.broadcast(
            self._opened(folder, parent, at.step, needed) if ranks.is_main else None
        )
        if isinstance(place, SaveError):
            return self._failed(at, place, quiet=waited)
        slot = self._slots.setdefault(parent, Slot())
        background = self.background and not waited
        if background and not self._fits(bytes_of(shard.tensors) - slot.bytes):
            self.counts.waited += 1
            background = False
        writer = FolderWriter(place, self.store.after)
        write = partial(_write, writer, shard_name(ranks.rank, ranks.world_size))
        job: Future[FileEntry | str] = Future()
        if background:
            self._pool = self._pool or ThreadPoolExecutor(1, "toque-save", lower_priority)
            job = self._pool.submit(write, slot.copied({"": shard.tensors})[""])
        else:
            job.set_result(write(shard.tensors))
        frozen = json.loads(json.dumps(state, allow_nan=False)) if ranks.is_main else {}
        waited_for = time.perf_counter() - started if background else None
        save = _Save(
            at.step, parent, job, shard.cut, writer, frozen, metrics, folder, started, waited_for
        )
        if not background:
            self.settle(at)
            wait_for_all(ranks, job)
            return self._complete(at, save, quiet=waited)
        self._under_way.append(save)
        return None

    def _opened(self, folder: ExitStack, parent: Path, step: int, needed: int) -> Path | SaveError:
        try:
            return folder.enter_context(self.store.writing(parent, step, needed)).folder
        except SaveError as error:
            return error

    def _fits(self, needed: int) -> bool:
        """Whether every machine has the memory for the copies of all its ranks."""
        own = (platform.node(), needed, psutil.virtual_memory().available)
        asked: list[tuple[str, int, int]] = self.ranks.all_gather(own)
        return all(
            sum(n for other, n, _ in asked if other == machine) <= SHARE_OF_MEMORY * free
            for machine, _, free in asked
        )

    def _complete(self, at: Progress, save: _Save, *, quiet: bool = False) -> SaveError | None:
        """Make a checkpoint of the shards, on rank 0; all learn what came of it."""
        own = (save.job.result(), save.cut)
        found: list[tuple[FileEntry | str, Mapping[str, CutTensor]]] = self.ranks.all_gather(own)
        made: Saved | SaveError = self.ranks.broadcast(
            self._sealed(save, found) if self.ranks.is_main else None
        )
        if isinstance(made, SaveError):
            return self._failed(at, made, quiet=quiet)
        if save.parent.name == self.store.folder.name:
            self.counts.written += 1
            if self.ranks.is_main:
                self.store.prune(save.step)
                self.callbacks.on_save(at, made)
        elif self.ranks.is_main:
            self.store.prune_best()
        return None

    def _sealed(
        self, save: _Save, found: Sequence[tuple[FileEntry | str, Mapping[str, CutTensor]]]
    ) -> Saved | SaveError:
        files = [entry for entry, _ in found if isinstance(entry, FileEntry)]
        faults = [f"rank {n}: {why}" for n, (why, _) in enumerate(found) if isinstance(why, str)]
        try:
            with save.folder:
                if faults:
                    raise save_error(save.step, save.parent, "; ".join(faults))
                cuts = {entry.file: cut for entry, (_, cut) in zip(files, found, strict=True)}
                files.append(save.writer.put(LAYOUT, joined(cuts).to_json()))
                size = self.store.seal(
                    save.writer,
                    save.step,
                    files,
                    state=save.state,
                    metrics=save.metrics,
                    version=SHARDED,
                )
        except SaveError as error:
            return error
        except CheckpointError as error:
            return save_error(save.step, save.parent, str(error))
        seconds = time.perf_counter() - save.started
        place = save.parent / step_name(save.step)
        return Saved(place, save.step, size, seconds, save.blocked_seconds)

    def _failed(self, at: Progress, error: SaveError, *, quiet: bool) -> SaveError:
        self.counts.failed += 1
        if not quiet:
            self._warn(at, str(error))
        return error

    def _warn(self, at: Progress, message: str) -> None:
        if self.ranks.is_main:
            self.callbacks.on_warning(at, message)

    def _give_up(self, error: BaseException) -> None:
        self._close()
        for save in self._under_way:
            with suppress(type(error)):
                save.folder.__exit__(type(error), error, error.__traceback__)
        self._under_way.clear()

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _write(writer: FolderWriter, name: str, tensors: Mapping[str, Tensor]) -> FileEntry | str:
    """The shard of this rank on the disk; or why the file system refused it."""
    try:
        entry = writer.write(name, partial(write_tensors, tensors))
        sync_file(writer.folder / name)
    except OSError as error:
        return error.strerror or str(error)
    return entry


Layout = Literal["whole", "sharded"]
SAVERS: Final[Mapping[Layout, type[Saves | ShardedSaves]]] = {
    "whole": Saves,
    "sharded": ShardedSaves,
}
