"""Run folders: refused while another process holds them, or where no save fits; and a short run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import toque
from fixtures.kitchens import tiny_config
from toque.errors import CheckpointError
from toque.training.checkpoint.store import run_lock


@pytest.mark.usefixtures("own_kitchen")
def test_a_short_run_reaches_its_learning_rate() -> None:
    run = toque.train(tiny_config(train={"stop_after": "1 epochs"}, optim={"warmup": "3 %"}))
    assert run.step < 40
    assert max(step["lr"] for step in run.history if step["event"] == "step") > 0.99e-2


def test_a_second_run_in_a_folder_is_refused_before_it_writes(own_kitchen: Path) -> None:
    run = own_kitchen / "run"
    refused = pytest.raises(CheckpointError, match="is in use by another training process")
    with run_lock(run / "checkpoints"), refused:
        toque.train("my.yaml")
    assert [path.name for path in run.iterdir()] == ["checkpoints"]


@pytest.mark.usefixtures("own_kitchen")
def test_a_disk_without_room_for_a_save_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(CheckpointError, match=r"has 1.0 kB free, and the next save does not fit"):
        toque.train("my.yaml")
