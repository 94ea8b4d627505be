"""Source files of paths, patterns and datasets, with their checksums and blocks."""

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
from toque.sources.decompress import SIGN_BYTES, is_workbook, plain_size
from toque.sources.hub_datasets import (
    PREFIX,
    dataset_files,
    names_a_folder,
    saved_files,
)
from toque.sources.records import Block, Located, RecordReader, Source
from toque.sources.workbooks import workbook_bytes
from toque.storage.atomic import sha256_of
from toque.storage.bucket import has_wildcard, is_remote
from toque.user_paths import named_path

GROUP_BYTES = 8 << 20  # raw bytes per shard, with about 6,000 recipes
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
    name: str  # name in reports and errors: the path, or the address of a download
    source: int  # index of the source
    reader: RecordReader
    sha256: str
    bytes: int

    @cached_property
    def plain_bytes(self) -> int:
        """Decompressed size in bytes, from a table's metadata or an estimate by `plain_size`."""
        with self.path.open("rb") as stream:
            start = stream.read(SIGN_BYTES)
        if columnar_format(start) == "parquet":
            size = decompressed_bytes(self.path)
        elif is_workbook(start):
            size = workbook_bytes(self.path)
        else:
            size = plain_size(self.path)
        return max(self.bytes, size)


def find_files(sources: Sequence[Source]) -> list[SourceFile]:
    """List and hash the files of all sources, in order.

    Raises:
        DataError: A file is missing, unreadable or empty.
    """
    if not sources:
        raise DataError(
            "data.sources is empty. Name at least one file, folder or pattern."
        )
    source_files: list[SourceFile] = []
    for number, source in enumerate(sources):
        files = locate_files(source.path) if source.files is None else source.files
        for file in files:
            try:
                size = file.path.stat().st_size
                digest = file.sha256 or sha256_of(file.path)
            except OSError as error:
                raise DataError(
                    f"The source {file.name} cannot be read ({error.strerror}). Check data.sources "
                    "and the file's permissions."
                ) from error
            if size == 0:
                raise DataError(
                    f"The source {file.name} is empty (0 bytes). Download it again, or remove it "
                    "from data.sources."
                )
            reader = source.readers.get(file.name, source.reader)
            source_files.append(
                SourceFile(file.path, file.name, number, reader, digest, size)
            )
    return source_files


def is_documentation(name: str) -> bool:
    """Check for a typical name of documentation, such as README.md, LICENSE or CHANGELOG.txt."""
    return _DOCUMENTATION.fullmatch(name.rpartition("/")[2]) is not None


def locate_files(
    pattern: str, say: Callable[[str], None] = lambda _: None
) -> tuple[Located, ...]:
    """List the files of a source's path, which is a file, folder, pattern or dataset.

    `say` reports the commit and the number of streamed rows of a dataset.
    """
    if pattern.startswith(PREFIX):
        return dataset_files(pattern, say)
    saved = saved_files(named_path(pattern))
    paths = _list_files(pattern) if saved is None else saved
    return tuple(Located(str(path), path) for path in paths)


def _list_files(pattern: str) -> list[Path]:
    """List the files of a path or pattern, sorted by name.

    Raises:
        DataError: No file exists.
    """
    path = named_path(pattern)
    if path.is_file():
        return [path]

    if path.is_dir():
        paths = _files_inside(path)
        message = f"The source folder {path} has no files. Correct data.sources."
    elif has_wildcard(pattern):
        paths = _matching_paths(path)
        message = f"No file matches the source {pattern!r}. Correct data.sources."
    else:
        message = (
            f"The source file {path} does not exist. Name a file, a folder or a pattern such as "
            '"recipes/*.jsonl.gz" in data.sources.'
        )
        if path.parent.is_dir():
            names = sorted(p.name for p in path.parent.iterdir())[:8]
            message += f" Its folder contains: {', '.join(names) or 'nothing'}."
        raise DataError(message)

    files = sorted(p for p in paths if p.is_file())
    if not files:
        raise DataError(message)
    return files


def _matching_paths(pattern: Path) -> list[Path]:
    """Return the paths that match a pattern. Folder names in it may contain literal brackets."""
    folder = Path(pattern.anchor)
    parts = list(pattern.relative_to(folder).parts)
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    rest = "/".join(parts)
    return list(folder.glob(rest)) or list(folder.glob(brackets_as_names(rest)))


def brackets_as_names(pattern: str) -> str:
    """Escape the brackets in a pattern, so that they match literal brackets.

    >>> brackets_as_names("data[old]/*.csv")
    'data[[]old]/*.csv'
    """
    return pattern.replace("[", "[[]")


def _files_inside(folder: Path) -> list[Path]:
    """List the files below a folder and its linked folders, without hidden files.

    Each folder is read once, if possible under its real name rather than a link's name. Links to
    the folder's parents are not followed.
    """
    files: list[Path] = []
    visited: set[Path] = set()
    root = folder.resolve()
    tops = [folder]
    # Linked folders are appended during the loop, so that real folders come first.
    for top in tops:
        for parent_name, folder_names, file_names in os.walk(top):
            parent = Path(parent_name)
            real = parent.resolve()
            if real in visited:
                folder_names.clear()
                continue
            visited.add(real)
            folder_names[:] = sorted(name for name in folder_names if name[0] != ".")
            links = (parent / n for n in folder_names if (parent / n).is_symlink())
            tops += [link for link in links if not root.is_relative_to(link.resolve())]
            files += [parent / name for name in file_names if name[0] != "."]
    return files


def is_local(path: str) -> bool:
    """Check whether a source can be read on this machine without a download."""
    if path.startswith(PREFIX):
        return names_a_folder(path)
    if is_remote(path):
        return False
    try:
        return bool(_list_files(path))
    except DataError:
        return False


def blocks_of(file: SourceFile) -> Iterator[Block]:
    """Read the blocks of a file, with its name and the index of its source."""
    try:
        with named(file.path, file.name):
            for block in file.reader.blocks(file.path):
                yield replace(block, source=file.source, path=file.name)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"The source {file.name} cannot be read to its end: {error}. The file may be truncated "
            "or damaged. Download it again."
        ) from error


@contextmanager
def named(path: Path, name: str) -> Iterator[None]:
    """Replace the cache path of a downloaded file in errors with the file's address."""
    try:
        yield
    except DataError as error:
        if str(path) == name:
            raise
        raise DataError(str(error).replace(str(path), name)) from error
