"""Fetching a run from its bucket onto an empty machine: the newest checkpoint that verifies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from toque.errors import CheckpointError
from toque.storage.atomic import atomic_folder, atomic_write
from toque.storage.bucket import Bucket
from toque.storage.bucket_errors import BucketError, RunBucketError
from toque.storage.bucket_lock import LOCK
from toque.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    NewerFormatError,
    parse_manifest,
    read_manifest,
    verify_files,
)

Say = Callable[[str], None]


def fetch_run(bucket: Bucket, run: Path, *, say: Say) -> int | None:
    """Bring `run` up to what the bucket holds, when that is further than what lies here.

    Args:
        bucket: the run's place.
        run: its folder here; made when missing.
        say: called with what was fetched, and what could not be used.

    Returns:
        The step fetched, or None when what lies here is as new, or there is nothing.

    Raises:
        CheckpointError: the bucket holds another run, or checkpoints of which none can be used.
        BucketError: the service refused or stayed away.
    """
    names = bucket.names()
    steps = complete_steps(names, "checkpoints")
    here = _newest_here(run)
    if here is not None and steps and _step(steps[0]) <= here.step:
        _refuse_another_run(bucket, steps, here)
    reasons: list[str] = []
    for step in steps:
        if here is not None and _step(step) <= here.step:
            return None
        try:
            manifest = _fetch(bucket, f"checkpoints/{step}", run)
        except (NewerFormatError, BucketError):
            raise
        except CheckpointError as error:
            reasons.append(str(error))
            say(f"{bucket.address}/checkpoints/{step} cannot be used: {error}")
            continue
        _fetch_rest(bucket, names, run, say)
        say(f"fetched step {manifest.step:,} from {bucket.address}")
        return manifest.step
    if not steps:
        return None
    raise CheckpointError(
        f"None of the {len(steps)} checkpoints in {bucket.address} can be used. "
        f"{' '.join(reasons)} Put a whole copy in their place, or choose another address."
    )


def complete_steps(names: list[str], kind: str) -> list[str]:
    """The `step-*` folders of `kind` whose manifest is among the names, newest first."""
    found = [name.split("/") for name in names]
    steps = [p[1] for p in found if len(p) == 3 and p[0] == kind and p[2] == MANIFEST]
    return sorted((s for s in steps if s.removeprefix("step-").isdecimal()), key=_step)[::-1]


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def _newest_here(run: Path) -> Manifest | None:
    for path in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        try:
            return read_manifest(path)
        except NewerFormatError:
            raise
        except CheckpointError:
            continue  # the user reads why when the run continues
    return None


def _refuse_another_run(bucket: Bucket, steps: list[str], here: Manifest) -> None:
    """Compare the data; settings and versions may change while a run continues.

    Raises:
        CheckpointError: it was another store's, or no manifest there can be read.
    """
    unread = CheckpointError("")
    for step in steps:
        place = f"checkpoints/{step}/{MANIFEST}"
        text = bucket.read(place)
        if text is None:
            continue  # removed meanwhile
        try:
            there = parse_manifest(text, f"{bucket.address}/{place}")
        except NewerFormatError:
            raise
        except CheckpointError as error:
            unread = error
            continue
        if there.data_fingerprint == here.data_fingerprint:
            return
        raise CheckpointError(
            f"{bucket.address} holds a run that was trained on another store (fingerprint "
            f"{there.data_fingerprint[:12]}) than the one in this run's folder "
            f"({here.data_fingerprint[:12]}); uploading would mix the two. Choose another "
            "checkpoint.upload, or another run_dir."
        )
    if str(unread):
        raise unread


def _fetch(bucket: Bucket, place: str, run: Path) -> Manifest:
    """One checkpoint, whole and verified, or nothing of it."""
    target = run / place
    with atomic_folder(target) as writer:
        temp = writer.folder
        bucket.get_file(f"{place}/{MANIFEST}", temp / MANIFEST)
        manifest = read_manifest(temp)
        if target.name != f"step-{manifest.step:08d}":
            raise CheckpointError(f"it holds step {manifest.step}: it was renamed or copied.")
        needed, free = sum(e.bytes for e in manifest.files), shutil.disk_usage(temp).free
        if needed > free:
            raise RunBucketError(
                f"{bucket.address}/{place} has {needed:,} bytes and the disk of {run} has "
                f"{free:,} left. Make room, or choose another run_dir."
            )
        for entry in manifest.files:  # only what the manifest lists, and plain names only
            bucket.get_file(f"{place}/{entry.file}", temp / entry.file)
        verify_files(temp, manifest)
    return manifest


def _fetch_rest(bucket: Bucket, names: list[str], run: Path, say: Say) -> None:
    """The best models, which are not needed to continue, and the run's small files."""
    for best in complete_steps(names, "best"):
        try:
            _fetch(bucket, f"best/{best}", run)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            say(f"{bucket.address}/best/{best} cannot be used: {error}")
    for name in names:
        if "/" not in name and name != LOCK and not name.startswith("."):
            data = bucket.read(name)
            if data is not None:
                atomic_write(run / name, data)
