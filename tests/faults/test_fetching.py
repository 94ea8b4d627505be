"""Fetching a run over one that lies here: aside, verified, and only then in its place."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from fixtures import remote_parts as parts
from fixtures.damage import flipped
from toque.errors import CheckpointError
from toque.storage.bucket import BucketError, Retry
from toque.training.checkpoint.fetch import fetch_run
from toque.training.checkpoint.store import CheckpointStore


def weights(folder):
    return load_file(folder / "model.safetensors")["w"]


def with_best(folder, *, loss, value, step=2):
    """A run of a few steps with a best model."""
    store = parts.made(folder, step)
    model = {"w": torch.full((300,), value)}
    store.save(
        step, {"model": model}, {"progress": {"step": step}}, metrics={"loss": loss}
    )
    return store


def test_fault_60_a_damaged_best_model_there_leaves_the_one_here(remote, tmp_path):
    with_best(tmp_path / "here", loss=1.0, value=7.0)
    with_best(tmp_path / "there", loss=1.0, value=8.0)
    parts.made(tmp_path / "there", 4)
    parts.upload(tmp_path / "there", remote)
    damaged = flipped(remote.read("best/step-00000002/model.safetensors"))
    remote.put("best/step-00000002/model.safetensors", damaged)
    said = []
    assert fetch_run(remote, tmp_path / "here", say=said.append) == 4
    assert "best/step-00000002 cannot be used; the local copy stays" in said[0]
    assert CheckpointStore(tmp_path / "here" / "checkpoints").best().step == 2
    assert float(weights(tmp_path / "here" / "best" / "step-00000002")[0]) == 7.0


def test_fault_60_a_line_that_breaks_leaves_all_as_it_was_and_the_next_start_fetches_all(
    remote, tmp_path, monkeypatch
):
    here = with_best(tmp_path / "here", loss=2.0, value=7.0)
    (tmp_path / "here" / "config.yaml").write_text("mine\n")
    with_best(tmp_path / "there", loss=1.0, value=8.0, step=4)
    parts.upload(tmp_path / "there", remote)
    whole = remote.files.get_file

    def breaking(key, path):
        if "/best/" in key and key.endswith("model.safetensors"):
            raise ConnectionResetError("the line broke")
        return whole(key, path)

    broken = dataclasses.replace(remote, retry=Retry(0.0))
    monkeypatch.setattr(remote.files, "get_file", breaking)
    with pytest.raises(BucketError, match="the line broke"):
        fetch_run(broken, tmp_path / "here", say=print)
    assert here.newest_valid().step == 2
    assert here.best().step == 2
    assert (tmp_path / "here" / "config.yaml").read_text() == "mine\n"
    monkeypatch.setattr(remote.files, "get_file", whole)
    assert fetch_run(remote, tmp_path / "here", say=print) == 4
    assert (here.newest_valid().step, here.best().step) == (4, 4)
    assert (tmp_path / "here" / "config.yaml").read_text() == "seed: 1\n"


def test_fault_60_a_damaged_checkpoint_here_is_fetched_again(remote, tmp_path):
    store = parts.made(tmp_path / "a", 2, 4)
    parts.upload(tmp_path / "a", remote)
    path = store.folder / "step-00000004" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert fetch_run(remote, tmp_path / "a", say=print) == 4
    assert store.newest_valid().step == 4


def test_fault_60_a_run_further_on_that_is_another_one_replaces_nothing(
    remote, tmp_path
):
    parts.made(tmp_path / "there", 8)
    parts.upload(tmp_path / "there", remote)
    store = parts.made(tmp_path / "here")
    store.identity = type(store.identity)(data_fingerprint="another")
    store.save(2, {}, {"progress": {"step": 2}})
    (tmp_path / "here" / "config.yaml").write_text("mine\n")
    with pytest.raises(CheckpointError, match="a run with different training data"):
        fetch_run(remote, tmp_path / "here", say=print)
    assert (tmp_path / "here" / "config.yaml").read_text() == "mine\n"
    assert store.newest_valid().step == 2
