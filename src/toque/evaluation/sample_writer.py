"""Sample writer: a callback that stores the texts of evaluations in samples.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from toque.cooking.recipe_scores import title_of
from toque.evaluation.evaluator import Evaluated, Evaluator
from toque.evaluation.text_samples import Sample, append_samples
from toque.reporter import SILENT, Reporter, clock_text, one_line
from toque.runs.run_record import BITS
from toque.storage.no_follow import current_path
from toque.training.callbacks import Callback, RunEnd, RunStart
from toque.training.observers.live_progress import Highlight
from toque.units import Progress

MAX_LINES: Final = 30
"""Maximum lines per text in the log."""
MAX_LETTERS: Final = 200
"""Maximum characters per line in the log."""
_QUALITY: Final = (
    "recipe_score",
    "ingredient_coherence",
    "instruction_quality",
    "completeness",
    "format_correctness",
)
_SHOWN: Final = ("bleu", "rouge1", "rouge2", "rougeL", *_QUALITY)
"""Scores in the log. All scores are in metrics.jsonl."""
_EXCERPT_LINES: Final = 3
"""Maximum lines per text at the end of a run."""
_MAIN: Final = ("recipe_score", "rougeL")
"""Main scores, the preferred one first. The progress line shows the first measured one."""
_NAMES: Final = {"bleu": "BLEU, of 100"} | {f"rouge{n}": f"ROUGE-{n} F1" for n in "12L"}


@dataclass
class SampleWriter(Callback):
    """Callback that stores and logs the texts generated in evaluations."""

    evaluator: Evaluator
    path: Path
    watched: Sequence[str] = ()
    """Metrics that decide on the best checkpoint or on stopping."""
    reporter: Reporter = SILENT
    warn: Callable[[Progress, str], None] = lambda _at, _message: None
    """Function called if texts cannot be stored or scored."""
    _before: Mapping[str, float] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)
    _left_out: list[int] = field(default_factory=list)
    """Number of omitted texts for each evaluation that omitted any."""

    def on_fit_start(self, start: RunStart) -> None:
        """Reset the counts of omitted texts."""
        self._left_out = []

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Store the texts. Log their scores, their cost, and the texts for the user's prompts."""
        evaluated = self.evaluator.last
        samples = [*evaluated.held_out, *evaluated.own]
        # The run may have been moved.
        path = current_path(self.path.parent) / self.path.name
        warning = append_samples(path, samples, step=at.step) if samples else None
        if warning is not None:
            self.warn(at, warning)

        if evaluated.left_out and self.evaluator.limit is not None:
            if not self._left_out:
                n_texts = len(samples) + evaluated.left_out
                self.warn(
                    at, self.evaluator.limit.left_out(evaluated.left_out, n_texts)
                )
            self._left_out.append(evaluated.left_out)
        for name, error in evaluated.failed.items():
            if name not in self._failed:
                self._failed.add(name)
                self.warn(at, f"scores of texts: {name} {error}")

        lines = block(evaluated, self._before, self.watched)
        self.reporter.detail("\n".join([*lines, cost(evaluated)]))
        for sample in evaluated.own:
            self.reporter.detail(shown(sample, step=at.step))
        self._before = evaluated.texts

    def on_fit_end(self, end: RunEnd) -> None:
        """Report the total number of omitted texts, if several evaluations omitted any."""
        if len(self._left_out) > 1:
            n, times = sum(self._left_out), len(self._left_out)
            self.warn(
                end.progress, f"{n:,} texts of {times:,} evaluations were not written"
            )


def main_score(names: Collection[str], watched: Sequence[str] = ()) -> str:
    """Choose the score for the progress line: a watched metric, else a main score, or "".

    >>> main_score(["bleu", "recipe_score"]), main_score(["bleu"]), main_score([])
    ('recipe_score', 'bleu', '')
    """
    return next((name for name in (*watched, *_MAIN, *names) if name in names), "")


def excerpt(sample: Sample, *, columns: int) -> str:
    """Format the first lines of a text below its prompt.

    >>> text = chr(10).join(["Bread.", "Toast.", "Butter.", "Eat."])
    >>> print(excerpt(Sample("make toast", text, 9, None, {}), columns=40))
    For "make toast" it writes:
        Bread.
        Toast.
        Butter.
        ... (1 more line in samples.jsonl)
    """
    lines = [
        one_line(line, columns - 4) for line in sample.text.splitlines() if line.strip()
    ]
    n_hidden = len(lines) - _EXCERPT_LINES
    if n_hidden > 0:
        noun = "line" if n_hidden == 1 else "lines"
        lines[_EXCERPT_LINES:] = [f"... ({n_hidden} more {noun} in samples.jsonl)"]
    prompt = one_line(title_of(sample.prompt) or sample.prompt, columns - 17)
    heading = f'For "{prompt}" it writes:'
    return "\n".join([heading, *(f"    {line}" for line in lines or ["(nothing)"])])


def highlight(evaluated: Evaluated, watched: Sequence[str] = ()) -> Highlight:
    """Choose the main score of an evaluation, and its first text.

    Without texts, the score is bits per byte or the perplexity.
    """
    name = main_score(evaluated.texts, watched)
    name = name or next((n for n in (BITS, "perplexity") if n in evaluated.metrics), "")
    value = evaluated.texts.get(name, evaluated.metrics.get(name, math.nan))
    samples = [*evaluated.own, *evaluated.held_out]
    return Highlight(name.replace("_", " "), value, samples[0].text if samples else "")


def block(
    evaluated: Evaluated, before: Mapping[str, float], watched: Sequence[str] = ()
) -> list[str]:
    """Format the scores of texts for held-out prompts, with the changes from `before`."""
    n = len(evaluated.held_out)
    if not n:
        return []

    noun = "text" if n == 1 else "texts"
    lines = [f"  {n} {noun} for held-out prompts:"]
    prefixes = tuple(
        {f"{sample.task}_" for sample in evaluated.held_out if sample.task}
    )
    of_tasks = [name for name in evaluated.texts if name.startswith(prefixes)]
    for name in dict.fromkeys((*_SHOWN, *watched, *of_tasks)):
        if name not in evaluated.texts:
            continue
        title = _NAMES.get(name, name.replace("_", " "))
        digits = ".2f" if name == "bleu" else ".4f"
        value = evaluated.texts[name]
        value_text = "not measured" if math.isnan(value) else f"{value:{digits}}"
        line = f"    {title:22}{value_text:>8}"
        change = value - before.get(name, math.nan)
        if math.isfinite(change):
            line += f"  ({change:+{digits}})"
        lines.append(line)
    return lines


def cost(evaluated: Evaluated) -> str:
    """Format the duration of an evaluation.

    >>> cost(Evaluated(seconds=4.2, texts_seconds=3.1, own=["a text"]))
    '  evaluated in 4.2 s, 3.1 s of it for texts'
    """
    line = f"  evaluated in {_format_seconds(evaluated.seconds)}"
    if evaluated.held_out or evaluated.own:
        line += f", {_format_seconds(evaluated.texts_seconds)} of it for texts"
    return line


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock_text(seconds)


def shown(sample: Sample, *, step: int) -> str:
    """Format a text with its prompt and its quality.

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
    quality = [
        f"{name.replace('_', ' ')} {sample.metrics[name]:.2f}"
        for name in _QUALITY
        if name in sample.metrics
    ]
    if quality:
        lines.append(f"  quality: {', '.join(quality)}")

    text = [line for line in sample.text.splitlines() if line.strip()] or ["(nothing)"]
    text = [
        line if len(line) <= MAX_LETTERS else f"{line[:MAX_LETTERS]} ..."
        for line in text
    ]
    if len(text) > MAX_LINES:
        text[MAX_LINES:] = [
            f"... ({len(text) - MAX_LINES} more lines in samples.jsonl)"
        ]
    return "\n".join([*lines, *(f"    {line}" for line in text)])
