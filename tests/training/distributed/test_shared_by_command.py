"""`toque train CONFIG --gpus N`, and torchrun, as a user types it: real runs on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from conftest import REPOSITORY
from fixtures.ports import free_port
from fixtures.ranks import prepared_folder, rank, started, train, wait_for
from toque.workflows.killed_sessions import differing, facts_of

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
@pytest.mark.timeout(600)
def test_a_killed_rank_is_named_and_the_run_goes_on_by_itself(kitchen: Path, whole: Path) -> None:
    command = train(kitchen, "killed", "--gpus", "2")
    wait_for(kitchen / "killed" / "checkpoints" / "step-00000004", command)
    victim = rank(command, 1)
    victim.kill()
    said = said_by(command)
    assert command.returncode == 0, said[-3000:]
    assert said.count("toque: ") == 1
    assert f"Rank 1 (process {victim.pid} on" in said
    assert "starting again from the newest checkpoint: restart 1 of 3" in said
    assert "continuing from step" in said
    assert differing(facts_of(whole), facts_of(kitchen / "killed")) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fault_22_without_restarts_all_end_within_ten_seconds_with_one_paragraph(
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
@pytest.mark.timeout(600)
def test_an_error_has_its_exit_code_and_is_printed_once(kitchen: Path) -> None:
    (kitchen / "blocked").write_text("a file, no folder")
    command = train(kitchen, "blocked", "--gpus", "2")
    said = said_by(command)
    assert command.returncode == 4, said[-3000:]
    assert said.count("toque: ") == 1
    assert "toque: blocked/checkpoints cannot be written" in said
    assert "starting again" not in said


@pytest.mark.slow
@pytest.mark.timeout(600)
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
    assert differing(facts_of(whole), facts_of(kitchen / name)) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_srun_names_the_ranks(kitchen: Path, whole: Path) -> None:
    """Two tasks as Slurm would start them."""
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
    }
    tasks = [
        train(kitchen, "srun", environ=step | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)})
        for n in (0, 1)
    ]
    said = [said_by(task) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert differing(facts_of(whole), facts_of(kitchen / "srun")) == []


def two_machines(kitchen: Path, run: str, *last_words: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of two commands of torchrun, as they are typed on two machines."""
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *where)
    words = ("--nproc-per-node", "1", "-m", "toque", "train", "run.yaml", f"run_dir={run}")
    both = [started(kitchen, *torchrun, *words), started(kitchen, *torchrun, *words, *last_words)]
    said = [said_by(each) for each in both]
    return [each.returncode for each in both], said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fault_25_two_machines_by_torchrun_train_to_the_same_bits_and_end_with_0(
    kitchen: Path, whole: Path
) -> None:
    """Where it is left to Python, gloo aborts one process in eight that is done."""
    codes, said = two_machines(kitchen, "machines")
    assert codes == [0, 0], said
    assert differing(facts_of(whole), facts_of(kitchen / "machines")) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_machines_with_other_settings_are_refused_before_anything_is_written(kitchen: Path) -> None:
    codes, said = two_machines(kitchen, "unlike", "seed=2")
    assert 0 not in codes, said
    assert sum(text.count("The 2 ranks are not alike: the configuration") for text in said) == 1
    assert not (kitchen / "unlike").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_machine_that_loses_its_network_is_named_and_all_continue_to_the_same_bits() -> None:
    script = REPOSITORY / "bench" / "robustness" / "lost_network.py"
    done = subprocess.run(
        [sys.executable, str(script), "--seconds", "20", "--steps", "12"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr[-3000:]
    record = json.loads(done.stdout)
    if "skipped" in record:
        pytest.skip(record["skipped"])
    assert record["ours"]["named"]
    assert record["ours"]["exit_codes"] == [0, 0, 0, 0]
    assert record["quality"]["differing"] == []
