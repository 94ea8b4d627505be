"""The average of a run's checkpoints: its weights, its loss, and the folder that it becomes."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import toque
from fixtures.kitchens import TINY, StopAt, kitchen_in
from tiny import shape_of
from toque.cli import main
from toque.config.dump import to_yaml
from toque.errors import CheckFailed, CheckpointError, ConfigError
from toque.models.loading.model_export import sample_logits
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.storage.atomic import remove_folder
from toque.training.checkpoint import saved
from toque.training.checkpoint.saved import verify_checkpoint
from toque.training.optim.weight_average import AVERAGE
from toque.workflows.inference.open_model import open_model

STEPS = {
    "stop_after": "36 steps",
    "save_every": "3 steps",
    "keep_last": 12,
    "batch": "1 examples",
    "optimisations": {"background_saves": False},
}
# The weights move around a minimum, so the newest average well. The oldest are still far from it.
HIGH_RATE = {"schedule": "constant", "peak_lr": 0.1}
T5 = {"family": "t5", "tokenizer": "trained:600", "shape": shape_of("t5")}


def trained(folder: Path, **sections) -> Path:
    sections = {"optim": HIGH_RATE, "train": STEPS} | sections
    config = kitchen_in(folder, evaluation={"max_examples": None}, **sections)
    assert main(["train", str(config)]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("averaged"))


@pytest.fixture
def copied(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def newest(run: Path, n: int) -> list[Path]:
    return sorted(run.glob("checkpoints/step-*"))[-n:]


def mean_of(folders: list[Path]) -> dict[str, torch.Tensor]:
    weights = [verify_checkpoint(folder).tensors("model") for folder in folders]
    return {
        name: torch.stack([w[name].double() for w in weights]).mean(0).float()
        for name in weights[0]
    }


def test_the_written_weights_are_the_mean_and_the_losses_are_those_of_training(
    run, tmp_path
):
    result = toque.average(run, tmp_path / "mean", last=3)
    result.raise_if_failed()
    assert result.folder == tmp_path / "mean"
    assert result.best == "average of 3 (steps 30 to 36)"

    written = load_file(tmp_path / "mean" / "model.safetensors")
    expected = mean_of(newest(run, 3))
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(written[name], tensor, rtol=1e-6, atol=1e-8)

    evaluations = [
        event["metrics"]["loss"]
        for event in toque.TrainedRun(run, 36, "finished").history
        if event["event"] == "evaluation"
    ]
    assert result.checkpoints == {
        "checkpoints/step-00000036": pytest.approx(evaluations[-1], rel=1e-5)
    }
    score = toque.evaluate(tmp_path / "mean", run / "config.yaml").metrics["loss"]
    assert result.loss == pytest.approx(score, rel=1e-5)
    assert result.loss < min(result.checkpoints.values())


def test_the_folder_is_a_model_for_other_commands(run, tmp_path):
    toque.average(run, tmp_path / "mean", last=3)
    assert toque.generate(tmp_path / "mean", "soup", max_new_tokens=4)
    toque.export(tmp_path / "mean", tmp_path / "exported")
    logits = sample_logits(open_model(tmp_path / "mean").model)
    exported = sample_logits(load_model(str(tmp_path / "exported")))
    torch.testing.assert_close(exported, logits)
    card = (tmp_path / "mean" / "README.md").read_text()
    assert "run, average of 3 (steps 30 to 36)" in card
    assert "checkpoints/step-00000036 |" in card


def test_an_average_that_is_worse_is_not_written(run, tmp_path, capsys):
    words = ["average", str(run), "--to", str(tmp_path / "mean")]
    assert main(words) == CheckFailed.exit_code
    printed = capsys.readouterr()
    assert "average of 12 (steps 3 to 36)" in printed.out
    assert "but checkpoints/step-00000036 has" in printed.err
    assert "another number of checkpoints, at least 2, use --last" in printed.err
    assert not (tmp_path / "mean").exists()


def test_an_average_must_not_be_worse_than_the_best_model(copied, tmp_path):
    [best] = (copied / "best").glob("step-*")
    assert best.name == "step-00000036"
    for folder in newest(copied, 4):
        shutil.rmtree(folder)
    result = toque.average(copied, tmp_path / "mean", last=2)
    assert list(result.checkpoints) == [
        "checkpoints/step-00000024",
        "best/step-00000036",
    ]
    assert result.folder is None
    with pytest.raises(CheckFailed, match="but best/step-00000036 has"):
        result.raise_if_failed()


def test_an_average_in_the_run_is_replaced_on_request(copied, capsys):
    words = ["average", str(copied), "--last", "3"]
    assert main(words) == 0
    first = (copied / "average" / "model.safetensors").read_bytes()
    (copied / "average" / "notes.txt").write_text("mine")
    assert main(words) == CheckpointError.exit_code
    assert "add --replace" in capsys.readouterr().err
    assert main([*words[:-1], "2", "--replace"]) == 0
    assert (copied / "average" / "model.safetensors").read_bytes() != first
    assert (copied / "average" / "notes.txt").read_text() == "mine"
    assert toque.checkpoints(copied).steps


def test_a_folder_that_is_not_an_average_is_never_replaced(copied, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        toque.average(copied, tmp_path / "mine", replace=True)
    for name in ("model", "best/step-00000003", "."):
        with pytest.raises(ConfigError, match="a run itself writes"):
            toque.average(copied, copied / name, replace=True)
    other = shutil.copytree(copied, tmp_path / "other")
    with pytest.raises(ConfigError, match="a run itself writes"):
        toque.average(copied, other / "model", replace=True)


@pytest.mark.parametrize("last", [-1, 0, 1])
def test_fewer_than_two_checkpoints_are_no_average(run, last):
    with pytest.raises(ConfigError, match=f"last={last}: an average needs at least 2"):
        toque.average(run, last=last)


def test_more_checkpoints_than_the_run_has(copied):
    with pytest.raises(CheckpointError, match=r"has 12 of the 13 checkpoints.*keep"):
        toque.average(copied, last=13)
    for folder in newest(copied, 11):
        shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"has 1 of the 2 checkpoints"):
        toque.average(copied)


def test_a_folder_that_is_not_a_run(run, tmp_path):
    with pytest.raises(ConfigError, match=r"is one checkpoint. Name its run, .*run"):
        toque.average(newest(run, 1)[0])
    with pytest.raises(ConfigError, match="is not a run folder"):
        toque.average(run / "model")
    with pytest.raises(ConfigError, match="is in a bucket"):
        toque.average("gs://pantry/runs/my")
    with pytest.raises(ConfigError, match="does not exist"):
        toque.average(tmp_path / "absent")


def test_a_damaged_checkpoint_is_named(copied, tmp_path):
    folder = newest(copied, 2)[0]
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=rf"{folder.name}.*is damaged.*move it away"
    ):
        toque.average(copied, tmp_path / "mean", last=3)
    assert not (tmp_path / "mean").exists()


def test_a_checkpoint_that_training_removes_meanwhile(copied, tmp_path, monkeypatch):
    real, removed = saved.verify_checkpoint, []

    def removing(folder):
        if not removed:
            removed.append(folder)
            remove_folder(folder)
        return real(folder)

    monkeypatch.setattr(saved, "verify_checkpoint", removing)
    result = toque.average(copied, tmp_path / "mean", last=3)
    assert result.best == "average of 3 (steps 27 to 33)"


def test_a_run_with_another_objective_is_refused(run, tmp_path):
    model = {"family": "auto", "start_from": str(run / "model")}
    config = toque.configure(TINY | {"model": model}, objective={"kind": "dpo"})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(ConfigError, match=r"objective\.kind=dpo"):
        toque.average(tmp_path)


def test_an_exponential_average_survives_a_stop_to_the_bit(tmp_path):
    optim = HIGH_RATE | {"ema_decay": 0.8}
    train = STEPS | {"stop_after": "12 steps", "save_every": "12 steps"}
    path = kitchen_in(tmp_path, optim=optim, train=train)
    config = toque.configure(path)
    whole = toque.train(config)
    parted = toque.configure(path, run_dir=str(tmp_path / "parted"))
    assert toque.train(parted, callbacks=[StopAt(5)]).interrupted
    toque.train(parted)
    states = [
        (run / "checkpoints" / "step-00000012" / "optimizer.safetensors").read_bytes()
        for run in (whole.folder, tmp_path / "parted")
    ]
    assert states[0] == states[1]

    result = toque.average(whole)
    result.raise_if_failed()
    assert result.best == "exponential average (step 12)"
    assert result.loss < min(result.checkpoints.values())
    written = load_file(whole.folder / "average" / "model.safetensors")
    state = verify_checkpoint(newest(whole.folder, 1)[0]).tensors("optimizer")
    for name, tensor in written.items():
        assert torch.equal(tensor, state[f"{name}/{AVERAGE}"])
    score = toque.evaluate(result.folder, path).metrics["loss"]
    assert result.loss == pytest.approx(score, rel=1e-5)

    # With a number of checkpoints, only their mean is measured.
    with pytest.raises(CheckpointError, match="or keep an exponential average"):
        toque.average(whole, tmp_path / "two", last=2)
    assert list(
        toque.average(tmp_path / "parted", tmp_path / "two", last=2).averages
    ) == ["average of 2 (steps 6 to 12)"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "sharded"])
def test_other_layouts_and_families(kind, tmp_path):
    layout = "sharded" if kind == "sharded" else "auto"
    model = T5 if kind == "t5" else TINY["model"]
    run = trained(tmp_path, model=model, checkpoint={"layout": layout})
    has_shards = (newest(run, 1)[0] / "shards.json").exists()
    assert has_shards == (kind == "sharded")
    result = toque.average(run, tmp_path / "mean", last=2)
    result.raise_if_failed()
    written = load_file(tmp_path / "mean" / "model.safetensors")
    for name, tensor in mean_of(newest(run, 2)).items():
        torch.testing.assert_close(written[name], tensor, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_an_adapter_becomes_an_adapter_of_the_same_size(run, tmp_path):
    model = {"family": "auto", "start_from": str(run / "model")}
    optim = HIGH_RATE | {"peak_lr": 30.0}
    adapted = trained(tmp_path, model=model, adapter={"r": 4}, optim=optim)
    result = toque.average(adapted, tmp_path / "mean", last=3)
    result.raise_if_failed()
    name = "adapter_model.safetensors"
    written = load_file(tmp_path / "mean" / name)
    finished = load_file(adapted / "model" / name)
    assert {n: t.shape for n, t in written.items()} == {
        n: t.shape for n, t in finished.items()
    }
    means = list(mean_of(newest(adapted, 3)).values())
    for tensor in written.values():
        assert any(m.shape == tensor.shape and torch.equal(m, tensor) for m in means)
    assert sample_logits(load_with_adapter(tmp_path / "mean")).isfinite().all()
    score = toque.evaluate(tmp_path / "mean", adapted / "config.yaml").metrics["loss"]
    assert result.loss == pytest.approx(score, rel=1e-5)
