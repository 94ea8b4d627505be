"""Demonstration: the main job on the embedded cookbook, from nothing to written recipes."""

from __future__ import annotations

import filecmp
import tempfile
import time
from pathlib import Path
from typing import Final

from toque.config import Resolved, RunConfig
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import ConfigError, argument, in_shell
from toque.reporter import SILENT, Reporter
from toque.user_paths import named_path
from toque.workflows.prepare import in_a_line, prepare
from toque.workflows.results import TrainedRun

DISHES: Final = {
    "Chickpea and Olive Oil Hummus": "chickpeas, olive oil, lemon juice, garlic, salt",
    "Baked Sweet Potatoes with Sour Cream and Salsa": (
        "sweet potatoes, olive oil, salt, sour cream, salsa"
    ),
    "Fried Rice with Peas and Carrots": (
        "cooked rice, eggs, frozen peas, carrots, garlic, vegetable oil, soy sauce, sesame oil"
    ),
}  # dishes that are asked for at the end, with their ingredients; the cookbook goes without them


N_RECIPES: Final = 8000  # of a cookbook, unless told


def demo(resolved: Resolved, *, n: int | None = None, reporter: Reporter = SILENT) -> TrainedRun:
    """Write a cookbook of `n` recipes, prepare, train, evaluate, and report three recipes.

    A cookbook that is there stays as it is; where `n` asks for another, that is a ConfigError.
    """
    began = time.monotonic()
    config = resolved.config
    cookbook = _cookbook_of(config)
    if not cookbook.exists():
        written = N_RECIPES if n is None else n
        write_cookbook(cookbook, n=written, seed=config.seed, unseen=DISHES)
    elif n is not None and not _holds(cookbook, n, config.seed):
        raise ConfigError(
            f"{argument('n')} is {n}, and {cookbook} holds another cookbook, which the store and "
            f"the run may be of. Leave {argument('n')} out to take it as it is, or begin another "
            "demonstration: run_dir=runs/another data.store=stores/another "
            "data.sources='[{path: runs/another/cookbook.jsonl}]'."
        )
    reporter.line(f"1/4  {cookbook}: synthetic recipes from the embedded grammar")
    prepared = in_a_line(prepare(config, reporter=reporter), config.data.engine)
    reporter.line(
        f"2/4  {prepared} `toque report {in_shell(config.data.store)}` makes a page of it."
    )
    with reporter.working("loading torch"):  # after processes have been forked
        from toque.training.stopping import CommandClock
        from toque.workflows.inference.generate import generate
        from toque.workflows.train import train

    run = train(resolved, clock=CommandClock(began=began), reporter=reporter)
    if run.interrupted:
        return run
    reporter.line(
        f"3/4  trained {run.step:,} steps and scored\n"
        "4/4  three recipes for dishes it has not seen:\n"
    )
    asked = [f"{dish}: {foods}" for dish, foods in DISHES.items()]
    for text in generate(run.folder, asked, seed=config.seed, reporter=reporter):
        reporter.line(str(text))
    minutes = (time.monotonic() - began) / 60
    reporter.line(
        f"Done in {minutes:.1f} minutes. The run folder is {run.folder}: model/, "
        "evaluation.json, samples.jsonl, metrics.jsonl.\n"
        f"`toque serve {in_shell(run.folder)}` shows a page where it writes for you, at "
        "http://127.0.0.1:8000.\n"
        "Your turn: `toque init RECIPES` writes a configuration for a file or folder of yours."
    )
    return run


def _cookbook_of(config: RunConfig) -> Path:
    """The file that the cookbook is written to, or a ConfigError where data.sources is no file."""
    paths = [source.path for source in config.data.sources]
    if len(paths) == 1 and not (":" in paths[0] or set(Path(paths[0]).name) & set("*?[")):
        cookbook = named_path(paths[0])
        if cookbook.is_file() or not cookbook.exists():
            return cookbook
    raise ConfigError(
        f"The demonstration writes its cookbook to the file that data.sources names, and it names "
        f"{', '.join(paths) or 'none'}. Name one file of this machine, or leave it out; recipes of "
        "your own are for `toque init RECIPES`."
    )


def _holds(cookbook: Path, n: int, seed: int) -> bool:
    """True if a file is the cookbook of `n` recipes, whose bytes are always the same."""
    with tempfile.TemporaryDirectory() as folder:
        anew = Path(folder) / cookbook.name
        write_cookbook(anew, n=n, seed=seed, unseen=DISHES)
        return filecmp.cmp(anew, cookbook, shallow=False)
