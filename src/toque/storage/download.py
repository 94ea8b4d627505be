"""Download cache: a bucket's files on this machine, fetched side by side, resumed, verified.

<cache>/s3/bucket/dumps/a.json.gz          the file, with the bucket's folders
<cache>/s3/bucket/dumps/.a.json.gz.json    size, tag and SHA-256 of what it should be
<cache>/s3/bucket/dumps/.a.json.gz.partial what has come so far of one that is not whole

fsspec's own caches begin a file again when the line breaks, and do not verify what they hold.
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
"""Environment variable: the one root of all that may be made again; ~/.cache/toque without it."""
CHUNK_BYTES = 8 << 20  # of one range request; a cut connection costs at most this
THREADS = 8
_TRIES = 3  # to fetch a file whose checksum is not the service's
_WILDCARD = re.compile(r"[*?[]")

Say = Callable[[str], None]  # function called with a sentence that the user should read


class _Record(msgspec.Struct):
    """The file beside it, as it is or will be when it is whole."""

    address: str
    bytes: int
    tag: str
    sha256: str | None = None  # known when the file is whole


def cache_folder(kind: Literal["sources", "measured", "runs", "models", "objects"]) -> Path:
    """The folder of fetched sources, measurements, runs or checkpoints, or a program's models."""
    root = os.environ.get(CACHE_VARIABLE)
    return (named_path(root) if root else Path.home() / ".cache" / "toque") / kind


def listing(address: str, say: Say) -> tuple[Bucket, list[RemoteFile]]:
    """The bucket of an address and the objects to read; `say` names hidden and empty ones."""
    bucket = open_bucket(address, SOURCES)
    found, hidden = bucket.objects(), list[RemoteFile]()
    if [file.key for file in found] != [bucket.path]:
        n_named = _WILDCARD.split(bucket.path)[0].count("/")
        hidden = [f for f in found if any(p[:1] == "." for p in f.key.split("/")[n_named:])]
    empty = [file for file in found if file.bytes == 0 and file not in hidden]
    for files, why in ((hidden, "hidden (a part of the name begins with a dot)"), (empty, "empty")):
        if files:
            shown = ", ".join(file.address for file in files[:3])
            more = f" and {len(files) - 3:,} more" if len(files) > 3 else ""
            say(f"Not read, because {why}: {shown}{more}.")
    left = [file for file in found if file not in hidden and file not in empty]
    if not left:
        raise SourceBucketError(
            f"{address} names {len(found):,} objects, all of them empty or hidden. Correct the "
            "address in data.sources, or write them again."
        )
    return bucket, left


def fetch(
    bucket: Bucket,
    files: Sequence[RemoteFile],
    *,
    progress: ProgressSink,
    say: Say,
    cache: Path | None = None,
) -> list[tuple[Path, str]]:
    """The places of the files in the cache, whole, and their SHA-256, in the order given.

    A file whose size, tag and SHA-256 are right is not fetched again.
    """
    cache = cache or cache_folder("sources")
    places, total = [place_of(file, cache) for file in files], sum(file.bytes for file in files)
    started = time.monotonic()
    needed = sum(
        file.bytes - _bytes_of(_part_of(place))  # a part is continued, or makes its space free
        for file, place in zip(files, places, strict=True)
        if not place.is_file()
    )
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise SourceBucketError(
            f"Fetching the sources needs {needed / 1e9:,.1f} GB more in {cache}, and its disk has "
            f"{free / 1e9:,.1f} GB left. Make space, or set {CACHE_VARIABLE} to a folder with more."
        )
    bucket = replace(bucket, retry=Retry(bucket.retry.deadline))
    session = _Session(bucket, cache)
    lock = cache / bucket.scheme / f".{bucket.name}.lock"

    def wait_for(holder: str) -> None:
        place = f"{bucket.scheme}://{bucket.name}"
        say(f"Another process (id {holder}) is fetching from {place}: waiting.")

    with ExitStack() as stack:
        with _cache_faults(cache):
            stack.enter_context(file_lock(lock, wait_for))
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fetch")
        fetch_one = _cache_faults(cache)(session.fetch)
        jobs = [pool.submit(fetch_one, *pair) for pair in zip(files, places, strict=True)]
        try:
            left = set(jobs)
            while left:
                done, left = wait(left, timeout=0.2, return_when=FIRST_EXCEPTION)
                for job in done:
                    job.result()  # raises the error of a file that did not arrive
                come = sum(session.there.copy().values())
                progress(come, total, f"fetching {len(files):,} files")
        finally:
            # Also on an error and on Ctrl-C: what has come stays, the rest is not begun.
            bucket.retry.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    say(session.summary(time.monotonic() - started))
    return [(place, job.result()) for place, job in zip(places, jobs, strict=True)]


def place_of(file: RemoteFile, cache: Path) -> Path:
    """The path of a file in the cache; a name that would put it outside is a SourceBucketError."""
    parts = file.key.split("/")
    if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts):
        raise SourceBucketError(
            f"The object {file.address!r} has a name that no folder here can hold safely: a part "
            "of it is empty, . or .., or has a backslash. Name the others by a pattern, or copy "
            "the object to another name."
        )
    return cache.joinpath(file.scheme, *parts)


def _part_of(place: Path) -> Path:
    """The path of what has come of a file that is not whole."""
    return place.with_name(f".{place.name}{PARTIAL}")


def _bytes_of(path: Path) -> int:
    """Size of a file in bytes; 0 if there is none, also because it was made whole meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


@dataclass
class _Session:
    """One call of `fetch`, shared by its threads."""

    bucket: Bucket
    cache: Path
    there: dict[str, int] = field(default_factory=dict)  # address -> bytes in the cache
    fetched: list[int] = field(default_factory=list)  # bytes that came, by file
    events: list[str] = field(default_factory=list)

    def summary(self, seconds: float) -> str:
        """The sentence at the end."""
        counts = Counter(self.events + ["retry"] * len(self.bucket.retry.waits))
        come = f"{sum(self.fetched) / 1e6:,.1f} MB in {seconds:.1f} s"
        parts = [f"{counts['fetched']:,} fetched ({come})"]
        parts += [f"{counts['whole']:,} already whole in {self.cache}"]
        for what, words in (
            ("resumed", "resumed where an earlier start stopped"),
            ("changed", "fetched again because they changed in the bucket"),
            ("damaged", "fetched again because the cached file was damaged"),
            ("retry", "requests repeated"),
        ):
            if counts[what]:
                parts.append(f"{counts[what]:,} {words}")
        return f"{self.bucket.scheme}://{self.bucket.name}: {', '.join(parts)}."

    def fetch(self, file: RemoteFile, place: Path) -> str:
        """Make one file whole; its SHA-256."""
        record_path = place.with_name(f".{place.name}.json")
        part = _part_of(place)
        record = read_json(record_path, _Record)
        known = record is not None and (record.tag, record.bytes) == (file.tag, file.bytes)
        if record is not None and record.sha256 is not None and place.is_file():
            if known and place.stat().st_size == file.bytes and sha256_of(place) == record.sha256:
                self.events.append("whole")
                self.there[file.address] = file.bytes
                return record.sha256
            self.events.append("damaged" if known else "changed")
        place.parent.mkdir(parents=True, exist_ok=True)
        if not known:
            part.unlink(missing_ok=True)
        elif part.is_file() and 0 < part.stat().st_size <= file.bytes:
            self.events.append("resumed")
        seen: set[str] = set()
        for _ in range(_TRIES):
            record = _Record(file.address, file.bytes, file.tag)
            atomic_write(record_path, msgspec.json.encode(record))
            self._append(file, part)
            record.sha256, md5 = sha256_of(part), md5_of(part)
            now = self.bucket.request(f"read {file.address}", partial(self.bucket.info, file.key))
            if (now.tag, now.bytes) != (file.tag, file.bytes):
                part.unlink(missing_ok=True)
                raise SourceBucketError(
                    f"{file.address} changed in the bucket after it was listed ({file.bytes:,} "
                    f"bytes then, {now.bytes:,} now): a store is made of one listing. What has "
                    "come is kept; run the same command again when nobody writes there."
                )
            # Not every S3 tag is an MD5 (encryption changes it): believed when it comes twice.
            if file.md5 in (None, md5) or md5 in seen:
                atomic_write(record_path, msgspec.json.encode(record))
                part.replace(place)
                self.events.append("fetched")
                return record.sha256
            seen.add(md5)
            part.unlink(missing_ok=True)
        raise SourceBucketError(
            f"{file.address} came {_TRIES} times with content that its checksum does not fit, each "
            "time another. The line or the service damages it; run the same command again later."
        )

    def _append(self, file: RemoteFile, part: Path) -> None:
        """Append the bytes that `part` lacks."""
        if part.exists() and part.stat().st_size > file.bytes:
            part.unlink()
        with os.fdopen(open_append(part), "ab") as out:
            start = at = self.there[file.address] = part.stat().st_size
            while at < file.bytes:
                if self.bucket.retry.stop.is_set():
                    raise SourceBucketError("Fetching was stopped; what has come is kept.")
                ask = partial(self._range, file, at, min(at + CHUNK_BYTES, file.bytes))
                at += out.write(self.bucket.request(f"read {file.address}", ask))
                self.there[file.address] = at
            out.flush()
            os.fsync(out.fileno())
        self.fetched.append(at - start)

    def _range(self, file: RemoteFile, start: int, end: int) -> bytes:
        chunk = self.bucket.read_range(file, start, end)
        if len(chunk) != end - start:
            raise MismatchError(f"{len(chunk):,} bytes came of {end - start:,} asked for")
        return chunk


@contextmanager
def _cache_faults(cache: Path) -> Iterator[None]:
    try:
        with disk_faults(cache, "fetching the sources", setting=CACHE_VARIABLE):
            yield
    except OSError as error:  # a name too long, or a file where another object needs a folder
        raise SourceBucketError(
            f"The cache {cache} cannot hold {error.filename or 'a file'} ({error.strerror}). Name "
            "the objects by a pattern that leaves this one out, or empty the cache."
        ) from error
