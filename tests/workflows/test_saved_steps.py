"""Every checkpoint and best model of a run is a model; and the list of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import toque
from fixtures.kitchens import TINY, kitchen_in
from tiny import shape_of
from toque.cli import main
from toque.errors import CheckpointError, ConfigError
from toque.models.loading.model_export import sample_logits
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.storage.atomic import remove_folder
from toque.training.checkpoint.saved import read_manifest, verify_checkpoint
from toque.workflows.inference import open_model as opening
from toque.workflows.inference import talk
from toque.workflows.inference.open_model import open_model
from toque.workflows.inference.serve import name_models

T5 = {"family": "t5", "tokenizer": "trained:600", "shape": shape_of("t5")}
OFTEN = {
    "stop_after": "6 steps",
    "save_every": "2 steps",
    "evaluate_every": "2 steps",
    "keep_last": 3,
    "keep_best": 3,
    "optimisations": {"background_saves": False},
}


def trained(folder: Path, **sections) -> Path:
    config = kitchen_in(
        folder, train=OFTEN, evaluation={"generate": 2, "texts": 2}, **sections
    )
    assert main(["train", str(config)]) == 0
    return folder / "run"


@pytest.fixture(
    scope="module",
    params=[
        "whole",
        "adapter",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("t5", "sharded")),
    ],
)
def run(request, tmp_path_factory) -> Path:
    """A finished run; its tests write into its folders of steps alone."""
    folder = tmp_path_factory.mktemp("run")
    if request.param == "adapter":
        base = folder / "base"
        base.mkdir()
        config = kitchen_in(base)
        assert main(["train", str(config)]) == 0
        model = {"family": "auto", "start_from": str(base / "run" / "model")}
        return trained(folder, model=model, adapter={"r": 4})
    model = T5 if request.param == "t5" else TINY["model"]
    layout = "sharded" if request.param == "sharded" else "auto"
    return trained(folder, model=model, checkpoint={"layout": layout})


@pytest.fixture
def plain_run(run, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def saved(run: Path) -> list[Path]:
    folders = [*run.glob("checkpoints/step-*"), *run.glob("best/step-*")]
    assert len(folders) == 6
    return sorted(folders)


def text_of(model: Path, **options) -> str:
    [text] = toque.generate(
        model, "soup", temperature=0, max_new_tokens=8, raw=True, **options
    )
    return text.text


def test_each_is_opened_with_its_own_weights(run):
    logits = {folder: sample_logits(open_model(folder).model) for folder in saved(run)}
    steps = {}
    for folder, found in logits.items():
        assert torch.equal(found, logits[run / "checkpoints" / folder.name])
        steps[folder.name] = found
    assert not torch.equal(steps["step-00000002"], steps["step-00000006"])
    finished = json.loads((run / "end.json").read_text())["model_step"]
    whole = sample_logits(open_model(run).model)
    torch.testing.assert_close(
        whole, steps[f"step-{finished:08d}"], rtol=1e-5, atol=1e-5
    )
    assert open_model(run / "best" / "step-00000002").step == 2


def test_commands_take_them(run, capsys):
    folder = run / "best" / "step-00000002"
    assert (
        main(["generate", str(folder), "--prompt", "soup", "--max-new-tokens", "4"])
        == 0
    )
    assert text_of(folder) == text_of(run / "checkpoints" / folder.name)
    record = opening.read_record(folder)
    assert record == opening.read_record(run)
    opened = talk.open_talk(folder, system=None, device="cpu")
    assert opened.name == str(folder)
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 0
    assert "checkpoint of step 2" in capsys.readouterr().out
    both = name_models([folder, run])
    assert both == {"run-step-00000002": folder, "run": run}


def test_evaluate_and_compare_leave_the_scores_of_the_run(run):
    of_run = (run / "evaluation.json").read_bytes()
    first, last = (run / "best" / f"step-0000000{step}" for step in (2, 6))
    for folder in (first, last):
        result = toque.evaluate(folder)
        assert result.step == read_manifest(folder).step
        expected = read_manifest(folder).metrics["loss"]
        assert result.metrics["loss"] == pytest.approx(expected, rel=1e-4)
        assert (folder / "evaluation.json").is_file()
    assert (run / "evaluation.json").read_bytes() == of_run
    verify_checkpoint(first)

    found = toque.compare(first, last, run, out=run.parent / "page.html")
    names = ["run/best/step-00000002", "run/best/step-00000006", "run"]
    assert list(found.record["runs"]) == names
    runs = [found.record["runs"][name] for name in names]
    assert [one["cost"]["steps"] for one in runs] == [2, 6, 6]
    assert [one["state"] for one in runs] == ["checkpoint", "checkpoint", "ended"]
    assert "loss" in found.record["differences"][names[1]]
    assert found.record["notes"] == []


def test_one_that_was_not_evaluated_is_compared_by_what_the_run_measured(run):
    first, last = (run / "checkpoints" / f"step-0000000{step}" for step in (4, 6))
    found = toque.compare(first, last, out=run.parent / "page.html")
    assert any(
        "`toque evaluate" in note and "step-00000004" in note for note in found.notes
    )
    assert "each on its own texts and without an interval" in found.sentence


@pytest.mark.parametrize("form", ["hf", "adapter"])
def test_export_writes_the_model_of_a_step(run, tmp_path, form, capsys):
    adapted = (run / "model" / "adapter_config.json").exists()
    if form == "adapter" and not adapted:
        return
    words = [
        "export",
        str(run),
        "--step",
        "2",
        "--to",
        str(tmp_path / "out"),
        "--format",
        form,
    ]
    assert main(words) == 0
    load = load_with_adapter(tmp_path / "out") if form == "adapter" else None
    model = load or load_model(str(tmp_path / "out"))
    expected = sample_logits(open_model(run / "best" / "step-00000002").model)
    torch.testing.assert_close(sample_logits(model), expected, rtol=1e-4, atol=1e-5)
    assert text_of(tmp_path / "out") == text_of(run / "checkpoints" / "step-00000002")
    assert "run, step 2" in (tmp_path / "out" / "README.md").read_text()
    assert main(words) == CheckpointError.exit_code
    assert "exists and is not empty" in capsys.readouterr().err


def test_a_step_that_is_not_there_is_answered_with_those_that_are(run, tmp_path):
    listed = "best/step-00000002, best/step-00000004, best/step-00000006, checkpoints/step-00000002"
    with pytest.raises(CheckpointError, match=listed):
        toque.generate(run / "best" / "step-00000300", "soup")
    with pytest.raises(CheckpointError, match=f"of step 300. .*{listed}"):
        toque.export(run, tmp_path / "out", step=300)
    for kind in ("best", "checkpoints"):
        with pytest.raises(ConfigError, match=f"not a checkpoint. .*{listed}"):
            toque.generate(run / kind, "soup")


def test_a_damaged_one_is_refused(plain_run):
    unfinished, damaged = (
        plain_run / "best" / f"step-0000000{step}" for step in (2, 4)
    )
    (unfinished / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="the save did not finish"):
        toque.generate(unfinished, "soup")
    file = max(damaged.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        toque.generate(damaged, "soup")


def test_one_that_the_run_removes_meanwhile(plain_run, monkeypatch):
    folder, real = plain_run / "best" / "step-00000002", opening.load_weights

    def removing(model, checkpoint):
        if checkpoint.step == 2 and checkpoint.path.exists():
            remove_folder(checkpoint.path)
        real(model, checkpoint)

    monkeypatch.setattr(opening, "load_weights", removing)
    with pytest.raises(
        CheckpointError, match=r"removed .*02 while Toque read it.*step-00000004"
    ):
        toque.generate(folder, "soup")


def test_the_best_model_of_an_unfinished_run_may_change_while_it_is_read(
    plain_run, monkeypatch
):
    for name in ("model", "end.json"):
        path = plain_run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    real, removed = opening.load_weights, []

    def removing(model, checkpoint):
        if not removed:
            removed.append(checkpoint.step)
            remove_folder(checkpoint.path)
        real(model, checkpoint)

    monkeypatch.setattr(opening, "load_weights", removing)
    assert open_model(plain_run).step not in removed


def test_a_run_that_was_moved_away_from_its_store(plain_run, monkeypatch, tmp_path):
    config = (plain_run / "config.yaml").read_text()
    store = toque.configure(plain_run / "config.yaml").data.store
    (plain_run / "config.yaml").write_text(config.replace(store, "stores/elsewhere"))
    monkeypatch.chdir(tmp_path)
    folder = plain_run / "best" / "step-00000002"
    assert open_model(folder).step == 2
    assert text_of(folder)
    shutil.rmtree(plain_run / "model")
    with pytest.raises(CheckpointError, match="needs the tokenizer of its run"):
        open_model(folder)


def test_the_list_of_them(run, capsys):
    found = toque.checkpoints(run)
    steps = [(one.place, one.step) for one in found.steps]
    assert steps == [
        (f.relative_to(run).as_posix(), read_manifest(f).step) for f in saved(run)
    ]
    by_place = {one.place: one for one in found.steps}
    newest = by_place["checkpoints/step-00000006"]
    assert newest.reason.startswith("newest, from which training continues")
    assert by_place["checkpoints/step-00000002"].reason == "one of the 3 newest"
    reasons = [one.reason for one in found.steps if one.place.startswith("best/")]
    assert {reason.partition(";")[0] for reason in reasons} == {
        f"lowest held-out loss, number {n}" for n in (1, 2, 3)
    }
    [finished] = [reason for reason in reasons if "the finished model" in reason]
    assert "number 1" in finished
    for one in found.steps:
        best = read_manifest(run / "best" / f"step-{one.step:08d}")
        assert one.metrics["loss"] == best.metrics["loss"]
        assert one.bytes > 1000
        assert one.seconds > 0
    assert main(["checkpoints", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[0].split()[:3] == ["trained", "for", "held-out"]
    assert main(["checkpoints", str(run), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["checkpoints"]) == 6


def test_the_list_of_a_damaged_run_and_of_no_run(plain_run, tmp_path):
    (plain_run / "best" / "step-00000002" / "manifest.json").unlink()
    (plain_run / "best" / "step-00000004" / "manifest.json").write_text("{}")
    found = toque.checkpoints(plain_run)
    assert len(found.steps) == 4
    assert len(found.damaged) == 2
    assert "step-00000002 has no manifest.json" in str(found)
    shutil.rmtree(plain_run / "best")
    shutil.rmtree(plain_run / "checkpoints")
    assert str(toque.checkpoints(plain_run)).endswith("has no checkpoint yet.")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is not a run"):
        toque.checkpoints(tmp_path / "empty")


@pytest.mark.slow
def test_those_of_a_run_in_a_bucket(s3_service, run, tmp_path, monkeypatch):
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "cache"))
    for path in sorted(run.rglob("*")):
        if path.is_file():
            s3_service.put(
                f"runs/mine/{path.relative_to(run).as_posix()}", path.read_bytes()
            )
    there = f"{s3_service.scheme}://pantry/runs/mine"
    local, remote = toque.checkpoints(run), toque.checkpoints(there)
    assert remote.steps == local.steps
    assert remote.address == there

    folder = run / "best" / "step-00000002"
    for _ in range(2):  # the second time from the cache
        assert text_of(f"{there}/best/step-00000002/") == text_of(folder)
    fetched = tmp_path / "cache" / "models" / "s3" / "pantry" / "runs" / "mine"
    assert not (fetched / "model" / "model.safetensors").exists()
    assert name_models([f"{there}/best/step-00000002"]) == {
        "mine-step-00000002": fetched / "best" / "step-00000002"
    }
    with pytest.raises(
        CheckpointError, match=r"lacks .* best/step-00000300\. .*best/step-00000006"
    ):
        toque.generate(f"{there}/best/step-00000300", "soup")
    with pytest.raises(ConfigError, match="is not the address of a checkpoint"):
        toque.generate(there, "soup")
    two = [f"{there}/best/step-0000000{step}" for step in (2, 6)]
    found = toque.compare(*two, out=tmp_path / "page.html")
    assert list(found.record["runs"]) == [
        "mine/best/step-00000002",
        "mine/best/step-00000006",
    ]
