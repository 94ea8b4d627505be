"""Sources asked for, compared with those that a store was prepared from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from toque.data.store.manifest import SourceEntry, StoreManifest
from toque.errors import DataError
from toque.sources.files import SourceFile, located
from toque.sources.hf_datasets import PREFIX
from toque.storage.bucket import is_remote
from toque.storage.checksums import sha256_of

_NAMED: Final = 3
"""Files that a sentence names."""

Read = Callable[[int], Sequence[SourceFile]]


def source_differences(
    manifest: StoreManifest,
    asked: Sequence[str],
    read: Read,
    *,
    max_files: Sequence[int | None] = (),
) -> list[str]:
    """How the sources asked for differ from the store's, in words; [] for none asked for.

    Files on this machine are compared by content and reader, wherever they lie. Files elsewhere, in
    a bucket, on the hub or on the machine that prepared them, are compared by name: nothing is
    fetched for it.

    Args:
        manifest: the store's.
        asked: the paths of the sources, in order.
        read: the files of a source of this machine by its number, hashed, each with its reader.
        max_files: the limit of each source; () for none.

    Raises:
        DataError: a source is here and cannot be read.
    """
    if not asked:
        return []
    there = _by_source(manifest)
    if len(there) != len(asked):
        files = named([entry.path for entry in manifest.sources])
        listed = named(asked)
        stores = f"it was prepared from {len(there)} (files such as {files})"
        return [f"{stores}, and data.sources lists {len(asked)} ({listed})"]
    found = []
    limits = manifest.settings.get("max_files") or [None] * len(asked)
    for i, (path, entries) in enumerate(zip(asked, there, strict=True)):
        place = f"data.sources[{i}] is {path}"
        if _is_here(path):
            found += [f"{place}: {how}" for how in _differing(entries, read(i))]
        elif not all(_names(path, entry.path) for entry in entries):
            files = named([entry.path for entry in entries])
            found.append(f"{place}, which is not on this machine, and it was prepared from {files}")
        elif (most := (max_files or [None] * len(asked))[i]) != limits[i]:
            found.append(f"{place} with max_files {most}, and it was prepared with {limits[i]}")
    return found


def named(paths: Sequence[str]) -> str:
    """The first few of many paths."""
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(paths[:_NAMED]) + more


def _by_source(manifest: StoreManifest) -> list[list[SourceEntry]]:
    numbers = sorted({entry.source for entry in manifest.sources})
    return [[e for e in manifest.sources if e.source == number] for number in numbers]


def _is_here(path: str) -> bool:
    """Whether a source can be read on this machine without fetching anything."""
    if path.startswith(PREFIX):
        return Path(path.removeprefix(PREFIX).partition(":")[0]).expanduser().is_dir()
    if is_remote(path):
        return False
    try:
        return bool(located(path))
    except DataError:
        return False


def _differing(entries: Sequence[SourceEntry], files: Sequence[SourceFile]) -> list[str]:
    known = {entry.sha256: entry for entry in entries}
    here = {file.sha256 for file in files}
    new = [file.name for file in files if file.sha256 not in known]
    gone = [e.path for e in entries if e.sha256 not in here and not _as_it_was(e)]
    other = [f.name for f in files if f.sha256 in known and _reader(known[f.sha256]) != _reader(f)]
    found = []
    if new:
        then = named([entry.path for entry in entries])
        found.append(f"{named(new)} is new or has changed since (it was prepared from {then})")
    elif gone:
        found.append(f"{named(gone)}, which the store was prepared from, is not there any more")
    if other:
        found.append(f"{named(other)} was read in another way (format or columns)")
    return found


def _reader(read: SourceEntry | SourceFile) -> str:
    return read.reader if isinstance(read, SourceEntry) else read.reader.recorded_name


def _as_it_was(entry: SourceEntry) -> bool:
    """Whether a file is in its place, and only the rules for what is read have changed."""
    path = Path(entry.path)
    return path.is_file() and sha256_of(path) == entry.sha256


def _names(pattern: str, path: str) -> bool:
    """Whether a source's path names this file: itself, or a folder or a pattern it lies in."""
    pattern = str(Path(pattern).expanduser()) if "://" not in pattern else pattern.rstrip("/")
    return (
        path == pattern or path.startswith((f"{pattern}/", f"{pattern}:")) or fnmatch(path, pattern)
    )
