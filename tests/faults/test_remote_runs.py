"""Runs in buckets, with real services on this machine."""

import json
import os
import shutil
import socket
import threading

import pytest
from safetensors.torch import load_file
from torch import ones

from fixtures import proxy
from fixtures import remote_parts as parts
from fixtures.damage import flipped
from fixtures.kitchens import StopAt
from fixtures.processes import python
from toque.cli import main
from toque.config import load_config
from toque.errors import CheckpointError
from toque.storage.bucket import RUNS, Bucket, open_bucket
from toque.storage.bucket_lock import LOCK, BucketLock
from toque.training.checkpoint.fetch import fetch_run
from toque.training.checkpoint.upload import Uploads
from toque.workflows.train import train


def run(kitchen, name, *words, stop_at=None):
    words = [
        f"run_dir={kitchen / name}" if "://" not in name else f"run_dir={name}",
        *words,
    ]
    resolved = load_config(str(kitchen / "run.yaml"), words)
    return train(resolved, callbacks=[StopAt(stop_at)] if stop_at else [])


def last(folder):
    return load_file(folder / "checkpoints" / "step-00000012" / "optimizer.safetensors")


@pytest.mark.slow
def test_a_run_continues_on_an_empty_machine_from_the_bucket_alone(kitchen, service):
    whole, at = f"whole-{service.scheme}", parts.address(service, "runs/a")
    assert run(kitchen, whole).reason == "finished"
    first = f"first-{service.scheme}"
    assert run(kitchen, first, f"checkpoint.upload={at}", stop_at=7).interrupted
    shutil.rmtree(kitchen / first)
    second = f"second-{service.scheme}"
    assert run(kitchen, second, f"checkpoint.upload={at}").reason == "finished"
    lines = (kitchen / second / "metrics.jsonl").read_text().splitlines()
    start = json.loads([line for line in lines if '"event": "start"' in line][-1])
    assert (
        start["step"] == 8
    )  # the signal comes after the callbacks of step 7 were asked
    mine, wanted = last(kitchen / second), last(kitchen / whole)
    assert mine.keys() == wanted.keys()
    assert all(mine[name].equal(wanted[name]) for name in mine)
    names = open_bucket(at, RUNS).names()
    manifests = [n for n in names if n.endswith("manifest.json")]
    assert "checkpoints/step-00000012/manifest.json" in manifests
    assert (
        len([n for n in manifests if n.startswith("checkpoints")]) == 2
    )  # train.keep_last
    assert {"config.yaml", "metrics.jsonl", "model/model.safetensors"} <= set(names)
    assert LOCK not in names


@pytest.mark.slow
def test_a_run_folder_may_be_an_address(kitchen, service, monkeypatch, tmp_path):
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "one"))
    at = parts.address(service, "runs/b")
    assert run(kitchen, at, stop_at=4).interrupted
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "two"))
    outcome = run(kitchen, at)
    assert outcome.reason == "finished"
    assert (
        outcome.folder
        == tmp_path / "two" / "runs" / service.scheme / "pantry" / "runs" / "b"
    )


@pytest.mark.parametrize("service", ["s3"], indirect=True)
def test_all_that_may_be_made_again_lies_below_toque_cache(
    kitchen, service, monkeypatch, tmp_path
):
    cache, home = tmp_path / "cache", tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TOQUE_CACHE", str(cache))
    place = open_bucket(parts.address(service, "cached"), RUNS)
    place.put("a.jsonl", (kitchen / "a.jsonl").read_bytes())
    words = [
        f"data.sources=[{{path: {place.address}/a.jsonl}}]",
        f"data.store={tmp_path / 'store'}",
        f"run_dir={place.address}/run",
        "train.stop_after=4 steps",
        "train.micro_batch_rows=auto",  # measured
    ]
    assert main(["prepare", str(kitchen / "run.yaml"), *words]) == 0
    run(kitchen, f"{place.address}/run", *words)
    assert sorted(p.name for p in cache.iterdir()) == ["measured", "runs", "sources"]
    assert (
        cache / "sources" / service.scheme / "pantry" / "cached" / "a.jsonl"
    ).is_file()
    assert list((cache / "measured").glob("*.json"))
    assert (
        cache / "runs" / service.scheme / "pantry" / "cached" / "run" / "model"
    ).is_dir()
    assert list(home.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "home", "store"]


def test_content_without_a_manifest_is_no_checkpoint_and_is_swept(remote, tmp_path):
    parts.made(tmp_path / "a", 4)
    parts.upload(tmp_path / "a", remote)
    remote.put("checkpoints/step-00000006/model.safetensors", b"half")
    said = []
    assert fetch_run(remote, tmp_path / "b", say=said.append) == 4
    parts.upload(tmp_path / "a", remote)
    assert [n for n in remote.names() if "step-00000006" in n] == []
    assert (tmp_path / "b" / "config.yaml").read_text() == "seed: 1\n"


def test_a_damaged_object_is_named_and_the_one_before_it_used(remote, tmp_path):
    store = parts.made(tmp_path / "a", 2)
    parts.upload(tmp_path / "a", remote)
    parts.made(tmp_path / "a", 4)
    parts.upload(tmp_path / "a", remote)
    damaged = flipped(remote.read("checkpoints/step-00000004/model.safetensors"))
    remote.put("checkpoints/step-00000004/model.safetensors", damaged)
    said = []
    assert fetch_run(remote, tmp_path / "b", say=said.append) == 2
    assert "step-00000004 cannot be used" in said[0]
    assert "model.safetensors is damaged" in said[0]
    assert store.newest_valid().step == 4


def test_a_damaged_object_costs_no_later_checkpoint(remote, tmp_path):
    parts.made(tmp_path / "a", 2)
    parts.upload(tmp_path / "a", remote)
    parts.made(tmp_path / "a", 6)
    parts.upload(tmp_path / "a", remote)
    damaged = flipped(remote.read("checkpoints/step-00000006/model.safetensors"))
    remote.put("checkpoints/step-00000006/model.safetensors", damaged)
    assert fetch_run(remote, tmp_path / "b", say=print) == 2
    for step in (4, 5):
        parts.made(tmp_path / "b", step)
        parts.upload(tmp_path / "b", remote, keep_last=1)
        steps = {name.split("/")[1] for name in remote.names("checkpoints")}
        assert steps == {
            f"step-{step:08d}",
            "step-00000006",
        }  # and the damaged one, as on a disk


def test_a_manifest_that_points_elsewhere_fetches_nothing(remote, tmp_path):
    manifest = {
        "format": 1, "step": 4, "progress": {}, "cursor": {}, "config_sha256": "",
        "data_fingerprint": "", "versions": {}, "settings": {},
        "files": [{"file": "../../../evil", "bytes": 1, "sha256": "0"}],
    }  # fmt: skip
    remote.put("checkpoints/step-00000004/manifest.json", json.dumps(manifest).encode())
    remote.put("evil", b"!")
    with pytest.raises(CheckpointError, match="Only plain names in its folder"):
        fetch_run(remote, tmp_path / "run" / "deep", say=print)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_two_machines_on_one_address_the_second_is_refused(remote):
    with BucketLock(remote, heartbeat=0.05, settle=0.01):
        # As from another machine: nothing there can be asked whether the process lives.
        with (
            pytest.raises(CheckpointError, match="in use by another training process"),
            BucketLock(remote, stale=5.0, settle=0.01),
        ):
            pass
        assert remote.read(LOCK) is not None


def test_a_lock_left_behind_is_taken_over_and_a_lost_one_is_noticed(remote):
    remote.put(LOCK, json.dumps({"id": "x", "host": "gone", "pid": 1}).encode())
    with BucketLock(remote, heartbeat=0.05, stale=0.2, settle=0.01) as lock:
        remote.put(LOCK, json.dumps({"id": "y", "host": "other", "pid": 1}).encode())
        assert lock.lost.wait(10)
    assert json.loads(remote.read(LOCK))["id"] == "y"


def other_machine(remote):
    """Take the lock in `remote` over, as a machine that found it stale."""
    record = {"id": "y", "host": "other", "pid": 1}
    remote.put(LOCK, json.dumps(record).encode())


def test_whose_lock_was_taken_over_uploads_no_end(remote, tmp_path):
    parts.made(tmp_path / "a", 4)
    with BucketLock(remote) as lock:  # which looks again in ten seconds
        with Uploads(tmp_path / "a", remote, lock, keep_last=2) as up:
            pass
        before = {name: remote.read(name) for name in remote.names() if name != LOCK}
        for name in ("end.json", "config.yaml", "evaluation.json", "metrics.jsonl"):
            (tmp_path / "a" / name).write_text("{}\n")
        other_machine(remote)
        with pytest.raises(CheckpointError, match=r"has taken over \S+"):
            up.upload_model()
        assert lock.lost.is_set()
        store = parts.made(tmp_path / "a", 6)
        with Uploads(tmp_path / "a", remote, lock, keep_last=2) as up:
            up.add(store.newest_valid().path)
    assert {
        name: remote.read(name) for name in remote.names() if name != LOCK
    } == before
    assert json.loads(remote.read(LOCK))["id"] == "y"


@pytest.mark.parametrize("service", ["s3"], indirect=True)
@pytest.mark.parametrize("noticed", [True, False])
def test_a_run_that_was_taken_over_ends_by_an_error(
    kitchen, remote, noticed, monkeypatch
):
    def look(uploads):
        uploads._lock.detect_takeover()
        return uploads._lock.lost.is_set()

    if noticed:  # by the next update, as if the lock were renewed that often
        monkeypatch.setattr(Uploads, "is_lost", look)

    class Taken:
        def on_step_end(self, run):
            if run.step == 5:
                other_machine(remote)

    words = [
        f"run_dir={kitchen / f'taken-{noticed}'}",
        f"checkpoint.upload={remote.address}",
    ]
    resolved = load_config(str(kitchen / "run.yaml"), words)
    with pytest.raises(CheckpointError, match=r"has taken over \S+") as caught:
        train(resolved, callbacks=[Taken()])
    assert caught.value.exit_code == 4
    assert "end.json" not in remote.names()
    assert not [name for name in remote.names() if name.startswith("model/")]
    assert not (noticed and (kitchen / "taken-True" / "model").exists())


def test_a_dead_process_of_this_machine_is_not_waited_for(remote):
    words = (
        "from toque.storage.bucket_lock import Owner; print(Owner().record().decode())"
    )
    left = python("-c", words)
    remote.put(LOCK, left.stdout.strip().encode())
    with BucketLock(remote, stale=3600.0, settle=0.01):
        held = json.loads(remote.read(LOCK))
    assert held["id"] != json.loads(left.stdout)["id"]
    assert held["pid"] == os.getpid()


def test_fault_59_a_living_process_of_another_machine_of_this_name_is_never_taken_over(
    remote,
):
    # A process that this machine does not have, on a machine of the same host name: by version
    # 0.1.0's lock and by today's, and the holder renews it every 0.2 s.
    old = {"id": "x", "host": socket.gethostname(), "pid": 4194999, "started": 1.0}
    for record in (old, {**old, "machine": "another boot", "began": 7}):
        remote.put(LOCK, json.dumps(record).encode())
        done = threading.Event()

        def renew(record=record, done=done):
            beat = 0
            while not done.wait(0.2):
                beat += 1
                remote.put(LOCK, json.dumps({**record, "beat": beat}).encode())

        thread = threading.Thread(target=renew)
        thread.start()
        try:
            with (
                pytest.raises(
                    CheckpointError, match="in use by another training process"
                ),
                BucketLock(remote, stale=5.0, settle=0.01),
            ):
                pass
        finally:
            done.set()
            thread.join()
        assert json.loads(remote.read(LOCK))["id"] == "x"


def test_a_damaged_manifest_there_is_passed_over_when_runs_are_compared(
    remote, tmp_path
):
    parts.made(tmp_path / "a", 2, 4)
    parts.upload(tmp_path / "a", remote)
    remote.put("checkpoints/step-00000006/manifest.json", b"{}")
    parts.made(tmp_path / "b", 8)
    assert fetch_run(remote, tmp_path / "b", say=print) is None
    remote.remove(["checkpoints/step-00000004/manifest.json"])
    with pytest.raises(
        CheckpointError, match=r"step-00000006/manifest\.json is not a checkpoint"
    ):
        fetch_run(remote, tmp_path / "b", say=print)


def test_a_line_that_breaks_is_repeated(service, monkeypatch, tmp_path):
    parts.made(tmp_path / "a", 4)
    with proxy.behind(service.port, cut_after=100, cuts=4) as line:
        monkeypatch.setenv(service.variable, f"http://127.0.0.1:{line.port}")
        remote = open_bucket(
            parts.address(service, "tests/broken"), RUNS, deadline=60.0
        )
        up = parts.upload(tmp_path / "a", remote)
        assert line.cuts_left == 0
    assert up.counts.uploaded == 1
    assert up.counts.failed == 0
    monkeypatch.setenv(service.variable, f"http://127.0.0.1:{service.port}")
    assert fetch_run(open_bucket(remote.address, RUNS), tmp_path / "b", say=print) == 4


def test_while_the_store_is_down_a_ring_waits_and_then_goes(
    remote, tmp_path, monkeypatch
):
    store = parts.made(tmp_path / "a", keep_last=1)
    down = threading.Event()
    down.set()
    pipe, put = remote.files.pipe_file, remote.files.put_file

    def refusing(real):
        def ask(*args, **kwargs):
            if down.is_set():
                raise ConnectionResetError("down")
            return real(*args, **kwargs)

        return ask

    with BucketLock(remote) as lock:
        monkeypatch.setattr(remote.files, "pipe_file", refusing(pipe))
        monkeypatch.setattr(remote.files, "put_file", refusing(put))
        with Uploads(tmp_path / "a", remote, lock, keep_last=9) as up:
            for step in range(2, 12, 2):
                up.add(
                    store.save(step, {"model": {"w": ones(9)}}, {"progress": {}}).path
                )
            waiting = sorted(p.name for p in (tmp_path / "a" / "outbox").iterdir())
            assert len(waiting) <= 3  # the ring, and what the thread had begun with
            down.clear()
    assert "checkpoints/step-00000010/manifest.json" in remote.names()
    assert up.counts.dropped >= 2
    assert list((tmp_path / "a" / "outbox").iterdir()) == []


def test_a_bucket_that_is_not_there_is_refused_before_training(kitchen, service, capfd):
    at = f"{service.scheme}://no-such-bucket/a"
    words = [f"run_dir={kitchen / 'nobucket'}", f"checkpoint.upload={at}"]
    assert main(["train", str(kitchen / "run.yaml"), *words]) == 4
    assert (
        "the bucket 'no-such-bucket' or the object does not exist"
        in capfd.readouterr().err.replace("\n", " ")
    )


def test_addresses_that_cannot_be_a_run_are_refused(kitchen, capfd):
    train = ["train", str(kitchen / "run.yaml")]
    for words in (
        ["run_dir=gs://bucket"],
        ["run_dir=https://host/a"],
        ["run_dir=gs://b/a", "checkpoint.upload=gs://b/c"],
        ["checkpoint.upload=/a/folder"],
        ["checkpoint.upload=s3://key:secret@bucket/a"],
    ):
        assert main([*train, *words]) == 2, capfd.readouterr().err


def test_a_best_model_that_cannot_be_read_holds_up_no_checkpoint(remote, tmp_path):
    store = parts.made(tmp_path / "a", 4)
    tensors = store.newest_valid().tensors("model")
    store.save(4, {"model": tensors}, {"progress": {"step": 4}}, metrics={"loss": 1.0})
    (tmp_path / "a" / "best" / "step-00000004" / "model.safetensors").unlink()
    up = parts.upload(tmp_path / "a", remote)
    assert "checkpoints/step-00000004/manifest.json" in remote.names()
    assert (up.counts.uploaded, up.counts.failed) == (1, 1)
    (said,) = up.messages()
    assert "best-step-00000004 is not uploaded." in said
    assert "model.safetensors is missing" in said
    assert list((tmp_path / "a" / "outbox").iterdir()) == []


def test_a_step_is_never_in_the_bucket_without_the_best_models_before_it(
    remote, tmp_path, monkeypatch
):
    """Found by `bench/robustness/kills.py --upload`: same weights, another finished model."""
    store = parts.made(tmp_path / "a", 4, 6)
    tensors = store.newest_valid().tensors("model")
    store.save(4, {"model": tensors}, {"progress": {"step": 4}}, metrics={"loss": 1.0})
    put, manifests = Bucket.put, []

    def watched(folder, name, data, *, new=False):
        manifests.append(name)
        return put(folder, name, data, new=new)

    monkeypatch.setattr(Bucket, "put", watched)
    parts.upload(tmp_path / "a", remote)
    assert [name for name in manifests if name.endswith("manifest.json")] == [
        "best/step-00000004/manifest.json",
        "checkpoints/step-00000006/manifest.json",
    ]
