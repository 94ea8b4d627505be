"""Ranks of real runs on the CPU, started by `--gpus` and torchrun, killed and stopped."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fixtures import lost_network
from fixtures.ports import free_port
from fixtures.processes import toque
from fixtures.ranks import (
    as_rank,
    losses_of,
    prepared_folder,
    rank,
    started,
    surroundings,
    torchrun,
    train,
    wait_for,
)
from toque.cooking.cookbook.recipes import write_cookbook
from toque.workflows.diagnosis.run_facts import facts_of, find_differences

pytestmark = pytest.mark.timeout(600)
STEPS = 16


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_folder(tmp_path_factory.mktemp("shared"), steps=STEPS)


def said_by(command: subprocess.Popen[str]) -> str:
    return command.communicate(timeout=300)[0]


def test_two_processes_train_on_a_machine_without_gpus(kitchen: Path) -> None:
    command = train(kitchen, "short", 'train.stop_after="4 steps"', "--gpus", "2")
    said = said_by(command)
    assert command.returncode == 0, said[-3000:]
    assert said.count("2 processes on the CPU, as this machine has no CUDA device") == 1
    assert said.count("2 ranks over gloo share each update") == 1
    assert (kitchen / "short" / "model" / "config.json").exists()


@pytest.fixture(scope="module")
def whole(kitchen: Path) -> Path:
    """The run that nothing happens to."""
    command = train(kitchen, "whole", "--gpus", "2")
    said = said_by(command)
    assert command.returncode == 0, said[-3000:]
    return kitchen / "whole"


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["gpus", "torchrun"])
def test_22_a_killed_rank_is_named_and_a_restart_continues_to_the_bit(
    kitchen: Path, whole: Path, starter: str
) -> None:
    if starter == "gpus":
        command = train(kitchen, starter, "--gpus", "2")
    else:
        command = torchrun(kitchen, starter, options=("--max-restarts", "2"))
    wait_for(kitchen / starter / "checkpoints" / "step-00000004", command)
    victim = rank(command, 1)
    victim.kill()
    said = said_by(command)
    assert command.returncode == 0, said[-3000:]
    assert said.count("toque: ") == 1
    assert f"Rank 1 (process {victim.pid} on" in said
    assert ("restart 1 of 3" in said) == (starter == "gpus")
    assert "continuing from step" in said
    assert find_differences(facts_of(whole), facts_of(kitchen / starter)) == []


@pytest.mark.slow
def test_22_without_restarts_all_end_within_ten_seconds_with_one_paragraph(
    kitchen: Path,
) -> None:
    command = train(kitchen, "gone", "--gpus", "2", "--restarts", "0")
    wait_for(kitchen / "gone" / "checkpoints" / "step-00000002", command)
    other = rank(command, 0)
    rank(command, 1).kill()
    other.wait(timeout=10)  # raises when it has not ended by then
    said = said_by(command)
    assert command.returncode == 1
    assert said.count("toque: ") == 1
    assert "is gone" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_an_error_has_its_exit_code_and_is_printed_once(kitchen: Path) -> None:
    (kitchen / "blocked").write_text("a file, no folder")
    command = train(kitchen, "blocked", "--gpus", "2")
    said = said_by(command)
    assert command.returncode == 4, said[-3000:]
    assert said.count("toque: ") == 1
    assert "toque: Cannot write blocked/checkpoints" in said
    assert "starting again" not in said


@pytest.mark.slow
@pytest.mark.parametrize("to_a_rank", [False, True])
def test_a_signal_saves_and_the_same_command_continues(
    kitchen: Path, whole: Path, *, to_a_rank: bool
) -> None:
    name = f"signalled-{to_a_rank}"
    command = train(kitchen, name, "--gpus", "2")
    wait_for(kitchen / name / "checkpoints" / "step-00000004", command)
    target = rank(command, 1) if to_a_rank else psutil.Process(command.pid)
    target.send_signal(signal.SIGINT)
    said = said_by(command)
    assert command.returncode == 75, said[-3000:]
    assert said.count("Stopped by a signal and saved at step") == 1
    assert "Continue with: toque train run.yaml run_dir=" in said
    assert "--gpus 2" in said
    again = train(kitchen, name, "--gpus", "2")
    said = said_by(again)
    assert again.returncode == 0, said[-3000:]
    assert find_differences(facts_of(whole), facts_of(kitchen / name)) == []


GRPO = (
    *("model.family=auto", "model.start_from=whole/model", "model.tokenizer=auto"),
    *("model.shape={}", 'train.batch="4 examples"', 'train.stop_after="8 steps"'),
    "objective={kind: grpo, kl: 0.1, samples: 4, rewards: {'kitchen_scores:variety': 1}}",
    *("--gpus", "2"),
)


@pytest.mark.slow
@pytest.mark.usefixtures("whole")
def test_ranks_that_learn_from_rewards_continue_to_the_bit(kitchen: Path) -> None:
    (kitchen / "kitchen_scores.py").write_text(
        "def variety(prompts, texts, references):\n"
        "    return [len(set(text)) for text in texts]\n"
    )
    command = train(kitchen, "rewarded", *GRPO)
    said = said_by(command)
    assert command.returncode == 0, said[-3000:]
    assert len(set(losses_of(kitchen / "rewarded").values())) == 8

    command = train(kitchen, "stopped-rewarded", *GRPO)
    wait_for(kitchen / "stopped-rewarded" / "checkpoints" / "step-00000002", command)
    psutil.Process(command.pid).send_signal(signal.SIGINT)
    said = said_by(command)
    assert command.returncode == 75, said[-3000:]
    command = train(kitchen, "stopped-rewarded", *GRPO)
    said = said_by(command)
    assert command.returncode == 0, said[-3000:]
    facts = facts_of(kitchen / "rewarded")
    assert find_differences(facts, facts_of(kitchen / "stopped-rewarded")) == []


def two_machines(
    kitchen: Path, run: str, *last_words: str
) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of two commands of torchrun, as they are typed on two machines."""
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *where)
    words = (
        "--nproc-per-node",
        "1",
        "-m",
        "toque",
        "train",
        "run.yaml",
        f"run_dir={run}",
    )
    both = [
        started(kitchen, *torchrun, *words),
        started(kitchen, *torchrun, *words, *last_words),
    ]
    said = [said_by(each) for each in both]
    return [each.returncode for each in both], said


@pytest.mark.slow
def test_25_two_machines_by_torchrun_train_to_the_same_bits_and_end_with_0(
    kitchen: Path, whole: Path
) -> None:
    """Where it is left to Python, gloo aborts one process in eight that is done."""
    codes, said = two_machines(kitchen, "machines")
    assert codes == [0, 0], said
    assert find_differences(facts_of(whole), facts_of(kitchen / "machines")) == []


@pytest.mark.slow
def test_machines_with_other_settings_are_refused_before_anything_is_written(
    kitchen: Path,
) -> None:
    codes, said = two_machines(kitchen, "unlike", "seed=2")
    assert 0 not in codes, said
    assert (
        sum(text.count("The 2 ranks differ: the configuration") for text in said) == 1
    )
    assert not (kitchen / "unlike").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_machine_that_loses_its_network_is_named_and_all_continue_to_the_same_bits(
    tmp_path: Path,
) -> None:
    with lost_network.network(4) as (bridge, machines):
        lost_network.prepare(tmp_path, steps=12)
        assert lost_network.train(machines, tmp_path, "undisturbed") == [0, 0, 0, 0]
        lost_network.start_run(machines, tmp_path, "lost")
        named = lost_network.lose_network(
            bridge, machines, machines[2], tmp_path / "lost" / "checkpoints", seconds=40
        )
        assert named, "\n".join(machine.text[-800:] for machine in machines)
        assert lost_network.train(machines, tmp_path, "lost") == [0, 0, 0, 0]
    undisturbed, lost = facts_of(tmp_path / "undisturbed"), facts_of(tmp_path / "lost")
    assert find_differences(undisturbed, lost) == []


@pytest.mark.slow
def test_23_a_rank_that_is_stopped_is_named(kitchen: Path) -> None:
    agent = torchrun(kitchen, "stopped", timeout=8)
    wait_for(kitchen / "stopped" / "checkpoints" / "step-00000002", agent)
    victim = rank(agent, 1)
    victim.suspend()
    said = said_by(agent)  # torchrun kills what does not end 30 s after SIGTERM
    assert agent.returncode != 0
    assert said.count("toque: ") == 1
    assert f"Rank 1 (process {victim.pid} on" in said
    assert "does not answer" in said
    assert said.count("Timeout (0:00:08)!") == 1  # where the other one waited


@pytest.mark.slow
def test_23_a_rank_that_hangs_is_named_with_its_stack(kitchen: Path) -> None:
    (kitchen / "endless.py").write_text(
        "import time\n\n\nclass Endless:\n    def on_step_end(self, state):\n"
        "        time.sleep(3600 if state.step == 4 else 0)\n"
    )
    agent = torchrun(kitchen, "hung", "observe.callbacks=[endless:Endless]", timeout=8)
    wait_for(kitchen / "hung" / "checkpoints" / "step-00000002", agent)
    victim = rank(agent, 0)
    said = said_by(agent)
    assert agent.returncode != 0
    assert f"Rank 0 (process {victim.pid} on" in said
    assert "does not answer" in said
    assert said.count("Timeout (0:00:08)!") == 2  # each rank's own stacks
    assert "in on_step_end" in said


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_once_and_one_process_continues(
    kitchen: Path, whole: Path
) -> None:
    """Fault 20, too: with another number of ranks the same order, and losses but for rounding."""
    agent = torchrun(kitchen, "moved")
    wait_for(kitchen / "moved" / "checkpoints" / "step-00000004", agent)
    rank(agent, 1).send_signal(signal.SIGTERM)
    said = said_by(agent)
    assert "exitcode:75" in said.replace(" ", "")
    assert said.count("Stopped by a signal and saved at step") == 1
    end = json.loads((kitchen / "moved" / "metrics.jsonl").read_text().splitlines()[-1])
    assert end["reason"] == "interrupted"
    assert (kitchen / "moved" / "checkpoints" / f"step-{end['step']:08d}").exists()
    one = toque(
        "train", "run.yaml", "run_dir=moved", "model.shape.n_layer=2", cwd=kitchen
    )
    assert one.returncode == 0, one.stderr[-2000:]
    assert "ranks: 2 -> 1" in one.stderr.replace("\n", " ")
    assert list(losses_of(kitchen / "moved")) == list(losses_of(whole))


@pytest.mark.slow
def test_fault_27_ranks_leave_out_the_same_updates_and_go_back_together(
    kitchen: Path,
) -> None:
    """A rate that is far too high, and hardly a margin: what matters is that the ranks agree."""
    words = (
        "optim.peak_lr=0.5",
        "optim.outliers={sigma: 1e-6, window: 2, roll_back_after: 2}",
        'train.stop_after="8 steps"',
    )
    agent = torchrun(kitchen, "outliers", *words)
    said = said_by(agent)
    text = (kitchen / "outliers" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    end = lines[-1]
    assert end["skipped_updates"] >= 2, said[-3000:]
    told = [line["message"] for line in lines if line["event"] == "warning"]
    assert any("continues with the weights of step" in text for text in told)
    # Either it ends well, or by the rule for a second time within a window; never in a deadlock,
    # and never because the ranks differ.
    assert end["reason"] in ("finished", "non_finite"), said[-3000:]
    recorded = (kitchen / "outliers" / "skipped_updates.jsonl").read_text().splitlines()
    assert len(recorded) == end["skipped_updates"]


@pytest.mark.slow
def test_48_one_rank_prepares_and_the_others_wait(kitchen: Path, whole: Path) -> None:
    fresh = ("data.store=fresh",)
    agent = torchrun(kitchen, "prepared", *fresh)
    said = said_by(agent)
    assert agent.returncode == 0, said[-3000:]
    assert said.count("fresh is not prepared yet") == 1
    assert find_differences(facts_of(whole), facts_of(kitchen / "prepared")) == []
    write_cookbook(kitchen / "b.jsonl", n=200, seed=4)
    agent = torchrun(kitchen, "other", *fresh, "data.sources=[{path: b.jsonl}]")
    said = said_by(agent)
    assert agent.returncode != 0
    assert said.count("was not prepared with this configuration") == 1
    assert not (kitchen / "other").exists()


LONG = """
import os, sys, time
from pathlib import Path
from toque.training.distributed import process_group
from toque.training.distributed.process_group import join_ranks, run_on_main_rank
process_group.HEARTBEAT_SECONDS = 0.5
with join_ranks(strategy="ddp") as ranks:
    done = Path(sys.argv[1])
    run_on_main_rank(ranks, lambda: (time.sleep(9), done.touch()))
    assert done.exists()
    print("went on", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_48_preparing_may_take_longer_than_ranks_wait_for_each_other(
    tmp_path: Path,
) -> None:
    shared = surroundings(timeout=4)
    both = [as_rank(n, shared, "-c", LONG, str(tmp_path / "done")) for n in (0, 1)]
    said = [each.communicate(timeout=120)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert all("went on" in words for words in said)
