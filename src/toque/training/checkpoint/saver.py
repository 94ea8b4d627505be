"""Checkpoint saver: saves in the background or in the loop, and reports each result.

In the background, a thread of low priority writes while training continues. Training waits only for
the snapshot, a copy of every tensor in CPU memory. A thread is enough, because hashing, writing and
fsync release Python's lock. The loop waits for the last save of a session, so the end of training
is reported only after the checkpoint is durable. While training continues, a failed save is only a
warning. At the end it is an error.

In the layout "whole", rank 0 gathers and writes all tensors. In the layout "sharded", every rank
writes its own slices. The folder has a temporary name until rank 0 has every shard's SHA-256, so an
incomplete save never replaces an earlier checkpoint. Ranks exchange data only in the training loop,
never in threads.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections import Counter
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
"""Maximum fraction of the free memory for a snapshot, or for the tensors that rank 0 gathers."""

CheckpointLayout = Literal["whole", "sharded"]
Tensors = Mapping[str, NamedTensors]
_Part = tuple[FileEntry | str, Mapping[str, CutTensor]]
"""A rank's shard or the reason why it was not written, and the positions of the shard's slices."""


def choose_layout(
    setting: Literal["auto", "whole", "sharded"],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ranks: Ranks,
) -> CheckpointLayout:
    """Choose the layout of a run's checkpoints. All ranks must call this.

    "auto" is "sharded" if the weights are sharded and too large for the memory of rank 0.
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
    """CPU memory for snapshots. Each snapshot overwrites the previous one."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, tensors: Tensors) -> dict[str, dict[str, Tensor]]:
        """Copy the tensors to CPU memory, over the previous snapshot."""
        copies: dict[str, dict[str, Tensor]] = {}
        is_on_gpu = False
        for stem, named in tensors.items():
            copies[stem] = {}
            for name, tensor in named.items():
                copies[stem][name] = self._copy_one((stem, name), tensor)
                is_on_gpu |= tensor.is_cuda
        if is_on_gpu:
            torch.cuda.synchronize()  # the copies run in parallel, so wait only once
        return copies

    @torch.no_grad()
    def _copy_one(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        """Start to copy a tensor into its buffer. Copies from a GPU are asynchronous."""
        buffer = self._buffers.get(key)
        layout = tensor.shape, tensor.dtype
        if buffer is None or (buffer.shape, buffer.dtype) != layout:
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


def _write_shard(writer: FolderWriter, name: str, tensors: Tensors) -> FileEntry | str:
    """Write and fsync a shard. If that fails, return the reason."""
    try:
        entry = writer.write(name, partial(write_tensors, tensors[""]))
        sync_file(writer.folder / name)
    except OSError as error:
        return error.strerror or str(error)
    return entry


def _list_shards(
    parts: list[_Part],
) -> tuple[list[FileEntry], dict[str, Mapping[str, CutTensor]]]:
    """Return the files of all shards, and the positions of their slices by file.

    Raises:
        OSError: A rank could not write its shard.
    """
    files: list[FileEntry] = []
    cuts: dict[str, Mapping[str, CutTensor]] = {}
    reasons: list[str] = []
    for rank, (entry, cut) in enumerate(parts):
        if isinstance(entry, str):
            reasons.append(f"rank {rank}: {entry}")
        else:
            files.append(entry)
            cuts[entry.file] = cut
    if reasons:
        raise OSError("; ".join(reasons))
    return files, cuts


def lower_priority() -> None:
    """Lower the priority of this thread, so that training threads run first."""
    with suppress(OSError):  # some systems do not allow it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


@dataclass
class _Save:
    """This rank's part of a save."""

    kind: str
    """Name of the checkpoint's parent folder: "checkpoints" or "best"."""
    tensors: Tensors
    write: Callable[[Tensors], Any]
    """Function that writes the tensors or their snapshot, in the thread or in the loop."""
    finish: Callable[[Any], Saved] = lambda saved: saved
    """Function that all writing ranks call in the loop, with the result of `write`."""
    folder: ExitStack = field(default_factory=ExitStack)
    """Folder of a sharded checkpoint, open on rank 0 until it has all shards."""
    job: Future[Any] = field(default_factory=Future)
    """Result of `write`, or its error."""
    blocked_seconds: float | None = None
    """Seconds that training waited for the snapshot of a background save."""


@final
@dataclass
class CheckpointSaver:
    """Saves of one session. All ranks must call each method at the same point of the loop."""

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
        """Ranks that write a part of each save. In the layout "whole", rank 0 writes alone."""
        return self.ranks if self.layout == "sharded" else Ranks()

    @contextmanager
    def session(self, at: Callable[[], Progress]) -> Iterator[None]:
        """Finish and report all saves at the end of the context.

        After an error, unfinished saves of several ranks are discarded: the ranks cannot agree on
        them any more. Earlier checkpoints are intact.
        """
        self.counts = SaveCounts()
        try:
            yield
        except BaseException as error:
            if self._writers.is_distributed:
                self._discard_unfinished(error)
            else:
                self.finish_all(at())
            raise
        else:
            self.finish_all(at())
        finally:
            self._close()

    def _discard_unfinished(self, error: BaseException) -> None:
        """Remove the folders of unfinished saves."""
        self._close()
        for save in self._unfinished:
            with suppress(type(error)):
                save.folder.__exit__(type(error), error, error.__traceback__)
        self._unfinished.clear()

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
        """Save the trainer's state. A `final` save is durable when this returns.

        A background save is skipped if the previous one is not finished.

        Raises:
            SaveError: The final save failed.
        """
        if self.layout == "whole":
            tensors = gather_tensors(tensors, keep=self.ranks.is_main)
            if not self.ranks.is_main:
                return
        if final or not self.background:
            self.finish_all(at)
        else:
            self.finish_written(at)
            if self._is_saving(self.store.current_folder):
                self._skip(at)
                return
        self._begin(at, tensors, state, metrics={}, final=final)

    def _skip(self, at: Progress) -> None:
        """Count a skipped save. Warn only once per session."""
        self.counts.skipped += 1
        if self.counts.skipped == 1:
            self._warn(
                at,
                f"the save at step {at.step} is skipped, because the previous save is not "
                "finished: the disk is too slow for train.save_every",
            )

    def save_best(
        self, at: Progress, model: nn.Module, metrics: dict[str, float]
    ) -> None:
        """Save the model if its evaluation is among the best. This save is never skipped."""
        if self._is_saving(self.store.best_folder):
            self.finish_all(at)  # the previous best model is part of the comparison
        is_main = self.ranks.is_main
        is_among_best = is_main and self.store.is_among_best(at.step, metrics)
        if not self.ranks.broadcast(is_among_best):
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
        """Check whether every rank has written its part. All writing ranks must call this."""
        [n_written] = self._writers.all_reduce_sum([save.job.done()])
        return n_written == self._writers.world_size

    def _begin(
        self,
        at: Progress,
        tensors: Tensors,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float],
        final: bool = False,
    ) -> None:
        """Start a save in the background, or write it immediately.

        Raises:
            SaveError: The save is final, and failed.
        """
        started = time.perf_counter()
        parent = self.store.best_folder if metrics else self.store.current_folder
        # Copy the state, because training changes it.
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

        if self.background and not final:
            buffers = self._buffers.setdefault(parent.name, SnapshotBuffers())
            needed = sum(map(bytes_of, save.tensors.values())) - buffers.bytes
            if self._fits(needed):
                copies = buffers.copy(save.tensors)
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, "toque-save", lower_priority)
                save.job = self._pool.submit(save.write, copies)
                save.blocked_seconds = time.perf_counter() - started
                self._unfinished.append(save)
                return
            if not metrics:  # best models are not counted
                self.counts.waited += 1

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
        """Prepare a sharded save: rank 0 creates the folder, and every rank selects its slices.

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
                opened = folder.enter_context(self.store.writing(parent, step, needed))
            except SaveError as error:
                return error
            return opened.folder

        path = ranks.broadcast(open_folder() if ranks.is_main else None)
        if isinstance(path, SaveError):
            raise path
        writer = FolderWriter(path, self.store.after)

        def finish(entry: FileEntry | str) -> Saved:
            parts = ranks.all_gather((entry, cut))
            result: int | SaveError = ranks.broadcast(
                seal(parts) if ranks.is_main else None
            )
            if isinstance(result, SaveError):
                raise result
            seconds = time.perf_counter() - started
            return Saved(parent / step_name(step), step, result, seconds)

        def seal(parts: list[_Part]) -> int | SaveError:
            """Complete the checkpoint with all ranks' shards on rank 0, and return its bytes."""
            try:
                with folder:
                    files, cuts = _list_shards(parts)
                    files.append(writer.put(LAYOUT, join_layouts(cuts).to_json()))
                    size = self.store.seal(
                        writer, step, files, state, metrics, version=SHARDED
                    )
            except SaveError as error:
                return error
            self.store.prune(step, best=bool(metrics))
            return size

        name = shard_name(ranks.rank, ranks.world_size)
        write = partial(_write_shard, writer, name)
        return _Save(parent.name, {"": slices}, write, finish, folder)

    def _fits(self, needed: int) -> bool:
        """Check whether every machine has enough memory for the snapshots of all its ranks."""
        request = (platform.node(), needed, psutil.virtual_memory().available)
        requests: list[tuple[str, int, int]] = self._writers.all_gather(request)
        needed_by_machine: Counter[str] = Counter()
        for machine, rank_bytes, _ in requests:
            needed_by_machine[machine] += rank_bytes
        return all(
            needed_by_machine[machine] <= SHARE_OF_MEMORY * free
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
        if save.kind == self.store.folder.name:  # best models are not reported
            self.counts.written += 1
            if self.ranks.is_main:
                saved = replace(saved, blocked_seconds=save.blocked_seconds)
                self.callbacks.tell(Callback.on_save, at, saved)

    def _fail(self, at: Progress, error: SaveError, *, final: bool) -> None:
        """Count a failed save. Warn, or raise the error if the save is final."""
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
