"""Mistakes that are answered before torch loads, which takes up to half a minute; and Ctrl-C."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.processes import toque

MISTAKES = {
    "generate ./absent --prompt soup": (
        2,
        "The folder absent does not exist. Next to it: bare, model",
    ),
    "generate bare --prompt soup": (4, "bare has no run"),
    "chat ./absent": (2, "The folder absent does not exist. Next to it: bare, model"),
    "chat model bare": (4, "bare has no run"),
    "serve model bare": (4, "bare has no run"),
    "serve model --port PORT": (2, "Choose another --port"),
    "serve model --rows 0": (2, "--rows is 0"),
    "watch . --port PORT": (2, "Choose another --port"),
    "export bare --to out": (2, "bare is not a run, checkpoint, model folder"),
    "train bse.yaml": (2, "Nearest: base.yaml."),
    "train base.yaml --from bare": (4, "the folder has no checkpoint"),
    "train base.yaml --no-prepare": (3, "nothing has no prepared store"),
    "show-batch base.yaml": (3, "nothing has no prepared store"),
    "check base.yaml": (3, "nothing has no prepared store"),
}


@pytest.fixture
def without_torch(tmp_path: Path) -> Path:
    """A folder in which importing torch fails, with a model's outline in it."""
    for name in ("no/torch", "bare", "model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "no/torch/__init__.py").write_text(
        "raise SystemExit('torch was loaded')"
    )
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "base.yaml").write_text(
        "data: {sources: [{path: none.jsonl}], store: nothing}"
    )
    return tmp_path


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_before_torch_loads(
    without_torch: Path, words: str
) -> None:
    code, said = MISTAKES[words]
    path = os.pathsep.join([str(without_torch / "no"), *filter(None, sys.path)])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        given = shlex.split(words.replace("PORT", port))
        done = toque(*given, cwd=without_torch, PYTHONPATH=path, HF_HUB_OFFLINE="1")
    assert (done.returncode, said in " ".join(done.stderr.split())) == (code, True), (
        done.stderr
    )


@pytest.mark.parametrize("verb", ["train", "show"])
def test_ctrl_c_before_the_first_update_says_what_continues(
    tmp_path: Path, verb: str
) -> None:
    """Ctrl-C while a command prepared or measured ended without a word."""
    os.mkfifo(tmp_path / "my.yaml")
    # A job in the background is born with Ctrl-C ignored.
    as_in_front = (
        "import signal, sys; from toque.cli import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main())"
    )
    words = [sys.executable, "-c", as_in_front, verb, "my.yaml", "seed=3"]
    path = os.pathsep.join(filter(None, sys.path))
    with (
        subprocess.Popen(
            words,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        ) as command,
        (tmp_path / "my.yaml").open("w"),
    ):  # opens when the command reads it
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=60)
    assert command.returncode == 130
    assert said.startswith("toque: Stopped by Ctrl-C.")
    continues = "run the same command again: toque train my.yaml seed=3" in said
    assert continues is (verb == "train")
    assert "Traceback" not in said
