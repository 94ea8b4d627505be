"""Checkpoint saver: saves in the background or in the loop, with a report of each result.

In the background, a thread of low priority writes while training continues. Training waits only for
the snapshot, a copy of every tensor in CPU memory. A thread is enough, because hashing, writing and
fsync release Python's lock. The loop waits for the last save of a session, so the end of training
is reported only after the checkpoint is durable. A failed save is a warning while training
continues, and an error at the end.

In the layout "whole", rank 0 gathers and writes all tensors. In the layout "sharded", every rank
writes its own slices, and the folder has a temporary name until rank 0 has every shard's SHA-256.
After a kill between two ranks' writes, the previous checkpoint is the newest. Ranks exchange data
only in the training loop, never in threads.
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
    join_layouts,
    shard_name,
    shard_of,
    write_tensors,
)
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.data_parallel import gather_tensors, is_sharded
from toque.training.optim.factory import state_bytes
from toque.units import Progress

_NICENESS: Final = 10
_POLL_SECONDS: Final = 1.0
"""Seconds between two checks of an unfinished save. Each check is a collective of all ranks."""
SHARE_OF_MEMORY: Final = 0.5
"""Largest share of the free memory for a snapshot, or for the whole tensors that rank 0 gathers."""

CheckpointLayout = Literal["whole", "sharded"]
Tensors = Mapping[str, NamedTensors]
_Part = tuple[FileEntry | str, Mapping[str, CutTensor]]
"""Shard of one rank, or the reason why it was not written, and the shard's slices."""


def choose_layout(
    setting: Literal["auto", "whole", "sharded"],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ranks: Ranks,
) -> CheckpointLayout:
    """Choose the layout of a run's checkpoints.

    "auto" means shards if the weights are sharded and too large for the memory of rank 0.
    """
    if setting != "auto":
        return setting
    if not any(is_sharded(p) for p in model.parameters()):
        return "whole"
    needed = bytes_of(model_tensors(model)) + state_bytes(optimizer)
    fits = needed <= SHARE_OF_MEMORY * psutil.virtual_memory().available
    layout: CheckpointLayout = ranks.broadcast("whole" if fits else "sharded")
    return layout


@final
class SnapshotBuffers:
    """CPU memory for the snapshots of one kind of save. Each snapshot reuses it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, tensors: Tensors) -> dict[str, dict[str, Tensor]]:
        """Copy the tensors to CPU memory, over the previous snapshot."""
        copies = {
            stem: {name: self._copy_one((stem, name), t) for name, t in named.items()}
            for stem, named in tensors.items()
        }
        if any(t.is_cuda for named in tensors.values() for t in named.values()):
            torch.cuda.synchronize()  # the copies run in parallel, so wait only once
        return copies

    @torch.no_grad()
    def _copy_one(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if (
            buffer is None
            or buffer.shape != tensor.shape
            or buffer.dtype != tensor.dtype
        ):
            buffer = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
            self._buffers[key] = buffer
        buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        return buffer

    @property
    def bytes(self) -> int:
        """Bytes of the buffers."""
        return bytes_of(self._buffers)


def lower_priority() -> None:
    """Lower the priority of this thread, so that training threads run first."""
    with suppress(OSError):  # some systems do not allow it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


@dataclass
class _Save:
    """Part of this rank in one save."""

    kind: str
    """Name of the checkpoint's parent folder: "checkpoints" or "best"."""
    tensors: Tensors
    write: Callable[[Tensors], Any]
    """Function that writes the tensors or their copies, in the thread or in the loop."""
    finish: Callable[[Any], Saved] = lambda saved: saved
    """Function that all writing ranks call in the loop, with the result of `write`."""
    folder: ExitStack = field(default_factory=ExitStack)
    """Folder of the checkpoint on rank 0. It is open until it has all shards."""
    job: Future[Any] = field(default_factory=Future)
    blocked_seconds: float | None = None


@final
@dataclass
class CheckpointSaver:
    """Saves of one session. All ranks call each method at the same point of the loop."""

    store: CheckpointStore
    callbacks: Callbacks
    """Callbacks of this rank. Only rank 0 calls them."""
    ranks: Ranks = field(default_factory=Ranks)
    layout: CheckpointLayout = "whole"
    background: bool = False
    """True if training continues during a save."""
    counts: SaveCounts = field(default_factory=SaveCounts)
    _pool: ThreadPoolExecutor | None = None
    _buffers: dict[str, SnapshotBuffers] = field(default_factory=dict)
    _unfinished: list[_Save] = field(default_factory=list)

    @property
    def _writers(self) -> Ranks:
        """Ranks that write. They agree on every save."""
        return self.ranks if self.layout == "sharded" else Ranks()

    @contextmanager
    def session(self, at: Callable[[], Progress]) -> Iterator[None]:
        """Finish and report all saves at the end of the context."""
        self.counts = SaveCounts()
        try:
            yield
        except BaseException as error:
            if not self._writers.is_distributed:
                self.finish_all(at())
                raise
            # After an error, the ranks cannot agree on a save. Earlier checkpoints are intact.
            self._close()
            for save in self._unfinished:
                with suppress(type(error)):
                    save.folder.__exit__(type(error), error, error.__traceback__)
            self._unfinished.clear()
            raise
        else:
            self.finish_all(at())
        finally:
            self._close()

    def finish_all(self, at: Progress) -> None:
        """Wait for the unfinished saves and report them."""
        while self._unfinished:
            save = self._unfinished.pop(0)
            while not self._is_written(save):
                wait([save.job], timeout=_POLL_SECONDS)
            self._finish(at, save)

    def finish_written(self, at: Progress) -> None:
        """Finish and report the saves that all ranks have written."""
        while self._unfinished and self._is_written(self._unfinished[0]):
            self._finish(at, self._unfinished.pop(0))

    def save(
        self, at: Progress, tensors: Tensors, state: Mapping[str, Any], *, final: bool
    ) -> None:
        """Save the trainer's state, and wait until it is durable if the save is `final`.

        Raises:
            SaveError: The final save failed.
        """
        if self.layout == "whole":
            tensors = gather_tensors(tensors, keep=self.ranks.is_main)
            if not self.ranks.is_main:
                return
        if self.background and not final:
            self.finish_written(at)
            if self._is_saving(self.store.current_folder):
                self.counts.skipped += 1
                if self.counts.skipped == 1:
                    self._warn(
                        at,
                        f"the save at step {at.step} is skipped, because the previous save is not "
                        "finished: the disk is too slow for train.save_every",
                    )
                return
        else:
            self.finish_all(at)
        self._begin(at, tensors, state, metrics={}, final=final)

    def save_best(
        self, at: Progress, model: nn.Module, metrics: dict[str, float]
    ) -> None:
        """Save the model if its evaluation is among the best. This save is never skipped."""
        if self._is_saving(self.store.best_folder):
            self.finish_all(at)  # the previous best model counts in the comparison
        is_main = self.ranks.is_main
        if not self.ranks.broadcast(
            is_main and self.store.is_among_best(at.step, metrics)
        ):
            return
        tensors: Tensors = {"model": model_tensors(model)}
        if self.layout == "whole":
            tensors = gather_tensors(tensors, keep=is_main)
            if not is_main:
                return
        self._begin(at, tensors, {"progress": asdict(at)}, metrics=metrics)

    def _is_saving(self, folder: Path) -> bool:
        return any(save.kind == folder.name for save in self._unfinished)

    def _is_written(self, save: _Save) -> bool:
        """Check on all ranks whether every rank has written its part."""
        return (
            self._writers.all_reduce_sum([save.job.done()])[0]
            == self._writers.world_size
        )

    def _begin(
        self,
        at: Progress,
        tensors: Tensors,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float],
        final: bool = False,
    ) -> None:
        """Start a save in the background, or write it.

        Raises:
            SaveError: The save is final, and failed.
        """
        started = time.perf_counter()
        parent = self.store.best_folder if metrics else self.store.current_folder
        # A copy: training changes it.
        state = json.loads(json.dumps(state, allow_nan=False))

        def write(tensors: Tensors) -> Saved:
            return self.store.save(at.step, tensors, state, metrics=metrics)

        try:
            if self.layout == "whole":
                save = _Save(parent.name, tensors, write)
            else:
                save = self._shard(at.step, parent, tensors, state, metrics)
        except SaveError as error:
            self._fail(at, error, final=final)
            return

        buffers = self._buffers.setdefault(parent.name, SnapshotBuffers())
        needed = sum(map(bytes_of, save.tensors.values())) - buffers.bytes
        background = self.background and not final
        if background and not self._fits(needed):
            if not metrics:  # the counts are without best models
                self.counts.waited += 1
            background = False

        if background:
            copies = buffers.copy(save.tensors)
            self._pool = self._pool or ThreadPoolExecutor(
                1, "toque-save", lower_priority
            )
            save.job = self._pool.submit(save.write, copies)
            save.blocked_seconds = time.perf_counter() - started
            self._unfinished.append(save)
            return

        self.finish_all(at)
        try:
            save.job.set_result(save.write(save.tensors))
        except SaveError as error:
            save.job.set_exception(error)
        self._finish(at, save, final=final)

    def _shard(
        self,
        step: int,
        parent: Path,
        tensors: Tensors,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> _Save:
        """Prepare a sharded save: rank 0 creates the folder, and every rank cuts its slices.

        Raises:
            SaveError: Rank 0 cannot create the folder. All ranks raise it.
        """
        started = time.perf_counter()
        ranks = self.ranks
        slices, cut = shard_of(tensors, rank=ranks.rank, world_size=ranks.world_size)
        needed = int(ranks.all_reduce_sum([bytes_of(slices)])[0])
        folder = ExitStack()

        def open_folder() -> Path | SaveError:
            try:
                return folder.enter_context(
                    self.store.writing(parent, step, needed)
                ).folder
            except SaveError as error:
                return error

        path = ranks.broadcast(open_folder() if ranks.is_main else None)
        if isinstance(path, SaveError):
            raise path
        writer = FolderWriter(path, self.store.after)

        def write(tensors: Tensors) -> FileEntry | str:
            """Write and fsync this rank's shard. Return the reason if the file system refuses."""
            name = shard_name(ranks.rank, ranks.world_size)
            try:
                entry = writer.write(name, partial(write_tensors, tensors[""]))
                sync_file(writer.folder / name)
            except OSError as error:
                return error.strerror or str(error)
            return entry

        def finish(entry: FileEntry | str) -> Saved:
            parts = ranks.all_gather((entry, cut))
            size: int | SaveError = ranks.broadcast(
                seal(parts) if ranks.is_main else None
            )
            if isinstance(size, SaveError):
                raise size
            return Saved(
                parent / step_name(step), step, size, time.perf_counter() - started
            )

        def seal(parts: list[_Part]) -> int | SaveError:
            """Make a checkpoint of all ranks' shards on rank 0, and return its bytes."""
            files = [entry for entry, _ in parts if isinstance(entry, FileEntry)]
            reasons = [
                f"rank {n}: {e}" for n, (e, _) in enumerate(parts) if isinstance(e, str)
            ]
            try:
                with folder:
                    if reasons:
                        raise OSError("; ".join(reasons))
                    cuts = {
                        entry.file: cut
                        for entry, (_, cut) in zip(files, parts, strict=True)
                    }
                    files.append(writer.put(LAYOUT, join_layouts(cuts).to_json()))
                    size = self.store.seal(
                        writer, step, files, state, metrics, version=SHARDED
                    )
            except SaveError as error:
                return error
            self.store.prune(step, best=bool(metrics))
            return size

        return _Save(parent.name, {"": slices}, write, finish, folder)

    def _fits(self, needed: int) -> bool:
        """Check that every machine has enough memory for the snapshots of all its ranks."""
        request = (platform.node(), needed, psutil.virtual_memory().available)
        requests: list[tuple[str, int, int]] = self._writers.all_gather(request)
        return all(
            sum(n for node, n, _ in requests if node == machine)
            <= SHARE_OF_MEMORY * free
            for machine, _, free in requests
        )

    def _finish(self, at: Progress, save: _Save, *, final: bool = False) -> None:
        """Report a completed save on all ranks that wrote it.

        Raises:
            SaveError: The save is final, and failed.
        """
        try:
            saved = save.finish(save.job.result())
        except SaveError as error:
            self._fail(at, error, final=final)
            return
        if save.kind == self.store.folder.name:
            self.counts.written += 1
            if self.ranks.is_main:
                saved = replace(saved, blocked_seconds=save.blocked_seconds)
                self.callbacks.tell(Callback.on_save, at, saved)

    def _fail(self, at: Progress, error: SaveError, *, final: bool) -> None:
        self.counts.failed += 1
        if final:
            raise error
        self._warn(at, str(error))

    def _warn(self, at: Progress, message: str) -> None:
        if self.ranks.is_main:
            self.callbacks.on_warning(at, message)

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
