"""`toque demo`: the main job on the embedded cookbook, from nothing to written recipes."""

from __future__ import annotations

import time
from pathlib import Path

from toque.config import load_config
from toque.cooking.cookbook.generate import write_cookbook


def run_demo(overrides: list[str], *, n: int) -> None:
    """Write the cookbook, prepare, train, evaluate, and show three recipes."""
    started = time.perf_counter()
    resolved = load_config("demo", overrides)
    config = resolved.config
    cookbook = Path(config.data.sources[0].path)
    if not cookbook.exists():
        cookbook.parent.mkdir(parents=True, exist_ok=True)
        write_cookbook(cookbook, n=n, seed=config.seed)
    print(f"1/4  {cookbook}: synthetic recipes from the embedded grammar", flush=True)
    from toque.workflows.prepare import run_prepare, told

    prepared = told(run_prepare(config), config)
    print(f"2/4  {prepared} Its report: {config.data.store}/report.md", flush=True)
    from toque.workflows.generate import SamplingParams, asked_for, write_texts
    from toque.workflows.train import run_training

    outcome = run_training(resolved)
    if outcome.interrupted:
        print("Stopped and saved; `toque demo` continues.")
        return
    print(f"3/4  trained {outcome.step} steps\n4/4  three recipes for dishes it has not seen:\n")
    asked = [
        "Chickpea and Olive Oil Hummus: chickpeas, olive oil, lemon juice, garlic",
        (
            "Baked Sweet Potatoes with Sour Cream and Salsa: sweet potatoes, olive oil, "
            "sour cream, salsa"
        ),
        "Fried Rice with Peas and Carrots: rice, eggs, peas, carrots, garlic, soy sauce",
    ]
    manner = SamplingParams(temperature=0.0, top_p=1.0, seed=config.seed)
    for text in write_texts(str(outcome.folder), asked_for(asked, None, raw=False), manner):
        print(text.shown())
    minutes = (time.perf_counter() - started) / 60
    print(
        f"Done in {minutes:.1f} minutes. The run folder is {outcome.folder}: model/, "
        "evaluation.json, samples.jsonl, metrics.jsonl.\n"
        "Your turn: toque prepare my.yaml && toque train my.yaml"
    )
