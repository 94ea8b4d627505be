"""The pages for people who come from other trainers: what each row's right column names is tried.

Commands are the matter of test_printed_commands.py. Here settings are resolved as a shell hands
them over, calls are made in the kitchen, and names are looked up; other words in code are listed.
"""

import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

import toque
from fixtures.pages import REPOSITORY
from toque.cli.app import app
from toque.config import load_config, presets
from toque.config.error_messages import setting_paths
from toque.cooking.recipe_scores import RECIPE_SCORES
from toque.errors import ConfigError
from toque.training.observers.watchers import METHODS, RunState
from toque.units import Duration, Progress

GUIDES = REPOSITORY / "docs" / "guides"
PAGES = [GUIDES / "coming-from-trainer.md", GUIDES / "coming-from-older-trainers.md"]
BASES = ("demo", "fast-iteration", "ten-improvements")
"""Presets that a setting may stand on: a model from scratch, an adapter, and every improvement."""
VALUES = {
    "adafactor", "muon", "dora", "neox", "llama", "auto", "fp16", "float32", "rtx-4090",
    "rtx-3090", '"save"', '"stop"', '"evaluate"', "weight", "r", "bf16", "trackio",
    "wandb",
}  # fmt: skip
"""Values of settings that a row speaks of, and what a callback may return."""
OTHER = {
    "state",
    "WANDB_PROJECT",
    ".npy",
    "adapter_model.safetensors",
    "bleu",
    "perplexity",
}
ROUGE = {"rouge1", "rouge2", "rougeL"}


def rows() -> list[tuple[str, str]]:
    """Place and right column of each row of the tables."""
    found = []
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        for number, (line, after) in enumerate(
            zip(lines, [*lines[1:], ""], strict=True), start=1
        ):
            if line.startswith("| ") and not after.startswith("|---"):
                found.append(
                    (
                        f"{page.name}:{number}",
                        line.removesuffix(" |").rsplit(" | ", 1)[1],
                    )
                )
    return found


ROWS = [(place, right) for place, right in rows() if "`" in right]
CALL = re.compile(r"(\w+ = )?toque\.\w+\(|(run|scores|state)\.\w|print\(")


def refused(setting: str) -> str | None:
    """Why a setting cannot be used on any of the presets; None where it can on one."""
    yaml = re.fullmatch(r"([a-z_.]+): (.+)", setting)
    words = [f"{yaml[1]}={yaml[2]}"] if yaml else shlex.split(setting)
    said = None
    for base in BASES:
        try:
            load_config(base, words)
        except ConfigError as error:
            said = str(error)
        else:
            return None
    return said


@cache
def known() -> set[str]:
    """Settings, presets, scores, methods, flags, extras and what is listed above."""
    verbs = [verb for verb in app if not verb.startswith("-")]
    arguments = [
        one for verb in verbs for one in app[verb].assemble_argument_collection()
    ]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return {
        *setting_paths(), *presets(), *RECIPE_SCORES, *ROUGE, *METHODS, *VALUES, *OTHER,
        *project["optional-dependencies"], *(name for one in arguments for name in one.names),
    }  # fmt: skip


def test_there_are_many_rows() -> None:
    assert len(ROWS) > 110


@pytest.mark.parametrize(("place", "right"), ROWS, ids=[place for place, _ in ROWS])
def test_what_a_row_names_is_there(place: str, right: str, kitchen: Path) -> None:
    names = known()
    for code in re.findall(r"`([^`]+)`", right):
        plain = code.strip("'").removesuffix("(state)")
        if (
            code.startswith(("toque ", "./", "pip "))
            or plain in names
            or CALL.match(code)
        ):
            continue  # commands and calls have tests of their own
        if re.match(r"[a-z_.]+(=|: )", plain):
            said = refused(code)
            assert said is None, f"{place}: {code}: {said}"
            continue
        if re.fullmatch(r'"[\d.]+ (steps|epochs|%)"', code):
            continue
        inside = kitchen / "runs/my" / plain.replace("step-00001000", "step-00000003")
        assert inside.exists(), f"{place}: `{code}` is nothing that there is"


def test_calls_can_be_made(kitchen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(kitchen)
    monkeypatch.syspath_prepend(kitchen)
    from mywatch import Watcher  # type: ignore[import-not-found]  # of the page on callbacks

    state = RunState(Progress(step=3), Duration(3, "steps"), metrics={"loss": 1.0})
    names: dict[str, object] = {
        "toque": toque, "state": state, "Watcher": Watcher, "text": "Ingredients:\n- 2 eggs",
        "config": toque.configure("my.yaml", run_dir="runs/calls"),
        "hypotheses": ["an egg"], "references": ["two eggs"],
    }  # fmt: skip
    made = [
        code
        for _, right in ROWS
        for code in re.findall(r"`([^`]+)`", right)
        if CALL.match(code)
    ]
    assert len(made) > 20
    for code in dict.fromkeys(made):
        exec(code, names)  # noqa: S102
