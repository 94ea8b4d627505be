"""A store and a run that release 0.1.0 wrote: later releases open, reuse and continue them.

`v0.1.0/` is never rewritten. It was made by 0.1.0 from forty made-up recipes of `toque cookbook`:
a store, and a run of six updates of which only the checkpoint at step 3 was kept, with the losses
0.1.0 itself had after it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import toque
from toque.cli import main

FOLDER = Path(__file__).parent / "v0.1.0"


@pytest.fixture
def kitchen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the store and the interrupted run in it."""
    shutil.copytree(FOLDER, tmp_path / "v")
    monkeypatch.chdir(tmp_path / "v")
    return tmp_path / "v"


@pytest.mark.usefixtures("kitchen")
def test_everything_verifies() -> None:
    assert main(["verify", "store"]) == 0
    assert main(["verify", "run"]) == 0


def test_the_run_continues_as_it_would_have(kitchen: Path) -> None:
    run = toque.train("my.yaml")
    assert (run.step, run.reason) == (6, "finished")
    expected = json.loads((kitchen / "losses.json").read_text())
    losses = dict(run.losses)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]  # the first three as 0.1.0 wrote them
    for step, loss in expected["after_continuing"].items():
        # Another processor adds up in another order; the same one gave the same bits.
        assert losses[int(step)] == pytest.approx(loss, rel=1e-6)
    assert run.metrics["loss"] == pytest.approx(expected["heldout"], rel=1e-6)
