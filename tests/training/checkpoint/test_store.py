import json
import shutil

import pytest
import torch

from fixtures.damage import flip, no_file_above, truncate
from fixtures.processes import python
from toque.errors import CheckpointError
from toque.training.callbacks import Goal
from toque.training.checkpoint.saved import SHARDED, OtherFormatError, verify_checkpoint
from toque.training.checkpoint.store import CheckpointStore, RunIdentity, SaveError


def tensors(value):
    return {
        "model": {"w": torch.full((40, 3), float(value)), "b": torch.arange(3.0)},
        "optimizer": {"w/exp_avg": torch.full((40, 3), value / 2)},
    }


def state(step):
    return {
        "progress": {"step": step, "epoch": step / 10},
        "cursor": {"epoch": 0, "row": step},
    }


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep_last=3)


def save(store, *steps):
    for step in steps:
        store.save(step, tensors(step), state(step))


def names(folder):
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def rewrite_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_is_saved_is_read_back(tmp_path):
    identity = RunIdentity("c0ffee", "da7a", {"torch": "2.x"})
    store = CheckpointStore(tmp_path / "checkpoints", identity=identity)
    saved = store.save(7, tensors(7), state(7))
    assert saved.path == tmp_path / "checkpoints" / "step-00000007"
    files = ["model.safetensors", "optimizer.safetensors", "state.json"]
    assert names(saved.path) == ["manifest.json", *files]
    found = store.newest_valid()
    assert torch.equal(found.tensors("model")["w"], torch.full((40, 3), 7.0))
    assert found.tensors("optimizer").keys() == {"w/exp_avg"}
    assert found.state() == state(7)
    manifest = json.loads((saved.path / "manifest.json").read_text())
    assert sorted(f["file"] for f in manifest.pop("files")) == files
    assert manifest.pop("self_sha256")
    assert manifest == {
        "format": 1, "step": 7, **state(7), "config_sha256": "c0ffee", "data_fingerprint": "da7a",
        "versions": {"torch": "2.x"}, "settings": {}, "metrics": {},
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=r"has no ema\.safetensors"):
        found.tensors("ema")


def test_the_newest_are_kept(store):
    assert store.newest_valid() is None
    store.folder.mkdir()
    assert store.newest_valid() is None
    save(store, 2, 4, 6, 8, 10)
    assert names(store.folder) == ["step-00000006", "step-00000008", "step-00000010"]


def listing(name):
    return [{"file": name, "bytes": 1, "sha256": "0"}]


DAMAGE = {
    "a flipped bit": lambda f: flip(f / "model.safetensors"),
    "a flipped bit in a header": lambda f: flip(f / "optimizer.safetensors", 12),
    "a flipped bit in the state": lambda f: flip(f / "state.json", 3),
    "a truncated file": lambda f: truncate(f / "model.safetensors"),
    "an empty file": lambda f: (f / "model.safetensors").write_bytes(b""),
    "a missing file": lambda f: (f / "optimizer.safetensors").unlink(),
    "a folder in its place": lambda f: (
        (f / "state.json").unlink(),
        (f / "state.json").mkdir(),
    ),
    "a missing manifest": lambda f: (f / "manifest.json").unlink(),
    "an empty manifest": lambda f: (f / "manifest.json").write_bytes(b""),
    "a truncated manifest": lambda f: [truncate(f / "manifest.json") for _ in range(2)],
    "a manifest that is no JSON": lambda f: (f / "manifest.json").write_bytes(
        b"\xff\x00{"
    ),
    "a manifest that is no object": lambda f: (f / "manifest.json").write_bytes(b"[1]"),
    "swapped files": lambda f: (
        (f / "model.safetensors").rename(f / "x"),
        (f / "optimizer.safetensors").rename(f / "model.safetensors"),
        (f / "x").rename(f / "optimizer.safetensors"),
    ),
    "another step's manifest": lambda f: rewrite_manifest(f, step=5),
    "a file listed twice": lambda f: rewrite_manifest(
        f, files=json.loads((f / "manifest.json").read_text())["files"] * 2
    ),
    "a file outside": lambda f: rewrite_manifest(
        f, files=listing("../step-00000002/state.json")
    ),
    "an absolute name": lambda f: rewrite_manifest(f, files=listing("/etc/passwd")),
    "a link to elsewhere": lambda f: (
        shutil.copy(f / "state.json", f.parent / "elsewhere"),
        (f / "state.json").unlink(),
        (f / "state.json").symlink_to(f.parent / "elsewhere"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_is_skipped_with_the_reason(store, damage):
    save(store, 2, 4)
    DAMAGE[damage](store.folder / "step-00000004")
    found = store.newest_valid()
    assert found.step == 2
    (skipped,) = found.skipped
    assert skipped[0] == "step-00000004"
    assert "step-00000004" in skipped[1]
    with pytest.raises(CheckpointError):
        verify_checkpoint(store.folder / "step-00000004")


def test_a_file_too_many_is_never_read(store):
    save(store, 4)
    folder = store.folder / "step-00000004"
    (folder / "model.bin").write_bytes(b"\x80pickle")
    shutil.copy(folder / "model.safetensors", folder / "more.safetensors")
    found = store.newest_valid()
    assert found.step == 4
    with pytest.raises(CheckpointError, match=r"has no more\.safetensors"):
        found.tensors("more")
    with pytest.raises(CheckpointError, match=r"has no model\.bin\.safetensors"):
        found.tensors("model.bin")


def test_when_none_can_be_used_nothing_starts_from_zero(store):
    save(store, 2, 4)
    for name in names(store.folder):
        truncate(store.folder / name / "state.json")
    with pytest.raises(CheckpointError, match="None of the 2 checkpoints") as error:
        store.newest_valid()
    assert str(error.value).count("state.json has") == 2


def test_a_newer_format_is_refused_and_not_skipped(store):
    save(store, 2, 4)
    rewrite_manifest(store.folder / "step-00000004", format=SHARDED + 1)
    with pytest.raises(
        OtherFormatError,
        match=f"format {SHARDED + 1}, but this Toque reads formats up to",
    ):
        store.newest_valid()


def test_a_damaged_one_of_the_same_step_is_replaced(store):
    save(store, 2, 4)
    truncate(store.folder / "step-00000004" / "state.json")
    save(store, 3)
    assert store.newest_valid().step == 3
    assert names(store.folder) == ["step-00000002", "step-00000003", "step-00000004"]
    save(store, 4)
    assert store.newest_valid().step == 4
    assert store.newest_valid().skipped == ()


def test_a_full_disk_is_refused_before_it_is_full(store, monkeypatch):
    save(store, 2)
    usage = shutil.disk_usage(store.folder)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(SaveError, match=r"Cannot save step 4.* needed and 100 are"):
        save(store, 4)
    assert names(store.folder) == ["step-00000002"]


def test_a_file_system_that_refuses_mid_file_harms_nothing(store):
    save(store, 2)
    big = {"model": {"w": torch.zeros(100_000)}}
    with no_file_above(50_000), pytest.raises(SaveError, match="File too large"):
        store.save(4, big, state(4))
    assert names(store.folder) == ["step-00000002"]
    store.save(4, big, state(4))
    assert store.newest_valid().step == 4


def test_an_old_checkpoint_that_cannot_be_deleted_stops_nothing(store):
    def after(stage):
        if stage.endswith("away"):
            raise PermissionError(13, "Permission denied")

    store.keep_last, store.after = 1, after
    save(store, 2, 4)
    assert store.newest_valid().step == 4


def keep_best(store, step, loss, **others):
    metrics = {"loss": loss, **others}
    if not store.is_among_best(step, metrics):
        return False
    store.save(
        step, {"model": tensors(step)["model"]}, {"progress": {}}, metrics=metrics
    )
    return True


def test_a_best_model_of_other_evaluations_is_not_compared(store):
    def evaluated(**settings):
        return RunIdentity(
            settings={"evaluation": {"max_examples": 512, "texts": 16} | settings}
        )

    store.identity = evaluated()
    assert keep_best(store, 2, 4.0)
    store.identity = evaluated(max_examples=1)
    assert store.best() is None
    assert keep_best(store, 4, 5.0)
    assert store.best().step == 4
    store.identity = evaluated(texts=0)  # on which the loss does not depend
    assert store.best().step == 2


def test_the_best_are_those_with_the_lowest_loss_and_a_damaged_one_is_passed_over(
    store,
):
    store.keep_best = 2
    losses = [
        (1, 5.0),
        (2, 4.0),
        (3, 4.5),
        (4, 9.0),
        (5, 4.0),
        (6, float("nan")),
        (5, 4.0),
    ]
    kept = [keep_best(store, step, loss) for step, loss in losses]
    assert kept == [
        True,
        True,
        True,
        False,
        True,
        False,
        True,
    ]  # the last met after a resume
    assert names(store.best_folder) == ["step-00000002", "step-00000005"]
    assert store.best().step == 2  # of equals, the earlier
    assert names(store.best().path) == [
        "manifest.json",
        "model.safetensors",
        "state.json",
    ]
    flip(store.best().path / "model.safetensors")
    assert store.best().step == 5


KILLS = """
import os, shutil, signal, sys
from pathlib import Path
import torch
from toque.training.checkpoint.store import CheckpointStore

folder = Path(sys.argv[1])

def save(step, value, after=lambda stage: None):
    store = CheckpointStore(folder, keep_last=1, after=after)
    tensors = {"model": {"w": torch.full((50,), float(value))}}
    store.save(step, tensors, {"progress": {"step": step, "value": value}})

class Kill:
    def __init__(self, at):
        self.at, self.count = at, 0
    def __call__(self, stage):
        self.count += 1
        if self.count == self.at:
            print(stage, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

save(1, 1)
before = (1, 1)
for step, value in ((2, 2), (2, 3)):           # a new step, then the same step once more
    for at in range(1, 100):
        child = os.fork()
        if child == 0:
            save(step, value, Kill(at))
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        for swept in (False, True):
            store = CheckpointStore(folder, keep_last=1)
            if swept:
                with store.sweeping():
                    pass
            found = store.newest_valid()
            progress = found.manifest.progress
            seen = progress["step"], progress["value"]
            assert found.skipped == (), found.skipped
            assert seen in (before, (step, value)), (seen, at)
            assert torch.equal(found.tensors("model")["w"], torch.full((50,), float(seen[1])))
        assert not list(folder.glob("temp-*")), at
        if seen == (step, value) and not killed:
            break
        if seen == (step, value):  # back, so that the later moments are met in that state too
            shutil.rmtree(folder)
            save(*before)
    assert not killed
    before = (step, value)
print("all moments passed")
"""


def test_killed_after_every_system_call_the_old_or_the_new_checkpoint_stands(tmp_path):
    # A fresh process forks a child for each moment: forking this one, with threads, is unsafe.
    done = python("-c", KILLS, tmp_path / "checkpoints")
    assert done.returncode == 0, done.stderr
    stages = done.stdout.split("\n")
    assert stages[-2] == "all moments passed"
    for stage in (
        "write model.safetensors",
        "fsync manifest.json",
        "rename",
        "set aside",
    ):
        assert stage in stages
    assert "remove step-00000001" in stages


def test_a_manifest_is_held_to_the_hash_of_itself(store):
    save(store, 4)
    path = store.folder / "step-00000004" / "manifest.json"
    text = path.read_bytes()
    for name in (b"step", b"cursor", b"config_sha256", b"versions", b"self_sha256"):
        path.write_bytes(text.replace(name, name.upper(), 1))
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            verify_checkpoint(store.folder / "step-00000004")
    path.write_bytes(text.replace(b'"row": 4', b'"row": 5'))
    with pytest.raises(CheckpointError, match="does not match its self_sha256"):
        verify_checkpoint(store.folder / "step-00000004")


def test_the_best_may_go_by_a_metric_that_rises_and_older_ones_lack_it_last(store):
    store.keep_best = 2
    keep_best(store, 1, 1.0)
    store.best_by = Goal("bleu", rises=True)
    for step, bleu in ((2, 5.0), (3, 7.0), (4, 6.0), (5, 1.0), (6, float("nan"))):
        keep_best(store, step, 9.0, bleu=bleu)
    assert names(store.best_folder) == ["step-00000003", "step-00000004"]
    assert store.best().step == 3
