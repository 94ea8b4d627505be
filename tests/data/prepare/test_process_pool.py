"""Workers forked or spawned: the same bytes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prepare_child import started
from store_checks import content, many_lines
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.tokenizer.tokenizer_training import interruptible


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are always spawned")
def test_forked_and_spawned_workers_write_the_same_store(
    tmp_path: Path, settings_for: Callable[..., PrepareSettings]
) -> None:
    path = many_lines(tmp_path, 60)
    for name, thread in (("forked", False), ("spawned", True)):
        process = started(path, tmp_path / name, settings_for(), thread=thread)
        out, said = process.communicate(timeout=120)
        assert out.split("\n")[:2] == ["not alone" if thread else "alone", "prepared"], said
    assert content(tmp_path / "forked") == content(tmp_path / "spawned")


@pytest.mark.skipif(sys.platform != "linux", reason="the worker is looked for in /proc")
def test_ctrl_c_ends_the_workers_at_once_and_the_store_goes_on(
    tmp_path: Path, settings_for: Callable[..., PrepareSettings]
) -> None:
    path, store, there = many_lines(tmp_path, 30), tmp_path / "store", tmp_path / "there"
    process = started(path, store, settings_for(), stuck=str(there))
    while not (there.exists() and there.read_text()) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)  # its worker would sleep for ten minutes
    assert "KeyboardInterrupt" in said
    assert not Path(f"/proc/{there.read_text()}").exists(), "the worker has gone, too"
    out, said = started(path, store, settings_for()).communicate(timeout=120)
    assert "prepared" in out, said


@pytest.mark.skipif(sys.platform == "win32", reason="signals are raised otherwise there")
def test_ctrl_c_is_answered_while_a_library_works() -> None:
    """Learning a tokenizer returns to Python after a minute; the main thread must not be in it."""
    script = (
        "import os, signal, threading, time\n"
        "from toque.data.tokenizer.tokenizer_training import interruptible\n"
        "threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "import ctypes\n"
        "interruptible(lambda: ctypes.CDLL(None).sleep(600))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode in (1, 130, -signal.SIGINT)


def test_what_fails_in_the_thread_fails_here() -> None:
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)
    assert interruptible(lambda: 3) == 3
