"""Checkpoint saver: save in the background or block, and report each result.

A save in the background is written by a thread of low priority while training goes on, which waits
only for the snapshot: a copy of every tensor in CPU memory, into buffers that are kept for the next
one. Hashing, writing and fsync release Python's lock, so a thread will do. The last save of a
session is written while the loop waits, so that the end, and an interruption, are durable before
anything says so. An error is a warning when training goes on, and never vanishes.

In the layout "whole" rank 0 gathers and writes all tensors. In "sharded" every rank writes its own
slices, and rank 0 makes one checkpoint of the files, whose folder has a temporary name until rank 0
knows every shard's SHA-256: a kill between two ranks' writes leaves the checkpoint before it. What
ranks must agree on they agree on in the training loop; threads exchange nothing.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, final

import psutil
import torch
from torch import Tensor, nn

from toque.storage.atomic import FileEntry, FolderWriter, sync_file
from toque.training.callbacks import Callback, Callbacks, SaveCounts, Saved
from toque.training.checkpoint.resume import model_tensors
from toque.training.checkpoint.saved import SHARDED, step_name
from toque.training.checkpoint.store import CheckpointStore, NamedTensors, SaveError
from toque.training.checkpoint.tensor_files import (
    LAYOUT,
    CutTensor,
    bytes_of,
    joined_layout,
    shard_name,
    shard_of,
    write_tensors,
)
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.sharing import gathered, is_divided
from toque.training.optim.factory import state_bytes
from toque.units import Progress

_NICENESS: Final = 10
_LOOK_EVERY: Final = 1.0
"""Seconds between two looks, each a collective, of all ranks at a save that they wait for."""
SHARE_OF_MEMORY: Final = 0.5
"""Share of the free memory that a snapshot may take, or the whole tensors that rank 0 gathers."""

CheckpointLayout = Literal["whole", "sharded"]
Tensors = Mapping[str, NamedTensors]
_Part = tuple[FileEntry | str, Mapping[str, CutTensor]]
"""The file of one rank, or why there is none, and the slices it holds."""


def chosen_layout(
    asked: Literal["auto", "whole", "sharded"],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ranks: Ranks,
) -> CheckpointLayout:
    """The run's layout; auto takes shards where weights are sharded and too large for rank 0."""
    if asked != "auto":
        return asked
    if not any(is_divided(p) for p in model.parameters()):
        return "whole"
    weights = bytes_of(model_tensors(model))  # a DTensor counts as the whole of it
    fits = weights + state_bytes(optimizer) <= SHARE_OF_MEMORY * psutil.virtual_memory().available
    told: CheckpointLayout = ranks.broadcast("whole" if fits else "sharded")
    return told


@final
class Slot:
    """The copies of one kind of save, in memory that is kept from one save to the next."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}

    def copied(self, tensors: Tensors) -> dict[str, dict[str, Tensor]]:
        """Copies in CPU memory; those of the call before are overwritten."""
        copies = {
            stem: {name: self._copy((stem, name), t) for name, t in named.items()}
            for stem, named in tensors.items()
        }
        if any(t.is_cuda for named in tensors.values() for t in named.values()):
            torch.cuda.synchronize()  # all copies run together and are waited for once
        return copies

    @torch.no_grad()
    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        kept = self._kept.get(key)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[key] = kept
        kept.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        return kept

    @property
    def bytes(self) -> int:
        """Memory that the copies take."""
        return bytes_of(self._kept)


def lower_priority() -> None:
    """Let a thread that writes checkpoints give way to those that train."""
    with suppress(OSError):  # some systems allow it to nobody
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


@dataclass
class _Save:
    """This rank's part of one save."""

    kind: str  # name of the folder it will lie in: checkpoints or best
    tensors: Tensors
    write: Callable[[Tensors], Any]  # writes them or their copies, in the thread or in the loop
    finish: Callable[[Any], Saved] = lambda saved: saved
    """Function called in the loop, by all ranks that write, with the result of `write`."""
    folder: ExitStack = field(default_factory=ExitStack)
    """The checkpoint's folder, open until all shards are in it, on rank 0."""
    job: Future[Any] = field(default_factory=Future)
    blocked_seconds: float | None = None


@final
@dataclass
class Saves:
    """The saves of one session; every method is called by all ranks at the same place."""

    store: CheckpointStore
    callbacks: Callbacks  # of this rank; rank 0's are called after each save
    ranks: Ranks = field(default_factory=Ranks)
    layout: CheckpointLayout = "whole"
    background: bool = False  # whether training goes on meanwhile
    counts: SaveCounts = field(default_factory=SaveCounts)
    _pool: ThreadPoolExecutor | None = None
    _slots: dict[str, Slot] = field(default_factory=dict)
    _under_way: list[_Save] = field(default_factory=list)

    @property
    def _writers(self) -> Ranks:
        """The ranks that write, and so agree on every save; rank 0 alone where it gathers."""
        return self.ranks if self.layout == "sharded" else Ranks()

    @contextmanager
    def session(self, at: Callable[[], Progress]) -> Iterator[None]:
        """Complete at the end the saves being written, and report them."""
        self.counts = SaveCounts()
        try:
            yield
        except BaseException as error:
            if not self._writers.is_distributed:
                self.settle(at())
                raise
            # Ranks that part ways cannot agree on anything, and what was saved before is intact.
            self._close()
            for save in self._under_way:
                with suppress(type(error)):
                    save.folder.__exit__(type(error), error, error.__traceback__)
            self._under_way.clear()
            raise
        else:
            self.settle(at())
        finally:
            self._close()

    def settle(self, at: Progress) -> None:
        """Wait for the saves being written, and report them."""
        while self._under_way:
            save = self._under_way.pop(0)
            while not self._is_written(save):
                wait([save.job], timeout=_LOOK_EVERY)
            self._complete(at, save)

    def tell(self, at: Progress) -> None:
        """Complete the saves that all ranks have written, and report them."""
        while self._under_way and self._is_written(self._under_way[0]):
            self._complete(at, self._under_way.pop(0))

    def save(
        self, at: Progress, tensors: Tensors, state: Mapping[str, Any], *, final: bool
    ) -> None:
        """Save the whole state; `final` waits until it is durable, and raises a SaveError."""
        if self.layout == "whole":
            tensors = gathered(tensors, keep=self.ranks.is_main)
            if not self.ranks.is_main:
                return
        if self.background and not final:
            self.tell(at)
            if any(save.kind == self.store.here.name for save in self._under_way):
                self.counts.skipped += 1
                if self.counts.skipped == 1:
                    self._warn(
                        at,
                        f"the save due at step {at.step} is skipped: the one before it is still "
                        "being written, by a disk slower than train.save_every asks for",
                    )
                return
        else:
            self.settle(at)
        failed = self._begin(at, tensors, state, metrics={}, final=final)
        if failed is not None and final:
            raise failed

    def save_best(self, at: Progress, model: nn.Module, metrics: dict[str, float]) -> None:
        """Keep the model apart when its loss is among the lowest. Never skipped."""
        if any(save.kind == self.store.best_folder.name for save in self._under_way):
            self.settle(at)  # the one before it decides what the lowest are
        is_main = self.ranks.is_main
        if not self.ranks.broadcast(is_main and self.store.is_among_best(at.step, metrics)):
            return
        tensors: Tensors = {"model": model_tensors(model)}
        if self.layout == "whole":
            tensors = gathered(tensors, keep=is_main)
            if not is_main:
                return
        self._begin(at, tensors, {"progress": asdict(at)}, metrics=metrics)

    def _is_written(self, save: _Save) -> bool:
        """True if every rank has written its part."""
        return self._writers.all_reduce_sum([save.job.done()])[0] == self._writers.world_size

    def _begin(
        self,
        at: Progress,
        tensors: Tensors,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float],
        final: bool = False,
    ) -> SaveError | None:
        """Have the tensors written; why the save failed, if it is known to have."""
        started = time.perf_counter()
        parent = self.store.best_folder if metrics else self.store.here
        state = json.loads(json.dumps(state, allow_nan=False))  # as it is now

        def write(tensors: Tensors) -> Saved:
            return self.store.save(at.step, tensors, state, metrics=metrics)

        try:
            if self.layout == "whole":
                save = _Save(parent.name, tensors, write)
            else:
                save = self._shard(at.step, parent, tensors, state, metrics)
        except SaveError as error:
            return self._failed(at, error, quiet=final)
        slot = self._slots.setdefault(parent.name, Slot())
        background = self.background and not final
        if background and not self._fits(sum(map(bytes_of, save.tensors.values())) - slot.bytes):
            self.counts.waited += not metrics  # best models are not counted in anything
            background = False
        if background:
            copies = slot.copied(save.tensors)
            self._pool = self._pool or ThreadPoolExecutor(1, "toque-save", lower_priority)
            save.job = self._pool.submit(save.write, copies)
            save.blocked_seconds = time.perf_counter() - started
            self._under_way.append(save)
            return None
        self.settle(at)
        try:
            save.job.set_result(save.write(save.tensors))
        except SaveError as error:
            save.job.set_exception(error)
        return self._complete(at, save, quiet=final)

    def _shard(
        self,
        step: int,
        parent: Path,
        tensors: Tensors,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> _Save:
        """This rank's slices, into a folder that rank 0 makes; SaveError on all if it cannot."""
        started, ranks = time.perf_counter(), self.ranks
        slices, cut = shard_of(tensors, rank=ranks.rank, world_size=ranks.world_size)
        needed = int(ranks.all_reduce_sum([bytes_of(slices)])[0])
        folder = ExitStack()

        def opened() -> Path | SaveError:
            try:
                return folder.enter_context(self.store.writing(parent, step, needed)).folder
            except SaveError as error:
                return error

        place = ranks.broadcast(opened() if ranks.is_main else None)
        if isinstance(place, SaveError):
            raise place
        writer = FolderWriter(place, self.store.after)

        def write(tensors: Tensors) -> FileEntry | str:
            """The shard of this rank on the disk; or why the file system refused it."""
            name = shard_name(ranks.rank, ranks.world_size)
            try:
                entry = writer.write(name, partial(write_tensors, tensors[""]))
                sync_file(writer.folder / name)
            except OSError as error:
                return error.strerror or str(error)
            return entry

        def finish(written: FileEntry | str) -> Saved:
            parts = ranks.all_gather((written, cut))
            size: int | SaveError = ranks.broadcast(sealed(parts) if ranks.is_main else None)
            if isinstance(size, SaveError):
                raise size
            return Saved(parent / step_name(step), step, size, time.perf_counter() - started)

        def sealed(parts: list[_Part]) -> int | SaveError:
            """Make a checkpoint of all ranks' shards, on rank 0; the bytes of it."""
            files = [entry for entry, _ in parts if isinstance(entry, FileEntry)]
            faults = [f"rank {n}: {e}" for n, (e, _) in enumerate(parts) if isinstance(e, str)]
            try:
                with folder:
                    if faults:
                        raise OSError("; ".join(faults))
                    cuts = {entry.file: cut for entry, (_, cut) in zip(files, parts, strict=True)}
                    files.append(writer.put(LAYOUT, joined_layout(cuts).to_json()))
                    size = self.store.seal(writer, step, files, state, metrics, version=SHARDED)
            except SaveError as error:
                return error
            self.store.prune(step, best=bool(metrics))
            return size

        return _Save(parent.name, {"": slices}, write, finish, folder)

    def _fits(self, needed: int) -> bool:
        """True if every machine has the memory for the copies of all its ranks."""
        own = (platform.node(), needed, psutil.virtual_memory().available)
        asked: list[tuple[str, int, int]] = self._writers.all_gather(own)
        return all(
            sum(n for other, n, _ in asked if other == machine) <= SHARE_OF_MEMORY * free
            for machine, _, free in asked
        )

    def _complete(self, at: Progress, save: _Save, *, quiet: bool = False) -> SaveError | None:
        """Report a save that is written; all that write learn what came of it."""
        try:
            saved = save.finish(save.job.result())
        except SaveError as error:
            return self._failed(at, error, quiet=quiet)
        if save.kind == self.store.folder.name:
            self.counts.written += 1
            if self.ranks.is_main:
                told = replace(saved, blocked_seconds=save.blocked_seconds)
                self.callbacks.tell(Callback.on_save, at, told)
        return None

    def _failed(self, at: Progress, error: SaveError, *, quiet: bool) -> SaveError:
        self.counts.failed += 1
        if not quiet:
            self._warn(at, str(error))
        return error

    def _warn(self, at: Progress, message: str) -> None:
        if self.ranks.is_main:
            self.callbacks.on_warning(at, message)

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
