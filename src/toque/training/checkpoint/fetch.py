"""Fetching a run from its bucket: the newest checkpoint that verifies, and what belongs to it.

Everything is fetched aside, verified, and only then put in the place of what lies here. The
checkpoint comes last: a start that a broken line ended finds it missing and fetches again. Whatever
else lies in the folder or the bucket stays there: a key, a dump of memory, a page with a script.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from toque.errors import CheckpointError
from toque.models.loading.provenance import WRITTEN
from toque.runs.run_files import grows, is_own
from toque.runs.run_record import CONFIG
from toque.storage.atomic import atomic_folder, atomic_path
from toque.storage.bucket import Bucket, BucketError, RunBucketError
from toque.storage.bucket_lock import LOCK
from toque.training.checkpoint.saved import (
    MANIFEST,
    MOST_BYTES,
    Manifest,
    OtherFormatError,
    parse_manifest,
    read_manifest,
    step_name,
    verify_checkpoint,
    verify_files,
)

Say = Callable[[str], None]

OUTBOX: Final = "outbox"  # folder of a run with the checkpoints that wait for their upload
MODEL_FILES: Final = tuple(f"model/{name}" for name in WRITTEN)
"""Files of the finished model or adapter."""


def fetch_run(bucket: Bucket, run: Path, *, say: Say) -> int | None:
    """Bring the folder `run` up to what the bucket holds, if that is further; its step."""
    names, steps, here = _there_and_here(bucket, run)
    reasons: list[str] = []
    for step in steps:
        if here is not None and _step(step) <= here.step:
            return None
        try:
            place = f"checkpoints/{step}"
            with _fetched(bucket, place, run) as manifest:
                absent = [e.file for e in manifest.files if f"{place}/{e.file}" not in names]
                if absent:
                    raise CheckpointError(f"its manifest lists {absent[0]}, which is not there.")
                _fetch_rest(bucket, names, run, say)
        except (OtherFormatError, BucketError):
            raise
        except CheckpointError as error:
            reasons.append(str(error))
            say(f"{bucket.address}/checkpoints/{step} cannot be used: {error}")
            continue
        say(f"fetched step {manifest.step:,} from {bucket.address}")
        return manifest.step
    if not steps:
        return None
    raise CheckpointError(
        f"None of the {len(steps)} checkpoints in {bucket.address} can be used. "
        f"{' '.join(reasons)} Put a whole copy in their place, or choose another address."
    )


def fetch_step(bucket: Bucket, run: Path, step: int, *, say: Say) -> None:
    """Bring one checkpoint here, when the bucket has it and no whole copy lies here."""
    place = f"checkpoints/{step_name(step)}"
    names, steps, here = _there_and_here(bucket, run)
    if step_name(step) not in steps or _whole_here(run / place) is not None:
        return
    with _fetched(bucket, place, run):
        if here is None or here.step < _step(steps[0]):
            _fetch_rest(bucket, names, run, say)
    say(f"fetched step {step:,} from {bucket.address}")


def fetch_model(bucket: Bucket, at: str, run: Path) -> None:
    """Bring one checkpoint or best model into the folder `run`, to be used as a model.

    `at` is its place, as best/step-00000200. What else belongs to the model comes with it: the
    run's configuration, tokenizer and record. RunBucketError where the bucket has no such place.
    """
    names, target = bucket.names(), run / at
    manifest = bucket.read(f"{at}/{MANIFEST}") if f"{at}/{MANIFEST}" in names else None
    if manifest is None or CONFIG not in names:
        steps = [
            f"{kind}/{one}"
            for kind in ("best", "checkpoints")
            for one in complete_steps(names, kind)
        ]
        raise RunBucketError(
            f"{bucket.address} has no {at} that is whole, or no {CONFIG}. It has "
            f"{', '.join(sorted(steps)) or 'no checkpoint yet'}."
        )
    if _whole_here(target) is None or (target / MANIFEST).read_bytes() != manifest:
        with _fetched(bucket, at, run):
            pass
    beside = [name for name in MODEL_FILES if not name.endswith(".safetensors")]
    for name in (CONFIG, *filter(names.__contains__, beside)):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(run / name) as temporary:
            bucket.get_file(name, temporary, max_bytes=shutil.disk_usage(run).free)


def _there_and_here(bucket: Bucket, run: Path) -> tuple[list[str], list[str], Manifest | None]:
    """Names and checkpoints in the bucket, and the newest one here, which must be of one run."""
    names, folders = bucket.names(), sorted((run / "checkpoints").glob("step-*"), reverse=True)
    steps = complete_steps(names, "checkpoints")
    here = next(filter(None, map(_whole_here, folders)), None)
    if here is None:
        return names, steps, None
    unread: CheckpointError | None = None
    for step in steps:
        place = f"checkpoints/{step}/{MANIFEST}"
        text = bucket.read(place)
        if text is None:
            continue  # removed meanwhile
        try:
            there = parse_manifest(text, f"{bucket.address}/{place}")
        except OtherFormatError:
            raise
        except CheckpointError as error:
            unread = error
            continue
        if there.data_fingerprint != here.data_fingerprint:
            raise CheckpointError(
                f"{bucket.address} holds a run that was trained on another store (fingerprint "
                f"{there.data_fingerprint[:12]}) than the one here ({here.data_fingerprint[:12]}). "
                "Choose another checkpoint.upload, or another run_dir."
            )
        return names, steps, here
    if unread is not None:
        raise unread
    return names, steps, here


def complete_steps(names: list[str], kind: str) -> list[str]:
    """The `step-*` folders of `kind` whose manifest is among the names, newest first."""
    found = [name.split("/") for name in names]
    steps = [p[1] for p in found if len(p) == 3 and p[0] == kind and p[2] == MANIFEST]
    return sorted((s for s in steps if s.removeprefix("step-").isdecimal()), key=_step)[::-1]


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def _whole_here(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None for a damaged one, of which a bucket may hold a copy."""
    try:
        return verify_checkpoint(folder).manifest
    except OtherFormatError:
        raise
    except CheckpointError:
        return None


@contextmanager
def _fetched(bucket: Bucket, place: str, run: Path) -> Iterator[Manifest]:
    """One checkpoint, whole and verified; it is put in place if the block ends without an error."""
    target = run / place
    with atomic_folder(target) as writer:
        temp = writer.folder
        bucket.get_file(f"{place}/{MANIFEST}", temp / MANIFEST, max_bytes=MOST_BYTES)
        manifest = read_manifest(temp)
        if target.name != step_name(manifest.step):
            raise CheckpointError(f"it holds step {manifest.step}: it was renamed or copied.")
        needed, free = sum(e.bytes for e in manifest.files), shutil.disk_usage(temp).free
        if needed > free:
            raise RunBucketError(
                f"{bucket.address}/{place} has {needed:,} bytes and the disk of {run} has "
                f"{free:,} left. Make room, or choose another run_dir."
            )
        for entry in manifest.files:  # only what the manifest lists, and plain names only
            bucket.get_file(f"{place}/{entry.file}", temp / entry.file, max_bytes=entry.bytes)
        verify_files(temp, manifest)
        yield manifest


def _fetch_rest(bucket: Bucket, names: list[str], run: Path, say: Say) -> None:
    """The best models, of which a damaged one is passed over, and the run's small files."""
    for best in complete_steps(names, "best"):
        try:
            here, there = run / "best" / best, bucket.read(f"best/{best}/{MANIFEST}")
            if _whole_here(here) is None or (here / MANIFEST).read_bytes() != there:
                with _fetched(bucket, f"best/{best}", run):
                    pass
        except (OtherFormatError, BucketError):
            raise
        except CheckpointError as error:
            kept = "; the one here stays" if (run / "best" / best).is_dir() else ""
            say(f"{bucket.address}/best/{best} cannot be used{kept}: {error}")
    others = {n for n in names if "/" not in n and not is_own(n)} - {LOCK}
    if others:
        say(f"not fetched from {bucket.address}, being no files of a run: {sorted(others)!s:.200}")
    with ExitStack() as stack:  # all of them are fetched before one is replaced
        for name in filter(is_own, names):
            temporary = stack.enter_context(atomic_path(run / name))
            most = shutil.disk_usage(run).free if grows(name) else MOST_BYTES
            bucket.get_file(name, temporary, max_bytes=most)
