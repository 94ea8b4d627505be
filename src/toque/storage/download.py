"""Download cache: copies of a bucket's files. Downloads are parallel, resumed and verified.

<cache>/s3/bucket/dumps/a.json.gz          the file, with the bucket's folders
<cache>/s3/bucket/dumps/.a.json.gz.json    its expected size, tag and SHA-256
<cache>/s3/bucket/dumps/.a.json.gz.partial the bytes of an unfinished download

fsspec's own caches start a file again when the connection breaks, and do not verify content.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec

from toque.reporter import ProgressSink
from toque.storage.atomic import PARTIAL, atomic_write, disk_faults, md5_of, sha256_of
from toque.storage.bucket import (
    SOURCES,
    Bucket,
    MismatchError,
    RemoteFile,
    Retry,
    SourceBucketError,
    open_bucket,
)
from toque.storage.json_files import read_json
from toque.storage.locks import file_lock
from toque.storage.no_follow import open_append
from toque.user_paths import named_path

CACHE_VARIABLE: Final = "TOQUE_CACHE"
"""Environment variable with the root of all caches. The default is ~/.cache/toque."""
CHUNK_BYTES = 8 << 20
"""Bytes per range request. A broken connection loses at most this many bytes."""
THREADS = 8
"""Number of files that are downloaded at the same time."""
_MAX_TRIES = 3
"""Maximum downloads of a file with a wrong checksum."""
_WILDCARD = re.compile(r"[*?[]")

Say = Callable[[str], None]
"""Function called with a message for the user."""


class _Record(msgspec.Struct):
    """Expected state of the cached file of the same name."""

    address: str
    bytes: int
    tag: str
    sha256: str | None = None
    """SHA-256 of the file. None until the download is complete."""


def cache_folder(
    kind: Literal[
        "sources", "archives", "measured", "runs", "models", "objects", "packages"
    ],
) -> Path:
    """Return the cache folder for a kind of file."""
    root = os.environ.get(CACHE_VARIABLE)
    cache = named_path(root) if root else Path.home() / ".cache" / "toque"
    return cache / kind


def list_sources(address: str, say: Say) -> tuple[Bucket, list[RemoteFile]]:
    """List the objects to read at an address. Report hidden and empty objects with `say`.

    Raises:
        SourceBucketError: All objects are hidden or empty, or the request failed.
    """
    bucket = open_bucket(address, SOURCES)
    objects = bucket.objects()
    hidden = list[RemoteFile]()
    # A hidden object is read if the address is its full name.
    if [file.key for file in objects] != [bucket.path]:
        n_fixed_parts = _WILDCARD.split(bucket.path)[0].count("/")
        hidden = [file for file in objects if _has_hidden_part(file, n_fixed_parts)]
    empty = [file for file in objects if file.bytes == 0 and file not in hidden]
    _report_unread(hidden, "hidden (a part of the name begins with a dot)", say)
    _report_unread(empty, "empty", say)

    readable = [file for file in objects if file not in hidden and file not in empty]
    if not readable:
        raise SourceBucketError(
            f"{address} matches {len(objects):,} objects, but all are empty or hidden. Correct the "
            "address in data.sources, or upload the files again."
        )
    return bucket, readable


def _has_hidden_part(file: RemoteFile, n_fixed_parts: int) -> bool:
    """Check for a path component that begins with a dot, after the components without wildcards."""
    return any(part.startswith(".") for part in file.key.split("/")[n_fixed_parts:])


def _report_unread(files: Sequence[RemoteFile], reason: str, say: Say) -> None:
    if not files:
        return
    addresses = ", ".join(file.address for file in files[:3])
    more = f" and {len(files) - 3:,} more" if len(files) > 3 else ""
    say(f"Not read, because {reason}: {addresses}{more}.")


def fetch(
    bucket: Bucket,
    files: Sequence[RemoteFile],
    *,
    progress: ProgressSink,
    say: Say,
) -> list[tuple[Path, str]]:
    """Download files into the cache. Return their paths and SHA-256, in the order of `files`.

    A cached file with the right size, tag and SHA-256 is not downloaded again.

    Raises:
        SourceBucketError: The disk is too small, a request failed, or a file is damaged.
    """
    cache = cache_folder("sources")
    paths = [cached_path(file, cache) for file in files]
    started = time.monotonic()
    _refuse_full_disk(files, paths, cache)
    bucket = replace(bucket, retry=Retry(bucket.retry.deadline))
    session = _Session(bucket, cache)
    lock = cache / bucket.scheme / f".{bucket.name}.lock"

    def report_wait(owner: str) -> None:
        address = f"{bucket.scheme}://{bucket.name}"
        say(f"Another process (id {owner}) is downloading from {address}: waiting.")

    with ExitStack() as stack:
        with _cache_faults(cache):
            stack.enter_context(file_lock(lock, report_wait))
        hashes = session.fetch_all(files, paths, progress)
    say(session.summary(time.monotonic() - started))
    return list(zip(paths, hashes, strict=True))


def _refuse_full_disk(
    files: Sequence[RemoteFile], paths: Sequence[Path], cache: Path
) -> None:
    """Refuse a download that is larger than the free space on the cache's disk."""
    # The bytes of a partial file count as free: it is continued or replaced.
    needed_bytes = sum(
        file.bytes - _size_of(_partial_path(path))
        for file, path in zip(files, paths, strict=True)
        if not path.is_file()
    )
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free_bytes = shutil.disk_usage(existing).free
    if needed_bytes > free_bytes:
        raise SourceBucketError(
            f"The sources need {needed_bytes / 1e9:,.1f} GB more in {cache}, but its disk has "
            f"{free_bytes / 1e9:,.1f} GB free. Free some space, or set {CACHE_VARIABLE} to a "
            "folder on another disk."
        )


def cached_path(file: RemoteFile, cache: Path) -> Path:
    """Return the path of a file in the cache.

    Raises:
        SourceBucketError: The name would lead out of the cache.
    """
    parts = file.key.split("/")
    if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts):
        raise SourceBucketError(
            f"The object {file.address!r} has a name that is not safe as a path: a part of it is "
            'empty, "." or "..", or contains a backslash. Use a pattern that leaves it out, or '
            "copy the object to another name."
        )
    return cache.joinpath(file.scheme, *parts)


def _partial_path(path: Path) -> Path:
    """Return the path of an unfinished download."""
    return path.with_name(f".{path.name}{PARTIAL}")


def _size_of(path: Path) -> int:
    """Return a file's size in bytes, or 0 if another thread has renamed it or it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


@dataclass
class _Session:
    """Downloads of one call to `fetch`, and their counts. All threads share the session."""

    bucket: Bucket
    cache: Path
    cached_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes in the cache by address."""
    downloaded_bytes: list[int] = field(default_factory=list)
    """Downloaded bytes per file."""
    events: list[str] = field(default_factory=list)
    """Kinds of events, which `summary` counts. Threads can append to a list without a lock."""

    def summary(self, seconds: float) -> str:
        """Describe the session in one sentence."""
        counts = Counter(self.events)
        counts["retry"] = len(self.bucket.retry.waits)
        speed = f"{sum(self.downloaded_bytes) / 1e6:,.1f} MB in {seconds:.1f} s"
        parts = [
            f"{counts['fetched']:,} fetched ({speed})",
            f"{counts['complete']:,} already complete in {self.cache}",
        ]
        for event, text in (
            ("resumed", "resumed after an interruption"),
            ("changed", "fetched again because they changed in the bucket"),
            ("damaged", "fetched again because the cached file was damaged"),
            ("retry", "requests retried"),
        ):
            if counts[event]:
                parts.append(f"{counts[event]:,} {text}")
        return f"{self.bucket.scheme}://{self.bucket.name}: {', '.join(parts)}."

    def fetch_all(
        self,
        files: Sequence[RemoteFile],
        paths: Sequence[Path],
        progress: ProgressSink,
    ) -> list[str]:
        """Fetch files in several threads, and return their SHA-256 in order."""
        total_bytes = sum(file.bytes for file in files)
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fetch")
        fetch_one = _cache_faults(self.cache)(self._fetch_file)
        jobs = [
            pool.submit(fetch_one, *pair) for pair in zip(files, paths, strict=True)
        ]
        try:
            waiting = set(jobs)
            while waiting:
                done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
                for job in done:
                    job.result()  # raises the error from a failed download
                n_bytes = sum(self.cached_bytes.copy().values())
                progress(n_bytes, total_bytes, f"fetching {len(files):,} files")
        finally:
            # After an error or Ctrl-C, retain the downloaded bytes and do not start other files.
            self.bucket.retry.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
        return [job.result() for job in jobs]

    def _fetch_file(self, file: RemoteFile, path: Path) -> str:
        """Download a file unless the cache has it, and return its SHA-256."""
        record_path = path.with_name(f".{path.name}.json")
        record = read_json(record_path, _Record)
        is_current = (
            record is not None and record.tag == file.tag and record.bytes == file.bytes
        )
        if record is not None and record.sha256 is not None and path.is_file():
            has_size = is_current and path.stat().st_size == file.bytes
            if has_size and sha256_of(path) == record.sha256:
                self.events.append("complete")
                self.cached_bytes[file.address] = file.bytes
                return record.sha256
            self.events.append("damaged" if is_current else "changed")

        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path = _partial_path(path)
        if not is_current:
            partial_path.unlink(missing_ok=True)
        elif 0 < _size_of(partial_path) <= file.bytes:
            self.events.append("resumed")
        return self._download(file, path, record_path)

    def _download(self, file: RemoteFile, path: Path, record_path: Path) -> str:
        """Download the rest of a file and verify its content. Return its SHA-256."""
        partial_path = _partial_path(path)
        earlier_md5s: set[str] = set()
        for _ in range(_MAX_TRIES):
            record = _Record(file.address, file.bytes, file.tag)
            atomic_write(record_path, msgspec.json.encode(record))
            self._append_missing(file, partial_path)
            record.sha256 = sha256_of(partial_path)
            md5 = md5_of(partial_path)
            self._refuse_changed(file, partial_path)

            # The tag of an encrypted S3 object looks like an MD5 but is not the MD5 of its content.
            # Therefore two downloads with the same content are also accepted.
            if file.md5 in (None, md5) or md5 in earlier_md5s:
                atomic_write(record_path, msgspec.json.encode(record))
                partial_path.replace(path)
                self.events.append("fetched")
                return record.sha256
            earlier_md5s.add(md5)
            partial_path.unlink(missing_ok=True)
        raise SourceBucketError(
            f"{file.address} was downloaded {_MAX_TRIES} times, each time with different content "
            "that does not match its checksum. The network or the service is corrupting the file. "
            "Run the same command again later."
        )

    def _refuse_changed(self, file: RemoteFile, partial_path: Path) -> None:
        """Refuse a file that changed in the bucket since the listing."""
        request = partial(self.bucket.info, file.key)
        current = self.bucket.request(f"read {file.address}", request)
        if (current.tag, current.bytes) == (file.tag, file.bytes):
            return
        partial_path.unlink(missing_ok=True)
        raise SourceBucketError(
            f"{file.address} changed in the bucket after it was listed (from {file.bytes:,} to "
            f"{current.bytes:,} bytes), and a store is made from one listing. The downloaded files "
            "are kept. Run the same command again when no one writes to the bucket."
        )

    def _append_missing(self, file: RemoteFile, partial_path: Path) -> None:
        """Download the bytes that are missing from a partial file."""
        if _size_of(partial_path) > file.bytes:
            partial_path.unlink()
        with os.fdopen(open_append(partial_path), "ab") as out:
            start = partial_path.stat().st_size
            position = start
            self.cached_bytes[file.address] = start
            while position < file.bytes:
                if self.bucket.retry.stop.is_set():
                    raise SourceBucketError(
                        "The download was stopped. The downloaded files are kept."
                    )
                end = min(position + CHUNK_BYTES, file.bytes)
                request = partial(self._read_range, file, position, end)
                chunk = self.bucket.request(f"read {file.address}", request)
                position += out.write(chunk)
                self.cached_bytes[file.address] = position
            out.flush()
            os.fsync(out.fileno())
        self.downloaded_bytes.append(position - start)

    def _read_range(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Read the bytes [start, end). Raise MismatchError if fewer arrive."""
        chunk = self.bucket.read_range(file, start, end)
        if len(chunk) != end - start:
            raise MismatchError(f"received {len(chunk):,} of {end - start:,} bytes")
        return chunk


@contextmanager
def _cache_faults(cache: Path) -> Iterator[None]:
    """Convert an OSError in the cache into an error with advice."""
    try:
        with disk_faults(cache, "fetching the sources", setting=CACHE_VARIABLE):
            yield
    except OSError as error:
        # Most likely the name is too long, or a file exists in place of a folder.
        raise SourceBucketError(
            f"The cache {cache} cannot store {error.filename or 'a file'} ({error.strerror}). Use "
            "a pattern that leaves this object out, or empty the cache."
        ) from error
