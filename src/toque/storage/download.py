"""A bucket's files in a local cache: fetched side by side, resumed, and not fetched twice.

<cache>/s3/bucket/dumps/a.json.gz          the file, with the bucket's folders
<cache>/s3/bucket/dumps/.a.json.gz.json    size, tag and SHA-256 of what it should be
<cache>/s3/bucket/dumps/.a.json.gz.partial what has come so far of one that is not whole
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from toque.errors import DataError
from toque.storage.atomic import PARTIAL, disk_faults, sha256_of, write_whole
from toque.storage.bucket import Bucket, RemoteFile
from toque.storage.located import Located
from toque.storage.progress import ProgressSink

CHUNK_BYTES = 8 << 20
"""One range request; what a cut connection costs at most."""
THREADS = 8
ATTEMPTS = 7
"""In a row without a byte; the waits between them add up to about a minute."""
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
_CHANGED = 3
"""Times a file may change while it is fetched."""

Say = Callable[[str], None]
"""Told, in a sentence, what the user should know."""


def cache_folder() -> Path:
    """Where fetched sources lie: $TOQUE_CACHE, or ~/.cache/toque/sources."""
    named = os.environ.get("TOQUE_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "toque" / "sources"


class _Record(msgspec.Struct):
    """What the file beside it is, or will be when it is whole."""

    address: str
    bytes: int
    tag: str
    sha256: str | None = None
    """Known when the file is whole."""


@dataclass
class _Fetched:
    """What became of the files, for the sentence at the end and the bar."""

    counts: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    """By address, what is there."""
    fetched_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)

    def there(self, file: RemoteFile, n_bytes: int, *, fetched: int = 0) -> None:
        with self.lock:
            self.bytes[file.address] = n_bytes
            self.fetched_bytes += fetched

    def done(self) -> int:
        with self.lock:
            return sum(self.bytes.values())

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1


def fetch(
    bucket: Bucket,
    files: Sequence[RemoteFile],
    *,
    progress: ProgressSink,
    say: Say,
    cache: Path | None = None,
) -> list[Located]:
    """The files in the cache, whole, in the order given.

    What is whole already is not fetched: its size, tag and SHA-256 are compared.

    Raises:
        DataError: a name that would leave the cache, a full disk, or requests that fail even
            after waiting; what has come is kept.
    """
    cache = cache or cache_folder()
    places = [place_of(file, cache) for file in files]
    fetched = _Fetched()
    total = sum(file.bytes for file in files)
    started = time.monotonic()
    enough_space(files, cache)
    with _cache_faults(cache), _alone(bucket, cache, say):
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fetch")
        jobs = [
            pool.submit(_one, bucket, file, place, fetched)
            for file, place in zip(files, places, strict=True)
        ]
        try:
            waiting = set(jobs)
            while waiting:
                done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
                for job in done:
                    job.result()
                progress(fetched.done(), total, f"fetching {len(files):,} files")
        finally:
            # Also on an error and on Ctrl-C: what has come stays, the rest is not begun.
            fetched.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
        hashes = [job.result() for job in jobs]
    say(_sentence(bucket, fetched, cache, time.monotonic() - started))
    return [
        Located(file.address, place, digest)
        for file, place, digest in zip(files, places, hashes, strict=True)
    ]


def place_of(file: RemoteFile, cache: Path) -> Path:
    """Where a file lies in the cache.

    Raises:
        DataError: its name would put it outside, or two names into one place.
    """
    parts = file.key.split("/")
    if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts):
        raise DataError(
            f"The object {file.address!r} has a name that no folder here can hold safely: a part "
            "of it is empty, . or .., or has a backslash. Name the others by a pattern, or copy "
            "the object to another name."
        )
    return cache.joinpath(file.scheme, *parts)


def _sentence(bucket: Bucket, fetched: _Fetched, cache: Path, seconds: float) -> str:
    counts = fetched.counts
    parts = [
        f"{counts['fetched']:,} fetched ({fetched.fetched_bytes / 1e6:,.1f} MB in {seconds:.1f} s)",
        f"{counts['whole']:,} already whole in {cache}",
    ]
    for what, words in (
        ("resumed", "resumed where an earlier start stopped"),
        ("changed", "fetched again because they changed in the bucket"),
        ("damaged", "fetched again because the cached file was damaged"),
        ("retries", "requests repeated"),
    ):
        if counts[what]:
            parts.append(f"{counts[what]:,} {words}")
    return f"{bucket.scheme}://{bucket.name}: {', '.join(parts)}."


def _one(bucket: Bucket, file: RemoteFile, place: Path, fetched: _Fetched) -> str:
    """Make one file whole; its SHA-256."""
    record_path = place.with_name(f".{place.name}.json")
    partial = place.with_name(f".{place.name}{PARTIAL}")
    record = _read_record(record_path)
    known = record is not None and (record.tag, record.bytes) == (file.tag, file.bytes)
    if record is not None and record.sha256 is not None and place.is_file():
        if known and place.stat().st_size == file.bytes and sha256_of(place) == record.sha256:
            fetched.count("whole")
            fetched.there(file, file.bytes)
            return record.sha256
        fetched.count("damaged" if known else "changed")
    place.parent.mkdir(parents=True, exist_ok=True)
    if not known:
        partial.unlink(missing_ok=True)
    elif partial.is_file() and 0 < partial.stat().st_size <= file.bytes:
        fetched.count("resumed")
    seen: set[str] = set()
    for _ in range(_CHANGED):
        write_whole(record_path, msgspec.json.encode(_Record(file.address, file.bytes, file.tag)))
        sha256, md5 = _download(bucket, file, partial, fetched)
        with bucket.refusals(file.address):
            now = bucket.again(file)
        # Not every S3 tag is an MD5 (encryption changes it): the same content twice is believed.
        if now.tag == file.tag and (file.md5 in (None, md5) or md5 in seen):
            done = _Record(file.address, file.bytes, file.tag, sha256)
            write_whole(record_path, msgspec.json.encode(done))
            partial.replace(place)
            fetched.count("fetched")
            return sha256
        seen.add(md5)
        file = now
        partial.unlink(missing_ok=True)
    raise DataError(
        f"{file.address} changed {_CHANGED} times while it was fetched. Wait until it is no longer "
        "written, and run the same command again."
    )


def _download(
    bucket: Bucket, file: RemoteFile, partial: Path, fetched: _Fetched
) -> tuple[str, str]:
    """Append to `partial` what it lacks; SHA-256 and MD5 of the whole."""
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with partial.open("a+b") as out:
        out.seek(0)
        while chunk := out.read(CHUNK_BYTES):
            sha256.update(chunk)
            md5.update(chunk)
        if out.tell() > file.bytes:
            out.truncate(0)
            return _download(bucket, file, partial, fetched)
        at = out.tell()
        fetched.there(file, at)
        while at < file.bytes:
            chunk = _patiently(bucket, file, at, min(at + CHUNK_BYTES, file.bytes), fetched)
            out.write(chunk)
            sha256.update(chunk)
            md5.update(chunk)
            at += len(chunk)
            fetched.there(file, at, fetched=len(chunk))
        out.flush()
        os.fsync(out.fileno())
    return sha256.hexdigest(), md5.hexdigest()


def _patiently(bucket: Bucket, file: RemoteFile, start: int, end: int, fetched: _Fetched) -> bytes:
    """Bytes [start, end), asked for again with growing waits while the service does not answer."""
    for attempt in range(ATTEMPTS):
        if fetched.stop.is_set():
            raise DataError("Fetching was stopped; what has come is kept.")
        with bucket.refusals(file.address):
            try:
                chunk = bucket.read(file, start, end)
            except (FileNotFoundError, PermissionError):
                raise
            except bucket.failures:
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                if len(chunk) == end - start:
                    return chunk
                if attempt == ATTEMPTS - 1:
                    break
        fetched.count("retries")
        fetched.stop.wait(wait_before(attempt, first=FIRST_WAIT))
    raise DataError(
        f"{file.address} is answered with fewer bytes than its {file.bytes:,}, {ATTEMPTS} times in "
        "a row. It is being written, or something between cuts it; run the same command later."
    )


def wait_before(attempt: int, *, first: float) -> float:
    """Seconds to wait after failed attempt number `attempt`, from 0, at most `LONGEST_WAIT`.

    They double from `first` and are drawn from [half, whole), so that many threads or writers do
    not all come back at the same instant.
    """
    longest = min(LONGEST_WAIT, first * 2**attempt)
    return random.uniform(longest / 2, longest)


def _read_record(path: Path) -> _Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Record)
    except (OSError, msgspec.DecodeError):
        return None


@contextmanager
def _alone(bucket: Bucket, cache: Path, say: Say) -> Iterator[None]:
    """One process at a time fetches of a bucket; a second one waits and then finds the files."""
    folder = cache / bucket.scheme
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{bucket.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another process is fetching from {bucket.scheme}://{bucket.name}: waiting.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _cache_faults(cache: Path) -> Iterator[None]:
    try:
        with disk_faults(cache, "fetching the sources", setting="TOQUE_CACHE"):
            yield
    except OSError as error:  # a name too long, or a file where another object needs a folder
        raise DataError(
            f"The cache {cache} cannot hold {error.filename or 'a file'} ({error.strerror}). Name "
            "the objects by a pattern that leaves this one out, or empty the cache."
        ) from error


def enough_space(files: Sequence[RemoteFile], cache: Path) -> None:
    """Stop before the first byte when the disk cannot hold what is still to come.

    Raises:
        DataError: with what is needed and what is free.
    """
    places = [place_of(file, cache) for file in files]
    needed = sum(f.bytes for f, p in zip(files, places, strict=True) if not p.is_file())
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise DataError(
            f"Fetching the sources needs {needed / 1e9:,.1f} GB in {cache}, and its disk has "
            f"{free / 1e9:,.1f} GB left. Make space, or set TOQUE_CACHE to a folder with more."
        )
