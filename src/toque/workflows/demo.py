"""Demonstration: the main job on the embedded cookbook, from nothing to written recipes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from toque.config import Resolved
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import in_shell
from toque.reporter import SILENT, Reporter
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


def demo(resolved: Resolved, *, n: int = 8000, reporter: Reporter = SILENT) -> TrainedRun:
    """Write a cookbook of `n` recipes, prepare, train, evaluate, and report three recipes."""
    started = time.perf_counter()
    config = resolved.config
    cookbook = Path(config.data.sources[0].path)
    if not cookbook.exists():
        cookbook.parent.mkdir(parents=True, exist_ok=True)
        write_cookbook(cookbook, n=n, seed=config.seed, unseen=DISHES)
    reporter.line(f"1/4  {cookbook}: synthetic recipes from the embedded grammar")
    prepared = in_a_line(prepare(config, reporter=reporter), config.data.engine)
    reporter.line(
        f"2/4  {prepared} `toque report {in_shell(config.data.store)}` makes a page of it."
    )
    with reporter.working("loading torch"):  # after processes have been forked
        from toque.workflows.inference.generate import generate
        from toque.workflows.train import train

    run = train(resolved, reporter=reporter)
    if run.interrupted:
        reporter.line("Stopped and saved; `toque demo` continues.")
        return run
    reporter.line(
        f"3/4  trained {run.step:,} steps and scored\n"
        "4/4  three recipes for dishes it has not seen:\n"
    )
    asked = [f"{dish}: {foods}" for dish, foods in DISHES.items()]
    for text in generate(run.folder, asked, seed=config.seed, reporter=reporter):
        reporter.line(str(text))
    minutes = (time.perf_counter() - started) / 60
    reporter.line(
        f"Done in {minutes:.1f} minutes. The run folder is {run.folder}: model/, "
        "evaluation.json, samples.jsonl, metrics.jsonl.\n"
        f"`toque serve {in_shell(run.folder)}` shows a page where it writes for you, at "
        "http://127.0.0.1:8000.\n"
        "Your turn: `toque init RECIPES` writes a configuration for a file or folder of yours."
    )
    return run
