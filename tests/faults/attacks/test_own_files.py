"""What else lies in a run's folder, or in its bucket, stays where it is."""

import json
import os
from contextlib import nullcontext

import pytest

from fixtures import remote_parts as parts
from toque.config import load_config
from toque.errors import CheckpointError
from toque.runs.places import FolderPlace
from toque.runs.run_files import is_run_file
from toque.storage import atomic
from toque.storage.bucket_lock import BucketLock
from toque.training.checkpoint.fetch import MODEL_FILES, fetch_run
from toque.training.checkpoint.upload import Uploads
from toque.workflows.train import train

SECRET = b"-----BEGIN PRIVATE KEY-----"
LARGE = b"x" * ((16 << 20) + 1)


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "id_ed25519"
    path.write_bytes(SECRET)
    return path


def sent(remote):
    """All that the bucket holds, in one."""
    return b"".join(remote.read(name) for name in remote.names())


def test_only_a_runs_own_files_leave_its_folder(remote, tmp_path, key):
    run = tmp_path / "run"
    parts.made(run, 2)
    for name in (
        "credentials.txt",
        "core",
        "model/credentials.txt",
        "model/config.json",
    ):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(b"{}" if name.endswith("config.json") else SECRET)
    (run / "report.html").write_text("<script>")
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "training.log").symlink_to(key)
    with BucketLock(remote) as lock, Uploads(run, remote, lock, keep_last=2) as up:
        # Made after the start, which refuses links.
        (run / "samples.jsonl").symlink_to(key)
        os.mkfifo(run / "evaluation.json")
        (run / "model" / "README.md").symlink_to(key)
        up.upload_model()
    names = remote.names()
    assert [name for name in names if "step" not in name] == [
        "config.yaml", "metrics.jsonl", "model/config.json",
    ]  # fmt: skip
    assert "checkpoints/step-00000002/manifest.json" in names
    assert SECRET not in sent(remote)
    said = " ".join(up.messages())
    assert "['core', 'credentials.txt', 'report.html']" in said
    assert "samples.jsonl is not uploaded: it is a symbolic link" in said
    assert "evaluation.json is not uploaded: it is not a regular file" in said


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_link_in_a_checkpoint_is_never_sent(
    hard_links, remote, tmp_path, key, monkeypatch
):
    def refuse(*_):
        raise OSError("no hard links here")

    if not hard_links:
        monkeypatch.setattr(atomic.os, "link", refuse)
    run = tmp_path / "run"
    parts.made(run, 2)
    weights = run / "checkpoints" / "step-00000002" / "model.safetensors"
    weights.unlink()
    weights.symlink_to(key)
    up = parts.upload(run, remote)
    assert up.counts.failed
    assert not up.counts.uploaded
    assert "model.safetensors" not in {
        name.rpartition("/")[2] for name in remote.names()
    }
    assert SECRET not in sent(remote)


def test_what_grows_is_sent_as_it_was_when_it_was_opened(remote, tmp_path, monkeypatch):
    run = tmp_path / "run"
    parts.made(run, 2)
    log, send = run / "metrics.jsonl", remote.files.put_file
    log.write_text('{"event": "start"}\n')

    def growing(*args, **named):
        with log.open("a") as file:
            file.write('{"event": "step"}\n')
        return send(*args, **named)

    monkeypatch.setattr(remote.files, "put_file", growing)
    assert parts.upload(run, remote).counts.failed == 0
    lines = remote.read("metrics.jsonl").decode().splitlines()
    assert json.loads(lines[0]) == {"event": "start"}
    assert 1 <= len(lines) < len(log.read_text().splitlines())


def test_only_a_runs_own_files_come_from_a_bucket(remote, tmp_path):
    parts.made(tmp_path / "there", 2)
    parts.upload(tmp_path / "there", remote)
    for name in (
        "report.html",
        "torch.py",
        "resources-rank1.json.py",
        ".bashrc",
        "toque/x.py",
    ):
        remote.put(name, b"import os")
    remote.put("resources-rank1.json", b"{}")
    said = []
    assert fetch_run(remote, tmp_path / "here", say=said.append) == 2
    come = {path.name for path in (tmp_path / "here").iterdir()}
    assert come == {"checkpoints", "config.yaml", "resources-rank1.json"}
    assert (
        "['.bashrc', 'report.html', 'resources-rank1.json.py', 'torch.py']"
        in " ".join(said)
    )


@pytest.mark.parametrize("service", ["s3"], indirect=True)
@pytest.mark.parametrize(
    "name", ["config.yaml", "checkpoints/step-00000002/manifest.json", "lock.json"]
)
def test_a_small_file_that_is_not_small_is_not_fetched(name, remote, tmp_path):
    parts.made(tmp_path / "there", 2)
    parts.upload(tmp_path / "there", remote)
    remote.put(name, LARGE)
    with (
        pytest.raises(
            CheckpointError, match=rf"{name} has 16,777,217 bytes, but at most"
        ),
        BucketLock(remote) if name == "lock.json" else nullcontext(),
    ):
        fetch_run(remote, tmp_path / "here", say=print)
    assert [path for path in (tmp_path / "here").rglob("*") if path.is_file()] == []


def test_an_object_larger_than_its_manifest_says_is_not_fetched(
    remote, tmp_path, monkeypatch
):
    parts.made(tmp_path / "there", 2)
    parts.upload(tmp_path / "there", remote)
    parts.made(tmp_path / "there", 4)
    parts.upload(tmp_path / "there", remote)
    large = "checkpoints/step-00000004/model.safetensors"
    remote.put(large, remote.read(large) + b"x")
    fetched, get = [], remote.files.get_file

    def noting(key, *rest, **named):
        fetched.append(key)
        return get(key, *rest, **named)

    monkeypatch.setattr(remote.files, "get_file", noting)
    said = []
    assert fetch_run(remote, tmp_path / "here", say=said.append) == 2
    assert "step-00000004 cannot be used" in said[0]
    assert not [key for key in fetched if key.endswith(large)]


def test_every_file_that_a_run_writes_is_one_of_its_own(kitchen):
    words = [
        f"run_dir={kitchen / 'own'}",
        "train.stop_after=3 steps",
        "evaluation.generate=2",
    ]
    run = train(load_config(str(kitchen / "run.yaml"), words)).folder
    written = {path.name for path in run.iterdir() if path.is_file()}
    assert {"config.yaml", "metrics.jsonl", "training.log", "end.json"} <= written
    assert [
        name for name in written if not (is_run_file(name) or name.startswith("."))
    ] == []
    model = {
        f.relative_to(run).as_posix() for f in (run / "model").rglob("*") if f.is_file()
    }
    assert "model/model.safetensors" in model
    assert model <= set(MODEL_FILES)
    # What `toque watch` and `toque compare` read, of a run in a bucket too.
    assert FolderPlace(run).look("samples.jsonl") is not None
