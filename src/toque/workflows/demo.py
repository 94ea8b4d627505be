"""Demonstration: train on synthetic recipes and generate three new ones."""

from __future__ import annotations

import filecmp
import tempfile
import time
from pathlib import Path

from toque.config import Resolved, RunConfig
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import ConfigError, argument, in_shell
from toque.reporter import SILENT, Reporter
from toque.user_paths import named_path
from toque.workflows.prepare import describe_result, prepare
from toque.workflows.results import TrainedRun

DISHES = {
    "Chickpea and Olive Oil Hummus": "chickpeas, olive oil, lemon juice, garlic, salt",
    "Baked Sweet Potatoes with Sour Cream and Salsa": (
        "sweet potatoes, olive oil, salt, sour cream, salsa"
    ),
    "Fried Rice with Peas and Carrots": (
        "cooked rice, eggs, frozen peas, carrots, garlic, vegetable oil, soy sauce, sesame oil"
    ),
}
"""Dishes, with ingredients, for the final prompts. The cookbook does not contain these dishes."""
N_RECIPES = 8000
"""Default number of recipes in the cookbook."""


def demo(
    resolved: Resolved, *, n: int | None = None, reporter: Reporter = SILENT
) -> TrainedRun:
    """Write a cookbook of `n` recipes, train on it, evaluate, and generate three recipes.

    Raises:
        ConfigError: The cookbook exists with another number of recipes.
    """
    began = time.monotonic()
    config = resolved.config
    cookbook = _find_cookbook(config)
    _write_or_check_cookbook(cookbook, n, seed=config.seed)
    reporter.line(f"1/4  {cookbook}: synthetic recipes from the embedded grammar")

    prepared = describe_result(prepare(config, reporter=reporter), config.data.engine)
    reporter.line(
        f"2/4  {prepared} `toque report {in_shell(config.data.store)}` shows it as a page."
    )

    with reporter.working("loading torch"):  # after preparation has forked its workers
        from toque.training.stopping import CommandClock
        from toque.workflows.inference.generate import generate
        from toque.workflows.train import train

    run = train(resolved, clock=CommandClock(began=began), reporter=reporter)
    if run.interrupted:
        return run
    reporter.line(f"3/4  trained {run.step:,} steps and scored")

    reporter.line("4/4  three recipes for unseen dishes:\n")
    prompts = [f"{dish}: {foods}" for dish, foods in DISHES.items()]
    for text in generate(run.folder, prompts, seed=config.seed, reporter=reporter):
        reporter.line(str(text))
    minutes = (time.monotonic() - began) / 60
    reporter.line(
        f"Done in {minutes:.1f} minutes. The run folder is {run.folder}: model/, "
        "evaluation.json, samples.jsonl, metrics.jsonl.\n"
        f"`toque serve {in_shell(run.folder)}` shows a page for your own prompts at "
        "http://127.0.0.1:8000.\n"
        "For your own data, `toque init RECIPES` writes a configuration for a file or folder."
    )
    return run


def _find_cookbook(config: RunConfig) -> Path:
    """Return the path of the cookbook, which may not exist yet.

    Raises:
        ConfigError: data.sources is not one local file.
    """
    paths = [source.path for source in config.data.sources]
    if len(paths) == 1:
        # A path with a colon is an address, and a name with one of *?[ is a pattern.
        is_local_path = ":" not in paths[0]
        is_pattern = any(char in Path(paths[0]).name for char in "*?[")
        cookbook = named_path(paths[0])
        is_file_or_new = cookbook.is_file() or not cookbook.exists()
        if is_local_path and not is_pattern and is_file_or_new:
            return cookbook
    raise ConfigError(
        "data.sources must name one local file, to which the demonstration writes its cookbook, "
        f"not {', '.join(paths) or 'none'}. For your own data, use `toque init RECIPES`."
    )


def _write_or_check_cookbook(cookbook: Path, n: int | None, *, seed: int) -> None:
    """Write a cookbook of `n` recipes, or check that an existing file is this cookbook.

    Without `n`, any existing file is accepted.
    """
    if not cookbook.exists():
        n_recipes = N_RECIPES if n is None else n
        write_cookbook(cookbook, n=n_recipes, seed=seed, unseen=DISHES)
    elif n is not None and not _is_cookbook(cookbook, n, seed):
        raise ConfigError(
            f"{argument('n')} is {n}, but {cookbook} already contains another cookbook, and the "
            f"store and the run may depend on it. Leave {argument('n')} out to use it, or begin "
            "another demonstration: run_dir=runs/another data.store=stores/another "
            "data.sources='[{path: runs/another/cookbook.jsonl}]'."
        )


def _is_cookbook(file: Path, n: int, seed: int) -> bool:
    """Return whether a file is the cookbook of `n` recipes with this seed."""
    with tempfile.TemporaryDirectory() as folder:
        expected = Path(folder) / file.name
        write_cookbook(expected, n=n, seed=seed, unseen=DISHES)
        return filecmp.cmp(expected, file, shallow=False)
