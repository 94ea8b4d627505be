"""Upload of checkpoints to a bucket, in the background while training goes on.

A checkpoint to be uploaded is hard-linked into `outbox/`: retention may delete the original. While
the service is down, the newest and the best stay there and older ones are given up, counted.
Content goes first, verified; the manifest goes last, and only it makes a checkpoint of it.
"""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from toque.errors import CheckpointError
from toque.runs.run_files import grows, is_own
from toque.storage.atomic import atomic_folder, link_or_copy, remove_folder, sweep
from toque.storage.bucket import Bucket, RunBucketError
from toque.storage.bucket_lock import BucketLock
from toque.storage.no_follow import refuse_moved
from toque.training.callbacks import Callback, Requests, Saved, StepInfo
from toque.training.checkpoint.fetch import MODEL_FILES, OUTBOX, complete_steps
from toque.training.checkpoint.saved import MANIFEST, read_manifest, step_name, verify_files
from toque.training.stopping import TAKEN_OVER
from toque.units import Progress

QUEUE: Final = 2  # checkpoints that wait at most, best models not counted
_KINDS: Final = ("best", "checkpoints")  # in the order in which they are uploaded
_AGAIN_AFTER: Final = 30.0
"""Seconds until a store that was down is tried again, if no new checkpoint comes before."""


@dataclass
class UploadCounts:
    """The uploads of a session, counted by their outcome."""

    uploaded: int = 0
    failed: int = 0
    given_up: int = 0
    newest_step: int | None = None

    def in_words(self) -> str:
        """The counts as a sentence."""
        newest = f", newest step {self.newest_step:,}" if self.newest_step else ""
        return (
            f"{self.uploaded} uploaded{newest}, {self.failed} tries failed, {self.given_up} given "
            "up for newer ones"
        )


@final
class Uploads:
    """The bucket's side of one run; entering takes over uploads that an earlier session left."""

    def __init__(self, run: Path, bucket: Bucket, lock: BucketLock, *, keep_last: int) -> None:
        self._run, self._bucket, self._lock, self._keep = run, bucket, lock, keep_last
        self._outbox = run / OUTBOX
        self.counts = UploadCounts()
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._changed = threading.Event()
        self._closing = False
        self._done: set[str] = set()
        self._told: set[str] = set()
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="toque-upload", daemon=True)

    def __enter__(self) -> Self:
        self._outbox.mkdir(parents=True, exist_ok=True)
        sweep(self._outbox)
        names = self._bucket.names()
        folders = {"/".join(n.split("/")[:2]) for n in names if n.split("/")[0] in _KINDS}
        for folder in sorted(folders):
            if f"{folder}/{MANIFEST}" not in names:  # content that a killed upload left
                self._remove(folder, names)
        # What lies here and not there: the newest checkpoint, and the best models.
        for kind in _KINDS:
            steps = sorted((self._run / kind).glob("step-*"), reverse=True)
            for path in steps[: 1 if kind == "checkpoints" else None]:
                if f"{kind}/{path.name}/{MANIFEST}" not in names and (path / MANIFEST).exists():
                    self.add(path)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """Upload what is left, unless the user interrupted (Ctrl-C)."""
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._bucket.retry.stop.set()
        self._closing = True
        self._changed.set()
        self._thread.join()

    def is_lost(self) -> bool:
        """True if another process has taken the run over."""
        return self._lock.lost.is_set()

    def _is_lost_now(self) -> bool:
        """`is_lost`, by a look into the bucket: who has just slept has not heard of it yet."""
        self._lock.look()
        return self.is_lost()

    def add(self, checkpoint: Path) -> None:
        """Have it uploaded; older ones that wait give way when the ring is full."""
        name = f"{checkpoint.parent.name}-{checkpoint.name}"
        with self._guard:
            if (self._outbox / name).exists() or name in self._done:
                return
            try:
                with atomic_folder(self._outbox / name) as writer:
                    for path in sorted(checkpoint.iterdir()):
                        link_or_copy(path, writer.folder / path.name)
            except FileNotFoundError:
                return  # a better or newer one has taken its place meanwhile
            except OSError as error:
                self._messages.put(
                    f"{checkpoint.name} cannot wait for its upload: {error.strerror or error}"
                )
                return
            for older in self._waiting("checkpoints")[QUEUE:]:
                remove_folder(older)
                self.counts.given_up += 1
        self._changed.set()

    def finished(self) -> None:
        """Upload the small files and the finished model, too.

        A RunBucketError, and nothing uploaded, where another process has taken the run over.
        """
        refuse_moved(self._run)
        if self._is_lost_now():
            raise RunBucketError(
                f"Another process has taken {self._bucket.address} over, because this one did not "
                "renew its lock for too long: it slept, or had no network. Nothing more of it was "
                f"uploaded; what it saved is in {self._run}, and the other goes on. Wait for that "
                "one, or stop it and start this command again, which continues from the newest."
            )
        for name in MODEL_FILES:
            self._send(name)
        self._small_files()

    def messages(self) -> list[str]:
        """Sentences for the user since the last call."""
        return [self._messages.get() for _ in range(self._messages.qsize())]

    def _waiting(self, kind: str) -> list[Path]:
        return sorted(self._outbox.glob(f"{kind}-step-*"), reverse=True)

    def _work(self) -> None:
        while not self.is_lost():
            # The best first: a bucket that holds a step and lacks a best model from before it would
            # continue to the same weights and finish with another model.
            with self._guard:
                path = next(iter(self._waiting("best") + self._waiting("checkpoints")), None)
            if path is None:
                if self._closing:
                    return
                self._changed.wait()
                self._changed.clear()
                continue
            try:
                self._upload(path)
            except (CheckpointError, OSError) as error:
                if not path.exists():
                    continue  # gave way while it was on its way
                self.counts.failed += 1
                self._messages.put(f"{path.name} is not uploaded yet. {error}")
                if self._closing:
                    return  # it stays in the outbox for the next session
                self._changed.wait(_AGAIN_AFTER)
                self._changed.clear()

    def _upload(self, path: Path) -> None:
        refuse_moved(path)
        kind, _, step = path.name.partition("-")
        try:
            manifest = read_manifest(path)
            verify_files(path, manifest, hashed=False)
        except CheckpointError as error:
            if path.exists():
                self._give_up(path, error)
            return
        place = f"{kind}/{step}"
        if self._is_lost_now():
            return
        for entry in manifest.files:
            self._bucket.put_file(path / entry.file, f"{place}/{entry.file}")
        if self._is_lost_now():
            return
        self._small_files()
        # One may be there, of the same step before continuing from an older one: the same bits.
        self._bucket.put(f"{place}/{MANIFEST}", (path / MANIFEST).read_bytes())
        with self._guard:
            remove_folder(path)
        self.counts.uploaded += 1
        self._done.add(path.name)
        if kind == "checkpoints":
            self.counts.newest_step = max(self.counts.newest_step or 0, manifest.step)
        self._prune(kind)

    def _give_up(self, path: Path, error: CheckpointError) -> None:
        """Leave out, in this session, what cannot be read here: all others would wait for it."""
        with self._guard:
            remove_folder(path)
        self._done.add(path.name)
        self.counts.failed += 1
        self._messages.put(f"{path.name} is not uploaded. {error}")

    def _small_files(self) -> None:
        """Configuration, figures and samples: what a run is continued with, and read by."""
        names = {path.name for path in self._run.iterdir() if not path.is_dir()}
        for name in sorted(filter(is_own, names)):
            self._send(name)
        others = {name for name in names if not (is_own(name) or name.startswith("."))}
        if others - self._told:
            self._messages.put(f"not uploaded, being no files of a run: {sorted(others)!s:.200}")
        self._told |= others

    def _send(self, name: str) -> None:
        """Upload a file of the run, if there is one."""
        try:
            self._bucket.put_file(self._run / name, name, grows=grows(name))
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in {errno.ELOOP, errno.EINVAL}:
                raise
            self._messages.put(f"{self._run / name} is not uploaded: {error.strerror}")

    def _prune(self, kind: str) -> None:
        """Remove there what is no longer kept; the manifest first, so that no half is one."""
        names = self._bucket.names(kind)
        there = complete_steps(names, kind)
        if kind == "best":
            here = {path.name for path in (self._run / "best").glob("step-*")}
            newest = max(here, default="")  # what is newer appears there before it does here
            kept = [step for step in there if step in here or step > newest] or there
        else:
            # As in `CheckpointStore.prune`: later steps were found damaged when the run continued.
            newest = step_name(self.counts.newest_step or 0)
            kept = there[: sum(step > newest for step in there) + self._keep]
        for step in set(there) - set(kept):
            self._remove(f"{kind}/{step}", names)

    def _remove(self, folder: str, names: list[str]) -> None:
        inside = [n for n in names if n.startswith(f"{folder}/")]
        manifest = f"{folder}/{MANIFEST}"
        self._bucket.remove(sorted(inside, key=lambda name: name != manifest))


class UploadProgress(Callback):
    """Hands every durable checkpoint to `Uploads`, and passes its warnings on."""

    def __init__(self, uploads: Uploads, run: Path, warn: Callable[[Progress, str], None]) -> None:
        self._uploads, self._run, self._warn = uploads, run, warn

    def on_step(self, info: StepInfo) -> Requests | None:
        """Stop when another machine has taken over: two writers would be two runs."""
        for sentence in self._uploads.messages():
            self._warn(info.progress, sentence)
        return Requests(stop=True, reason=TAKEN_OVER) if self._uploads.is_lost() else None

    def on_save(self, at: Progress, saved: Saved) -> None:
        """Have it uploaded, and new best models before it."""
        for best in sorted((self._run / "best").glob("step-*")):
            self._uploads.add(best)
        self._uploads.add(saved.path)
