"""Names of a run's files, and checks that a run does not overwrite the user's files.

A session overwrites files with these names. If a folder or a bucket has such files but is not a
run, the files belong to the user. The command then refuses the folder before it writes anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from toque.config.user_code import HEADER
from toque.errors import ConfigError
from toque.models.loading.provenance import FOLDER, RECORD, WRITTEN
from toque.runs.history import METRICS
from toque.runs.run_record import CONFIG, END
from toque.storage.bucket import Bucket
from toque.storage.bucket_lock import LOCK as BUCKET_LOCK
from toque.storage.bucket_lock import owner_in

_GROWING: Final = (
    r"(metrics|samples|skipped_updates)\.jsonl|scores_by_text\.json|training\.log"
)
"""Pattern of files that a run appends to, or that grow with its data."""
_SMALL: Final = r"config\.yaml|(end|evaluation|non_finite|resources(-rank\d+)?)\.json"
"""Pattern of files that a run writes entirely."""
_FILE: Final = re.compile(rf"{_SMALL}|(?P<growing>{_GROWING})", re.ASCII)
_FOLDERS: Final = (
    "best",
    "checkpoints",
    "model",
    "outbox",
    "set-aside",
    "start-adapter",
    "tensorboard",
    "trace",
)
_RUN_ONLY: Final = re.compile(
    r"checkpoints/\.lock(\.lease)?|(checkpoints|best)/step-[0-9]{8,}/.+", re.DOTALL
)
"""Files that only a run has. The lock is written first and remains."""
_EVENT_START: Final = b'{"event"'
"""First bytes of a run's metrics.jsonl."""
_MODEL_FILES: Final = {f"model/{name}" for name in WRITTEN}
_MODEL_RECORD: Final = f"model/{FOLDER}/{RECORD}"
"""File that a run writes next to its model."""


def is_run_file(name: str) -> bool:
    """Check whether a file with this name in a run's folder belongs to the run."""
    return _FILE.fullmatch(name) is not None


def is_growing(name: str) -> bool:
    """Check whether the run's file with this name grows, so that only the disk limits its size."""
    match = _FILE.fullmatch(name)
    return match is not None and match["growing"] is not None


def refuse_users_folder(folder: Path, *, writes: Collection[str] | None = None) -> None:
    """Refuse a folder with the user's files that a command would overwrite.

    Args:
        folder: The folder of the run.
        writes: Names of the files that the command writes. None means the files of a training run.

    Raises:
        ConfigError: The folder has such files.
    """

    def read(name: str) -> bytes:
        with suppress(OSError), (folder / name).open("rb") as file:
            return file.read(len(HEADER))
        return b""

    names: list[str] = []
    with suppress(OSError):  # missing or unreadable: a later step reports it
        for path in folder.iterdir():
            is_folder = path.name in _FOLDERS and path.is_dir()
            names += _names_below(path) if is_folder else [path.name]
    _refuse_users_files(names, read, str(folder), writes=writes)


def refuse_users_address(bucket: Bucket) -> None:
    """Refuse a bucket's address with objects that a run would overwrite.

    Raises:
        ConfigError: The address has such objects.
    """
    names = bucket.names()

    def read(name: str) -> bytes:
        return bucket.read(name) or b""

    is_locked = BUCKET_LOCK in names
    if is_locked and not {"id", "beat"} <= owner_in(read(BUCKET_LOCK)).keys():
        raise _refusal(bucket.address, [BUCKET_LOCK])
    _refuse_users_files(names, read, bucket.address, is_locked=is_locked)


def _names_below(folder: Path) -> Iterator[str]:
    """Yield the names in a folder and its subfolders, e.g. best/step-00000200/manifest.json."""
    for inner in folder.iterdir():
        name = f"{folder.name}/{inner.name}"
        yield name
        if inner.is_dir():
            yield from (f"{name}/{file.name}" for file in inner.iterdir())


def _refuse_users_files(
    names: Iterable[str],
    read: Callable[[str], bytes],
    place: str,
    *,
    is_locked: bool = False,
    writes: Collection[str] | None = None,
) -> None:
    """Refuse the user's files that a command would overwrite.

    Args:
        names: Names of all files below `place`.
        read: Function that returns the start of a file.
        place: Folder or address, for the message.
        is_locked: Whether a run's lock is among the files.
        writes: Names of the files that the command writes. None means the files of a training run.
    """
    listed = set(names)
    has_config = CONFIG in listed and read(CONFIG).startswith(HEADER.encode())
    has_events = METRICS in listed and read(METRICS).startswith(_EVENT_START)
    has_trained = END in listed or has_events
    has_run_files = any(map(_RUN_ONLY.fullmatch, listed))

    users_files = _overwritten_by_run(listed)
    if is_locked or has_run_files or (has_config and has_trained):
        # In a run's folder, only a configuration or a model may be the user's.
        possible = set()
        if not has_config:
            possible.add(CONFIG)
        has_model = not listed.isdisjoint(_MODEL_FILES)
        if has_model and listed.isdisjoint({END, _MODEL_RECORD}):
            possible.add("model/")
        users_files &= possible
    if writes is not None:
        users_files.intersection_update(writes)
    if users_files:
        raise _refusal(place, sorted(users_files))


def _overwritten_by_run(names: Iterable[str]) -> set[str]:
    """Return the names of files and folders that a training run would overwrite."""
    overwritten: set[str] = set()
    for name in names:
        top, _, inner = name.partition("/")
        if top in _FOLDERS or (is_run_file(top) and not inner):
            overwritten.add(f"{top}/" if inner else top)
    return overwritten


def _refusal(place: str, users_files: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{place} has files that no run wrote and that a run would overwrite: "
        f"{', '.join(users_files)}. Nothing was changed. Choose another folder, e.g. "
        "run_dir=runs/mine, or move these files away."
    )
