"""Upload of checkpoints to a bucket, in the background during training.

A waiting checkpoint is hard-linked into `outbox/`, because retention may delete the original. While
the service is down, all best models wait, but only the newest checkpoints. Dropped checkpoints are
counted. The manifest is uploaded last, after the verified content, so a killed upload leaves no
incomplete checkpoint.
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
from toque.runs.run_files import is_growing, is_run_file
from toque.storage.atomic import atomic_folder, link_or_copy, remove_folder, sweep
from toque.storage.bucket import Bucket, RunBucketError
from toque.storage.bucket_lock import BucketLock
from toque.storage.no_follow import refuse_moved
from toque.training.callbacks import Callback, Requests, Saved, StepInfo
from toque.training.checkpoint.fetch import MODEL_FILES, OUTBOX, complete_steps
from toque.training.checkpoint.saved import (
    MANIFEST,
    read_manifest,
    step_name,
    verify_files,
)
from toque.training.stopping import TAKEN_OVER
from toque.units import Progress

QUEUE: Final = 2
"""Maximum number of waiting checkpoints. Best models are not limited."""
_KINDS: Final = ("best", "checkpoints")
"""Folders of a run that are uploaded."""
_RETRY_SECONDS: Final = 30.0
"""Seconds until a failed upload is retried. A new checkpoint causes an immediate retry."""


@dataclass
class UploadCounts:
    """Number of uploads in a session by outcome."""

    uploaded: int = 0
    failed: int = 0
    dropped: int = 0
    newest_step: int | None = None

    def summary(self) -> str:
        """Summarise the counts for the user."""
        newest = f", newest step {self.newest_step:,}" if self.newest_step else ""
        return (
            f"{self.uploaded} uploaded{newest}, {self.failed} failed attempts, {self.dropped} "
            "dropped for newer checkpoints"
        )


@final
class Uploads:
    """Queue and thread for the uploads of a run. Waiting uploads of earlier sessions come first.

    `__exit__` waits until the queue is empty or an upload fails.
    """

    def __init__(
        self, run: Path, bucket: Bucket, lock: BucketLock, *, keep_last: int
    ) -> None:
        self._run = run
        self._bucket = bucket
        self._lock = lock
        self._keep_last = keep_last
        self._outbox = run / OUTBOX
        self.counts = UploadCounts()
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._changed = threading.Event()
        self._closing = False
        self._done: set[str] = set()
        self._reported: set[str] = set()
        """Names of files that are not uploaded and have been reported."""
        self._guard = threading.Lock()
        self._thread = threading.Thread(
            target=self._work, name="toque-upload", daemon=True
        )

    def __enter__(self) -> Self:
        self._outbox.mkdir(parents=True, exist_ok=True)
        sweep(self._outbox)

        names = self._bucket.names()
        self._remove_incomplete(names)
        self._add_missing(names)
        self._thread.start()
        return self

    def _remove_incomplete(self, names: list[str]) -> None:
        """Remove the leftovers of killed uploads from the bucket."""
        parts_of_names = [name.split("/") for name in names]
        folders = {"/".join(p[:2]) for p in parts_of_names if p[0] in _KINDS}
        for folder in sorted(folders):
            if f"{folder}/{MANIFEST}" not in names:
                self._remove(folder, names)

    def _add_missing(self, names: list[str]) -> None:
        """Queue the best models and the newest checkpoint, unless the bucket has them."""
        best = sorted((self._run / "best").glob("step-*"), reverse=True)
        checkpoints = sorted((self._run / "checkpoints").glob("step-*"))
        for path in [*best, *checkpoints[-1:]]:
            is_uploaded = f"{path.parent.name}/{path.name}/{MANIFEST}" in names
            if not is_uploaded and (path / MANIFEST).exists():
                self.add(path)

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """Upload the waiting checkpoints, unless the user has interrupted (Ctrl-C)."""
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._bucket.retry.stop.set()
        self._closing = True
        self._changed.set()
        self._thread.join()

    def is_lost(self) -> bool:
        """Check whether another process has taken over the run."""
        return self._lock.lost.is_set()

    def _is_lost_now(self) -> bool:
        """Read the lock in the bucket, which a process may lose while the computer sleeps."""
        self._lock.detect_takeover()
        return self.is_lost()

    def add(self, checkpoint: Path) -> None:
        """Queue a checkpoint for upload. If the queue is full, drop the oldest waiting one."""
        target = self._outbox / f"{checkpoint.parent.name}-{checkpoint.name}"
        with self._guard:
            if target.exists() or target.name in self._done:
                return
            try:
                _link_files(checkpoint, target)
            except FileNotFoundError:
                return  # retention has already removed the checkpoint
            except OSError as error:
                self._messages.put(
                    f"{checkpoint.name} cannot wait for its upload: {error.strerror or error}"
                )
                return
            for older in self._waiting("checkpoints")[QUEUE:]:
                remove_folder(older)
                self.counts.dropped += 1
        self._changed.set()

    def upload_model(self) -> None:
        """Upload the finished model and the small files.

        Raises:
            RunBucketError: Another process has taken over the run. Nothing is uploaded.
        """
        refuse_moved(self._run)
        if self._is_lost_now():
            raise RunBucketError(
                f"Another process has taken over {self._bucket.address}, because this process did "
                "not renew its lock in time: the computer was asleep or had no network. Nothing "
                f"more was uploaded. The saved files are in {self._run}, and the other process "
                "continues the run. Wait for it, or stop it and start this command again to "
                "continue from the newest checkpoint."
            )
        for name in MODEL_FILES:
            self._upload_file(name)
        self._upload_small_files()

    def messages(self) -> list[str]:
        """Return the messages for the user since the last call."""
        return [self._messages.get() for _ in range(self._messages.qsize())]

    def _waiting(self, kind: str) -> list[Path]:
        """List the waiting checkpoints or best models, newest first."""
        return sorted(self._outbox.glob(f"{kind}-step-*"), reverse=True)

    def _work(self) -> None:
        """Upload what is waiting until the context ends. This runs in the thread."""
        while not self.is_lost():
            # Upload best models first. If a bucket had a checkpoint but not an earlier best model,
            # a resumed run would have the same weights but finish with a different model.
            with self._guard:
                waiting = self._waiting("best") + self._waiting("checkpoints")
            max_wait = None
            if waiting:
                if self._try_upload(waiting[0]):
                    continue
                max_wait = _RETRY_SECONDS
            if self._closing:
                return  # a failed upload waits in the outbox for the next session
            self._changed.wait(max_wait)
            self._changed.clear()

    def _try_upload(self, path: Path) -> bool:
        """Upload a waiting checkpoint. If that fails, report the error and return False."""
        try:
            self._upload(path)
        except (CheckpointError, OSError) as error:
            if path.exists():  # otherwise it was dropped during the upload
                self.counts.failed += 1
                self._messages.put(f"{path.name} is not uploaded yet. {error}")
                return False
        return True

    def _upload(self, path: Path) -> None:
        """Verify and upload a waiting checkpoint, the manifest last, and remove it from the outbox.

        Nothing more is uploaded after another process has taken over the run.
        """
        refuse_moved(path)
        try:
            manifest = read_manifest(path)
            verify_files(path, manifest, hashed=False)
        except CheckpointError as error:
            if path.exists():
                self._skip(path, error)
            return

        kind, _, step = path.name.partition("-")
        if self._is_lost_now():
            return
        for entry in manifest.files:
            self._bucket.put_file(path / entry.file, f"{kind}/{step}/{entry.file}")
        if self._is_lost_now():
            return
        self._upload_small_files()
        # After a resume from an older checkpoint, the bucket may have an equal copy of this step.
        self._bucket.put(f"{kind}/{step}/{MANIFEST}", (path / MANIFEST).read_bytes())

        with self._guard:
            remove_folder(path)
        self.counts.uploaded += 1
        self._done.add(path.name)
        if kind == "checkpoints":
            self.counts.newest_step = max(self.counts.newest_step or 0, manifest.step)
        self._prune(kind)

    def _skip(self, path: Path, error: CheckpointError) -> None:
        """Skip a damaged checkpoint in this session, so that it does not block the queue."""
        with self._guard:
            remove_folder(path)
        self._done.add(path.name)
        self.counts.failed += 1
        self._messages.put(f"{path.name} is not uploaded. {error}")

    def _upload_small_files(self) -> None:
        """Upload the configuration, metrics and samples, which a resume and reports need."""
        names = {path.name for path in self._run.iterdir() if not path.is_dir()}
        run_files = set(filter(is_run_file, names))
        for name in sorted(run_files):
            self._upload_file(name)
        other_files = {n for n in names - run_files if not n.startswith(".")}
        if other_files - self._reported:
            self._messages.put(
                f"not uploaded, because they are not files of a run: {sorted(other_files)!s:.200}"
            )
        self._reported |= other_files

    def _upload_file(self, name: str) -> None:
        """Upload a file of the run if it exists. Links and special files are reported instead."""
        try:
            self._bucket.put_file(self._run / name, name, grows=is_growing(name))
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in {errno.ELOOP, errno.EINVAL}:
                raise
            self._messages.put(f"{self._run / name} is not uploaded: {error.strerror}")

    def _prune(self, kind: str) -> None:
        """Remove the checkpoints or best models from the bucket that need not be retained."""
        names = self._bucket.names(kind)
        remote = complete_steps(names, kind)
        if kind == "best":
            local = {path.name for path in (self._run / "best").glob("step-*")}
            newest_local = max(local, default="")
            outdated = [s for s in remote if s not in local and s <= newest_local]
            if outdated == remote:  # keep at least one best model
                outdated = []
        else:
            # As in `CheckpointStore.prune`, later steps were damaged when the run continued. Do not
            # count or remove them.
            newest = step_name(self.counts.newest_step or 0)
            intact = [step for step in remote if step <= newest]
            outdated = intact[self._keep_last :]
        for step in outdated:
            self._remove(f"{kind}/{step}", names)

    def _remove(self, folder: str, names: list[str]) -> None:
        """Remove a folder from the bucket. The manifest is first, so that no part looks valid."""
        inside = [name for name in names if name.startswith(f"{folder}/")]
        manifest = f"{folder}/{MANIFEST}"
        self._bucket.remove(sorted(inside, key=lambda name: name != manifest))


def _link_files(checkpoint: Path, target: Path) -> None:
    """Create a folder with hard links to the files of a checkpoint."""
    with atomic_folder(target) as writer:
        for path in sorted(checkpoint.iterdir()):
            link_or_copy(path, writer.folder / path.name)


class UploadProgress(Callback):
    """Callback that queues durable checkpoints for upload and reports warnings from `Uploads`."""

    def __init__(
        self, uploads: Uploads, run: Path, warn: Callable[[Progress, str], None]
    ) -> None:
        self._uploads = uploads
        self._run = run
        self._warn = warn

    def on_step(self, info: StepInfo) -> Requests | None:
        """Show the waiting messages, and stop if another process has taken over the run."""
        for message in self._uploads.messages():
            self._warn(info.progress, message)
        if self._uploads.is_lost():
            return Requests(stop=True, reason=TAKEN_OVER)
        return None

    def on_save(self, at: Progress, saved: Saved) -> None:
        """Queue the new best models and the checkpoint."""
        for best in sorted((self._run / "best").glob("step-*")):
            self._uploads.add(best)
        self._uploads.add(saved.path)
