"""Sample texts of every evaluation: kept in samples.jsonl, their scores and cost logged."""

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

MOST_LINES: Final = 30  # of a text, that are shown
MOST_LETTERS: Final = 200  # letters of a line that are shown
_QUALITY: Final = (
    "recipe_score",
    "ingredient_coherence",
    "instruction_quality",
    "completeness",
    "format_correctness",
)
_SHOWN: Final = ("bleu", "rouge1", "rouge2", "rougeL", *_QUALITY)  # metrics.jsonl has all scores
_EXCERPT_LINES: Final = 3  # of a text at the end of a run
_MAIN: Final = ("recipe_score", "rougeL")  # scores that a row shows, the first that was measured
_NAMES: Final = {"bleu": "BLEU, of 100"} | {f"rouge{n}": f"ROUGE-{n} F1" for n in "12L"}


@dataclass
class SampleWriter(Callback):
    """Keeps and logs the texts of evaluations; `warn` receives failures of keeping or scoring."""

    evaluator: Evaluator
    path: Path
    watched: Sequence[str] = ()  # metrics that the run goes by
    reporter: Reporter = SILENT
    warn: Callable[[Progress, str], None] = lambda _at, _message: None
    _before: Mapping[str, float] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)
    _left_out: list[int] = field(default_factory=list)  # texts by evaluation, where some were

    def on_fit_start(self, start: RunStart) -> None:
        """Begin to count the texts that are left out."""
        self._left_out = []

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Keep the texts; log the scores, the cost, and the texts for the user's own prompts."""
        found = self.evaluator.last
        samples = [*found.held_out, *found.own]
        path = current_path(self.path.parent) / self.path.name  # the run may have been moved
        refused = append_samples(path, samples, step=at.step) if samples else None
        if refused is not None:
            self.warn(at, refused)
        if found.left_out and self.evaluator.limit is not None:
            if not self._left_out:
                n_texts = len(samples) + found.left_out
                self.warn(at, self.evaluator.limit.left_out(found.left_out, n_texts))
            self._left_out.append(found.left_out)
        for name in [name for name in found.failed if name not in self._failed]:
            self._failed.add(name)
            self.warn(at, f"scores of texts: {name} {found.failed[name]}")
        lines = block(found, self._before, self.watched)
        self.reporter.detail("\n".join([*lines, cost(found)]))
        for sample in found.own:
            self.reporter.detail(shown(sample, step=at.step))
        self._before = found.texts

    def on_fit_end(self, end: RunEnd) -> None:
        """Report how many texts were left out, if it was more than once."""
        if len(self._left_out) > 1:
            n, times = sum(self._left_out), len(self._left_out)
            self.warn(end.progress, f"{n:,} texts of {times:,} evaluations were not written")


def main_score(names: Collection[str], watched: Sequence[str] = ()) -> str:
    """The score of texts that a line has space for: that the run selects by, or the usual; or "".

    >>> main_score(["bleu", "recipe_score"]), main_score(["bleu"]), main_score([])
    ('recipe_score', 'bleu', '')
    """
    return next((name for name in (*watched, *_MAIN, *names) if name in names), "")


def excerpt(sample: Sample, *, columns: int) -> str:
    """The first lines of a text under its prompt.

    >>> text = chr(10).join(["Bread.", "Toast.", "Butter.", "Eat."])
    >>> print(excerpt(Sample("make toast", text, 9, None, {}), columns=40))
    For "make toast" it writes:
        Bread.
        Toast.
        Butter.
        ... (1 more line in samples.jsonl)
    """
    lines = [one_line(line, columns - 4) for line in sample.text.splitlines() if line.strip()]
    left = len(lines) - _EXCERPT_LINES
    if left > 0:
        lines[_EXCERPT_LINES:] = [f"... ({left} more line{'s' * (left > 1)} in samples.jsonl)"]
    prompt = one_line(title_of(sample.prompt) or sample.prompt, columns - 17)
    heading = f'For "{prompt}" it writes:'
    return "\n".join([heading, *(f"    {line}" for line in lines or ["(nothing)"])])


def highlight(found: Evaluated, watched: Sequence[str] = ()) -> Highlight:
    """The score of an evaluation that a row has space for, and its first text.

    Without texts the score is bits per byte.
    """
    name = main_score(found.texts, watched)
    name = name or next((n for n in (BITS, "perplexity") if n in found.metrics), "")
    value = found.texts.get(name, found.metrics.get(name, math.nan))
    samples = [*found.own, *found.held_out]
    return Highlight(name.replace("_", " "), value, samples[0].text if samples else "")


def block(found: Evaluated, before: Mapping[str, float], watched: Sequence[str] = ()) -> list[str]:
    """The lines of the scores of held-out prompts' texts, with changes from those `before`."""
    n = len(found.held_out)
    if not n:
        return []
    lines = [f"  {n} text{'s' * (n > 1)} for held-out prompts:"]
    of_tasks = tuple(f"{task}_" for task in {s.task: 0 for s in found.held_out} if task)
    own = [name for name in found.texts if name.startswith(of_tasks)] if of_tasks else []
    for name in dict.fromkeys((*_SHOWN, *watched, *own)):
        if name not in found.texts:
            continue
        words, form = _NAMES.get(name, name.replace("_", " ")), ".2f" if name == "bleu" else ".4f"
        value = found.texts[name]
        said = "not measured" if math.isnan(value) else f"{value:{form}}"
        change = value - before.get(name, math.nan)
        lines.append(
            f"    {words:22}{said:>8}" + (f"  ({change:+{form}})" if math.isfinite(change) else "")
        )
    return lines


def cost(found: Evaluated) -> str:
    """The cost of an evaluation.

    >>> cost(Evaluated(seconds=4.2, texts_seconds=3.1, own=["a text"]))
    '  evaluated in 4.2 s, 3.1 s of it for texts'
    """
    entire, writing = (
        f"{seconds:.1f} s" if seconds < 60 else clock_text(seconds)
        for seconds in (found.seconds, found.texts_seconds)
    )
    texts = f", {writing} of it for texts" if found.held_out or found.own else ""
    return f"  evaluated in {entire}{texts}"


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
