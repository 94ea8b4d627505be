"""The whole report on written recipes, against rouge-score + sacrebleu + Python loops.

    python bench/speed/report.py [--examples 10000] [--pairs 3]

Ours: ROUGE-1/2/L/Lsum, BLEU, the recipe metrics, and 95 % bootstrap intervals of all of them over
1,000 resamples, on one thread. The baseline is what anyone would write: `rouge_scorer` over the
examples, `sacrebleu`'s `corpus_score` with its own bootstrap, the same recipe metrics, and a Python
loop that averages each score over the same 1,000 resamples. The ratio is of the process's CPU
seconds, A B A B.

References are real recipes; a prediction is the same recipe with lines left out or taken from
others and words of its steps changed, or (1 in 4) another recipe. The ratio is void when one ROUGE
or BLEU score differs by more than 1e-9, or an interval does.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import numpy as np
import peers
import sacrebleu
from rouge_score import rouge_scorer

from toque.cooking.ingredients.names import (
    forms_in_line,
    has_quantity,
    head_of_line,
    ingredient_name,
)
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.plausible_amounts import is_sane_line
from toque.cooking.prompts import write_prompt
from toque.cooking.recipe import Recipe, to_text
from toque.cooking.recipe_scores import text_metrics
from toque.evaluation.bootstrap import RESAMPLES, draws
from toque.evaluation.rouge import NAMES, rouge_f1
from toque.evaluation.text_samples import Sample
from toque.evaluation.text_scores import PART, TextScores

Pair = tuple[str, str, str]
"""Prompt, prediction, reference."""
Scores = tuple[dict[str, list[float]], float, dict[str, tuple[float, float, float]]]
"""Of the baseline: each example's, BLEU, and means with intervals."""


def real_pairs(n: int) -> list[Pair]:
    """Requests, made-up answers and real references."""
    rng, recipes = random.Random(5), []
    with gzip.open(peers.shared(peers.RECIPES), "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["ingredients"] and record["directions"]:
                texts = tuple(record["ingredients"]), tuple(record["directions"])
                recipes.append(Recipe(record["title"], *texts))
            if len(recipes) == 2 * n:
                break
    words = [word for recipe in recipes[:500] for step in recipe.steps for word in step.split()]

    def reworded(step: str) -> str:
        kept = [word for word in step.split() if rng.random() > 0.08]
        return " ".join(rng.choice(words) if rng.random() < 0.12 else word for word in kept)

    pairs = []
    for i in range(min(n, len(recipes))):
        recipe, other = recipes[i], recipes[-1 - i]
        prediction = other
        if i % 4:
            listed = [
                rng.choice(other.ingredients) if rng.random() < 0.15 else line
                for line in recipe.ingredients
                if rng.random() > 0.1
            ]
            steps = [reworded(step) for step in recipe.steps if rng.random() > 0.1]
            prediction = Recipe(recipe.title, tuple(listed), tuple(steps))
        prompt = write_prompt(recipe.title, recipe.ingredients)
        pairs.append((prompt, to_text(prediction), to_text(recipe)))
    return pairs


def forget_lines() -> None:
    """Empty what was remembered of ingredient lines: neither side may profit from the other."""
    names = (parse_line, ingredient_name, head_of_line, forms_in_line, has_quantity)
    for remembered in (*names, is_sane_line):
        remembered.cache_clear()


def ours(pairs: list[Pair]) -> dict[str, Any]:
    """The report of `toque evaluate` on texts that are there."""
    scores = TextScores(("bleu", "rouge", "recipe"))
    scores.add(Sample(p, text, 0, ref, text_metrics(p, text)) for p, text, ref in pairs)
    overall = scores.result().overall
    return {name: (e.value, e.low, e.high) for name, e in overall.items()}


def per_pair_loops(pairs: list[Pair]) -> dict[str, list[float]]:
    """ROUGE F1 and recipe metrics of each pair."""
    scorer = rouge_scorer.RougeScorer(list(NAMES))
    columns: dict[str, list[float]] = {name: [] for name in NAMES}
    for prompt, text, reference in pairs:
        for name, score in scorer.score(reference, text).items():
            columns[name].append(score.fmeasure)
        for name, value in text_metrics(prompt, text).items():
            columns.setdefault(name, []).append(value)
    return columns


def bleu_with_intervals(pairs: list[Pair]) -> float:
    """BLEU with sacrebleu's own bootstrap."""
    texts, references = [p[1] for p in pairs], [p[2] for p in pairs]
    found = sacrebleu.BLEU().corpus_score(texts, [references], n_bootstrap=RESAMPLES)
    return float(found.score)


def bootstrap_loops(columns: dict[str, list[float]]) -> dict[str, tuple[float, float, float]]:
    """Mean and interval of each score, resample by resample."""
    found = {}
    n = len(columns["rouge1"])
    samples = [draws(n, b).tolist() for b in range(RESAMPLES)]
    for name, values in columns.items():
        if len(values) == n:
            means = sorted(sum(values[i] for i in chosen) / n for chosen in samples)
            low, high = np.quantile(means, [0.025, 0.975])
            found[name] = (sum(values) / n, float(low), float(high))
    return found


def baseline(pairs: list[Pair]) -> Scores:
    """What anyone would write."""
    columns = per_pair_loops(pairs)
    whole = {name: values for name, values in columns.items() if len(values) == len(pairs)}
    return columns, bleu_with_intervals(pairs), bootstrap_loops(whole)


def worst_difference(pairs: list[Pair], theirs: Scores) -> float:
    """Largest difference of any score of any example, of BLEU and of intervals."""
    columns, bleu, intervals = theirs
    report = ours(pairs)
    worst = abs(report["bleu"][0] - bleu)
    for i in range(0, len(pairs), PART):
        part = pairs[i : i + PART]
        found = rouge_f1([p[1] for p in part], [p[2] for p in part])
        expected = np.stack([columns[name][i : i + PART] for name in NAMES], axis=1)
        worst = max(worst, float(np.abs(found - expected).max()))
    for name, values in intervals.items():
        worst = max(worst, *(abs(a - b) for a, b in zip(report[name], values, strict=True)))
    return worst


def measure(a: argparse.Namespace) -> harness.Result:
    """The pairs of runs, and the scores compared."""
    examples = real_pairs(a.examples)
    ours(examples[:PART])  # imports and tables
    scores: list[Scores] = []

    def our_turn(_: int) -> None:
        forget_lines()
        ours(examples)

    def their_turn(_: int) -> None:
        forget_lines()
        scores.append(baseline(examples))

    def quality(*_: object) -> dict[str, Any]:
        difference = worst_difference(examples, scores[-1])
        return {"passes": difference < 1e-9, "worst_difference": difference}

    result = harness.paired(
        our_turn, their_turn, pairs=a.pairs, score=harness.by_processor, quality=quality
    )
    words = statistics.mean(len(reference.split()) for _, _, reference in examples)
    result.details = {"examples": len(examples), "words_per_reference": round(words, 1)}
    return result


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--examples", type=int, default=1000)
    p.add_argument("--pairs", type=int, default=2)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
