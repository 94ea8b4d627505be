"""A run from its bucket onto an empty machine: the newest checkpoint that verifies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from toque.errors import CheckpointError
from toque.storage.atomic import sync_folder, atomic_write
from toque.storage.atomic_folder import TEMP_PREFIX
from toque.storage.bucket_folder import RemoteFolder, StoreError
from toque.storage.bucket_lock import LOCK
from toque.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    NewerFormatError,
    read_manifest,
    verify_files,
)


def fetch_run(remote: RemoteFolder, run: Path, *, say: Callable[[str], None]) -> int | None:
    """Bring `run` up to what the bucket holds, when that is further than what lies here.

    Args:
        remote: the run's address.
        run: its folder here; made when missing.
        say: told what was fetched, and what could not be used.

    Returns:
        The step fetched, or None when what lies here is as new, or there is nothing.

    Raises:
        CheckpointError: the bucket holds another run, or checkpoints of which none can be used.
        StoreError: the store refused or stayed away.
    """
    names = remote.names()
    there = _steps(names, "checkpoints")
    here = _newest_here(run)
    if not there:
        return None
    if here is not None and int(there[0].removeprefix("step-")) <= here.step:
        _refuse_another_run(remote, there[0], here)
        return None
    reasons: list[str] = []
    for step in there:
        if here is not None and int(step.removeprefix("step-")) <= here.step:
            return None
        try:
            manifest = _fetch(remote, f"checkpoints/{step}", run)
        except (NewerFormatError, StoreError):
            raise
        except CheckpointError as error:
            reasons.append(str(error))
            say(f"{remote.address}/checkpoints/{step} cannot be used: {error}")
            continue
        for best in _steps(names, "best"):
            _fetch_quietly(remote, f"best/{best}", run, say)
        for name in names:
            if "/" not in name and name != LOCK and not name.startswith("."):
                data = remote.read(name)
                if data is not None:
                    atomic_write(run / name, data)
        say(f"fetched step {manifest.step:,} from {remote.address}")
        return manifest.step
    raise CheckpointError(
        f"None of the {len(there)} checkpoints in {remote.address} can be used. "
        f"{' '.join(reasons)} Put a whole copy in their place, or choose another address."
    )


def _steps(names: list[str], kind: str) -> list[str]:
    """Folders of `kind` whose manifest is there, newest first."""
    found = [name.split("/") for name in names]
    whole = {p[1] for p in found if len(p) == 3 and p[0] == kind and p[2] == MANIFEST}
    steps = {step for step in whole if step.removeprefix("step-").isdecimal()}
    return sorted(steps, key=lambda step: int(step.removeprefix("step-")), reverse=True)


def _newest_here(run: Path) -> Manifest | None:
    for path in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        try:
            return read_manifest(path)
        except NewerFormatError:
            raise
        except CheckpointError:
            continue  # what it lacks is told when the run continues
    return None


def _refuse_another_run(remote: RemoteFolder, step: str, here: Manifest) -> None:
    temp_free = remote.read(f"checkpoints/{step}/{MANIFEST}")
    if temp_free is None or here.data_fingerprint.encode() in temp_free:
        return
    raise CheckpointError(
        f"{remote.address} holds a run that was trained on another store than the one in this "
        "run's folder; uploading would mix the two. Choose another checkpoint.upload, or another "
        "run_dir."
    )


def _fetch(remote: RemoteFolder, place: str, run: Path) -> Manifest:
    """One checkpoint, whole and verified, or nothing of it."""
    target = run / place
    if target.exists():
        shutil.rmtree(target)  # called only for what is newer than, or lacking beside, ours
    temp = target.with_name(f"{TEMP_PREFIX}fetch-{target.name}")
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    try:
        remote.fetch(f"{place}/{MANIFEST}", temp / MANIFEST)
        manifest = read_manifest(temp)
        if target.name != f"step-{manifest.step:08d}":
            raise CheckpointError(f"it holds step {manifest.step}: it was renamed or copied.")
        needed, free = sum(e.bytes for e in manifest.files), shutil.disk_usage(temp).free
        if needed > free:
            raise StoreError(
                f"{remote.address}/{place} has {needed:,} bytes and the disk of {run} has "
                f"{free:,} left. Make room, or choose another run_dir."
            )
        for entry in manifest.files:  # only what the manifest lists, and plain names only
            remote.fetch(f"{place}/{entry.file}", temp / entry.file)
        verify_files(temp, manifest)
        temp.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return manifest


def _fetch_quietly(remote: RemoteFolder, place: str, run: Path, say: Callable[[str], None]) -> None:
    try:
        _fetch(remote, place, run)
    except NewerFormatError:
        raise
    except CheckpointError as error:  # a best model is not needed to continue
        say(f"{remote.address}/{place} cannot be used: {error}")
