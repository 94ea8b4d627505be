"""Recipes held to their prompts' ingredients and their form, against the same model left free.

    python bench/quality/structured_writing.py --run RUN [--prompts N]

RUN is a finished run over recipes. Its first N held-out prompts are written greedily and sampled
(temperature 0.7, top_p 0.95), free and held, and scored as `toque evaluate` scores texts. Held to
them, coverage and form are no merit of the model's: "ingredients_used", the share that the steps
use, says whether it cooks with what it lists. Quality: held texts list all that was asked.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from toque.cooking.recipe_scores import text_metrics
from toque.data.store.token_store import TokenStore
from toque.evaluation.text_samples import Prompt, held_out_prompts
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions
from toque.workflows.inference.generate import held_texts
from toque.workflows.inference.open_model import OpenedModel, open_model

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "top_p": 0.95},
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
        GenerationOptions(max_new_tokens=opened.provenance.max_new_tokens, **way),
        eos_id=codec.eos_id,
        pad_id=codec.pad_id,
        held=held_texts(codec, [p.text for p in prompts], opened.provenance) if held else (),
    )
    seconds = time.perf_counter() - started
    each = [text_metrics(p.text, codec.decode(t)) for p, t in zip(prompts, texts, strict=True)]
    found: dict[str, float] = {}
    for name in SHOWN:
        having = [metrics[name] for metrics in each if name in metrics]
        found[name] = round(sum(having) / len(having), 3)
    return found | {"tokens": sum(map(len, texts)), "seconds": round(seconds, 1)}


def measure(a: argparse.Namespace) -> harness.Result:
    """Each way free and held."""
    if a.run is None:
        raise harness.Skipped("no run was named: --run RUN, a finished run over recipes")
    opened = open_model(a.run)
    if opened.config is None:
        raise harness.Skipped(f"{a.run} is no run folder, so it has no held-out prompts")
    data = opened.config.data
    prompts = held_out_prompts(TokenStore.open(data.store), a.prompts, data)
    free, held = (
        {name: scores(opened, prompts, held=on, way=way) for name, way in WAYS.items()}
        for on in (False, True)
    )
    result = harness.Result(ours=held, theirs=free, details={"prompts": len(prompts)})
    if any(found["ingredient_coverage"] < 1.0 for found in held.values()):
        result.void("a held text lacks something that was asked for")
    return result


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--run", type=Path, help="a finished run over recipes")
    p.add_argument("--prompts", type=int, default=50)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
