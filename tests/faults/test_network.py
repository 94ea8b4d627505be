"""Faults of the line to a bucket, brought about by a proxy before a real service."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fixtures import proxy
from fixtures import remote_parts as parts
from fixtures.proxy import UNAVAILABLE
from toque.errors import CheckpointError
from toque.storage.bucket import RUNS, BucketError, open_bucket
from toque.storage.bucket_lock import BucketLock
from toque.training.checkpoint.fetch import fetch_run
from toque.training.checkpoint.upload import Uploads

pytestmark = [
    pytest.mark.parametrize(
        "service", ["s3", pytest.param("gs", marks=pytest.mark.slow)], indirect=True
    ),
]
STEP = "checkpoints/step-00000004"


@pytest.fixture
def line(service, monkeypatch, request):
    """`line(*faults)`: a folder of a bucket at the end of a line with these faults."""
    lines = []

    def open_line(*faults, deadline=20.0):
        lines.append(proxy.FaultProxy(service.port, *faults))
        # Read when the first request is made, so it stays until the next line is opened.
        monkeypatch.setenv(service.variable, f"http://127.0.0.1:{lines[-1].port}")
        name = parts.address(service, f"lines/{request.node.name}")
        return open_bucket(name, RUNS, deadline=deadline)

    yield open_line
    for opened in lines:
        opened.close()


def fetched(remote, folder):
    """The step that an empty machine gets from the bucket."""
    return fetch_run(remote, folder, say=print)


UPLOAD = """
import os, sys
from pathlib import Path
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
from toque.storage import bucket, bucket_lock
bucket.FIRST_WAIT, bucket_lock._SETTLE = 0.01, 0.01
from toque.storage.bucket import RUNS, open_bucket
from toque.storage.bucket_lock import BucketLock
from toque.training.checkpoint.upload import Uploads

remote = open_bucket(sys.argv[1], RUNS, deadline=20.0)
with BucketLock(remote, settle=0.01) as lock:
    with Uploads(Path(sys.argv[2]), remote, lock, keep_last=2):
        pass
"""


def uploading(service, remote, run, *faults):
    """A process that uploads `run` behind a line; the faults may kill it."""
    line = proxy.FaultProxy(service.port, *faults)
    environment = os.environ | {
        service.variable: f"http://127.0.0.1:{line.port}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return line, subprocess.Popen(
        [sys.executable, "-c", UPLOAD, remote.address, str(run)], env=environment
    )


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["model.safetensors", "state.json", "config.yaml"])
def test_fault_03_killed_while_uploading_leaves_no_checkpoint_there(
    service, remote, tmp_path, ending
):
    parts.made(tmp_path / "a", 4)
    lives = []
    fault = proxy.Fault(
        proxy.writes(ending), then=lambda: lives[0].send_signal(signal.SIGKILL)
    )
    line, process = uploading(service, remote, tmp_path / "a", fault)
    lives.append(process)
    assert process.wait(60) == -signal.SIGKILL
    line.close()
    assert f"{STEP}/manifest.json" not in remote.names()
    assert fetched(remote, tmp_path / "b") is None
    parts.upload(tmp_path / "a", remote)
    assert fetched(remote, tmp_path / "b") == 4


@pytest.mark.slow
def test_fault_04_killed_between_the_manifest_and_our_own_books(
    service, remote, tmp_path
):
    parts.made(tmp_path / "a", 4)
    lives = []
    fault = proxy.Fault(
        proxy.writes(f"{STEP}/manifest.json"),
        then=lambda: lives[0].send_signal(signal.SIGKILL),
    )
    line, process = uploading(service, remote, tmp_path / "a", fault)
    lives.append(process)
    assert process.wait(60) == -signal.SIGKILL
    line.close()
    waiting = tmp_path / "a" / "outbox" / "checkpoints-step-00000004"
    assert waiting.exists()  # here it is not known to have arrived
    assert fetched(remote, tmp_path / "b") == 4  # there it is a checkpoint
    before = remote.read(f"{STEP}/manifest.json")
    again = parts.upload(tmp_path / "a", remote)
    assert not waiting.exists()
    assert again.counts.failed == 0
    assert remote.read(f"{STEP}/manifest.json") == before


MODEL, MANIFEST = f"{STEP}/model.safetensors", f"{STEP}/manifest.json"


@pytest.mark.parametrize(
    ("ending", "times", "what"),
    [
        (MODEL, 2, {"answer": UNAVAILABLE}),
        (MANIFEST, 2, {"answer": UNAVAILABLE}),
        (MODEL, 1, {"damage": True}),
        (MANIFEST, 1, {"lose_answer": True}),
        pytest.param(MODEL, 1, {"lose_answer": True}, marks=pytest.mark.slow),
    ],
    ids=["busy", "busy-at-the-end", "damaged", "unanswered-at-the-end", "unanswered"],
)
def test_faults_31_and_37_a_write_that_is_refused_damaged_or_unanswered_is_repeated(
    line, tmp_path, ending, times, what
):
    parts.made(tmp_path / "a", 4)
    fault = proxy.Fault(proxy.writes(ending), times, **what)
    up = parts.upload(tmp_path / "a", line(fault))
    assert fault.struck == times
    assert (up.counts.uploaded, up.counts.failed) == (1, 0)
    assert fetched(line(), tmp_path / "b") == 4


@pytest.mark.slow
def test_fault_31_training_is_not_held_up_by_a_store_that_hangs(line, tmp_path):
    store = parts.made(tmp_path / "a", 4)
    fault = proxy.Fault(proxy.writes(f"{STEP}/model.safetensors"), stall=2.0)
    remote = line(fault)
    with (
        BucketLock(remote) as lock,
        Uploads(tmp_path / "a", remote, lock, keep_last=2) as up,
    ):
        began = time.monotonic()
        for step in (6, 8):
            saved = store.save(step, {}, {"progress": {"step": step}})
            up.add(saved.path)
        handed_over = time.monotonic() - began
        assert fault.struck == 0 or up.counts.uploaded == 0
    assert handed_over < fault.stall
    assert fetched(remote, tmp_path / "b") == 8


@pytest.mark.slow
def test_fault_35_rights_that_end_while_training_keep_what_is_here(
    service, line, tmp_path
):
    parts.made(tmp_path / "a", 4)
    fault = proxy.Fault(
        proxy.writes(f"{STEP}/model.safetensors"), 99, answer=proxy.FORBIDDEN
    )
    up = parts.upload(tmp_path / "a", line(fault))
    assert (up.counts.uploaded, up.counts.failed) == (0, 1)
    denied = "the credentials are wrong, expired"
    if service.scheme == "gs":  # the emulator is used without any
        denied = "no credentials are set"
    assert denied in " ".join(up.messages())
    assert (
        tmp_path / "a" / "outbox" / "checkpoints-step-00000004" / "manifest.json"
    ).exists()
    again = parts.upload(tmp_path / "a", line())  # renewed
    assert again.counts.uploaded == 1


def test_fault_36_two_that_take_one_place_at_once(service, line):
    if service.scheme == "gs":
        pytest.skip("the emulator of GCS knows no preconditions")
    first, second = line(), line()
    assert first.put("lock.json", b"mine", new=True)
    assert not second.put("lock.json", b"yours", new=True)
    assert first.read("lock.json") == b"mine"


def test_fault_37_a_lost_answer_to_new_is_ours_and_not_anothers(line):
    fault = proxy.Fault(proxy.writes("lock.json"), lose_answer=True)
    assert line(fault).put("lock.json", b"mine", new=True)
    assert fault.struck == 1


@pytest.mark.slow  # the libraries' own patience comes before ours
def test_fault_33_a_store_that_stays_away_ends_in_words(line):
    remote = line(proxy.Fault(lambda *_: True, 10**6, answer=UNAVAILABLE), deadline=0.5)
    with pytest.raises(
        BucketError, match="the service did not respond correctly"
    ) as caught:
        remote.put("a", b"1")
    assert "The files on this machine are intact" in str(caught.value)
    assert isinstance(caught.value, CheckpointError)
