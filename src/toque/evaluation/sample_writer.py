"""Sample writer: a callback that stores the generated texts of evaluations in samples.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from toque.cooking.recipe_scores import title_of
from toque.data.loader.batch_stream import RewardedText
from toque.evaluation.evaluator import Evaluation, Evaluator
from toque.evaluation.text_samples import Sample, append_samples
from toque.reporter import SILENT, Reporter, clock_text, one_line
from toque.runs.metric_names import ACCURACY, MAIN_SCORES, REWARD, metric_named
from toque.runs.run_record import BITS
from toque.storage.no_follow import current_path
from toque.training.callbacks import Callback, RunEnd, RunStart, StepInfo
from toque.training.observers.live_progress import Highlight
from toque.units import Progress

MAX_LINES: Final = 30
"""Maximum number of lines per text in the log."""
MAX_LETTERS: Final = 200
"""Maximum number of characters per line of a text in the log."""
_QUALITY: Final = (
    "cookable",
    "recipe_score",
    "ingredient_coherence",
    "instruction_quality",
    "completeness",
    "format_correctness",
)
_SHOWN: Final = ("bleu", "rouge1", "rouge2", "rougeL", *_QUALITY)
"""Scores in the log. metrics.jsonl has all scores."""
_EXCERPT_LINES: Final = 3
"""Maximum number of lines in an excerpt at the end of a run."""
_TITLES: Final = {"bleu": "BLEU, of 100"} | {
    f"rouge{n}": f"ROUGE-{n} F1" for n in "12L"
}
"""Titles of scores in the log, if they differ from the name."""


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
    """Scores of the previous evaluation's texts."""
    _failed: set[str] = field(default_factory=set)
    """Metrics with an error that has been reported."""
    _left_out: list[int] = field(default_factory=list)
    """Number of omitted texts for each evaluation that omitted any."""
    _rewarded: Sequence[RewardedText] = ()
    """Best and worst text of a prompt of the newest update, if the run learns from rewards."""

    def on_fit_start(self, start: RunStart) -> None:
        """Reset the counts of omitted texts."""
        self._left_out = []

    def on_step(self, info: StepInfo) -> None:
        """Remember texts of the update."""
        self._rewarded = info.texts

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Store the texts. Log their scores, their cost, and the texts for the user's prompts.

        Show the best and the worst text of a prompt of the newest update.
        """
        evaluation = self.evaluator.last
        samples = [*evaluation.held_out, *evaluation.users]
        n_samples = len(samples)
        samples += [
            Sample(text.prompt, text.text, text.tokens, None, {REWARD: text.reward})
            for text in reversed(self._rewarded)  # a page shows the newest first
        ]
        # The run may have been moved.
        path = current_path(self.path.parent) / self.path.name
        warning = append_samples(path, samples, step=at.step) if samples else None
        if warning is not None:
            self.warn(at, warning)
        self._report_left_out(at, evaluation.left_out, n_samples)
        for name, error in evaluation.failed.items():
            if name not in self._failed:
                self._failed.add(name)
                self.warn(at, f"scores of texts: {name} {error}")

        for line in format_rewarded(self._rewarded, columns=self.reporter.columns):
            self.reporter.notice(line)
        lines = format_scores(evaluation, self._before, self.watched)
        self.reporter.detail("\n".join([*lines, format_cost(evaluation)]))
        for sample in evaluation.users:
            self.reporter.detail(format_sample(sample, step=at.step))
        self._before = evaluation.texts

    def _report_left_out(self, at: Progress, n_left_out: int, n_samples: int) -> None:
        """Count omitted texts. Warn at the first evaluation that omits texts."""
        if n_left_out == 0 or self.evaluator.limit is None:
            return
        if not self._left_out:
            n_texts = n_samples + n_left_out
            self.warn(at, self.evaluator.limit.describe_left_out(n_left_out, n_texts))
        self._left_out.append(n_left_out)

    def on_fit_end(self, end: RunEnd) -> None:
        """Report the total number of omitted texts, if more than one evaluation omitted texts."""
        n_evaluations = len(self._left_out)
        if n_evaluations > 1:
            n = sum(self._left_out)
            message = f"{n:,} texts of {n_evaluations:,} evaluations were not generated"
            self.warn(end.progress, message)


def choose_main_score(names: Collection[str], watched: Sequence[str] = ()) -> str:
    """Choose the score for the progress line. Return "" if `names` is empty.

    A watched metric is preferred, then a main score, then any score.

    >>> choose_main_score(["bleu", "recipe_score"]), choose_main_score(["bleu"])
    ('recipe_score', 'bleu')
    """
    return next(
        (name for name in (*watched, *MAIN_SCORES, *names) if name in names), ""
    )


def format_excerpt(sample: Sample, *, columns: int) -> str:
    """Format the first lines of a text below its prompt.

    >>> text = chr(10).join(["Bread.", "Toast.", "Butter.", "Eat."])
    >>> print(format_excerpt(Sample("make toast", text, 9, None, {}), columns=40))
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
    # 17 is the length of the heading without the prompt.
    prompt = one_line(title_of(sample.prompt) or sample.prompt, columns - 17)
    heading = f'For "{prompt}" it writes:'
    return "\n".join([heading, *(f"    {line}" for line in lines or ["(nothing)"])])


def highlight(evaluation: Evaluation, watched: Sequence[str] = ()) -> Highlight:
    """Choose the main score and a text of an evaluation, for the progress line.

    For pairs, the score is their accuracy. Without texts, it is bits per byte or the perplexity.
    """
    scores = evaluation.texts
    name = choose_main_score(scores, watched)
    has_pairs = ACCURACY in evaluation.metrics
    if not name or (has_pairs and name not in watched):
        scores = evaluation.metrics
        name = next((n for n in (ACCURACY, BITS, "perplexity") if n in scores), "")
    samples = [*evaluation.users, *evaluation.held_out]
    text = samples[0].text if samples else ""
    return Highlight(metric_named(name).title, scores.get(name, math.nan), text)


def format_rewarded(texts: Sequence[RewardedText], *, columns: int) -> list[str]:
    """Format the best and the worst text of a prompt, one line each.

    >>> texts = [RewardedText("make toast", "Toast it.", 2, 0.9), RewardedText("", "Eat.", 1, 0.2)]
    >>> print(*format_rewarded(texts, columns=80), sep=chr(10))
             best text for "make toast", reward 0.9000: Toast it.
             worst text, reward 0.2000: Eat.
    """
    if not texts:
        return []
    prompt = one_line(title_of(texts[0].prompt) or texts[0].prompt, columns // 4)
    labels = [f'best text for "{prompt}"', "worst text"]
    if len(texts) == 1:
        labels = [f'equally good texts for "{prompt}"']
    lines = []
    for label, text in zip(labels, texts, strict=True):
        start = f"{'':9}{label}, reward {text.reward:.4f}: "
        lines.append(start + (one_line(text.text, columns - len(start)) or "(nothing)"))
    return lines


def format_scores(
    evaluation: Evaluation, before: Mapping[str, float], watched: Sequence[str] = ()
) -> list[str]:
    """Format the scores of texts for held-out prompts, with the changes from `before`."""
    n = len(evaluation.held_out)
    if not n:
        return []

    noun = "text" if n == 1 else "texts"
    lines = [f"  {n} {noun} for held-out prompts:"]
    tasks = {sample.task for sample in evaluation.held_out if sample.task}
    prefixes = tuple(f"{task}_" for task in tasks)
    task_scores = [name for name in evaluation.texts if name.startswith(prefixes)]
    for name in dict.fromkeys((*_SHOWN, *watched, *task_scores)):
        if name not in evaluation.texts:
            continue
        title = _TITLES.get(name, name.replace("_", " "))
        digits = ".2f" if name == "bleu" else ".4f"
        value = evaluation.texts[name]
        value_text = "not measured" if math.isnan(value) else f"{value:{digits}}"
        line = f"    {title:22}{value_text:>8}"
        change = value - before.get(name, math.nan)
        if math.isfinite(change):
            line += f"  ({change:+{digits}})"
        lines.append(line)
    return lines


def format_cost(evaluation: Evaluation) -> str:
    """Format the duration of an evaluation.

    >>> format_cost(Evaluation(seconds=4.2, texts_seconds=3.1, users=["a text"]))
    '  evaluated in 4.2 s, 3.1 s of it for texts'
    """
    line = f"  evaluated in {_format_seconds(evaluation.seconds)}"
    if evaluation.held_out or evaluation.users:
        line += f", {_format_seconds(evaluation.texts_seconds)} of it for texts"
    return line


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock_text(seconds)


def format_sample(sample: Sample, *, step: int) -> str:
    """Format a text with its prompt and its quality.

    >>> scores = {"recipe_score": 0.5}
    >>> sample = Sample("make toast", "Bread.", 2, None, scores, asked="Recipe: toast")
    >>> print(format_sample(sample, step=9))
    step 9  make toast
      asked as: Recipe: toast
      quality: recipe score 0.50
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

    text = [line for line in sample.text.splitlines() if line.strip()]
    shown = [
        line if len(line) <= MAX_LETTERS else f"{line[:MAX_LETTERS]} ..."
        for line in text[:MAX_LINES]
    ]
    n_hidden = len(text) - MAX_LINES
    if n_hidden > 0:
        shown.append(f"... ({n_hidden} more lines in samples.jsonl)")
    lines += [f"    {line}" for line in shown or ["(nothing)"]]
    return "\n".join(lines)
