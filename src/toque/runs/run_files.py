"""Files of a run by their names, in a folder or a bucket, and whether a place may become a run's.

A session writes over files of these names. A place that is not a run's and holds one is the user's,
and refused before anything is written.
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

_GROWING: Final = r"(metrics|samples|skipped_updates)\.jsonl|scores_by_text\.json|training\.log"
_SMALL: Final = r"config\.yaml|(end|evaluation|non_finite|resources(-rank\d+)?)\.json"
_FILE: Final = re.compile(rf"{_SMALL}|(?P<growing>{_GROWING})", re.ASCII)
_FOLDERS: Final = ("best", "checkpoints", "model", "outbox", "set-aside", "tensorboard", "trace")
_OF_A_RUN: Final = re.compile(
    r"checkpoints/\.lock(\.lease)?|(checkpoints|best)/step-[0-9]{8,}/.+", re.DOTALL
)
"""Files that a run alone has: its lock comes first and stays."""
_EVENT: Final = b'{"event"'
_MODEL: Final = {f"model/{name}" for name in WRITTEN}
_RECORD: Final = f"model/{FOLDER}/{RECORD}"  # next to every model that a run wrote


def is_own(name: str) -> bool:
    """True if a file of this name in a run's folder is the run's."""
    return _FILE.fullmatch(name) is not None


def grows(name: str) -> bool:
    """True if a run's file has no bound but the disk's."""
    return bool((match := _FILE.fullmatch(name)) and match["growing"])


def refuse_users_folder(folder: Path, *, writes: Collection[str] | None = None) -> None:
    """Raise a ConfigError for a folder with files of the user's that a run would write over.

    `writes` are the names of the files that a command writes; None for those of a training.
    """

    def read(name: str) -> bytes:
        with suppress(OSError), (folder / name).open("rb") as file:
            return file.read(len(HEADER))
        return b""

    names: list[str] = []
    with suppress(OSError):  # absent, or not ours to read: whoever opens it reports that
        for path in folder.iterdir():
            is_folder = path.name in _FOLDERS and path.is_dir()
            names += _below(path) if is_folder else [path.name]
    _refuse_users_files(names, read, str(folder), writes=writes)


def refuse_users_address(bucket: Bucket) -> None:
    """Raise a ConfigError for a bucket's address with objects that a run would write over."""
    names = bucket.names()

    def read(name: str) -> bytes:
        return bucket.read(name) or b""

    locked = BUCKET_LOCK in names
    if locked and not {"id", "beat"} <= owner_in(read(BUCKET_LOCK)).keys():
        raise _refusal(bucket.address, [BUCKET_LOCK])
    _refuse_users_files(names, read, bucket.address, locked=locked)


def _below(folder: Path) -> Iterator[str]:
    """Names of the content of a run's folder, down to the files by which a run is recognised."""
    for inner in folder.iterdir():
        yield f"{folder.name}/{inner.name}"
        if inner.is_dir():
            yield from (f"{folder.name}/{inner.name}/{file.name}" for file in inner.iterdir())


def _refuse_users_files(
    names: Iterable[str],
    read: Callable[[str], bytes],
    place: str,
    *,
    locked: bool = False,
    writes: Collection[str] | None = None,
) -> None:
    """Refuse files at a place by their names below it; `read` gives the beginning of one."""
    listed = set(names)
    wrote_config = CONFIG in listed and read(CONFIG).startswith(HEADER.encode())
    has_trained = END in listed or (METRICS in listed and read(METRICS).startswith(_EVENT))
    is_run = locked or (wrote_config and has_trained) or any(map(_OF_A_RUN.fullmatch, listed))

    users_files = {
        f"{top}/" if inner else top
        for top, _, inner in (name.partition("/") for name in listed)
        if top in _FOLDERS or (is_own(top) and not inner)
    }
    if is_run:  # a user may have put these into the folder of a run
        users = {
            CONFIG: not wrote_config,
            "model/": not listed & {END, _RECORD} and _MODEL & listed,
        }
        users_files = {name for name in users_files if users.get(name)}
    if writes is not None:
        users_files.intersection_update(writes)
    if users_files:
        raise _refusal(place, sorted(users_files))


def _refusal(place: str, users_files: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{place} holds files that no run wrote and that a run would write over: "
        f"{', '.join(users_files)}. Nothing was changed. Choose another folder, e.g. "
        "run_dir=runs/mine, or move these files away."
    )
