"""A limit on examples ends reading early, and the store does not depend on who read how far."""

import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from fixtures.processes import python
from fixtures.stores import Made, recipe_text
from line_reader import LineReader
from prepare_child import started
from store_checks import content, interrupted_after, many_lines, prepared
from toque.data.prepare import shards
from toque.data.prepare.shards import NOT_READ, ShardResult
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.tokenizer.tokenizer_training import interruptible
from toque.errors import ConfigError, DataError

Make = Callable[..., PrepareSettings]
pytestmark = pytest.mark.usefixtures("small_groups")


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Four files of sixty recipes; every tenth repeats the one before."""
    folder = tmp_path / "dump"
    folder.mkdir()
    rng = random.Random(6)
    for name in "abcd":
        lines: list[str] = []
        for i in range(60):
            record = {"id": ord(name) * 1000 + i, "prompt": f"{name}{i}"}
            again = lines[-1] if i % 10 == 9 else None
            lines.append(again or json.dumps(record | {"target": recipe_text(rng)}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_reading_stops_and_files_take_turns(made: Made, dump: Path) -> None:
    result = made("s", of=dump, max_examples=40)
    report = result.report
    assert report.examples == 40
    assert report.read < 120
    assert report.notes[NOT_READ] > 0
    assert report.read == report.kept + sum(report.dropped.values())
    used = np.asarray(result.store.column("id"))[result.store.split != 255].astype(int)
    per_file = np.bincount(used // 1000 - ord("a"), minlength=4)
    assert per_file.min() >= 8


def test_it_does_not_depend_on_workers_or_interruptions(
    dump: Path, tmp_path: Path, settings_for: Make
) -> None:
    settings = settings_for(max_examples=60)
    prepared(dump, tmp_path / "calm", settings, workers=1)
    prepared(dump, tmp_path / "two", settings, workers=2)
    assert content(tmp_path / "two") == content(tmp_path / "calm")
    interrupted_after(2, dump, tmp_path / "broken", settings)
    prepared(dump, tmp_path / "broken", settings, workers=2)
    assert content(tmp_path / "broken") == content(tmp_path / "calm")


def test_a_limit_beyond_the_data_reads_everything(made: Made, dump: Path) -> None:
    report = made("s", of=dump, max_examples=1000).report
    assert (report.read, report.examples) == (240, 216)
    assert NOT_READ not in report.notes
    exact = made("t", of=dump, max_examples=216).report
    assert exact.examples == 216


def test_duplicates_are_counted_group_by_group(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group's columns are read once, however many groups of duplicates come."""
    rng = random.Random(4)
    texts = [recipe_text(rng) for _ in range(60)]
    chosen = [*rng.choices(range(20), k=200), *range(60)]
    lines = [json.dumps({"prompt": f"Dish {i}", "target": texts[i]}) for i in chosen]
    (tmp_path / "again.jsonl").write_text("\n".join(lines) + "\n")
    counted, read = Counter[tuple[int, ...]](), shards.read_column

    def counting(store: Path, of: Sequence[ShardResult], name: str) -> np.ndarray:
        counted[tuple(shard.group for shard in of)] += name == "record_key"
        return read(store, of, name)

    monkeypatch.setattr(shards, "read_column", counting)
    store = made("s", of=tmp_path / "again.jsonl", max_examples=40, workers=1).store
    n = len(list((tmp_path / "s" / "shards").iterdir()))
    assert n > 20
    assert counted == {(group,): 1 for group in range(n)}
    keys = store.column("record_key")
    assert len(np.unique(keys)) >= 40 > len(np.unique(keys[: store._bounds[-2]]))


class NamedReader(LineReader):
    """Counts how often its name is asked for."""

    n_asked = 0

    @property
    def recorded_name(self) -> str:
        NamedReader.n_asked += 1
        return "lines:lines"


def test_many_files_are_looked_at_once_and_not_for_every_group(
    made: Made, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    rng, n = random.Random(5), 60
    for i in range(n):
        lines = [
            json.dumps({"prompt": f"{i} {k}", "target": recipe_text(rng)})
            for k in range(6)
        ]
        (tmp_path / "files" / f"{i}.jsonl").write_text("\n".join(lines))
    made("s", of=tmp_path / "files", reader=NamedReader(), workers=1)
    assert len(list((tmp_path / "s" / "shards").iterdir())) > n // 2
    assert NamedReader.n_asked < 20 * n


# Workers forked or spawned: the same bytes.


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere workers are always spawned"
)
def test_forked_and_spawned_workers_write_the_same_store(
    tmp_path: Path, settings_for: Callable[..., PrepareSettings]
) -> None:
    path = many_lines(tmp_path, 60)
    for name, thread in (("forked", False), ("spawned", True)):
        process = started(path, tmp_path / name, settings_for(), thread=thread)
        out, said = process.communicate(timeout=120)
        assert out.split("\n")[:2] == [
            "not alone" if thread else "alone",
            "prepared",
        ], said
    assert content(tmp_path / "forked") == content(tmp_path / "spawned")


@pytest.mark.skipif(sys.platform != "linux", reason="the worker is looked for in /proc")
def test_ctrl_c_ends_the_workers_at_once_and_the_store_goes_on(
    tmp_path: Path, settings_for: Callable[..., PrepareSettings]
) -> None:
    path, store, there = (
        many_lines(tmp_path, 30),
        tmp_path / "store",
        tmp_path / "there",
    )
    process = started(path, store, settings_for(), stuck=str(there))
    while not (there.exists() and there.read_text()) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)  # its worker would sleep for ten minutes
    assert "KeyboardInterrupt" in said
    assert not Path(f"/proc/{there.read_text()}").exists(), "the worker has gone, too"
    out, said = started(path, store, settings_for()).communicate(timeout=120)
    assert "prepared" in out, said


@pytest.mark.skipif(
    sys.platform == "win32", reason="signals are raised otherwise there"
)
def test_ctrl_c_is_answered_while_a_library_works() -> None:
    """Learning a tokenizer returns to Python after a minute; the main thread must not be in it."""
    script = (
        "import os, signal, threading, time\n"
        "from toque.data.tokenizer.tokenizer_training import interruptible\n"
        "threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "import ctypes\n"
        "interruptible(lambda: ctypes.CDLL(None).sleep(600))\n"
    )
    done = python("-c", script)
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode in (1, 130, -signal.SIGINT)


def test_what_fails_in_the_thread_fails_here() -> None:
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)
    assert interruptible(lambda: 3) == 3


# On a Ray cluster: the same bytes; without Ray: what to install.


READERS = str(Path(__file__).parents[2])


def test_without_ray_it_says_what_to_install(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'toque\[ray\]'"):
        made("s", engine="ray")


@pytest.mark.slow
@pytest.mark.usefixtures("small_groups")
@pytest.mark.filterwarnings(
    "ignore"
)  # Ray's own, about its future defaults and open sockets
def test_two_workers_of_a_cluster_write_the_same_bytes(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", READERS)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made("calm", dedup="near")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": READERS}},
    )
    try:
        store = tmp_path / "s"
        made(store, dedup="near", engine="ray", workers=2)
        assert content(store) == content(tmp_path / "calm")
        # A worker's refusal arrives as it was written.
        with pytest.raises(DataError, match="has more than 10 tokens"):
            made(
                "t", max_target_tokens=10, on_overlong="error", engine="ray", workers=2
            )
    finally:
        ray.shutdown()
