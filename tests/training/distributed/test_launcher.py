"""The launcher over real processes that are no trainings: exit codes, restarts, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from toque.errors import ConfigError, RankLost
from toque.hardware.processor import usable_cores
from toque.training.distributed.launcher import (
    environment_of,
    launch,
    refuse_impossible,
)

RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


@pytest.fixture
def said() -> list[str]:
    return []


def ended(body: str, said: list[str], restarts: int = 1) -> int:
    """The exit code of a launcher whose two ranks do this."""
    command = [sys.executable, "-c", RANK + body]
    return launch(command, gpus=2, restarts=restarts, say=said.append)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(75)", 75),
        ("sys.exit(4 if rank else 0)", 4),
        ("time.sleep(0.5 * rank); sys.exit(1 if rank else 3)", 3),
    ],
)
def test_the_ranks_exit_code_is_the_commands_and_is_not_tried_again(body, code, said):
    assert ended(body, said) == code
    assert not any("starting again" in line for line in said)


def test_a_rank_that_still_works_is_waited_for(said, tmp_path):
    """Torch's own agent would end it as soon as the first has left with 75."""
    late = tmp_path / "late"
    body = f"time.sleep(1.5 * rank); open({str(late)!r}, 'a').close(); sys.exit(75)"
    assert ended(body, said) == 75
    assert late.exists()


def test_a_killed_rank_is_started_again_with_the_others(said, tmp_path):
    body = f"""
open({str(tmp_path)!r} + f"/{{rank}}-{{again}}", "w").close()
if rank == 1 and again == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert ended(body, said) == 0
    assert names(tmp_path) == ["0-0", "0-1", "1-0", "1-1"]
    assert "Rank 1 (process " in said[1]
    assert said[1].endswith("was killed by SIGKILL, out of memory perhaps")
    assert said[2] == "starting again from the newest checkpoint: restart 1 of 1"


def test_a_rank_that_is_killed_again_is_named_in_the_end(said):
    with pytest.raises(
        RankLost, match=r"Rank 0 \(process \d+ on .*\) was killed by SIGKILL"
    ):
        ended("rank or os.kill(os.getpid(), signal.SIGKILL)", said)
    assert len([line for line in said if "restart 1 of 1" in line]) == 1


def test_what_a_rank_said_itself_is_not_said_again(said):
    body = "sys.exit(1) if rank else os.kill(os.getpid(), signal.SIGKILL)"
    assert ended(body, said, restarts=0) == 1
    assert len(said) == 1  # what is started


def when(there: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Do something once a condition holds."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not there() and time.monotonic() < deadline:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("answer", "code"),
    [("sys.exit(75)", 75), ("os._exit(130)", 130), (None, 128 + signal.SIGTERM)],
)
def test_signals_go_to_the_ranks_and_end_the_command(answer, code, said, tmp_path):
    """A rank that does not handle one dies of it: then nothing was saved, nor is tried again."""
    handler = f"signal.signal(signal.SIGTERM, lambda *_: {answer})" if answer else ""
    body = f"""
{handler}
open({str(tmp_path)!r} + f"/{{rank}}", "w").close()
time.sleep(60)
"""
    sender = when(
        lambda: len(names(tmp_path)) == 2, lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert ended(body, said) == code
    sender.join()
    assert len(said) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("gpus", "restarts", "told"),
    [
        (0, 3, "gpus must be at least 1, not 0"),
        (2, -1, "restarts must be at least 0, not -1"),
        (3, 0, "gpus must be at most 2, the number of CUDA devices"),
    ],
)
def test_what_cannot_be_meant_is_refused(monkeypatch, gpus, restarts, told):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refuse_impossible(2, 0)
    with pytest.raises(ConfigError, match=told):
        refuse_impossible(gpus, restarts)


def test_cores_are_divided_unless_the_user_has(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(usable_cores())
    assert environment_of(1)["OMP_NUM_THREADS"] == str(cores)
    assert environment_of(2 * cores)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment_of(1)["OMP_NUM_THREADS"] == "7"


def test_ranks_end_with_their_launcher(tmp_path: Path):
    """Killed with SIGKILL, it cannot tell them; a rank of `toque train` asks for a SIGTERM."""
    body = f"""
from toque.training.distributed.launcher import follow_launcher
follow_launcher()
signal.signal(signal.SIGTERM, lambda *_: (open({str(tmp_path / "told")!r}, "w"), sys.exit(75)))
open({str(tmp_path / "there")!r}, "w").close()
time.sleep(60)
"""
    script = """
import sys
from toque.training.distributed.launcher import launch
launch([sys.executable, "-c", sys.argv[1]], gpus=1, restarts=0, say=print)
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", script, RANK + body],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    when((tmp_path / "there").exists, launcher.kill).join()
    launcher.wait()
    deadline = time.monotonic() + 30
    while not (tmp_path / "told").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "told").exists()
