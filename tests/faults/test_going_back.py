"""Going back to a named checkpoint: the same bits again, and nothing is lost of what was newer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures import remote_parts as parts
from toque.cli import main
from toque.errors import CheckpointError
from toque.runs.history import read_metrics
from toque.storage.atomic import sha256_of
from toque.training.callbacks import Callbacks
from toque.training.checkpoint.fetch import fetch_run, fetch_step
from toque.training.checkpoint.saved import verify_checkpoint
from toque.training.checkpoint.saver import CheckpointSaver
from toque.training.distributed.collectives import Ranks
from toque.units import Progress
from toque.workflows.export import export
from toque.workflows.inference.open_model import open_model
from toque.workflows.results import TrainedRun
from toque.workflows.run_folder.continuation import parse_step
from toque.workflows.run_folder.set_aside import set_aside

LAST = "checkpoints/step-00000012"
UNDONE = ("end.json", "evaluation.json", "scores_by_text.json", "model/")  # of an end


def trained(kitchen: Path, run: Path, *words: str) -> int:
    settings = ("train.keep_last=4", "train.optimisations.background_saves=false")
    return main(
        ["train", str(kitchen / "run.yaml"), f"run_dir={run}", *settings, *words]
    )


@pytest.fixture
def again(
    kitchen: Path, whole_run: Path, tmp_path: Path, capfd: Any
) -> Callable[..., Any]:
    """Train once more in a copy of a whole run; the exit code, and what was said."""
    shutil.copytree(whole_run, tmp_path / "run")

    def train(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        code = trained(kitchen, tmp_path / "run", *words)
        return code, "".join(capfd.readouterr())

    return train


def tree(folder: Path) -> dict[str, str]:
    """Every file with its hash, locks and logs aside."""
    return {
        str(path.relative_to(folder)): sha256_of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not path.name.startswith(".")
        and path.name != "training.log"
    }


def end_of(run: Path) -> list[str]:
    """Hashes of the last weights, of the optimizer and of the finished model."""
    files = ("model.safetensors", "optimizer.safetensors")
    return [
        *(sha256_of(run / LAST / name) for name in files),
        sha256_of(run / "model" / "model.safetensors"),
    ]


def test_going_on_from_an_older_one_makes_the_same_bits(again, whole_run, tmp_path):
    run = tmp_path / "run"
    before = tree(run)
    code, said = again("--resume", "step-00000008")
    assert code == 0
    assert end_of(run) == end_of(whole_run)
    (aside,) = (path for path in (run / "set-aside").iterdir() if path.is_dir())
    newer = ("step-00000010", "step-00000012", *UNDONE)
    assert tree(aside) == {
        n: h for n, h in before.items() if any(name in n for name in newer)
    }
    told = [line for line in said.splitlines() if "were moved to" in line]
    assert len(told) == 1
    assert "continuing from step-00000008" in told[0]
    assert "checkpoints/step-00000012, checkpoints/step-00000010" in told[0]
    steps = [
        e["step"] for e in read_metrics(run / "metrics.jsonl") if e["event"] == "step"
    ]
    assert steps == list(range(1, 13))
    assert "resume" not in (run / "config.yaml").read_text()


AT_NINE = """
import os, signal

class AtNine:
    def on_step_end(self, run):
        if run.step == 9:
            os.kill(os.getpid(), signal.SIGTERM)
"""


def test_the_undone_model_and_its_scores_are_not_those_of_the_run_any_more(
    again, tmp_path, monkeypatch
):
    (tmp_path / "at_nine.py").write_text(AT_NINE)
    monkeypatch.syspath_prepend(tmp_path)
    run = TrainedRun(tmp_path / "run", 12, "finished")
    assert run.metrics
    code, said = again("--resume", "8", "observe.callbacks=[at_nine:AtNine]")
    assert (code, "saved at step 10" in said) == (75, True)
    assert not [name for name in UNDONE if (run.folder / name).exists()]
    assert TrainedRun(run.folder, 10, "interrupted").metrics == {}
    assert open_model(run.folder).step == 10
    with pytest.raises(CheckpointError, match="has no finished model yet"):
        export(run.folder, tmp_path / "exported")


def test_the_newest_may_be_named_and_nothing_is_moved(again, tmp_path):
    code, said = again("--resume", "step-00000012")
    assert code == 0
    assert "continuing from step-00000012, the newest checkpoint" in said
    assert [p.name for p in (tmp_path / "run" / "set-aside").iterdir()] == [
        "resumed.json"
    ]


def test_what_is_not_there_damaged_or_of_other_settings_is_refused_and_nothing_moved(
    again, tmp_path
):
    file = tmp_path / "run" / "checkpoints" / "step-00000006" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    before = tree(tmp_path / "run")
    there = "step-00000006, step-00000008, step-00000010, step-00000012"
    for words, told in (
        (["step-00000007"], ("The checkpoint 'step-00000007' is not in", there)),
        (
            ["../best/step-00000010"],
            ("The checkpoint '../best/step-00000010' is not in", there),
        ),
        (["6"], ("optimizer.safetensors is damaged",)),
        (["8", "optim.peak_lr=0.5"], ("optim.peak_lr: 0.01 -> 0.5",)),
    ):
        code, said = again("--resume", *words)
        assert code == 4
        assert all(part in " ".join(said.split()) for part in told), said
        assert tree(tmp_path / "run") == before


def test_a_run_that_has_not_begun_has_nothing_to_go_back_to(kitchen, tmp_path, capfd):
    assert trained(kitchen, tmp_path / "new", "--resume", "8") == 4
    assert "Checkpoints: none yet" in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "new").exists()


def test_it_goes_with_neither_a_new_run_nor_a_bucket_left_alone(again, whole_run):
    code, said = again("--resume", "8", "--from", str(whole_run))
    assert code == 2
    assert "--resume and --from cannot be combined" in " ".join(said.split())
    code, said = again(
        "--resume", "8", "--no-upload", "checkpoint.upload=s3://pantry/runs/x"
    )
    assert code == 2
    assert "newer checkpoints must be set aside in the bucket" in " ".join(said.split())


def test_a_launchers_restart_does_not_go_back_twice(again, tmp_path, monkeypatch):
    """What the command has saved before its restart is its own work."""
    run = tmp_path / "run"
    assert (
        again("--resume", "6")[0] == 0
    )  # made steps 8, 10 and 12; 6 is no longer kept after 14
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    shutil.rmtree(run / LAST)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    code, said = again("--resume", "6")
    assert code == 0
    assert "restarted after going back to 6" in " ".join(said.split())
    assert len([p for p in (run / "set-aside").iterdir() if p.is_dir()]) == 1
    start = [e for e in read_metrics(run / "metrics.jsonl") if e["event"] == "start"][
        -1
    ]
    assert start["step"] == 10


def test_in_a_bucket_the_newer_ones_are_set_aside_too(remote, tmp_path):
    run = tmp_path / "run"
    parts.made(run, 2, 4, 6, keep_last=3)
    for step in (2, 4, 6):  # a session that uploads takes the newest alone
        newest = run / "checkpoints" / f"step-{step:08d}"
        for path in newest.iterdir():
            for kind in ("checkpoints", "best") if step == 6 else ("checkpoints",):
                remote.put_file(path, f"{kind}/{newest.name}/{path.name}")
    ended = {
        "end.json",
        "evaluation.json",
        "scores_by_text.json",
        "model/model.safetensors",
    }
    for name in ended:
        remote.put(name, b"{}")
    before = {name: remote.read(name) for name in remote.names()}
    new = tmp_path / "new"  # an empty machine
    fetch_step(remote, new, 4, say=lambda _sentence: None)
    assert [p.name for p in (new / "checkpoints").iterdir()] == ["step-00000004"]
    assert (new / "end.json").exists()
    small = [
        "end.json",
        "evaluation.json",
        "scores_by_text.json",
    ]  # a model is not fetched
    assert sorted(set_aside(new, 4, bucket=remote)) == [
        "best/step-00000006", "checkpoints/step-00000006", *small,
    ]  # fmt: skip
    assert not [name for name in ended if (new / name).exists()]
    assert not list((new / "best").iterdir())
    after = {name: remote.read(name) for name in remote.names()}
    moved = {
        n.split("/", 2)[2]: text
        for n, text in after.items()
        if n.startswith("set-aside/")
    }
    assert {n.rpartition("/")[0] for n in moved if n not in ended} == {
        "checkpoints/step-00000006", "best/step-00000006",
    }  # fmt: skip
    assert ended <= moved.keys()
    assert (
        moved | {n: text for n, text in after.items() if "set-aside" not in n} == before
    )
    assert fetch_run(remote, tmp_path / "another", say=lambda _sentence: None) == 4
    assert set_aside(new, 4, bucket=remote) == []  # the same command again
    with pytest.raises(
        CheckpointError, match="Checkpoints: step-00000002, step-00000004"
    ):
        parse_step("6", new, remote)


def test_what_waits_to_be_uploaded_is_set_aside_too(remote, tmp_path):
    run = tmp_path / "run"
    parts.made(run, 2, 4, keep_last=2)
    for kind, step in (("checkpoints", 2), ("checkpoints", 4), ("best", 4)):
        source = run / "checkpoints" / f"step-{step:08d}"
        shutil.copytree(source, run / "outbox" / f"{kind}-{source.name}")
    set_aside(run, 2, bucket=remote)
    assert [p.name for p in (run / "outbox").iterdir()] == ["checkpoints-step-00000002"]
    parts.upload(run, remote)
    assert fetch_run(remote, tmp_path / "another", say=lambda _sentence: None) == 2


def test_a_sharded_checkpoint_goes_to_a_bucket_and_comes_back(remote, tmp_path):
    run, alone = tmp_path / "run", {"w": torch.arange(40.0).reshape(8, 5)}
    saves = CheckpointSaver(parts.made(run), Callbacks([]), Ranks(), "sharded")
    saves.save(Progress(2), {"model": alone}, {"progress": {"step": 2}}, final=True)
    parts.upload(run, remote)
    assert fetch_run(remote, tmp_path / "new", say=lambda _sentence: None) == 2
    found = verify_checkpoint(tmp_path / "new" / "checkpoints" / "step-00000002")
    assert found.manifest.format == 2
    assert torch.equal(found.tensors("model")["w"], alone["w"])


def test_a_run_without_checkpoints_begins_anew_and_leaves_no_part_of_the_former_one(
    again, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    former = tree(run / "model")
    shutil.rmtree(run / "checkpoints")
    code, said = again(
        "optim.peak_lr=1e-5"
    )  # whose models are worse than the former best one
    assert code == 0, said
    assert f"{run} has no checkpoint, so the run begins at step 0" in said
    (aside,) = (path for path in (run / "set-aside").iterdir() if path.is_dir())
    assert tree(aside / "model") == former
    assert tree(run / "model") != former
    kept = [path.read_text() for path in (run / "best").glob("step-*/manifest.json")]
    assert [json.loads(text)["settings"]["optim"]["peak_lr"] for text in kept] == [1e-5]


def test_a_run_does_not_begin_from_the_model_that_it_would_replace(
    again, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints")
    before = tree(run)
    (best,) = (run / "best").glob("step-*")
    code, said = again("--from", str(best))
    assert code == 4
    assert "would replace the model that it begins from" in " ".join(said.split())
    assert tree(run) == before


def test_the_same_command_continues_a_run_that_began_from_a_checkpoint(
    kitchen: Path, whole_run: Path, tmp_path: Path, capfd: Any
) -> None:
    run, starts = (
        tmp_path / "new",
        sorted((whole_run / "checkpoints").glob("step-*"))[-2:],
    )
    assert trained(kitchen, run, "--from", str(starts[0])) == 0
    whole = end_of(run)
    shutil.rmtree(run / LAST)  # as if it had been killed before
    capfd.readouterr()
    assert trained(kitchen, run, "--from", str(starts[0])) == 0
    assert "continuing" in capfd.readouterr().err
    assert end_of(run) == whole
    assert trained(kitchen, run, "--from", str(starts[1])) == 4
    assert "already has a run at step 12" in capfd.readouterr().err
