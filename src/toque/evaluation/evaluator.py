"""Evaluator of a run, which every rank calls: held-out loss, texts of fixed prompts, scores."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from toque.config.schema import DataConfig, EvaluationConfig, TrainConfig
from toque.cooking.prompts import task_table
from toque.errors import ConfigError, Interrupted, nearest_hint
from toque.evaluation.heldout_loss import LEFT, HeldOut
from toque.evaluation.text_samples import Prompt, Sample, Sampler, metrics_of
from toque.evaluation.text_scores import NO_CLASS, ScoresByTask, groups_in, names_in
from toque.reporter import SILENT, Count, Reporter, counting, uncounted
from toque.runs.history import metric_named
from toque.runs.run_record import BITS, HELD_OUT
from toque.training.callbacks import Goal
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.sharing import Sharing


@dataclass(frozen=True)
class Evaluated:
    """Metrics and texts of an evaluation, and its cost."""

    metrics: Mapping[str, float] = field(default_factory=dict)  # on every rank the same
    texts: Mapping[str, float] = field(default_factory=dict)  # scores of texts, a part of metrics
    held_out: Sequence[Sample] = ()
    own: Sequence[Sample] = ()  # texts for the user's own prompts
    failed: Mapping[str, str] = field(default_factory=dict)  # metrics that raised, with the error
    seconds: float = 0.0
    texts_seconds: float = 0.0  # seconds of writing texts and scoring them, a part of `seconds`


@dataclass
class Evaluator:
    """Evaluates the weights that are in the model when it is called.

    Draws nothing at random, and leaves the model in the mode it was in. The sampler writes for
    `n_held_out` prompts with references, then for the user's own.
    """

    heldout: HeldOut
    model: nn.Module
    sharing: Sharing
    sampler: Sampler
    n_held_out: int
    ranks: Ranks
    scores: Callable[[], ScoresByTask]
    watched: Sequence[str] = ()
    """Metrics that the run goes by; one that cannot be measured is NaN, which is no improvement."""
    known: Sequence[str] = ()  # names that metrics may have; the user's functions may give others
    reporter: Reporter = SILENT
    interrupted: Callable[[], bool] = bool  # asked after every batch and token whether to leave
    last: Evaluated = Evaluated()

    def __call__(self) -> dict[str, float]:
        """All metrics by name; raises Interrupted, with nothing measured, if any rank is."""
        began = time.perf_counter()
        metrics = self.losses()
        between = time.perf_counter()
        samples = self._written()
        held_out, own = samples[: self.n_held_out], samples[self.n_held_out :]
        texts: dict[str, float] = {}
        failed: dict[str, str] = {}
        if held_out:
            if self.ranks.is_main:
                scores = self.scores()
                scores.add(held_out)
                found = scores.result(resamples=0)
                texts, failed = found.metrics, dict(found.failed)
            # The user's metrics may differ by rank; what the run goes by must not.
            texts, failed = self.ranks.broadcast((texts, failed))
            self._fill(texts, failed)
        ended = time.perf_counter()
        self.last = Evaluated(
            metrics | texts, texts, held_out, own, failed, ended - began, ended - between
        )
        return dict(self.last.metrics)

    def losses(self) -> dict[str, float]:
        """The figures of the held-out examples alone: loss, perplexity, bits a byte."""
        with counting(self.reporter, "evaluating", "held-out examples") as count:
            return self.heldout(self.model, self._told(count, together=self.heldout.in_step))

    def record(self) -> dict[str, Any]:
        """Further fields of the newest evaluation's event."""
        found: dict[str, Any] = {"seconds": self.last.seconds}
        if self.last.held_out or self.last.own:
            n_texts, texts = len(self.last.held_out), dict(self.last.texts)
            found |= {"texts_seconds": self.last.texts_seconds, "n_texts": n_texts, "texts": texts}
        return found

    def _written(self) -> list[Sample]:
        if not self.sampler.prompts:
            return []
        with (
            self.sharing.whole() as model,
            counting(self.reporter, "writing", "texts") as count,
        ):
            return sample_on_all_ranks(self.sampler, model, self.ranks, self._told(count))

    def _told(self, count: Count, *, together: bool = False) -> Count:
        """A count that leaves the evaluation when asked; `together`: all ranks call it as often."""

        def told(done: int, total: int, share: float | None = None, /) -> None:
            count(done, total, share)
            leave = int(self.interrupted())
            if self.ranks.all_reduce_max(leave) if together else leave:
                raise Interrupted(LEFT)

        return told

    def _fill(self, texts: dict[str, float], failed: Mapping[str, str]) -> None:
        raised = any(":" in name for name in failed)
        for name in self.watched:
            if name in texts or name in (*HELD_OUT, BITS):
                continue
            if name not in self.known and not raised:
                raise ConfigError(
                    f"The run goes by {name} (train.best_by or train.early_stopping.metric), and "
                    "neither Toque nor a function in evaluation.metrics measures it. Measured are "
                    f"{', '.join([*HELD_OUT, *texts])}."
                )
            texts[name] = math.nan


def sample_on_all_ranks(
    sampler: Sampler, model: nn.Module, ranks: Ranks, on_progress: Count = uncounted
) -> list[Sample]:
    """One sample for each prompt, a part from each rank; all are Interrupted where one is."""
    own = replace(sampler, prompts=sampler.prompts[ranks.rank :: ranks.world_size])
    n = len(sampler.prompts)

    def count(done: int, total: int, share: float | None = None) -> None:
        on_progress(round(n * done / max(1, total)), n, share)  # the others do about as many

    written: list[dict[str, Any]] | None = None
    with suppress(Interrupted):
        written = [asdict(sample) for sample in own(model, count)]
    shares = ranks.all_gather(written)
    if any(share is None for share in shares):
        raise Interrupted(LEFT)
    return [Sample(**shares[i % len(shares)][i // len(shares)]) for i in range(n)]


def goal_of(metric: str) -> Goal:
    """The metric as a goal."""
    return Goal(metric, rises=metric_named(metric).better != "lower")


def watched_metrics(
    train: TrainConfig,
    evaluation: EvaluationConfig,
    data: DataConfig,
    prompts: Sequence[Prompt],
    *,
    bits: bool = False,
) -> tuple[list[str], list[str]]:
    """The metrics that the run goes by, and those that come with Toque and it measures.

    `prompts` are written for at every evaluation; with `bits` the targets' bytes are known.
    """
    asked = {"train.best_by": train.best_by}
    if train.early_stopping is not None:
        asked["train.early_stopping.metric"] = train.early_stopping.metric
    known, own = [*HELD_OUT], False
    table = task_table(data)
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        names: Sequence[str] = ("auto",) if evaluation.metrics == "auto" else evaluation.metrics
        names = metrics_of(table[task]) if task else names
        own |= any(":" in name for name in names)
        found = names_in(groups_in(names)) + [NO_CLASS] * bool(task and table[task].classes)
        known += [f"{task}_{name}" if task else name for name in found]
    known += [BITS] if bits else []
    for setting, metric in asked.items():
        if metric in known or own:
            continue  # what functions of the user's give is known when they have been called
        told = f"{setting} is {metric}, which the evaluations of this run do not measure."
        told += nearest_hint(metric, known)
        told += f" Allowed: {', '.join(known)}."
        if not prompts:
            told += (
                " Scores of texts are measured where held-out examples have prompts, and "
                "evaluation.texts and evaluation.generate are above 0."
            )
        raise ConfigError(told)
    return list(dict.fromkeys(asked.values())), known
