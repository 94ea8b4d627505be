"""Source files: those that paths, patterns and saved data sets name, their checksums and blocks."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from toque.errors import DataError
from toque.sources.columnar import columnar_format, decompressed_bytes
from toque.sources.decompress import plain_size
from toque.sources.hub_datasets import PREFIX, dataset_files, names_a_folder, saved_files
from toque.sources.records import Block, Located, RecordReader, Source
from toque.storage.atomic import sha256_of
from toque.storage.bucket import is_remote
from toque.user_paths import named_path

GROUP_BYTES = 8 << 20  # raw bytes per shard: about 6,000 recipes
_DOCUMENTATION = re.compile(
    r"(?:readme|licen[cs]e|copying|copyright|notice|change(?:s|log)|history|news|authors|credits"
    r"|contribut(?:ors|ing)|code[_-]of[_-]conduct|citation|security|install)"
    r"(?:[_-][\w-]*)?(?:\.(?:md|rst|txt|adoc|html?|cff))?|.*\.(?:md|markdown|rst|adoc)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class SourceFile:
    """One file to read."""

    path: Path
    name: str  # its name in reports and errors: its path, or the address it was fetched from
    source: int
    reader: RecordReader
    sha256: str
    bytes: int

    @cached_property
    def plain_bytes(self) -> int:
        """Bytes once decompressed: as Parquet says, or as `plain_size` finds."""
        with self.path.open("rb") as stream:
            is_parquet = columnar_format(stream.read(8)) == "parquet"
        return max(self.bytes, (decompressed_bytes if is_parquet else plain_size)(self.path))


def find_files(sources: Sequence[Source]) -> list[SourceFile]:
    """The files of all sources in order, hashed; each must be there, readable and not empty."""
    if not sources:
        raise DataError("data.sources is empty. Name at least one file, folder or pattern.")
    files: list[SourceFile] = []
    for number, source in enumerate(sources):
        for file in source.files if source.files is not None else located(source.path):
            reader = source.readers.get(file.name, source.reader)
            try:
                size, digest = file.path.stat().st_size, file.sha256 or sha256_of(file.path)
            except OSError as error:
                raise DataError(
                    f"The source {file.name} cannot be read ({error.strerror}). Check data.sources "
                    "and the file's permissions."
                ) from error
            if size == 0:
                raise DataError(
                    f"The source {file.name} is empty (0 bytes). Fetch it again, or take it out of "
                    "data.sources."
                )
            files.append(SourceFile(file.path, file.name, number, reader, digest, size))
    return files


def is_documentation(name: str) -> bool:
    """True if a file is documentation by its name: README.md, LICENSE, CHANGELOG.txt, notes.rst."""
    return _DOCUMENTATION.fullmatch(name.rpartition("/")[2]) is not None


def located(pattern: str, say: Callable[[str], None] = lambda _: None) -> tuple[Located, ...]:
    """The files that a source's path names: itself, those of a folder, a pattern or a data set.

    `say` hears which commit of a data set was read, and of how many rows.
    """
    if pattern.startswith(PREFIX):
        return dataset_files(pattern, say)
    saved = saved_files(named_path(pattern))
    paths = _files_of(pattern) if saved is None else saved
    return tuple(Located(str(path), path) for path in paths)


def _files_of(pattern: str) -> list[Path]:
    path = named_path(pattern)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = _files_inside(path)
        lacks = f"The source folder {path} holds no files. Correct data.sources."
    else:
        found = _matching(path)
        lacks = f"No file matches the source {pattern!r}. Correct data.sources."
    if path.is_dir() or any(sign in pattern for sign in "*?["):
        if found := sorted(p for p in found if p.is_file()):
            return found
        raise DataError(lacks)
    near = sorted(p.name for p in path.parent.iterdir())[:8] if path.parent.is_dir() else []
    beside = f" Beside it: {', '.join(near)}." if near else ""
    raise DataError(
        f"There is no source file {path}. Give a file, a folder or a pattern such as "
        f'"recipes/*.jsonl.gz" in data.sources.{beside}'
    )


def _matching(pattern: Path) -> list[Path]:
    """The paths that match a pattern, in which the name of a folder may have brackets, too."""
    folder = Path(pattern.anchor)
    parts = list(pattern.relative_to(folder).parts)
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    rest = "/".join(parts)
    return list(folder.glob(rest)) or list(folder.glob(brackets_as_names(rest)))


def brackets_as_names(pattern: str) -> str:
    """A pattern whose brackets stand for themselves.

    >>> brackets_as_names("data[old]/*.csv")
    'data[[]old]/*.csv'
    """
    return pattern.replace("[", "[[]")


def _files_inside(folder: Path) -> list[Path]:
    """The files below a folder, and below those linked to in it; none that is hidden.

    A folder is read once, under its own name if it has one there, and a link to a folder around
    the first one is not followed.
    """
    found, seen, around = list[Path](), set[Path](), folder.resolve()
    tops = [folder]
    for top in tops:  # links join its end, behind all that is really there
        for name, below, files in os.walk(top):
            place = Path(name)
            if (real := place.resolve()) in seen:
                below.clear()
                continue
            seen.add(real)
            below[:] = sorted(n for n in below if n[0] != ".")
            links = (place / n for n in below if (place / n).is_symlink())
            tops += [link for link in links if not around.is_relative_to(link.resolve())]
            found += [place / n for n in files if n[0] != "."]
    return found


def is_here(path: str) -> bool:
    """True if a source can be read on this machine without fetching anything."""
    if path.startswith(PREFIX):
        return names_a_folder(path)
    if is_remote(path):
        return False
    try:
        return bool(_files_of(path))
    except DataError:
        return False


def blocks_of(file: SourceFile) -> Iterator[Block]:
    """The file's blocks, with its name and the index of its source."""
    try:
        with named(file.path, file.name):
            for block in file.reader.blocks(file.path):
                yield replace(block, source=file.source, path=file.name)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"The source {file.name} cannot be read to its end: {error}. It may be cut short or "
            "damaged; fetch it again."
        ) from error


@contextmanager
def named(path: Path, name: str) -> Iterator[None]:
    """Put a fetched file's address into errors, in place of its path in the cache."""
    try:
        yield
    except DataError as error:
        if str(path) == name:
            raise
        raise DataError(str(error).replace(str(path), name)) from error
