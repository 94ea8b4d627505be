"""Disks that are full, out of names or read-only: real ones of a few kilobytes.

A child process in a namespace of its own mounts them (small_disks.py), once for all tests here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toque.data.store.store_manifest import read_manifest

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(kitchen, tmp_path_factory):
    work = tmp_path_factory.mktemp("disks")
    probe = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", str(work)]
    try:
        tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(
            "no unshare here; the tests with a limit on file sizes hold the same"
        )
    if tried.returncode:
        pytest.skip(f"the kernel refuses a tmpfs of our own: {tried.stderr.strip()}")
    runs = HERE.parent / "fixtures" / "runs.py"
    script = [
        str(HERE / "small_disks.py"),
        str(runs),
        str(work),
        str(kitchen / "run.yaml"),
    ]
    done = subprocess.run(
        ["unshare", "-Urm", sys.executable, *script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


def trained_on(found, name):
    """The facts of a run that must have computed what an undisturbed one computes."""
    facts = found[name]
    assert "crashed" not in facts, facts["crashed"]
    assert facts["losses"] == found["calm"]
    assert facts["reason"] == "finished"
    return facts


def test_fault_08_disk_full_while_saving(found):
    facts = trained_on(found, "full")
    assert facts["failed"] >= 2  # at steps 6, 8 and 10
    assert facts["newest"] == 18
    assert any("Cannot save step" in w and "are intact" in w for w in facts["warnings"])


def test_fault_09_disk_full_while_writing_metrics(found):
    facts = trained_on(found, "full")
    assert facts["dropped"] >= 1
    # What was written is whole lines, and writing goes on once there is room.
    assert facts["logged"][0] == 1
    assert facts["logged"][-1] == 18
    assert len(facts["logged"]) < 18


def test_fault_10_disk_full_while_preparing(found, kitchen):
    facts = found["preparing"]
    assert "crashed" not in facts, facts["crashed"]
    assert facts["first"]["code"] == 3
    assert "is full" in facts["first"]["said"]
    assert "run the same command again" in facts["first"]["said"]
    assert facts["again"]["code"] == 0, facts["again"]["said"]
    whole = read_manifest(kitchen / "store")
    assert facts["hashes"] == [entry.sha256 for entry in whole.shards]


def test_fault_11_a_read_only_folder_is_refused_before_the_model_is_built(found):
    facts = found["refused"]
    assert "crashed" not in facts, facts["crashed"]
    assert facts["code"] == 4
    assert "Cannot write" in facts["said"]
    assert "M parameters" not in facts["said"]


def test_fault_12_no_names_left_on_the_disk(found):
    facts = trained_on(found, "no_names")
    assert facts["failed"] >= 2
    assert facts["newest"] == 18
