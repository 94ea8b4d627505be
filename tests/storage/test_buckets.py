"""Buckets read through real services on this machine: S3 by moto, GCS by its emulator."""

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from fixtures.buckets import Service
from fixtures.processes import python
from fixtures.proxy import behind
from store_checks import READER
from toque.config import load_config
from toque.data.prepare.pipeline import prepare
from toque.errors import DataError
from toque.reporter import no_progress
from toque.sources.records import Located, Source
from toque.storage import bucket as buckets
from toque.storage import download
from toque.storage.bucket import MismatchError, RemoteFile, Retry, is_remote
from toque.storage.download import cache_folder, cached_path, fetch, list_sources
from toque.workflows.prepared_store import open_sources

# Looked for, not imported: gcsfs reads a variable at its import, which the product sets before.
NEEDED = ("s3fs", "gcsfs", "moto", "gcp_storage_emulator")
# Of the services and their clients, which no test of ours can repair.
pytestmark = [
    pytest.mark.skipif(
        not all(map(find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}"
    ),
]

BIG = os.urandom(299_999) + b"!"  # tests damage the last byte
OBJECTS = {
    "dumps/a.json": b"[1]",
    "dumps/deep/er/b.json": b"[2, 3]",
    "dumps/big.bin": BIG,
    "dumps/.hidden": b"x",
    "dumps/empty.json": b"",
    "other/c.json": b"[4]",
}


@pytest.fixture(scope="module", params=["s3", "gs"])
def running(request) -> Iterator[Service]:
    found = Service(request.param)
    yield found
    found.close()


@pytest.fixture
def service(running, monkeypatch, tmp_path) -> Service:
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "cache"))
    for name, data in OBJECTS.items():
        running.put(name, data)
    return running.lead_here(monkeypatch)


def cached(service: Service, name: str = "dumps") -> Path:
    """The place of the bucket's folder or file in the cache."""
    return cache_folder("sources") / service.scheme / "pantry" / name


def fetched(address: str) -> tuple[list[Located], list[str]]:
    said: list[str] = []
    bucket, files = list_sources(address, said.append)
    told: list[tuple[int, int, str]] = []
    places = fetch(bucket, files, progress=lambda *at: told.append(at), say=said.append)
    found = [Located(f.address, *whole) for f, whole in zip(files, places, strict=True)]
    assert told[-1][0] == told[-1][1] == sum(file.bytes for file in files)
    return found, said


def test_folders_names_and_patterns(service):
    base = f"{service.scheme}://pantry"
    found, said = fetched(f"{base}/dumps/")
    names = ["a.json", "big.bin", "deep/er/b.json"]
    assert [file.name for file in found] == [f"{base}/dumps/{name}" for name in names]
    for file, name in zip(found, names, strict=True):
        assert file.path == cached(service, f"dumps/{name}")
        assert file.path.read_bytes() == OBJECTS[f"dumps/{name}"]
        assert file.sha256 == hashlib.sha256(OBJECTS[f"dumps/{name}"]).hexdigest()
    assert (
        f"hidden (a part of the name begins with a dot): {base}/dumps/.hidden."
        in said[0]
    )
    assert f"Not read, because empty: {base}/dumps/empty.json." in said[1]
    assert "3 fetched (0.3 MB" in said[2]
    for address, wanted in (
        (f"{base}/dumps/a.json", ["dumps/a.json"]),
        (f"{base}/dumps/.hidden", ["dumps/.hidden"]),
        (f"{base}/*/*.json", ["dumps/a.json", "other/c.json"]),
        (f"{base}/dumps/**/*.json", ["dumps/a.json", "dumps/deep/er/b.json"]),
    ):
        _, files = list_sources(address, said.append)
        assert [file.key for file in files] == [f"pantry/{name}" for name in wanted]


def test_what_is_whole_is_not_fetched_and_what_changed_is(service):
    address = f"{service.scheme}://pantry/dumps"
    first, _ = fetched(address)
    again, said = fetched(address)
    assert again == first
    assert "0 fetched" in said[-1]
    assert "3 already complete" in said[-1]
    service.put("dumps/a.json", b"[9]")  # of the same size
    first[1].path.write_bytes(BIG[:-1] + b"?")
    changed, said = fetched(address)
    assert changed[0].path.read_bytes() == b"[9]"
    assert changed[1].path.read_bytes() == BIG
    assert "2 fetched" in said[-1]
    assert "1 fetched again because they changed in the bucket" in said[-1]
    assert "1 fetched again because the cached file was damaged" in said[-1]


def test_a_partial_file_is_resumed_and_a_wrong_one_is_not_believed(service):
    address = f"{service.scheme}://pantry/dumps/big.bin"
    bucket, files = list_sources(address, print)
    said: list[str] = []
    place = cached_path(files[0], cache_folder("sources"))
    place.parent.mkdir(parents=True)
    record = place.with_name(".big.bin.json")
    partial = place.with_name(".big.bin.partial")
    known = {"address": address, "bytes": files[0].bytes, "tag": files[0].tag}
    for start, of_this_version, words in (
        (BIG[:200_000], True, "0.1 MB"),
        (b"?" * 200_000, True, "0.4 MB"),
        (BIG[:200_000], False, "0.3 MB"),
        (BIG, True, "0.0 MB"),
        (BIG + b"?", True, "0.3 MB"),
    ):
        place.unlink(missing_ok=True)
        partial.write_bytes(start)
        record.write_text(
            json.dumps(known | ({} if of_this_version else {"tag": "older"}))
        )
        found = fetch(bucket, files, progress=no_progress, say=said.append)
        assert found[0][0].read_bytes() == BIG
        assert f"1 fetched ({words}" in said[-1], said
        assert not partial.exists()


def test_a_line_that_breaks_is_repeated_from_where_it_broke(service, monkeypatch):
    monkeypatch.setattr(download, "CHUNK_BYTES", 50_000)
    with behind(service.port, cut_after=30_000, cuts=2) as line:
        monkeypatch.setenv(service.variable, f"http://127.0.0.1:{line.port}")
        found, said = fetched(f"{service.scheme}://pantry/dumps/big.bin")
        assert line.cuts_left == 0
    assert found[0].path.read_bytes() == BIG
    assert (
        "1 fetched (0.3 MB" in said[-1]
    )  # every byte once: the broken requests gave none


KILLED = """
import signal, os
from toque.storage import download

download.CHUNK_BYTES = 50_000
bucket, files = download.list_sources({address!r}, print)
read = type(bucket).read_range

def killed(self, file, start, end):
    if start >= 200_000:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, file, start, end)

type(bucket).read_range = killed
download.fetch(bucket, files, progress=lambda *_: None, say=print)
"""


@pytest.mark.slow
def test_a_killed_fetch_is_continued_and_whole(service):
    address = f"{service.scheme}://pantry/dumps/big.bin"
    done = python("-c", KILLED.format(address=address))
    assert done.returncode == -signal.SIGKILL, done.stderr
    partial = cached(service, "dumps/.big.bin.partial")
    n_bytes = partial.stat().st_size
    assert 0 < n_bytes < len(BIG)
    assert partial.read_bytes() == BIG[:n_bytes]
    assert not cached(service, "dumps/big.bin").exists()
    found, said = fetched(address)
    assert found[0].path.read_bytes() == BIG
    assert found[0].sha256 == hashlib.sha256(BIG).hexdigest()
    assert "1 resumed" in said[-1]
    assert f"1 fetched ({(len(BIG) - n_bytes) / 1e6:.1f} MB" in said[-1]
    assert not partial.exists()


def test_a_line_that_stays_broken_ends_in_words_and_the_next_start_continues(
    service, monkeypatch
):
    monkeypatch.setattr(download, "CHUNK_BYTES", 50_000)
    address = f"{service.scheme}://pantry/dumps/big.bin"
    bucket, files = list_sources(address, print)
    bucket = replace(bucket, retry=Retry(deadline=0.0))
    read = type(bucket).read_range

    def failing(self, file, start, end):
        if start >= 200_000:
            raise ConnectionResetError("the line broke")
        return read(self, file, start, end)

    with monkeypatch.context() as patched:
        patched.setattr(type(bucket), "read_range", failing)
        with pytest.raises(
            DataError, match=r"big.bin: .*: the line broke.*files are kept"
        ):
            fetch(bucket, files, progress=no_progress, say=print)
    _, said = fetched(address)
    assert "1 fetched (0.1 MB" in said[-1]
    assert "1 resumed" in said[-1]


def test_what_has_come_needs_no_space_again(service, monkeypatch, tmp_path):
    monkeypatch.setattr(download, "CHUNK_BYTES", 50_000)
    bucket, files = list_sources(f"{service.scheme}://pantry/dumps/big.bin", print)
    usage = shutil.disk_usage(tmp_path)._replace(free=len(BIG) - 100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(DataError, match=r"The sources need .* GB"):
        fetch(bucket, files, progress=no_progress, say=print)
    partial = cached(service, "dumps/.big.bin.partial")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(BIG[:100_000])
    found = fetch(bucket, files, progress=no_progress, say=print)
    assert found[0][0].read_bytes() == BIG


def test_requests_that_fail_are_repeated_and_counted(service, monkeypatch):
    bucket, files = list_sources(f"{service.scheme}://pantry/dumps/big.bin", print)
    read = type(bucket).read_range
    answers = iter([ConnectionResetError, b"short", TimeoutError, None])

    def failing(self, file, start, end):
        answer = next(answers)
        if isinstance(answer, type):
            raise answer
        return read(self, file, start, end) if answer is None else answer

    monkeypatch.setattr(type(bucket), "read_range", failing)
    said: list[str] = []
    found = fetch(bucket, files, progress=no_progress, say=said.append)
    assert found[0][0].read_bytes() == BIG
    assert said[-1].endswith("3 requests retried.")


def failing(error: Exception) -> Callable[[], None]:
    def ask() -> None:
        raise error

    return ask


def test_credentials_are_asked_for_by_name(service, monkeypatch, tmp_path):
    """Where there are none, where their file is not there, and where they are refused."""
    if service.scheme == "gs":
        monkeypatch.delenv("STORAGE_EMULATOR_HOST")
        monkeypatch.setenv(
            "GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json")
        )
        with pytest.raises(
            DataError, match=r"absent.json, which does not exist\. Set GOOGLE"
        ):
            list_sources("gs://pantry/dumps/", print)
        (tmp_path / "absent.json").write_text("{}")
        with pytest.raises(DataError, match="has no valid credentials"):
            list_sources("gs://pantry/dumps/", print)
        return
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    bucket, _ = list_sources("s3://pantry/dumps/", print)  # a public one needs none
    words = r"no credentials are set\. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    with pytest.raises(DataError, match=words):
        bucket.request(
            "read s3://pantry/dumps/", failing(PermissionError("Access Denied"))
        )
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(
        DataError, match=r"credentials are invalid: .*nobody.* AWS_PROFILE"
    ):
        list_sources("s3://pantry/dumps/", print)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            PermissionError("Access Denied for a-secret-of-tests"),
            "credentials are wrong",
        ),
        (OSError("Forbidden: https://host/o\nlong"), "expired, or lack the right"),
        (OSError("no route to host a-secret-of-tests"), "correctly: no route to host"),
    ],
)
def test_refusals_name_what_to_set_and_no_secret(service, error, words):
    bucket, _ = list_sources(f"{service.scheme}://pantry/dumps/a.json", print)
    # gs runs without credentials here, on its emulator.
    expected = (
        words
        if service.scheme == "s3" or "route" in words
        else "no credentials are set"
    )
    with pytest.raises(DataError, match=expected) as caught:
        bucket.request("read s3://pantry/x", failing(error), once=True)
    assert "a-secret-of-tests" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_store_is_the_same_from_a_bucket_and_names_the_address(
    service, lines_file, settings_for, tmp_path
):
    service.put("lines/recipes.jsonl", lines_file.read_bytes())
    address = f"{service.scheme}://pantry/lines/"
    files, _ = fetched(address)
    there = Source(address, READER, files=tuple(files))
    far = prepare([there], store=tmp_path / "far", settings=settings_for())
    near = prepare(
        [Source(str(lines_file), READER)],
        store=tmp_path / "near",
        settings=settings_for(),
    )
    assert far.store.manifest.fingerprint == near.store.manifest.fingerprint
    assert far.store.manifest.sources[0].path == f"{address}recipes.jsonl"
    for file in (tmp_path / "far").rglob("*.json"):
        text = file.read_text()
        assert str(tmp_path / "cache") not in text, file
        assert "a-secret-of-tests" not in text
    shards = [sorted(p for p in (tmp_path / n).rglob("*.npy")) for n in ("far", "near")]
    assert [p.read_bytes() for p in shards[0]] == [p.read_bytes() for p in shards[1]]
    assert far.report.read == near.report.read == 33


def test_max_files_fetches_the_first_by_name(service):
    config = load_config(
        "demo",
        overrides=[
            f"data.sources=[{{path: '{service.scheme}://pantry/dumps/', max_files: 2}}]"
        ],
    ).config
    said: list[str] = []
    (source,) = open_sources(config, say=said.append)
    assert [file.path.name for file in source.files] == ["a.json"]
    assert [name.rpartition("/")[2] for name in source.left_out] == ["big.bin"]
    assert (
        f"{service.scheme}://pantry/dumps/: max_files is 2, so the first 2 of its 3 files"
        in said[2]
    )
    here = sorted(p.name for p in cached(service).iterdir() if p.name[0] != ".")
    assert here == ["a.json", "big.bin"]


def test_an_object_that_changes_after_it_was_listed_is_refused_and_named(service):
    address = f"{service.scheme}://pantry/dumps"
    bucket, files = list_sources(address, print)
    service.put("dumps/a.json", b"[1, 1]")
    service.put("dumps/new.json", b"[7]")
    words = rf"{address}/a.json changed in the bucket after it was listed \(from 3 to 6 bytes\)"
    with pytest.raises(DataError, match=words) as refused:
        fetch(bucket, files, progress=no_progress, say=print)
    assert refused.value.exit_code == 3
    assert not cached(service, "dumps/a.json").exists()
    bucket, files = list_sources(address, print)
    found = fetch(bucket, files, progress=no_progress, say=print)
    assert found[0][0].read_bytes() == b"[1, 1]"


def test_what_is_not_there_is_said(service):
    base = f"{service.scheme}://"
    for address, words in (
        (
            f"{base}no-such-bucket-here/a/",
            "the bucket 'no-such-bucket-here' or the object does not exist",
        ),
        (f"{base}pantry/nothing/", "matches nothing: the bucket exists"),
        (f"{base}pantry/none*.json", "matches nothing"),
        (f"{base}pantry/dumps/empty.json", "1 objects, but all are empty or hidden"),
        (f"{base}", "has no valid bucket name"),
        (f"{base}key:word@pantry/a", "has no valid bucket name"),
    ):
        with pytest.raises(DataError, match=words) as caught:
            list_sources(address, print)
        assert "word" not in str(caught.value)


def test_names_that_would_leave_the_cache_or_need_anothers_place_are_refused(tmp_path):
    for key in ("b/../../x", "b/a//x", "b/./x", "b/..", "b/a\\x", "b/a\0x"):
        with pytest.raises(DataError, match="that is not safe as a path"):
            cached_path(RemoteFile("s3", key, 1, "", None), tmp_path)
    place = cached_path(RemoteFile("s3", "b/a/..x", 1, "", None), tmp_path)
    assert place == tmp_path / "s3/b/a/..x"
    (tmp_path / "s3" / "b").mkdir(parents=True)
    (tmp_path / "s3" / "b" / "a").write_bytes(b"x")
    with (
        pytest.raises(DataError, match=r"cannot store .*"),
        download._cache_faults(tmp_path),
    ):
        place.parent.mkdir(parents=True)


def test_addresses_are_told_from_paths():
    assert is_remote("gs://a/b")
    assert is_remote("s3://a/b")
    assert not is_remote("hf:name")
    assert not is_remote("folder/a.json")
    with pytest.raises(DataError, match=r"https:// addresses are not supported"):
        is_remote("https://token@host/a.json")


def test_each_kind_has_its_folder_in_the_one_root(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOQUE_CACHE", "~/here")
    assert cache_folder("runs") == tmp_path / "here" / "runs"
    monkeypatch.delenv("TOQUE_CACHE")
    assert cache_folder("sources") == tmp_path / ".cache" / "toque" / "sources"


class Failing:
    """Fails with each of its errors in turn, then answers."""

    def __init__(self, *errors):
        self.errors, self.asked = list(errors), 0

    def __call__(self):
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


PASSING = (
    ConnectionResetError("reset"),
    TimeoutError(),
    OSError("Slow Down: 503"),
    MismatchError("a has 403 bytes in the bucket; 401 were sent"),
    OSError("MD5 9f403ab2 differs"),
)
LASTING = (
    FileNotFoundError("gone"),
    PermissionError("Access Denied"),
    OSError("Forbidden: https://host/o"),
    OSError("An error occurred (403) when calling PutObject"),
    ValueError("InvalidAccessKeyId"),
)


def test_what_may_pass_is_asked_again_after_waits_that_double(monkeypatch):
    monkeypatch.setattr(buckets, "FIRST_WAIT", 0.001)
    ask, again = Failing(*PASSING), Retry()
    assert again(ask, (OSError,)) == "answer"
    assert ask.asked == len(again.waits) + 1 == len(PASSING) + 1
    for attempt, seconds in enumerate(again.waits):
        assert 0.0005 * 2**attempt <= seconds <= 0.001 * 2**attempt


def test_what_lasts_a_deadline_or_a_stop_ends_it():
    stopped = Retry()
    stopped.stop.set()
    ends = [(Retry(), error) for error in LASTING]
    ends += [
        (Retry(deadline=0.0), ConnectionResetError()),
        (stopped, ConnectionResetError()),
    ]
    for retry, error in ends:
        ask = Failing(error)
        with pytest.raises(type(error)):
            retry(ask, (OSError, ValueError))
        assert ask.asked == 1
