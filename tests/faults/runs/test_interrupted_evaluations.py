"""A signal during an evaluation ends it between two batches or tokens; it is made later."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from fixtures.processes import python
from fixtures.ranks import TORCHRUN
from toque.cli import main
from toque.errors import Interrupted
from toque.training.checkpoint.saved import verify_checkpoint

KILLED = """
import os, signal, sys
from toque.cli import main
from toque.evaluation.heldout_loss import HeldOut
from toque.models.generation import live_rows

owner, name = {"losses": (HeldOut, "_batches"), "texts": (live_rows.LiveRows, "step")}[sys.argv[1]]
plain, seen = getattr(owner, name), []

def interrupted(*given):
    if os.path.exists(os.path.join(sys.argv[3], "metrics.jsonl")):  # it trains
        seen.append(name)
    if os.environ.get("RANK", "1") == "1":  # the other one ends its own texts
        if len(seen) == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGINT)
        assert len(seen) < 40, "it went on after the signal"
    return plain(*given)

setattr(owner, name, interrupted)
if __name__ == "__main__":
    sys.exit(main(sys.argv[4:]))
"""
WORDS = (
    "train.evaluate_every=4 steps",
    "train.optimisations.background_saves=false",
    "evaluation.max_examples=null",
    "evaluation.texts=2",
    "evaluation.generate=2",
)


def evaluations(run: Path) -> list[tuple[int, float]]:
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        (e["step"], e["metrics"]["loss"]) for e in events if e["event"] == "evaluation"
    ]


def interrupted_in(
    part: str, at: int, config: Path, run: Path, *launcher: str
) -> subprocess.CompletedProcess[str]:
    script = run.parent / "killed.py"
    script.write_text(KILLED)
    words = (part, at, run, "train", config, f"run_dir={run}", *WORDS)
    return python(*launcher, script, *words)


@pytest.mark.parametrize(
    ("part", "at"),
    [("losses", 1), pytest.param("texts", 5, marks=pytest.mark.slow)],
)
def test_it_is_left_and_made_when_the_run_continues(
    kitchen: Path, tmp_path: Path, part: str, at: int
) -> None:
    run = tmp_path / "run"
    done = interrupted_in(part, at, kitchen / "run.yaml", run)
    assert done.returncode == Interrupted.exit_code, done.stderr
    assert (
        "SIGINT: leaving this evaluation, which is repeated when the run" in done.stderr
    )
    assert evaluations(run) == []
    newest = max((run / "checkpoints").glob("step-*"))
    assert newest.name == "step-00000004"
    assert verify_checkpoint(newest).state()["owes_evaluation"]
    assert main(["train", str(kitchen / "run.yaml"), f"run_dir={run}", *WORDS]) == 0
    assert [step for step, _ in evaluations(run)] == [4, 8, 12]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "at"), [("losses", 1), ("texts", 5)])
def test_a_signal_to_one_rank_ends_it_on_all(
    kitchen: Path, tmp_path: Path, part: str, at: int
) -> None:
    run = tmp_path / "run"
    done = interrupted_in(part, at, kitchen / "run.yaml", run, *TORCHRUN[1:])
    # torchrun returns 1 for whatever a process returned, which its report has.
    assert re.search(r"exitcode +: 75", done.stderr), done.stderr
    assert evaluations(run) == []
    (newest,) = (run / "checkpoints").glob("step-00000004")
    assert verify_checkpoint(newest).state()["owes_evaluation"]
    assert not (run / "model").exists()
