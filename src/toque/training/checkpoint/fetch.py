"""Download of a run from its bucket: the newest valid checkpoint and the run's other files.

Each checkpoint is downloaded to a temporary folder, verified, and only then moved to its final
path. The newest checkpoint is moved last: if the connection breaks before, it is missing, so the
next start downloads again. Files that do not belong to a run, such as keys, memory dumps and
scripts, are never transferred.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from toque.errors import CheckpointError
from toque.models.loading.provenance import WRITTEN
from toque.runs.run_files import is_growing, is_run_file
from toque.runs.run_record import CONFIG
from toque.storage.atomic import atomic_folder, atomic_path
from toque.storage.bucket import Bucket, BucketError, RunBucketError
from toque.storage.bucket_lock import LOCK
from toque.training.checkpoint.saved import (
    MANIFEST,
    MAX_SMALL_FILE_BYTES,
    Manifest,
    OtherFormatError,
    parse_manifest,
    read_manifest,
    step_name,
    step_of,
    verify_checkpoint,
    verify_files,
)

Say = Callable[[str], None]

OUTBOX: Final = "outbox"
"""Folder of a run with the checkpoints that wait for their upload."""
MODEL_FILES: Final = tuple(f"model/{name}" for name in WRITTEN)
"""Files of the finished model or adapter."""


def fetch_run(bucket: Bucket, run: Path, *, say: Say) -> int | None:
    """Download the newest valid checkpoint, if it is newer than the valid checkpoints in `run`.

    Returns:
        The step of the checkpoint, or None if nothing was downloaded.

    Raises:
        CheckpointError: No checkpoint is valid, or the bucket has another run.
        BucketError: The bucket cannot be read.
    """
    names, steps, local = _list_steps(bucket, run)
    reasons: list[str] = []
    for step in steps:
        path = f"checkpoints/{step}"
        if local is not None and step_of(step) <= local.step:
            return None
        try:
            with _fetched(bucket, path, run) as manifest:
                _fetch_rest(bucket, names, run, say)
        except (OtherFormatError, BucketError):
            raise
        except CheckpointError as error:
            reasons.append(str(error))
            say(f"{bucket.address}/{path} cannot be used: {error}")
            continue
        say(f"fetched step {manifest.step:,} from {bucket.address}")
        return manifest.step

    if not steps:
        return None
    raise CheckpointError(
        f"None of the {len(steps)} checkpoints in {bucket.address} can be used. "
        f"{' '.join(reasons)} Replace one with a good copy, or choose another address."
    )


def fetch_step(bucket: Bucket, run: Path, step: int, *, say: Say) -> None:
    """Download one checkpoint, if the bucket has it and `run` has no valid copy."""
    path = f"checkpoints/{step_name(step)}"
    names, steps, local = _list_steps(bucket, run)
    if step_name(step) not in steps or _valid_manifest(run / path) is not None:
        return
    with _fetched(bucket, path, run):
        if local is None or local.step < step_of(steps[0]):
            _fetch_rest(bucket, names, run, say)
    say(f"fetched step {step:,} from {bucket.address}")


def fetch_model(bucket: Bucket, at: str, run: Path) -> None:
    """Download a checkpoint or best model into `run`, with its configuration and tokenizer.

    Args:
        bucket: Bucket of the run.
        at: Path of the checkpoint in the run, e.g. best/step-00000200.
        run: Folder for the files.

    Raises:
        RunBucketError: The bucket has no such checkpoint.
    """
    names = bucket.names()
    manifest_name = f"{at}/{MANIFEST}"
    manifest = bucket.read(manifest_name) if manifest_name in names else None
    if manifest is None or CONFIG not in names:
        steps = [f"best/{step}" for step in complete_steps(names, "best")]
        steps += [
            f"checkpoints/{step}" for step in complete_steps(names, "checkpoints")
        ]
        raise RunBucketError(
            f"{bucket.address} lacks {CONFIG} or a complete {at}. It has "
            f"{', '.join(sorted(steps)) or 'no checkpoint yet'}."
        )

    _update(bucket, at, run, manifest)
    other_files = [name for name in MODEL_FILES if not name.endswith(".safetensors")]
    for name in (CONFIG, *filter(names.__contains__, other_files)):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(run / name) as temporary:
            bucket.get_file(name, temporary, max_bytes=shutil.disk_usage(run).free)


def _list_steps(
    bucket: Bucket, run: Path
) -> tuple[list[str], list[str], Manifest | None]:
    """List the bucket, and refuse a local run with other training data.

    Returns:
        The names in the bucket, its checkpoints (newest first), and the manifest of the newest
        valid local checkpoint.
    """
    names = bucket.names()
    steps = complete_steps(names, "checkpoints")
    folders = sorted((run / "checkpoints").glob("step-*"), reverse=True)
    local = next(filter(None, map(_valid_manifest, folders)), None)
    if local is None:
        return names, steps, None

    remote = _newest_manifest(bucket, steps)
    if remote is not None and remote.data_fingerprint != local.data_fingerprint:
        raise CheckpointError(
            f"{bucket.address} has a run with different training data (fingerprint "
            f"{remote.data_fingerprint[:12]}) than {run} ({local.data_fingerprint[:12]}). Choose "
            "another checkpoint.upload, or another run_dir."
        )
    return names, steps, local


def _newest_manifest(bucket: Bucket, steps: list[str]) -> Manifest | None:
    """Read the newest readable manifest of `steps`, or return None if all were removed meanwhile.

    Raises:
        CheckpointError: There are manifests, but all are damaged.
    """
    damage: CheckpointError | None = None
    for step in steps:
        path = f"checkpoints/{step}/{MANIFEST}"
        text = bucket.read(path)
        if text is None:
            continue
        try:
            return parse_manifest(text, f"{bucket.address}/{path}")
        except OtherFormatError:
            raise
        except CheckpointError as error:
            damage = error
    if damage is not None:
        raise damage
    return None


def complete_steps(names: list[str], kind: str) -> list[str]:
    """List the `step-*` folders of `kind` with a manifest among the names, newest first."""
    paths = [name.split("/") for name in names]
    steps = [p[1] for p in paths if len(p) == 3 and p[0] == kind and p[2] == MANIFEST]
    numbered = [step for step in steps if step.removeprefix("step-").isdecimal()]
    return sorted(numbered, key=step_of, reverse=True)


def _valid_manifest(folder: Path) -> Manifest | None:
    """Verify a checkpoint and return its manifest, or None if the bucket should replace it."""
    try:
        return verify_checkpoint(folder).manifest
    except OtherFormatError:
        raise
    except CheckpointError:
        return None


@contextmanager
def _fetched(bucket: Bucket, path: str, run: Path) -> Iterator[Manifest]:
    """Download and verify a checkpoint. Move it to its final path if the context succeeds."""
    target = run / path
    with atomic_folder(target) as writer:
        temp = writer.folder
        bucket.get_file(
            f"{path}/{MANIFEST}", temp / MANIFEST, max_bytes=MAX_SMALL_FILE_BYTES
        )
        manifest = read_manifest(temp)
        if target.name != step_name(manifest.step):
            raise CheckpointError(
                f"it has the checkpoint of step {manifest.step}. It was renamed or copied."
            )
        needed = sum(entry.bytes for entry in manifest.files)
        free = shutil.disk_usage(temp).free
        if needed > free:
            raise RunBucketError(
                f"{bucket.address}/{path} has {needed:,} bytes, but the disk of {run} has only "
                f"{free:,} free bytes. Free some space, or choose another run_dir."
            )
        for entry in manifest.files:  # the manifest has only plain names
            bucket.get_file(
                f"{path}/{entry.file}", temp / entry.file, max_bytes=entry.bytes
            )
        verify_files(temp, manifest)
        yield manifest


def _update(bucket: Bucket, path: str, run: Path, manifest: bytes | None) -> None:
    """Download a checkpoint unless the local copy is valid and has the bucket's manifest."""
    local = run / path
    if _valid_manifest(local) is None or (local / MANIFEST).read_bytes() != manifest:
        with _fetched(bucket, path, run):
            pass


def _fetch_rest(bucket: Bucket, names: list[str], run: Path, say: Say) -> None:
    """Download the valid best models and the run's small files."""
    for best in complete_steps(names, "best"):
        path = f"best/{best}"
        try:
            _update(bucket, path, run, bucket.read(f"{path}/{MANIFEST}"))
        except (OtherFormatError, BucketError):
            raise
        except CheckpointError as error:
            kept_local = "; the local copy stays" if (run / path).is_dir() else ""
            say(f"{bucket.address}/{path} cannot be used{kept_local}: {error}")

    other_files = {n for n in names if "/" not in n and not is_run_file(n)} - {LOCK}
    if other_files:
        say(
            f"not fetched from {bucket.address}, because they are not files of a run: "
            f"{sorted(other_files)!s:.200}"
        )
    # The end of the stack replaces the files, after all of them are downloaded.
    with ExitStack() as stack:
        for name in filter(is_run_file, names):
            temporary = stack.enter_context(atomic_path(run / name))
            max_bytes = MAX_SMALL_FILE_BYTES
            if is_growing(name):
                max_bytes = shutil.disk_usage(run).free
            bucket.get_file(name, temporary, max_bytes=max_bytes)
