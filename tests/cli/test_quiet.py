"""Other libraries' warnings and log lines: none reaches the terminal of a command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "src"
CHATTY = """
import importlib.util
import sys


class Chatty:
    # Makes transformers warn and log whenever it is asked for a model's embedding.

    def find_spec(self, name, path=None, target=None):
        if name != "transformers.modeling_utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            inner = module.PreTrainedModel.get_input_embeddings

            def chatty(model):
                import logging, warnings
                import transformers.utils.logging

                open("spoke", "w").close()
                warnings.warn("not ours: the place is the library's", FutureWarning)
                warnings.warn("not ours: the place is the caller's", FutureWarning, stacklevel=2)
                logging.getLogger("somebody").warning("not ours: a line of a bare logger")
                transformers.utils.logging.get_logger("any").warning("not ours: its own")
                return inner(model)

            module.PreTrainedModel.get_input_embeddings = chatty

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Chatty())
"""
FOREIGN = re.compile(
    r"not ours|Warning:|warnings\.warn|site-packages|\bdeprecat|Traceback|^\[[WEI]\d|^[WEI]\d{4} "
    r"|\btransformers\b|\bINFO\b|\bWARNING\b|%\|"
)
"""Forms in which libraries write: warnings, log lines, progress bars."""


COMMANDS = """
import pathlib, sys
from toque.cli import main

for words in {commands!r}:
    sys.argv[1:] = words
    assert main() == 0, words
    print(f"end of {{words[0]}}")
    pathlib.Path("spoke").unlink()  # the library did talk
"""


def lines_of(folder: Path, *commands: list[str]) -> list[str]:
    """All that commands print on both streams, each as in a process of its own."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    search = os.pathsep.join(map(str, (folder / "hook", SOURCES)))
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS.format(commands=commands)],
        cwd=folder,
        env=clean | {"PYTHONPATH": search, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.fixture
def folder(own_kitchen: Path) -> Path:
    """A configuration, recipes, and a transformers that talks."""
    (own_kitchen / "hook").mkdir()
    (own_kitchen / "hook" / "sitecustomize.py").write_text(CHATTY, encoding="utf-8")
    return own_kitchen


def test_train_and_generate_print_no_line_of_another_library(folder: Path):
    commands = (
        ["train", "my.yaml", "data.store=another"],
        ["generate", "run", "--prompt", "soup: lentils"],
    )
    lines = lines_of(folder, *commands)
    assert len(lines) > 8
    assert [line for line in lines if FOREIGN.search(line)] == []


@pytest.mark.slow
def test_the_demo_prints_no_line_of_another_library(folder: Path):
    lines = lines_of(
        folder, ["demo", "train.stop_after=2 steps", "evaluation.generate=2"]
    )
    assert [line for line in lines if FOREIGN.search(line)] == []
