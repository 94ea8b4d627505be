"""The whole report on 10,000 written recipes, against rouge-score + sacrebleu + Python loops.

    python bench/report.py [--pairs 10000] [--baseline 1000] [--rounds 3]

Ours: ROUGE-1/2/L/Lsum, BLEU, the recipe metrics, and 95 % bootstrap intervals of all of them over
1,000 resamples, on one thread. The baseline is what anyone would write: `rouge_scorer` over the
pairs, `sacrebleu`'s `corpus_score` with its own bootstrap, the same recipe metrics, and a Python
loop that averages each score over the same 1,000 resamples. Its costs that grow with the number of
pairs are measured on `--baseline` pairs and scaled linearly; give as many as `--pairs` to measure
all. Times are the process's CPU seconds, A B A B; the ratio is the median of the pairs of runs.

References are real recipes ($TOQUE_SHARED or ../shared); a prediction is the same recipe with
lines left out or taken from others and words of its steps changed, or (1 in 4) another recipe.
The ratio is void when one ROUGE or BLEU score differs by more than 1e-9, or an interval does.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import sacrebleu
from rouge_score import rouge_scorer

from toque.cooking.ingredients.names import (
    forms_in_line,
    has_quantity,
    head_of_line,
    ingredient_name,
)
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.prompts import write_prompt
from toque.cooking.recipe import Recipe, to_text
from toque.cooking.scoring.recipe_scores import consistency, text_metrics
from toque.evaluation.bootstrap import RESAMPLES, draws
from toque.evaluation.text_metrics.rouge import NAMES, rouge
from toque.evaluation.text_samples import Sample
from toque.evaluation.text_scores import PART, TextScores

SHARED = Path(os.environ.get("TOQUE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
SOURCE = SHARED / "data" / "recipes" / "allrecipes_epicurious_as_is.jsonl.gz"
Pair = tuple[str, str, str]
"""Prompt, prediction, reference."""


def real_pairs(n: int) -> list[Pair]:
    """Requests, made-up answers and real references."""
    rng, recipes = random.Random(5), []
    with gzip.open(SOURCE, "rt", encoding="utf-8") as lines:
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
    for remembered in (*names, consistency._is_sane):  # noqa: SLF001
        remembered.cache_clear()


def ours(pairs: list[Pair]) -> dict[str, Any]:
    """The report of `toque evaluate` on texts that are there."""
    scores = TextScores(("bleu", "rouge", "recipe"))
    scores.add(Sample(p, text, 0, ref, text_metrics(p, text)) for p, text, ref in pairs)
    overall = scores.result().overall
    return {name: (e.value, e.low, e.high) for name, e in overall.items()}


def per_pair_loops(pairs: list[Pair], *, stem: bool) -> dict[str, list[float]]:
    """ROUGE F1 and recipe metrics of each pair."""
    scorer = rouge_scorer.RougeScorer(list(NAMES), use_stemmer=stem)
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


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, and what came of it."""
    forget_lines()
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def baseline(pairs: list[Pair], n_measured: int, *, stem: bool) -> tuple[dict[str, float], Any]:
    """CPU seconds by part, those of loops over pairs scaled to all pairs; and the scores."""
    some, factor = pairs[:n_measured], len(pairs) / n_measured
    loops, columns = timed(lambda: per_pair_loops(some, stem=stem))
    bleu, score = timed(lambda: bleu_with_intervals(some))
    repeated = {name: (v * -(-len(pairs) // len(v)))[: len(pairs)] for name, v in columns.items()}
    whole = {n: v for n, v in repeated.items() if len(columns[n]) == len(some)}
    boots, intervals = timed(lambda: bootstrap_loops(whole))
    seconds = {"rouge_and_recipe_loops": loops * factor, "bleu": bleu * factor, "bootstrap": boots}
    return seconds, (columns, score, intervals if factor == 1 else None)


def worst_difference(pairs: list[Pair], theirs: Any, *, stem: bool) -> float:
    """Largest difference of any score of any measured pair, of BLEU and of intervals."""
    columns, bleu, intervals = theirs
    some = pairs[: len(columns["rouge1"])]
    worst = 0.0
    for i in range(0, len(some), PART):
        part = some[i : i + PART]
        found = rouge([p[1] for p in part], [p[2] for p in part], stem=stem)
        for name in NAMES:
            expected = np.array(columns[name][i : i + PART])
            worst = max(worst, float(np.abs(found[name][:, 2] - expected).max()))
    report = ours(some)
    worst = max(worst, abs(report["bleu"][0] - bleu))
    expected = bootstrap_loops({k: v for k, v in columns.items() if len(v) == len(some)})
    for name, values in (intervals or expected).items():
        worst = max(worst, *(abs(a - b) for a, b in zip(report[name], values, strict=True)))
    return worst


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--baseline", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not SOURCE.exists():
        json.dump({"skipped": f"{SOURCE.name} is not there: set TOQUE_SHARED"}, sys.stdout)
        return
    pairs = real_pairs(args.pairs)
    n_measured = min(args.baseline, len(pairs))
    ours(pairs[:PART])  # imports and tables
    rounds = []
    for _ in range(args.rounds):
        our_seconds, _ = timed(lambda: ours(pairs))
        their_seconds, theirs = baseline(pairs, n_measured, stem=False)
        rounds.append((our_seconds, their_seconds))
    difference = worst_difference(pairs, theirs, stem=False)
    ratios = [sum(their.values()) / our for our, their in rounds]
    result = {
        "pairs": len(pairs),
        "baseline_measured_on": n_measured,
        "words_per_reference": round(statistics.mean(len(p[2].split()) for p in pairs), 1),
        "ours_cpu_seconds": [round(our, 2) for our, _ in rounds],
        "baseline_cpu_seconds": [
            {name: round(s, 1) for name, s in their.items()} for _, their in rounds
        ],
        "worst_difference": difference,
        "ratio": round(statistics.median(ratios), 1) if difference < 1e-9 else "void",
        "ratios": [round(ratio, 1) for ratio in ratios],
        "threads": 1,
        "versions": {
            "python": platform.python_version(),
            **{n: version(n) for n in ("toque", "numpy", "rouge-score", "sacrebleu")},
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "command": " ".join(["python", "bench/report.py", *sys.argv[1:]]),
    }
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
