"""Runs below a folder or a bucket's address, found again while new ones begin."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final

from toque.runs.history import METRICS
from toque.storage.bucket import Bucket
from toque.watching.places import BucketPlace, FolderPlace, Place

_DEPTH: Final = 3
_MOST_RUNS: Final = 200
_OF_A_RUN: Final = frozenset({"checkpoints", "best", "model", "outbox", "tensorboard", "wandb"})


class Finder(Protocol):
    """Something that knows where runs are."""

    @property
    def address(self) -> str:
        """What is watched, as the user wrote it."""

    def places(self) -> Mapping[str, Place]:
        """The runs that are there now, by a short name.

        Raises:
            OSError, BucketError: it cannot be listed.
        """


@final
@dataclass(frozen=True)
class FolderFinder:
    """A run's folder, or one with runs in it, or in folders of it; links are not followed."""

    folder: Path

    @property
    def address(self) -> str:
        """The folder."""
        return str(self.folder)

    def places(self) -> Mapping[str, Place]:
        """As `Finder.places`."""
        if _is_run(self.folder):
            return {self.folder.resolve().name: FolderPlace(self.folder)}
        found: dict[str, Place] = {}
        for folder in _runs_below(self.folder, _DEPTH):
            if len(found) == _MOST_RUNS:
                break
            found[folder.relative_to(self.folder).as_posix()] = FolderPlace(folder)
        return found


@final
@dataclass(frozen=True)
class BucketFinder:
    """A run in a bucket, or a folder there that holds runs."""

    bucket: Bucket

    @property
    def address(self) -> str:
        """The bucket's address."""
        return self.bucket.address

    def places(self) -> Mapping[str, Place]:
        """As `Finder.places`."""
        names = self.bucket.names()
        own = self.bucket.path.rstrip("/").rpartition("/")[2]
        if any(name in names for name in (METRICS, "config.yaml")):
            return {own: BucketPlace(self.bucket)}
        below = sorted(name.removesuffix(METRICS) for name in names if name.endswith(f"/{METRICS}"))
        return {path.rstrip("/"): BucketPlace(self.bucket, path) for path in below[:_MOST_RUNS]}


def _is_run(folder: Path) -> bool:
    return (folder / METRICS).exists() or (folder / "checkpoints").is_dir()


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return  # not ours to read
    inner = [e for e in entries if _is_own_folder(e) and e.name not in _OF_A_RUN]
    for entry in inner:
        path = Path(entry.path)
        if _is_run(path):
            yield path
        elif depth > 1:
            yield from _runs_below(path, depth - 1)


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    try:
        mode = entry.stat(follow_symlinks=False).st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) and not entry.name.startswith(".")
