"""Evaluation block: scores of written texts, and texts for a user's own prompts, for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from toque.evaluation.text_samples import Sample
from toque.reporter import clock_text
from toque.workflows.assembly.while_training.evaluator import Evaluated

MOST_LINES: Final = 30
"""Of a text that are shown; a model that has just begun may write hundreds."""
MOST_LETTERS: Final = 200
"""Of a line that are shown."""
_ROWS: Final = (
    ("bleu", "BLEU, of 100", ".2f"),
    ("rouge1", "ROUGE-1 F1", ".4f"),
    ("rouge2", "ROUGE-2 F1", ".4f"),
    ("rougeL", "ROUGE-L F1", ".4f"),
    ("recipe_score", "recipe score", ".4f"),
    ("ingredient_coherence", "ingredient coherence", ".4f"),
    ("instruction_quality", "instruction quality", ".4f"),
    ("completeness", "completeness", ".4f"),
    ("format_correctness", "format correctness", ".4f"),
)
"""Scores that are shown, with their names for people; the others are in metrics.jsonl."""
_QUALITY: Final = (
    "recipe_score",
    "ingredient_coherence",
    "instruction_quality",
    "completeness",
    "format_correctness",
)


def block(found: Evaluated, before: Mapping[str, float], watched: Sequence[str] = ()) -> list[str]:
    """The lines of the scores; none where no text was written for held-out prompts.

    Args:
        found: by this evaluation.
        before: scores of the evaluation before, by name.
        watched: metrics that the run goes by, shown whatever they are.
    """
    n = len(found.held_out)
    if not n:
        return []
    known = {name for name, _, _ in _ROWS}
    more = [(name, name.replace("_", " "), ".4f") for name in watched if name not in known]
    lines = [f"  {n} text{'s' * (n > 1)} for held-out prompts:"]
    for name, words, form in (*_ROWS, *more):
        if name not in found.texts:
            continue
        value = found.texts[name]
        said = "not measured" if math.isnan(value) else f"{value:{form}}"
        change = value - before.get(name, math.nan)
        lines.append(
            f"    {words:22}{said:>8}" + (f"  ({change:+{form}})" if math.isfinite(change) else "")
        )
    return lines


def cost(found: Evaluated, share: float) -> str:
    """What an evaluation cost.

    Args:
        found: by it.
        share: of the session's time so far that evaluations took.

    >>> cost(Evaluated(seconds=4.2, texts_seconds=3.1, own=["a text"]), 0.064)
    '  evaluated in 4.2 s, 3.1 s of it for texts; evaluations took 6.4 % of the time so far'
    """
    texts = f", {seconds(found.texts_seconds)} of it for texts" * bool(found.held_out or found.own)
    return (
        f"  evaluated in {seconds(found.seconds)}{texts}; evaluations took {share:.1%} of the time "
        "so far"
    ).replace("%", " %")


def seconds(amount: float) -> str:
    """Seconds for people."""
    return f"{amount:.1f} s" if amount < 60 else clock_text(amount)


def shown(sample: Sample, *, step: int) -> str:
    """A text with its prompt and its quality, indented so that it stands apart.

    >>> scores = {"recipe_score": 0.5, "completeness": 1.0}
    >>> print(shown(Sample("make toast", "Bread.", 2, None, scores, asked="Recipe: toast"), step=9))
    step 9  make toast
      asked as: Recipe: toast
      quality: recipe score 0.50, completeness 1.00
        Bread.
    """
    lines = [f"step {step:,}  {sample.prompt}"]
    if sample.asked is not None:
        lines.append(f"  asked as: {sample.asked}")
    named = [
        f"{name.replace('_', ' ')} {sample.metrics[name]:.2f}"
        for name in _QUALITY
        if name in sample.metrics
    ]
    if named:
        lines.append(f"  quality: {', '.join(named)}")
    text = [line for line in sample.text.splitlines() if line.strip()] or ["(nothing)"]
    text = [line if len(line) <= MOST_LETTERS else f"{line[:MOST_LETTERS]} ..." for line in text]
    if len(text) > MOST_LINES:
        text[MOST_LINES:] = [f"... ({len(text) - MOST_LINES} more lines in samples.jsonl)"]
    return "\n".join([*lines, *(f"    {line}" for line in text)])
