"""Evaluator of a run: held-out loss, and scores of texts for fixed prompts.

Every rank calls it.
"""

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
from toque.evaluation.text_samples import Prompt, Sample, Sampler, TimeIsUp, metrics_of
from toque.evaluation.text_scores import NO_CLASS, ScoresByTask, groups_in, names_in
from toque.reporter import SILENT, Count, Reporter, counting, uncounted
from toque.runs.history import metric_named
from toque.runs.run_record import BITS, HELD_OUT
from toque.training.callbacks import Goal
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.data_parallel import DataParallel
from toque.training.stopping import CommandClock, TimeLimit


@dataclass(frozen=True)
class Evaluated:
    """Metrics, texts and cost of an evaluation."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics, equal on all ranks."""
    texts: Mapping[str, float] = field(default_factory=dict)
    """Scores of texts, a subset of `metrics`."""
    held_out: Sequence[Sample] = ()
    """Texts for held-out prompts."""
    own: Sequence[Sample] = ()
    """Texts for the user's prompts."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Error of each metric that raised one."""
    seconds: float = 0.0
    texts_seconds: float = 0.0
    """Seconds for generating and scoring texts, a part of `seconds`."""
    left_out: int = 0
    """Number of texts that were not finished before the time limit."""


@dataclass
class Evaluator:
    """Evaluator of a model's current weights.

    It uses no random numbers and restores the training mode. The first `n_held_out` prompts of the
    sampler have references. The user's prompts follow.
    """

    heldout: HeldOut
    model: nn.Module
    sharing: DataParallel
    sampler: Sampler
    n_held_out: int
    ranks: Ranks
    scores: Callable[[], ScoresByTask]
    watched: Sequence[str] = ()
    """Metrics that decide on the best checkpoint or on stopping. A missing one is NaN, which never
    counts as an improvement."""
    known: Sequence[str] = ()
    """Names of Toque's metrics. The user's functions may add others."""
    reporter: Reporter = SILENT
    interrupted: Callable[[], bool] = bool
    """Called after every batch and token. True stops the evaluation."""
    limit: TimeLimit | None = None
    """Time limit of the command, only on the first rank."""
    last: Evaluated = Evaluated()

    def __call__(self) -> dict[str, float]:
        """Compute all metrics by name.

        Raises:
            Interrupted: A rank was interrupted. Nothing is measured.
        """
        started = time.perf_counter()
        metrics = self.losses()
        loss_seconds = time.perf_counter() - started

        samples = self._write_samples()
        held_out = [sample for n, sample in samples.items() if n < self.n_held_out]
        own_samples = [sample for n, sample in samples.items() if n >= self.n_held_out]
        texts: dict[str, float] = {}
        failed: dict[str, str] = {}
        # Scores of fewer texts would not be comparable with earlier evaluations.
        if held_out and len(held_out) == self.n_held_out:
            if self.ranks.is_main:
                accumulated = self.scores()
                accumulated.add(held_out)
                scores = accumulated.result(resamples=0)
                texts = scores.metrics
                failed = dict(scores.failed)
            # The user's metrics may differ by rank, but all ranks must decide alike.
            texts, failed = self.ranks.broadcast((texts, failed))
            self._fill_missing(texts, failed)
        elif self.n_held_out:
            texts = dict.fromkeys(self._watched_texts(), math.nan)

        seconds = time.perf_counter() - started
        self.last = Evaluated(
            metrics=metrics | texts,
            texts=texts,
            held_out=held_out,
            own=own_samples,
            failed=failed,
            seconds=seconds,
            texts_seconds=seconds - loss_seconds,
            left_out=len(self.sampler.prompts) - len(samples),
        )
        return dict(self.last.metrics)

    def losses(self) -> dict[str, float]:
        """Compute the metrics of the held-out examples: loss, perplexity and bits per byte."""
        with counting(self.reporter, "evaluating", "held-out examples") as count:
            count_or_stop = self._stop_if_interrupted(
                count, together=self.heldout.in_step
            )
            return self.heldout(self.model, count_or_stop)

    def record(self) -> dict[str, Any]:
        """Return additional fields of the event of the newest evaluation."""
        fields: dict[str, Any] = {"seconds": self.last.seconds}
        if self.last.held_out or self.last.own:
            fields["texts_seconds"] = self.last.texts_seconds
            fields["n_texts"] = len(self.last.held_out)
            fields["texts"] = dict(self.last.texts)
        if self.last.left_out:
            fields["texts_left_out"] = self.last.left_out
        return fields

    def _write_samples(self) -> dict[int, Sample]:
        if not self.sampler.prompts:
            return {}
        with (
            self.sharing.full_model() as model,
            counting(self.reporter, "writing", "texts") as count,
        ):
            return self.written(self.sampler, model, self._stop_if_interrupted(count))

    def written(
        self,
        sampler: Sampler,
        model: nn.Module,
        on_progress: Count,
        *,
        final: bool = False,
    ) -> dict[int, Sample]:
        """Generate as many texts as the time limit permits. Return the samples by prompt number.

        Every rank calls it. If training is over, `final` allows the texts to use the time that is
        otherwise reserved for training.
        """
        prompts = sampler.prompts
        samples: dict[int, Sample] = {}
        clock = CommandClock() if self.limit is None else self.limit.clock
        start = 0
        while start < len(prompts):
            fit: tuple[int, float] = (len(prompts) - start, math.inf)
            if self.limit is not None:
                fit = self.limit.texts_that_fit(fit[0], final=final)
            # All ranks use the numbers of the first.
            n, seconds = self.ranks.broadcast(fit)
            if n == 0:
                break

            started = clock.seconds()
            part = replace(sampler, prompts=prompts[start : start + n])
            count_in_time = _until(clock, started + seconds, on_progress)
            finished = sample_on_all_ranks(part, model, self.ranks, count_in_time)
            if self.limit is not None:
                self.limit.wrote(n, clock.seconds() - started)
            samples |= {start + number: sample for number, sample in finished.items()}
            if len(finished) < n:
                break
            start += n
        return samples

    def _stop_if_interrupted(self, count: Count, *, together: bool = False) -> Count:
        """Wrap a progress callback to raise Interrupted after a signal.

        With `together`, all ranks call the callback equally often and stop together.
        """

        def count_or_stop(done: int, total: int, share: float | None = None, /) -> None:
            count(done, total, share)
            stop = int(self.interrupted())
            if together:
                stop = self.ranks.all_reduce_max(stop)
            if stop:
                raise Interrupted(LEFT)

        return count_or_stop

    def _watched_texts(self) -> list[str]:
        return [name for name in self.watched if name not in (*HELD_OUT, BITS)]

    def _fill_missing(self, texts: dict[str, float], failed: Mapping[str, str]) -> None:
        """Set watched scores that are missing to NaN.

        Raises:
            ConfigError: A watched metric does not exist.
        """
        user_metric_failed = any(":" in name for name in failed)
        for name in self._watched_texts():
            if name in texts:
                continue
            if name not in self.known and not user_metric_failed:
                raise ConfigError(
                    f"{name} in train.best_by or train.early_stopping.metric is not a metric of "
                    "this run. Neither Toque nor a function in evaluation.metrics measures it. "
                    f"Measured metrics: {', '.join([*HELD_OUT, *texts])}."
                )
            texts[name] = math.nan


def _until(clock: CommandClock, end: float, on_progress: Count) -> Count:
    """Wrap a progress callback to raise TimeIsUp after the time `end`."""

    def count(done: int, total: int, share: float | None = None, /) -> None:
        if clock.seconds() > end:
            raise TimeIsUp
        on_progress(done, total, share)

    return count


def sample_on_all_ranks(
    sampler: Sampler, model: nn.Module, ranks: Ranks, on_progress: Count = uncounted
) -> dict[int, Sample]:
    """Divide the prompts among the ranks. Return the finished samples by prompt number.

    Raises:
        Interrupted: At least one rank was interrupted. All ranks raise it.
    """
    n = len(sampler.prompts)
    numbers = range(ranks.rank, n, ranks.world_size)
    local_sampler = replace(
        sampler, prompts=sampler.prompts[ranks.rank :: ranks.world_size]
    )

    def count(done: int, total: int, share: float | None = None) -> None:
        # Estimated from this rank.
        on_progress(round(n * done / max(1, total)), n, share)

    local_samples: list[tuple[int, dict[str, Any]]] | None = None
    with suppress(Interrupted):
        finished = local_sampler.by_number(model, count)
        local_samples = [(numbers[i], asdict(sample)) for i, sample in finished.items()]
    shares = ranks.all_gather(local_samples)
    if any(share is None for share in shares):
        raise Interrupted(LEFT)
    samples = {number: sample for share in shares for number, sample in share}
    return {number: Sample(**samples[number]) for number in sorted(samples)}


def goal_of(metric: str) -> Goal:
    """Return the goal to raise or lower a metric."""
    return Goal(metric, rises=metric_named(metric).better != "lower")


def watched_metrics(
    train: TrainConfig,
    evaluation: EvaluationConfig,
    data: DataConfig,
    prompts: Sequence[Prompt],
    *,
    bits: bool = False,
) -> tuple[list[str], list[str]]:
    """List the metrics that the run depends on, and all of Toque's metrics that it measures.

    Args:
        train: Settings with the metrics for checkpoints and early stopping.
        evaluation: Settings with the metrics of texts.
        data: Settings with the tasks.
        prompts: Prompts of every evaluation.
        bits: Whether the number of bytes of the targets is known.

    Raises:
        ConfigError: The run depends on a metric that it does not measure.
    """
    metric_of_setting = {"train.best_by": train.best_by}
    if train.early_stopping is not None:
        metric_of_setting["train.early_stopping.metric"] = train.early_stopping.metric

    metric_names = [*HELD_OUT]
    has_user_metrics = False
    table = task_table(data)
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        names: Sequence[str] = (
            ("auto",) if evaluation.metrics == "auto" else evaluation.metrics
        )
        if task:
            names = metrics_of(table[task])
        has_user_metrics |= any(":" in name for name in names)
        scores = names_in(groups_in(names))
        if task and table[task].classes:
            scores.append(NO_CLASS)
        metric_names += [f"{task}_{name}" if task else name for name in scores]
    if bits:
        metric_names.append(BITS)

    for setting, metric in metric_of_setting.items():
        if metric in metric_names or has_user_metrics:
            continue  # the names of the user's metrics are known only after the first call
        hint = nearest_hint(metric, metric_names)
        message = (
            f"{setting} is {metric}, which the evaluations of this run do not measure.{hint} "
            f"Allowed: {', '.join(metric_names)}."
        )
        if not prompts:
            message += (
                " Scores of texts need held-out examples with prompts, and evaluation.texts and "
                "evaluation.generate above 0."
            )
        raise ConfigError(message)
    return list(dict.fromkeys(metric_of_setting.values())), metric_names
