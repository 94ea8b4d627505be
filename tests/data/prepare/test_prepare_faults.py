"""Kills, full disks, damage: a store is whole, or continues, or says what is wrong."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fixtures.damage import no_file_above
from fixtures.stores import Made
from prepare_child import started
from store_checks import (
    content,
    continues,
    interrupted_after,
    many_lines,
    prepared,
    whole_shards,
)
from toque.data.prepare.store_plan import PrepareSettings
from toque.errors import DataError
from toque.storage.atomic import save_array

Make = Callable[..., PrepareSettings]

pytestmark = pytest.mark.usefixtures("small_groups")


def test_a_damaged_store_is_repaired_shard_by_shard(made: Made, tmp_path: Path) -> None:
    store = tmp_path / "s"
    made(store)
    before = content(store)
    kept = (store / "shards" / "00000" / "key.npy").stat().st_mtime_ns
    (store / "shards" / "00001" / "target_tokens.npy").write_bytes(b"short")
    told: list[str] = []
    again = made(store, progress=lambda _, __, message: told.append(message))
    assert not again.reused
    assert any("repairing the store" in message for message in told)
    assert content(store) == before
    assert (store / "shards" / "00000" / "key.npy").stat().st_mtime_ns == kept


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_any_moment_it_ends_with_the_same_bytes(
    tmp_path: Path, settings_for: Make, workers: int
) -> None:
    path, settings = many_lines(tmp_path, 60), settings_for()
    store = tmp_path / "killed"
    for n_shards in (1, 6):
        process = started(path, store, settings, workers=workers)
        while len(whole_shards(store)) < n_shards and process.poll() is None:
            pass
        process.send_signal(signal.SIGKILL)
        process.communicate()
    whole = len(whole_shards(store))
    assert whole >= 6
    assert not (store / "manifest.json").exists()
    written = {p: p.stat().st_mtime_ns for p in whole_shards(store)}
    continues(path, store, settings)
    kept = [p for p, at in written.items() if p.stat().st_mtime_ns == at]
    assert len(kept) == whole


def killed_at(call: int, path: Path, store: Path, settings: PrepareSettings) -> bool:
    """Prepare in a child that is killed before its n-th call on the store; False: it has fewer."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] != 0
    calls = {
        "open",
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.truncate",
        "shutil.rmtree",
    }
    seen: list[str] = []

    def count(event: str, arguments: tuple[object, ...]) -> None:
        if event in calls and str(arguments[0]).startswith(str(store)):
            seen.append(event)
            if len(seen) == call:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    prepared(path, store, settings, workers=1, replace=True)
    os._exit(0)


@pytest.mark.parametrize("before", ["nothing", "another store"])
def test_killed_at_any_early_call_it_begins_again(
    tmp_path: Path, settings_for: Make, before: str
) -> None:
    settings, other = settings_for(), settings_for(max_target_tokens=30)
    path = many_lines(tmp_path, 12)
    prepared(path, tmp_path / "calm", settings)
    if before == "another store":
        prepared(path, tmp_path / "other", other)
    for call in range(1, 13):
        store = tmp_path / f"s{call}"
        if before == "another store":
            shutil.copytree(tmp_path / "other", store)
        assert killed_at(call, path, store, settings)
        prepared(path, store, settings, replace=True)
        assert content(store) == content(tmp_path / "calm"), call


def test_after_a_kill_shards_of_a_source_that_changed_are_written_again(
    tmp_path: Path, settings_for: Make
) -> None:
    path, settings = many_lines(tmp_path, 60), settings_for()
    interrupted_after(3, path, tmp_path / "s", settings)
    path.write_text(path.read_text().replace("Dish 0", "Salt alone"))
    continues(path, tmp_path / "s", settings)


@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        ".lock.lease",
        ".lock.lease.break.4711.0123456789abcdef0123456789abcdef",
        ".building.json.0123456789abcdef.partial",
    ],
)
def test_what_a_start_leaves_does_not_make_the_folder_somebody_elses(
    made: Made, tmp_path: Path, name: str
) -> None:
    store = tmp_path / "s"
    store.mkdir()
    (store / name).touch()
    made(store)
    (tmp_path / "mine").mkdir()
    for foreign in (name, f"{name}.of.mine"):
        (tmp_path / "mine" / foreign).touch()
    with pytest.raises(DataError, match="has files but no token store"):
        made("mine")
    assert {p.name for p in (tmp_path / "mine").iterdir()} == {name, f"{name}.of.mine"}


def test_a_disk_that_was_full_at_the_first_byte_is_no_obstacle_later(
    tmp_path: Path, settings_for: Make
) -> None:
    path, settings = many_lines(tmp_path, 60), settings_for()
    process = started(path, tmp_path / "s", settings, limit=1, workers=1)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 3, out
    assert "is full" in out
    assert not (tmp_path / "s" / "building.json").exists()
    prepared(path, tmp_path / "s", settings)


def at_work(
    path: Path, store: Path, settings: PrepareSettings
) -> tuple[subprocess.Popen[str], list[str]]:
    """A process that has written a shard, and its workers."""
    process = started(path, store, settings)
    while not whole_shards(store):
        assert process.poll() is None
    return process, Path(
        f"/proc/{process.pid}/task/{process.pid}/children"
    ).read_text().split()


def test_workers_end_with_a_killed_main_process(
    tmp_path: Path, settings_for: Make
) -> None:
    process, children = at_work(
        many_lines(tmp_path, 200), tmp_path / "s", settings_for()
    )
    assert len(children) >= 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in children):
        assert time.monotonic() < deadline, (
            "workers outlive the process that started them"
        )


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_paragraph_and_it_continues(
    tmp_path: Path, settings_for: Make, workers: int
) -> None:
    path, settings = many_lines(tmp_path, 60), settings_for()
    store = tmp_path / "s"
    for stage in ("tokenizer", "shard"):
        # A limit on the size of a file fails a write as a full disk does.
        process = started(path, store, settings, limit=300, workers=workers)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 3, out
        assert "is full" in out
        assert "run the same command again" in out
        assert (store / "tokenizer").exists() == (stage == "shard")
        if stage == "tokenizer":
            interrupted_after(2, path, store, settings)
    assert len(list(store.glob("shards/*"))) == 2  # whole ones only
    continues(path, store, settings)


def test_a_disk_that_fills_inside_an_array_is_known_by_its_number(
    tmp_path: Path,
) -> None:
    with (
        no_file_above(100_000),
        pytest.raises(OSError, match="File too large") as caught,
    ):
        save_array(tmp_path / "a.npy", np.zeros(1_000_000))
    assert (
        caught.value.errno == errno.EFBIG
    )  # numpy's tofile raises one without a number


def test_no_permission_is_said(made: Made, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(DataError, match="cannot be written"):
        made(tmp_path / "closed" / "s")


def test_two_at_once_are_refused(made: Made) -> None:
    def again(_: int, __: int, message: str) -> None:
        if message.endswith("examples"):
            with pytest.raises(
                DataError, match=r"Another process is preparing .* \(id \d+ on .*\)"
            ):
                made("s")

    made("s", progress=again)


@pytest.mark.parametrize("tokenizer", ["given", "trained:420"])
def test_a_damaged_tokenizer_is_written_again(
    lines_file: Path, tmp_path: Path, settings_for: Make, tokenizer: str
) -> None:
    settings = (
        settings_for() if tokenizer == "given" else settings_for(tokenizer=tokenizer)
    )
    store = tmp_path / "s"
    prepared(lines_file, store, settings)
    before = content(store)
    (store / "tokenizer" / "tokenizer.json").write_text("{")
    assert not prepared(lines_file, store, settings).reused
    assert content(store) == before
    for name, old, new in (  # it can be read, and gives other ids
        ("tokenizer.json", '"merges"', '  "merges"'),
        ("tokenizer_config.json", '"eos_token"', '"eos_token": "a",   "unused"'),
    ):
        file = store / "tokenizer" / name
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new, 1))
        kept = (store / "shards" / "00000" / "key.npy").stat().st_mtime_ns
        assert not prepared(lines_file, store, settings).reused
        assert content(store) == before
        assert (store / "shards" / "00000" / "key.npy").stat().st_mtime_ns == kept


def test_a_killed_worker_is_named_and_the_next_start_ends_with_the_same_bytes(
    tmp_path: Path, settings_for: Make
) -> None:
    path, settings = many_lines(tmp_path, 100), settings_for()
    store = tmp_path / "s"
    process, children = at_work(path, store, settings)
    os.kill(
        int(children[-1]), signal.SIGKILL
    )  # as the system does when memory is short
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 3, out
    assert (
        "A worker process ended unexpectedly, probably because the system killed it"
        in out
    )
    assert whole_shards(store)
    continues(path, store, settings)
