"""A console that cannot be written, or goes away: it is an observer, and the run goes on."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "COLUMNS": "80"
}  # fmt: skip


@pytest.fixture
def words(kitchen, tmp_path) -> list[str]:
    """The command of a short run of its own."""
    run = ["train", str(kitchen / "run.yaml"), f"run_dir={tmp_path / 'run'}"]
    return [sys.executable, "-m", "toque", *run]


def events(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def ended(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The last end; what came after a session may stand behind it."""
    return next(event for event in reversed(found) if event["event"] == "end")


def lost(folder: Path) -> list[str]:
    found = [e["message"] for e in events(folder) if e["event"] == "warning"]
    return [message for message in found if "console" in message]


def assert_whole(folder: Path) -> None:
    found = events(folder)
    assert [e["step"] for e in found if e["event"] == "step"] == list(range(1, 13))
    assert ended(found)["reason"] == "finished"
    assert ended(found)["saves"]["failed"] == 0
    assert (folder / "checkpoints" / "step-00000012" / "manifest.json").exists()
    assert (folder / "model" / "config.json").exists()


def reading_one_line(words: list[str], **more: Any) -> tuple[bytes, int]:
    """What `| head -1` sees of a command's output and errors, and the command's exit code."""
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT, **more
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.close()
    return line, process.wait(timeout=120)


def test_fault_62_the_reader_goes_away(words, tmp_path):
    line, code = reading_one_line([*words, "evaluation.generate=1"])
    assert line
    assert code == 0
    assert_whole(tmp_path / "run")
    (message,) = lost(tmp_path / "run")
    assert "Broken pipe" in message


@needs_full
@pytest.mark.slow
def test_fault_62_the_log_is_on_a_full_disk(words, tmp_path):
    with FULL.open("wb") as full:
        code = subprocess.run(
            words, stdout=full, stderr=full, env=ENVIRONMENT, check=False
        )
    assert code.returncode == 0
    assert_whole(tmp_path / "run")
    (message,) = lost(tmp_path / "run")
    assert "No space left on device" in message


SLOW = """
import time

class Slow:
    def on_step_end(self, state):
        time.sleep(0.1)
"""
LEADER = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.parametrize(
    "started", ["as usual", pytest.param("nohup", marks=pytest.mark.slow)]
)
def test_fault_62_the_terminal_is_closed(words, tmp_path, started):
    (tmp_path / "slow.py").write_text(SLOW)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, started, *words, "observe.callbacks=[slow:Slow]"],
        stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT, start_new_session=True,
        cwd=tmp_path,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while b"step 1 " not in seen:
        seen += os.read(ours, 4096)
    os.close(
        ours
    )  # the terminal's window is closed: SIGHUP, and EIO for whoever writes
    code = process.wait(timeout=120)
    if started == "nohup":
        assert code == 0
        assert_whole(tmp_path / "run")
        assert "Input/output error" in lost(tmp_path / "run")[0]
    else:
        assert code == 75
        assert ended(events(tmp_path / "run"))["reason"] == "interrupted"
        step = ended(events(tmp_path / "run"))["step"]
        assert (
            tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "manifest.json"
        ).exists()


HANG_UP = """
import os, signal

class HangUp:
    def on_step_end(self, state):
        if state.step == 5:
            for _ in range(int(os.environ["TIMES"])):
                os.kill(os.getpid(), signal.SIGHUP)
"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_fault_62_a_hangup_saves_and_ends(words, tmp_path, times):
    """The shell and the kernel both send one when a terminal goes."""
    (tmp_path / "hangs.py").write_text(HANG_UP)
    done = subprocess.run(
        [*words, "observe.callbacks=[hangs:HangUp]"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**ENVIRONMENT, "TIMES": str(times)},
    )  # fmt: skip
    assert done.returncode == 75, done.stderr
    assert "SIGHUP: finishing this step" in done.stderr
    assert ended(events(tmp_path / "run"))["reason"] == "interrupted"
    assert (
        tmp_path / "run" / "checkpoints" / "step-00000005" / "manifest.json"
    ).exists()


@pytest.mark.slow
def test_fault_62_two_ranks_whose_reader_goes_away(words, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line, code = reading_one_line([words[0], *torchrun, *words[1:]])
    assert line
    assert code == 0
    assert_whole(tmp_path / "run")


COMMANDS = ["presets", "show demo", "--help", "no-such-verb"]


@pytest.mark.parametrize("command", COMMANDS)
def test_fault_62_a_command_whose_reader_went_away_ends_quietly(command):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "toque", *command.split()],
        stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == (2 if command == "no-such-verb" else 0)
    assert "Traceback" not in done.stderr
    assert not re.search("Broken ?[Pp]ipe", done.stderr)


@needs_full
@pytest.mark.parametrize("command", ["presets", "--help"])
def test_fault_62_a_result_that_cannot_be_written_is_an_error(command):
    with FULL.open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "toque", *command.split()],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=ENVIRONMENT,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("toque: ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_fault_62_closed_streams(words, tmp_path):
    """As `toque train my.yaml >&- 2>&-` and some supervisors do it."""
    shell = shutil.which("sh")
    assert shell is not None
    closed = [shell, "-c", '"$@" >&- 2>&-', "sh", *words]
    assert subprocess.run(closed, env=ENVIRONMENT, check=False).returncode == 0
    assert_whole(tmp_path / "run")
