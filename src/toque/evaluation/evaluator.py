"""Evaluator of a run: held-out loss, and scores of generated texts for fixed prompts.

Every rank calls the evaluator.
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
from toque.evaluation.text_scores import (
    NO_CLASS,
    ScoresByTask,
    is_user_metric,
    score_names_of,
)
from toque.reporter import SILENT, Count, Reporter, counting, uncounted
from toque.runs.metric_names import metric_named
from toque.runs.run_record import BITS, HELD_OUT
from toque.training.callbacks import Goal
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.data_parallel import DataParallel
from toque.training.stopping import CommandClock, TimeLimit


@dataclass(frozen=True)
class Evaluation:
    """Metrics, texts and cost of an evaluation."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics, equal on all ranks."""
    texts: Mapping[str, float] = field(default_factory=dict)
    """Scores of the generated texts, a subset of `metrics`."""
    held_out: Sequence[Sample] = ()
    """Generated texts for held-out prompts."""
    users: Sequence[Sample] = ()
    """Generated texts for the user's prompts."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Error raised by each failed metric."""
    seconds: float = 0.0
    texts_seconds: float = 0.0
    """Seconds spent on generating and scoring texts, included in `seconds`."""
    left_out: int = 0
    """Number of texts that were not finished before the time limit."""


@dataclass
class Evaluator:
    """Evaluator of a model's current weights.

    It uses no random numbers and restores the training mode. The sampler's first `n_held_out`
    prompts have references. The user's prompts follow.
    """

    heldout: HeldOut
    model: nn.Module
    sharing: DataParallel
    sampler: Sampler
    n_held_out: int
    ranks: Ranks
    scores: Callable[[], ScoresByTask]
    """Function that returns empty accumulators of the scores."""
    watched: Sequence[str] = ()
    """Metrics that decide on the best checkpoint or on stopping. A missing metric is NaN, which
    never counts as an improvement."""
    known: Sequence[str] = ()
    """Names of Toque's metrics. The user's functions may add other metrics."""
    reporter: Reporter = SILENT
    interrupted: Callable[[], bool] = bool
    """Called after every batch and token. True stops the evaluation."""
    limit: TimeLimit | None = None
    """Time limit for the command. None on all ranks except the first."""
    last: Evaluation = Evaluation()
    """Newest evaluation."""

    def __call__(self) -> dict[str, float]:
        """Compute all metrics by name. `last` then has the details.

        Raises:
            Interrupted: A rank was interrupted. `last` does not change.
        """
        started = time.perf_counter()
        metrics = self.losses()
        loss_seconds = time.perf_counter() - started

        samples = self._generate_samples()
        held_out = [sample for n, sample in samples.items() if n < self.n_held_out]
        users_samples = [s for n, s in samples.items() if n >= self.n_held_out]
        texts, failed = self._score_texts(held_out)

        seconds = time.perf_counter() - started
        self.last = Evaluation(
            metrics=metrics | texts,
            texts=texts,
            held_out=held_out,
            users=users_samples,
            failed=failed,
            seconds=seconds,
            texts_seconds=seconds - loss_seconds,
            left_out=len(self.sampler.prompts) - len(samples),
        )
        return dict(self.last.metrics)

    def losses(self) -> dict[str, float]:
        """Compute the metrics of the held-out examples: loss, perplexity and bits per byte."""
        with counting(self.reporter, "evaluating", "held-out examples") as count:
            is_in_step = self.heldout.in_step
            count_or_stop = self._stop_if_interrupted(count, together=is_in_step)
            return self.heldout(self.model, count_or_stop)

    def record(self) -> dict[str, Any]:
        """Return additional fields for the newest evaluation's event."""
        fields: dict[str, Any] = {"seconds": self.last.seconds}
        if self.last.held_out or self.last.users:
            fields["texts_seconds"] = self.last.texts_seconds
            fields["n_texts"] = len(self.last.held_out)
            fields["texts"] = dict(self.last.texts)
        if self.last.left_out:
            fields["texts_left_out"] = self.last.left_out
        return fields

    def _generate_samples(self) -> dict[int, Sample]:
        """Generate a text for each prompt of the sampler, in the time limit."""
        if not self.sampler.prompts:
            return {}
        with (
            self.sharing.full_model() as model,
            counting(self.reporter, "writing", "texts") as count,
        ):
            count_or_stop = self._stop_if_interrupted(count)
            return self.generate_in_time(self.sampler, model, count_or_stop)

    def _score_texts(
        self, held_out: Sequence[Sample]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Return the scores of the held-out texts, and the errors raised by the user's metrics."""
        texts: dict[str, float] = {}
        failed: dict[str, str] = {}
        if self.n_held_out == 0:
            return texts, failed
        if len(held_out) < self.n_held_out:
            # Scores of fewer texts would not be comparable with earlier evaluations.
            return dict.fromkeys(self._watched_texts(), math.nan), failed

        if self.ranks.is_main:
            accumulators = self.scores()
            accumulators.add(held_out)
            scores = accumulators.result(resamples=0)
            texts = scores.metrics
            failed = dict(scores.failed)
        # The user's metrics may differ between ranks, but all ranks must take the same decisions.
        texts, failed = self.ranks.broadcast((texts, failed))
        self._fill_missing(texts, failed)
        return texts, failed

    def generate_in_time(
        self,
        sampler: Sampler,
        model: nn.Module,
        on_progress: Count,
        *,
        final: bool = False,
    ) -> dict[int, Sample]:
        """Generate texts until the time limit. Return the samples by prompt index.

        Every rank calls this method. With `final`, i.e. after training, generation may also use the
        time reserved for training.
        """
        prompts = sampler.prompts
        samples: dict[int, Sample] = {}
        clock = CommandClock() if self.limit is None else self.limit.clock
        start = 0
        while start < len(prompts):
            n_left = len(prompts) - start
            fitting: tuple[int, float] = (n_left, math.inf)
            if self.limit is not None:
                fitting = self.limit.texts_that_fit(n_left, final=final)
            # All ranks use the numbers of the first rank, which has the time limit.
            n, seconds = self.ranks.broadcast(fitting)
            if n == 0:
                break

            started = clock.seconds()
            part = replace(sampler, prompts=prompts[start : start + n])
            count_in_time = _stop_after(clock, started + seconds, on_progress)
            finished = sample_on_all_ranks(part, model, self.ranks, count_in_time)
            if self.limit is not None:
                self.limit.record_texts(n, clock.seconds() - started)
            samples |= {start + number: sample for number, sample in finished.items()}
            if len(finished) < n:
                break
            start += n
        return samples

    def _stop_if_interrupted(self, count: Count, *, together: bool = False) -> Count:
        """Wrap a progress callback to raise Interrupted after a signal.

        With `together`, all ranks must call the callback equally often. They stop together.
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
        """Return the watched metrics that are scores of texts."""
        return [name for name in self.watched if name not in (*HELD_OUT, BITS)]

    def _fill_missing(self, texts: dict[str, float], failed: Mapping[str, str]) -> None:
        """Set watched scores that are missing to NaN.

        Raises:
            ConfigError: A watched metric does not exist.
        """
        user_metric_failed = any(map(is_user_metric, failed))
        for name in self._watched_texts():
            if name in texts:
                continue
            if name not in self.known and not user_metric_failed:
                raise ConfigError(
                    f"{name} in train.best_by or train.early_stopping.metric is not a metric of "
                    "this run. Neither Toque nor a function in evaluation.metrics computes it. "
                    f"Available metrics: {', '.join([*HELD_OUT, *texts])}."
                )
            texts[name] = math.nan


def _stop_after(clock: CommandClock, end: float, on_progress: Count) -> Count:
    """Wrap a progress callback to raise TimeIsUp after the time `end`."""

    def count(done: int, total: int, share: float | None = None, /) -> None:
        if clock.seconds() > end:
            raise TimeIsUp
        on_progress(done, total, share)

    return count


def sample_on_all_ranks(
    sampler: Sampler, model: nn.Module, ranks: Ranks, on_progress: Count = uncounted
) -> dict[int, Sample]:
    """Generate the texts on all ranks. Return the finished samples by prompt index.

    Raises:
        Interrupted: At least one rank was interrupted. All ranks raise the error.
    """
    n = len(sampler.prompts)
    numbers = range(ranks.rank, n, ranks.world_size)
    local_prompts = [sampler.prompts[number] for number in numbers]
    local_sampler = replace(sampler, prompts=local_prompts)

    def count(done: int, total: int, share: float | None = None) -> None:
        # Estimate the progress of all ranks from the progress of this rank.
        on_progress(round(n * done / max(1, total)), n, share)

    # None marks an interruption of this rank.
    local_samples: list[tuple[int, dict[str, Any]]] | None = None
    with suppress(Interrupted):
        finished = local_sampler.generate_samples(model, count)
        local_samples = [(numbers[i], asdict(sample)) for i, sample in finished.items()]
    gathered = ranks.all_gather(local_samples)
    if None in gathered:
        raise Interrupted(LEFT)
    samples = {number: sample for part in gathered for number, sample in part}
    return {number: Sample(**samples[number]) for number in sorted(samples)}


def goal_of(metric: str) -> Goal:
    """Return the goal of maximising or minimising a metric."""
    return Goal(metric, rises=metric_named(metric).better != "lower")


def watched_metrics(
    train: TrainConfig,
    evaluation: EvaluationConfig,
    data: DataConfig,
    prompts: Sequence[Prompt],
    *,
    bits: bool = False,
) -> tuple[list[str], list[str]]:
    """List the metrics on which the run depends, and all of Toque's metrics that it computes.

    Args:
        train: Settings with the metrics for checkpoints and early stopping.
        evaluation: Settings with the metrics of texts.
        data: Settings with the tasks.
        prompts: Prompts of every evaluation.
        bits: Whether the number of bytes in the targets is known.

    Raises:
        ConfigError: The run depends on a metric that it does not compute.
    """
    metric_of_setting = {"train.best_by": train.best_by}
    if train.early_stopping is not None:
        metric_of_setting["train.early_stopping.metric"] = train.early_stopping.metric

    requested = _requested_metrics(evaluation, data, prompts)
    has_user_metrics = any(
        is_user_metric(metric) for metrics in requested.values() for metric in metrics
    )
    metric_names = [*HELD_OUT, *_text_score_names(requested, data)]
    if bits:
        metric_names.append(BITS)

    for setting, metric in metric_of_setting.items():
        # The names of the user's metrics are known only after the first call.
        if metric in metric_names or has_user_metrics:
            continue
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


def _requested_metrics(
    evaluation: EvaluationConfig, data: DataConfig, prompts: Sequence[Prompt]
) -> dict[str, Sequence[str]]:
    """Return the configured metrics by task name. The name "" is for all other texts."""
    table = task_table(data)
    common: Sequence[str] = ("auto",)
    if evaluation.metrics != "auto":
        common = evaluation.metrics
    return {
        prompt.task: metrics_of(table[prompt.task]) if prompt.task else common
        for prompt in prompts
    }


def _text_score_names(
    requested: Mapping[str, Sequence[str]], data: DataConfig
) -> list[str]:
    """List the names of Toque's scores of texts. A task's scores start with the task's name."""
    table = task_table(data)
    all_names: list[str] = []
    for task, metrics in requested.items():
        score_names = score_names_of(metrics)
        if not task:
            all_names += score_names
            continue
        if table[task].classes:
            score_names.append(NO_CLASS)
        all_names += [f"{task}_{name}" for name in score_names]
    return all_names
