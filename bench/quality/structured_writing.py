"""Recipes held to their prompts' ingredients and their form, against the same model left free.

    python bench/quality/structured_writing.py RUN [--prompts N]

RUN is a finished run over recipes. Its first N held-out prompts are written greedily and sampled
(temperature 0.7, top_p 0.95), free and held, and scored as `toque evaluate` scores texts.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from toque.cooking.scoring.recipe_scores import text_metrics
from toque.data.store.token_store import TokenStore
from toque.evaluation.text_samples import Prompt
from toque.models.generation.engine import generate
from toque.workflows.asking.structured_writing import recipe_constraint
from toque.workflows.assembly.evaluation import held_out_prompts
from toque.workflows.open_model import OpenedModel, open_model

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"strategy": "sample", "temperature": 0.7, "top_p": 0.95},
}
SHOWN = (
    "ingredient_coverage",
    "hallucinated_ingredients",
    "structure",
    "ingredients_used",
    "recipe_score",
)


def scores(
    opened: OpenedModel, prompts: list[Prompt], *, held: bool, way: dict[str, Any]
) -> dict[str, float]:
    """Mean scores, tokens, and seconds of the prompts' texts."""
    codec = opened.codec
    started = time.perf_counter()
    texts = generate(
        opened.model,
        [list(prompt.ids) for prompt in prompts],
        max_new_tokens=opened.provenance.max_new_tokens,
        eos_id=codec.eos_id,
        pad_id=codec.pad_id,
        constraint=recipe_constraint(codec, [p.text for p in prompts], opened.provenance)
        if held
        else None,
        **way,
    )
    seconds = time.perf_counter() - started
    each = [text_metrics(p.text, codec.decode(t)) for p, t in zip(prompts, texts, strict=True)]
    found: dict[str, float] = {}
    for name in SHOWN:
        having = [metrics[name] for metrics in each if name in metrics]
        found[name] = round(sum(having) / len(having), 3)
    return found | {"tokens": sum(map(len, texts)), "seconds": round(seconds, 1)}


def main() -> None:
    """Print one record a way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=50)
    asked = parser.parse_args()
    opened = open_model(asked.run)
    if opened.config is None:
        parser.error(f"{asked.run} is no run folder, so it has no held-out prompts.")
    prompts = held_out_prompts(TokenStore.open(opened.config.data.store), asked.prompts)
    for name, way in WAYS.items():
        for held in (False, True):
            record = scores(opened, prompts, held=held, way=way)
            print({"way": name, "held": held, "prompts": len(prompts)} | record, flush=True)


if __name__ == "__main__":
    main()
