"""Archives (ZIP and tar): their members are read like the files of a folder.

Several processes read a source, and some formats need random access. So an archive is unpacked
once, into a folder of the cache that depends on the path, size and time of the archive. Each member
has a numbered folder there and keeps only the last part of its name, so it cannot lead out.
Unpacking an archive removes archives that were not used for a month.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, NamedTuple, Self

import msgspec
import xxhash

from toque.errors import DataError
from toque.reporter import ProgressSink, size_text
from toque.sources.decompress import (
    CHUNK_BYTES,
    MAX_EXPANSION,
    MIN_BOMB_BYTES,
    TAR_ARCHIVE,
    ZIP_ARCHIVE,
    opened,
    packed_as,
)
from toque.sources.layouts import is_pickle
from toque.sources.records import Located
from toque.sources.token_arrays import is_array_file
from toque.storage.atomic import atomic_folder, remove_folder, sweep
from toque.storage.download import CACHE_VARIABLE, Say, cache_folder
from toque.storage.json_files import read_json
from toque.storage.locks import file_lock
from toque.storage.no_follow import new_file

UNUSED_DAYS: Final = 30
"""Days after its last use after which an unpacked archive is removed."""
_MAX_DEPTH: Final = 2
"""Maximum depth of archives in archives. An export of Tandoor has an archive for each recipe."""
_MAX_MEMBERS: Final = 1_000_000
_MAX_NAME_BYTES: Final = 200
_MAX_SHOWN_CHARS: Final = 1000
_MAX_HEADER_BYTES: Final = 1 << 20
_DRIVE: Final = re.compile(r"[A-Za-z]:[\\/]")
_EXTENDED: Final = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""Types of headers with the name of the next member. tarfile reads them into memory."""
_BAD_HEADERS: Final = (
    tarfile.InvalidHeaderError,  # type: ignore[attr-defined]
    tarfile.TruncatedHeaderError,  # type: ignore[attr-defined]
    tarfile.EmptyHeaderError,  # type: ignore[attr-defined]
)
_CONTENTS: Final = "contents.json"
"""List of the unpacked members."""
_PICTURES: Final = (
    ".jpg", ".jpeg", ".png", ".gif", ".webp", ".avif", ".heic", ".bmp", ".tif", ".tiff", ".svg",
    ".ico", ".mp4", ".mov", ".webm", ".mp3",
)  # fmt: skip
"""Suffixes of members that are counted, but not unpacked."""
_HIDDEN: Final = ("__MACOSX", "Thumbs.db", "desktop.ini")
_DAMAGED: Final = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error, EOFError,
    NotImplementedError, RuntimeError, ValueError, IndexError, OverflowError,
)  # fmt: skip
"""Exceptions that the libraries raise for damaged archives, or for an unknown compression."""


class _Member(msgspec.Struct, frozen=True):
    """Unpacked file of an archive."""

    file: str
    name: str
    bytes: int


class _Contents(msgspec.Struct):
    """Unpacked files of an archive, and the number of its pictures."""

    members: list[_Member] = []
    n_pictures: int = 0


class _Entry(NamedTuple):
    """Member of an archive that is being read."""

    name: str
    size: int
    stream: IO[bytes]
    position: Callable[[], int]
    """Function that returns the number of bytes of the archive that were read so far."""


def is_archive(path: Path) -> bool:
    """Check by its content whether a file is an archive that can be unpacked."""
    kind = packed_as(path)
    if kind == TAR_ARCHIVE:
        return True
    return kind == ZIP_ARCHIVE and not is_array_file(path) and not is_pickle(path)


def unpack_archives(
    files: Sequence[Located], *, progress: ProgressSink, say: Say
) -> list[Located]:
    """Replace each archive by its members, which are unpacked into the cache.

    Hidden members and pictures are left out. `say` reports the number of pictures.

    Raises:
        DataError: An archive is damaged or encrypted, has a link or a name that leads out of it,
            expands like a decompression bomb, or does not fit on the disk.
    """
    found: list[Located] = []
    for file in files:
        if is_archive(file.path):
            found += _members_of(file, progress, say)
        else:
            found.append(file)
    return found


def _members_of(
    archive: Located, progress: ProgressSink, say: Say
) -> Iterator[Located]:
    cache = cache_folder("archives")
    state = archive.path.stat()
    identity = f"{archive.path.resolve()} {state.st_size} {state.st_mtime_ns}"
    folder = cache / xxhash.xxh3_128_hexdigest(identity.encode("utf-8", "replace"))

    def report_wait(owner: str) -> None:
        say(f"Another process (id {owner}) is unpacking an archive: waiting.")

    try:
        with file_lock(cache / ".lock", report_wait):
            contents = read_json(folder / _CONTENTS, _Contents)
            if contents is None or not _is_complete(folder, contents):
                _remove_unused(cache, say)
                with atomic_folder(folder, has_many_files=True) as writer:
                    unpacker = _Unpacker(archive, writer.folder, progress)
                    contents = unpacker.unpack_all()
                    writer.put(_CONTENTS, msgspec.json.encode(contents))
            with suppress(OSError):  # the cache is read-only
                os.utime(folder / _CONTENTS)
    except OSError as error:
        raise DataError(
            f"{archive.name} cannot be unpacked into {cache}: {error.strerror or error}. Free some "
            f"space, or set {CACHE_VARIABLE} to a folder on another disk."
        ) from error
    if contents.n_pictures:
        say(f"{archive.name}: {contents.n_pictures:,} pictures or films are not read.")
    if not contents.members:
        raise DataError(
            f"{archive.name} has no file that can be read. Correct data.sources."
        )
    for member in contents.members:
        yield Located(f"{archive.name}/{member.name}", folder / member.file)


def _remove_unused(cache: Path, say: Say) -> None:
    """Remove the archives that were not used for `UNUSED_DAYS`, and parts of killed unpackings.

    The caller must have locked the cache. The time of an archive's list is its last use.
    """
    sweep(cache)
    limit = time.time() - UNUSED_DAYS * 86_400
    n_removed = 0
    for folder in cache.iterdir():
        with suppress(FileNotFoundError, NotADirectoryError):  # not an archive
            if (folder / _CONTENTS).lstat().st_mtime < limit:
                remove_folder(folder)
                n_removed += 1
    if n_removed:
        say(
            f"Removed {n_removed:,} unpacked archives that were not used for {UNUSED_DAYS} days "
            f"from {cache}."
        )


def _is_complete(folder: Path, contents: _Contents) -> bool:
    """Check that the files of an earlier process still exist."""
    try:
        return all(
            _is_plain(folder, member.file, member.bytes) for member in contents.members
        )
    except OSError:
        return False


def _is_plain(folder: Path, name: str, n_bytes: int) -> bool:
    """Check that a name is inside of a folder, and is a file of this size and not a link."""
    is_inside = not name.startswith("/") and ".." not in name.split("/")
    state = (folder / name).lstat() if is_inside else None
    return (
        state is not None and stat.S_ISREG(state.st_mode) and state.st_size == n_bytes
    )


@dataclass
class _Unpacker:
    """Writer of the members of an archive into a new folder."""

    archive: Located
    folder: Path
    progress: ProgressSink
    contents: _Contents = field(default_factory=_Contents)
    n_bytes: int = 0
    """Number of unpacked bytes."""
    n_entries: int = 0
    names: Counter[str] = field(default_factory=Counter)

    def unpack_all(self) -> _Contents:
        """Unpack all members. A member that is an archive is unpacked too."""
        self._unpack(self.archive.path, "", 1)
        return self.contents

    def _unpack(self, path: Path, prefix: str, depth: int) -> None:
        packed_bytes = path.stat().st_size
        with _archive_errors(f"{self.archive.name}/{prefix}".rstrip("/")):
            is_zip = packed_as(path) == ZIP_ARCHIVE
            entries = _zip_entries(path) if is_zip else _tar_entries(path)
            for entry in entries:
                if depth == 1:
                    message = f"unpacking {self.archive.name}"
                    self.progress(entry.position(), packed_bytes, message)
                self._add(entry, prefix, depth)

    def _add(self, entry: _Entry, prefix: str, depth: int) -> None:
        """Write a member, or the members of an archive in the archive."""
        parts = entry.name.replace("\\", "/").split("/")
        is_absolute = not parts[0] or _DRIVE.match(entry.name) is not None
        if is_absolute or ".." in parts:
            raise DataError(
                f"{self.archive.name} has a member named {entry.name[:200]!r}, which leads out of "
                "the archive. Nothing was read. Remove it from data.sources, or unpack it yourself "
                "if you trust it."
            )
        self.n_entries += 1
        if self.n_entries > _MAX_MEMBERS:
            raise DataError(
                f"{self.archive.name} has more than {_MAX_MEMBERS:,} members. Unpack it yourself, "
                "and join the files."
            )
        parts = [part for part in parts if part not in ("", ".")]
        if not parts or any(part[0] == "." or part in _HIDDEN for part in parts):
            return
        if entry.name.lower().endswith(_PICTURES):
            self.contents.n_pictures += 1
            return
        self._refuse_large(entry.size)
        file = self.folder / f"{self.n_entries:06d}" / _safe_name(parts[-1])
        file.parent.mkdir()
        with new_file(file) as target:
            while chunk := _read(entry.stream):
                self._refuse_large(len(chunk))
                self.n_bytes += target.write(chunk)
        name = self._free_name((prefix + "/".join(parts))[-_MAX_SHOWN_CHARS:])
        if depth < _MAX_DEPTH and is_archive(file):
            self._unpack(file, f"{name}/", depth + 1)
            file.unlink()
            return
        if n_bytes := file.stat().st_size:
            stored = file.relative_to(self.folder).as_posix()
            self.contents.members.append(_Member(stored, name, n_bytes))

    def _free_name(self, name: str) -> str:
        """Return a printable name that no other member has. Archives may repeat a name."""
        shown = _printable(name)
        self.names[shown] += 1
        number = self.names[shown]
        return shown if number == 1 else f"{shown} ({number})"

    def _refuse_large(self, n_bytes: int) -> None:
        """Refuse a decompression bomb, and a member that does not fit on the disk."""
        packed_bytes = self.archive.path.stat().st_size
        total = self.n_bytes + n_bytes
        if total > max(MIN_BOMB_BYTES, MAX_EXPANSION * packed_bytes):
            raise DataError(
                f"{self.archive.name} expands from {packed_bytes:,} to more than {total:,} bytes, "
                f"over {MAX_EXPANSION} times as many. Texts do not compress that well, so it is "
                "damaged or a decompression bomb. Remove it from data.sources, or unpack it "
                "yourself if you trust it."
            )
        free_bytes = shutil.disk_usage(self.folder).free
        if n_bytes > free_bytes:
            raise DataError(
                f"{self.archive.name} needs {size_text(n_bytes)} more in {self.folder.parent}, but "
                f"its disk has {size_text(free_bytes)} free. Free some space, or set "
                f"{CACHE_VARIABLE} to a folder on another disk."
            )


def _read(stream: IO[bytes]) -> bytes:
    """Read a chunk of a member. An OSError is damage here, and not a problem of the cache."""
    try:
        return stream.read(CHUNK_BYTES)
    except OSError as error:
        raise tarfile.ReadError(str(error)) from error


def _printable(name: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in name)


def _safe_name(name: str) -> str:
    """Return a name for a file, of limited length. Recipes of Cooklang have it as their title."""
    return (
        _printable(name).encode()[-_MAX_NAME_BYTES:].decode(errors="ignore") or "file"
    )


def _zip_entries(path: Path) -> Iterator[_Entry]:
    with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if stat.S_ISLNK(info.external_attr >> 16):
                raise _LinkError(info.filename)
            if info.flag_bits & 1:
                raise _PasswordError
            with archive.open(info) as stream:
                yield _Entry(info.filename, info.file_size, stream, raw.tell)


def _tar_entries(path: Path) -> Iterator[_Entry]:
    with (
        opened(path) as (stream, _, raw),
        tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive,
    ):
        for info in archive:
            if info.isdir():
                continue
            content = archive.extractfile(info) if info.isfile() else None
            if content is None:
                raise _LinkError(info.name)
            yield _Entry(info.name, info.size, content, raw.tell)


class _Header(tarfile.TarInfo):
    """Header of a member. tarfile itself ends without an error at a damaged header."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Read a header. The text of an extended header must have a normal size."""
        header = super().frombuf(buf, encoding, errors)
        if header.type in _EXTENDED and header.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a name of {header.size:,} bytes")
        return header

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        """Read the next header."""
        try:
            return super().fromtarfile(tarfile_)
        except _BAD_HEADERS as error:
            raise tarfile.ReadError(f"a damaged or missing header: {error}") from error


class _LinkError(Exception):
    """An archive has a link or a device, which is named."""


class _PasswordError(Exception):
    """An archive is encrypted."""


@contextmanager
def _archive_errors(name: str) -> Iterator[None]:
    """Convert the errors of an archive into errors for the user."""
    try:
        yield
    except _LinkError as error:
        raise DataError(
            f"{name} has a link or a device, {error.args[0][:200]!r}, and links may lead out of an "
            "archive. Nothing was read. Unpack it yourself if you trust it, and name the folder in "
            "data.sources."
        ) from error
    except _PasswordError as error:
        raise DataError(
            f"{name} is encrypted with a password. Unpack it first, for example with unzip, and "
            "name the folder in data.sources."
        ) from error
    except _DAMAGED as error:
        raise DataError(
            f"{name} is a damaged archive, or has an unknown compression ({error}). Download or "
            "create it again, or unpack it yourself and name the folder in data.sources."
        ) from error
