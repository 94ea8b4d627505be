"""Faults 20, 22, 23 and 25: real runs under torchrun whose processes are killed and stopped."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.ranks import (
    as_rank,
    losses_of,
    prepared_folder,
    rank,
    surroundings,
    torchrun,
    wait_for,
)
from toque.cooking.cookbook.recipes import write_cookbook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 24


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory) -> Path:
    return prepared_folder(tmp_path_factory.mktemp("ranks"), steps=STEPS)


def ended(agent: subprocess.Popen[str], *, within: float) -> str:
    """What was printed; the run must end by itself."""
    try:
        return agent.communicate(timeout=within)[0]
    except subprocess.TimeoutExpired:
        agent.send_signal(signal.SIGINT)
        raise


def hashes(run: Path) -> list[str]:
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    files = (last / "model.safetensors", last / "optimizer.safetensors")
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.fixture(scope="module")
def whole(kitchen) -> Path:
    """The run that nothing happens to."""
    agent = torchrun(kitchen, "whole")
    said = ended(agent, within=240)
    assert agent.returncode == 0, said[-3000:]
    assert "2 ranks over gloo share each update" in said
    assert (kitchen / "whole" / "model" / "config.json").exists()
    return kitchen / "whole"


def test_22_a_killed_rank_ends_all_and_a_restart_continues_to_the_bit(kitchen, whole):
    agent = torchrun(kitchen, "killed", options=("--max-restarts", "2"))
    wait_for(kitchen / "killed" / "checkpoints" / "step-00000004", agent)
    victim = rank(agent, 1)
    victim.kill()
    said = ended(agent, within=240)
    assert agent.returncode == 0, said[-3000:]
    assert said.count("toque: ") == 1
    assert f"Rank 1 (process {victim.pid} on" in said
    assert "continuing from step" in said
    assert hashes(kitchen / "killed") == hashes(whole)
    assert losses_of(kitchen / "killed") == losses_of(whole)


def test_23_a_rank_that_is_stopped_is_named(kitchen):
    agent = torchrun(kitchen, "stopped", timeout=8)
    wait_for(kitchen / "stopped" / "checkpoints" / "step-00000002", agent)
    victim = rank(agent, 1)
    victim.suspend()
    said = ended(agent, within=120)  # torchrun kills what does not end 30 s after SIGTERM
    assert agent.returncode != 0
    assert said.count("toque: ") == 1
    assert f"Rank 1 (process {victim.pid} on" in said
    assert "does not answer" in said
    assert said.count("Timeout (0:00:08)!") == 1  # where the other one waited


def test_23_a_rank_that_hangs_is_named_with_its_stack(kitchen):
    (kitchen / "endless.py").write_text(
        "import time\n\n\nclass Endless:\n    def on_step_end(self, state):\n"
        "        time.sleep(3600 if state.step == 4 else 0)\n"
    )
    agent = torchrun(kitchen, "hung", "observe.callbacks=[endless:Endless]", timeout=8)
    wait_for(kitchen / "hung" / "checkpoints" / "step-00000002", agent)
    victim = rank(agent, 0)
    said = ended(agent, within=120)
    assert agent.returncode != 0
    assert f"Rank 0 (process {victim.pid} on" in said
    assert "does not answer" in said
    assert said.count("Timeout (0:00:08)!") == 2  # each rank's own stacks
    assert "in on_step_end" in said


def test_a_signal_to_one_rank_saves_once_and_one_process_continues(kitchen, whole):
    """Fault 20, too: with another number of ranks the same order, and losses but for rounding."""
    agent = torchrun(kitchen, "moved")
    wait_for(kitchen / "moved" / "checkpoints" / "step-00000004", agent)
    rank(agent, 1).send_signal(signal.SIGTERM)
    said = ended(agent, within=60)
    assert "exitcode:75" in said.replace(" ", "")
    assert said.count("Stopped by a signal and saved at step") == 1
    end = json.loads((kitchen / "moved" / "metrics.jsonl").read_text().splitlines()[-1])
    assert end["reason"] == "interrupted"
    assert (kitchen / "moved" / "checkpoints" / f"step-{end['step']:08d}").exists()
    one = subprocess.run(
        [
            *(sys.executable, "-m", "toque", "train", "run.yaml", "run_dir=moved"),
            "model.shape.n_layer=2",
        ],
        cwd=kitchen,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert one.returncode == 0, one.stderr[-2000:]
    assert "ranks: 2 -> 1" in one.stderr.replace("\n", " ")
    assert list(losses_of(kitchen / "moved")) == list(losses_of(whole))


def test_fault_27_ranks_leave_out_the_same_updates_and_go_back_together(kitchen):
    """A rate that is far too high, and hardly a margin: what matters is that the ranks agree."""
    words = (
        "optim.peak_lr=0.5",
        "optim.outliers={sigma: 1e-6, window: 2, roll_back_after: 2}",
        'train.stop_after="8 steps"',
    )
    agent = torchrun(kitchen, "outliers", *words)
    said = ended(agent, within=240)
    text = (kitchen / "outliers" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    end = lines[-1]
    assert end["skipped_updates"] >= 2, said[-3000:]
    told = [line["message"] for line in lines if line["event"] == "warning"]
    assert any("the weights are those of step" in text for text in told)
    # Either it ends well, or by the rule for a second time within a window; never in a deadlock,
    # and never because the ranks differ.
    assert end["reason"] in ("finished", "non_finite"), said[-3000:]
    recorded = (kitchen / "outliers" / "skipped_updates.jsonl").read_text().splitlines()
    assert len(recorded) == end["skipped_updates"]


def test_48_one_rank_prepares_and_the_others_wait(kitchen, whole):
    fresh = ("data.store=fresh",)
    agent = torchrun(kitchen, "prepared", *fresh)
    said = ended(agent, within=240)
    assert agent.returncode == 0, said[-3000:]
    assert said.count("fresh is not prepared yet") == 1
    assert hashes(kitchen / "prepared") == hashes(whole)
    write_cookbook(kitchen / "b.jsonl", n=200, seed=4)
    agent = torchrun(kitchen, "other", *fresh, "data.sources=[{path: b.jsonl}]")
    said = ended(agent, within=240)
    assert agent.returncode != 0
    assert said.count("is not the one that the configuration asks for") == 1
    assert not (kitchen / "other").exists()


LONG = """
import os, sys, time
from pathlib import Path
from toque.training.distributed.process_group import joined
from toque.training.distributed.process_group import while_others_wait
with joined(strategy="ddp") as ranks:
    done = Path(sys.argv[1])
    while_others_wait(ranks, lambda: (time.sleep(9), done.touch()), beat=0.5)
    assert done.exists()
    print("went on", flush=True)
os._exit(0)
"""


def test_48_preparing_may_take_longer_than_ranks_wait_for_each_other(tmp_path):
    shared = surroundings(timeout=4)
    both = [as_rank(n, shared, "-c", LONG, str(tmp_path / "done")) for n in (0, 1)]
    said = [each.communicate(timeout=120)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert all("went on" in words for words in said)
