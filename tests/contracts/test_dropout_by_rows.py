"""With dropout on, runs with other rows at once or ranks have the losses of one run, to 1e-5."""

from pathlib import Path

import pytest

import toque
from fixtures.kitchens import kitchen_in
from fixtures.ranks import losses_of, torchrun
from tiny import shape_of
from toque.config import load_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

UPDATES = 20


@pytest.fixture(scope="module", params=["gpt2", "t5"])
def folder(request, tmp_path_factory) -> Path:
    """A folder with run.yaml and its prepared store, for a model with dropout in every place."""
    folder = tmp_path_factory.mktemp(request.param)
    shape = shape_of(request.param, positions=512, dropout=0.1)
    kitchen_in(
        folder,
        n=80,
        model={"family": request.param, "tokenizer": "trained:512", "shape": shape},
        optim={"warmup": "2 steps", "peak_lr": 3e-3},
        train={"stop_after": f"{UPDATES} steps", "batch": "4096 tokens"},
    )
    return folder


def losses(run: Path) -> list[float]:
    return [loss for _, loss in sorted(losses_of(run).items())]


def alone(folder: Path, run: str, *settings: str) -> list[float]:
    """Losses of a run by one process."""
    settings = (f"run_dir={folder / run}", *settings)
    toque.train(load_config(str(folder / "run.yaml"), list(settings)).config)
    return losses(folder / run)


def check(folder: Path, *settings: str, run: str) -> None:
    """Compare 2 and 4 rows at once, and two ranks of 2 rows at once, with one row at once."""
    reference = alone(folder, f"{run}-1", *settings, "train.micro_batch_rows=1")
    assert len(reference) == UPDATES
    others = {
        rows: alone(
            folder, f"{run}-{rows}", *settings, f"train.micro_batch_rows={rows}"
        )
        for rows in (2, 4)
    }
    ranks = torchrun(folder, f"{run}-ranks", *settings, "train.strategy=ddp")
    output = ranks.communicate()[0]
    assert ranks.returncode == 0, output[-4000:]
    others["ranks"] = losses(folder / f"{run}-ranks")
    for name, found in others.items():
        assert found == pytest.approx(reference, abs=1e-5), name


def test_rows_and_ranks_change_no_loss(folder):
    check(folder, run="whole")


def test_nor_those_of_an_adapter_with_dropout(folder):
    toque.train(
        load_config(str(folder / "run.yaml"), ["train.stop_after=5 steps"]).config
    )
    model = (f"model.start_from={folder / 'run' / 'model'}", "model.shape={}")
    adapter = "adapter={kind: lora, r: 4, dropout: 0.1, target_modules: all}"
    check(folder, *model, adapter, run="lora")
