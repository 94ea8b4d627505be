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
    """Metrics and texts of an evaluation, and its cost."""

    metrics: Mapping[str, float] = field(default_factory=dict)  # on every rank the same
    texts: Mapping[str, float] = field(default_factory=dict)  # scores of texts, a part of metrics
    held_out: Sequence[Sample] = ()
    own: Sequence[Sample] = ()  # texts for the user's own prompts
    failed: Mapping[str, str] = field(default_factory=dict)  # metrics that raised, with the error
    seconds: float = 0.0
    texts_seconds: float = 0.0  # seconds of writing texts and scoring them, a part of `seconds`
    left_out: int = 0  # texts that were not written, or not finished, in the time that was left


@dataclass
class Evaluator:
    """Evaluates the weights that are in the model when it is called.

    Draws nothing at random, and leaves the model in the mode it was in. The sampler writes for
    `n_held_out` prompts with references, then for the user's own.
    """

    heldout: HeldOut
    model: nn.Module
    sharing: DataParallel
    sampler: Sampler
    n_held_out: int
    ranks: Ranks
    scores: Callable[[], ScoresByTask]
    watched: Sequence[str] = ()
    """Metrics that the run goes by; one that cannot be measured is NaN, which is no improvement."""
    known: Sequence[str] = ()  # names that metrics may have; the user's functions may give others
    reporter: Reporter = SILENT
    interrupted: Callable[[], bool] = bool  # asked after every batch and token whether to leave
    limit: TimeLimit | None = None  # of the command, which texts must keep; on the first rank alone
    last: Evaluated = Evaluated()

    def __call__(self) -> dict[str, float]:
        """All metrics by name; raises Interrupted, with nothing measured, if any rank is."""
        began = time.perf_counter()
        metrics = self.losses()
        between = time.perf_counter()
        samples = self._written()
        held_out = [sample for n, sample in samples.items() if n < self.n_held_out]
        own = [sample for n, sample in samples.items() if n >= self.n_held_out]
        left_out = len(self.sampler.prompts) - len(samples)
        texts: dict[str, float] = {}
        failed: dict[str, str] = {}
        # Scores of fewer texts would not compare with those of the other evaluations.
        if held_out and len(held_out) == self.n_held_out:
            if self.ranks.is_main:
                scores = self.scores()
                scores.add(held_out)
                found = scores.result(resamples=0)
                texts, failed = found.metrics, dict(found.failed)
            # The user's metrics may differ by rank; what the run goes by must not.
            texts, failed = self.ranks.broadcast((texts, failed))
            self._fill(texts, failed)
        elif self.n_held_out:
            of_losses = (*HELD_OUT, BITS)
            texts = {name: math.nan for name in self.watched if name not in of_losses}
        ended = time.perf_counter()
        self.last = Evaluated(
            metrics | texts, texts, held_out, own, failed, ended - began, ended - between, left_out
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
        if self.last.left_out:
            found["texts_left_out"] = self.last.left_out
        return found

    def _written(self) -> dict[int, Sample]:
        if not self.sampler.prompts:
            return {}
        with (
            self.sharing.full_model() as model,
            counting(self.reporter, "writing", "texts") as count,
        ):
            return self.written(self.sampler, model, self._told(count))

    def written(
        self, sampler: Sampler, model: nn.Module, on_progress: Count, *, final: bool = False
    ) -> dict[int, Sample]:
        """Samples by the number of their prompt, as many as the time limit has time for.

        Every rank calls it. `final`: training is over, and nothing but the end needs the rest.
        """
        prompts, samples = sampler.prompts, dict[int, Sample]()
        clock = CommandClock() if self.limit is None else self.limit.clock
        at, unfinished = 0, False
        while at < len(prompts) and not unfinished:
            fit: tuple[int, float] = (len(prompts) - at, math.inf)
            if self.limit is not None:
                fit = self.limit.texts_that_fit(fit[0], final=final)
            n, seconds = self.ranks.broadcast(fit)  # the first rank's, as all of them write
            if n == 0:
                break

            began = clock.seconds()
            part = replace(sampler, prompts=prompts[at : at + n])
            in_time = _until(clock, began + seconds, on_progress)
            finished = sample_on_all_ranks(part, model, self.ranks, in_time)
            if self.limit is not None:
                self.limit.wrote(n, clock.seconds() - began)
            samples |= {at + number: sample for number, sample in finished.items()}
            at, unfinished = at + n, len(finished) < n
        return samples

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


def _until(clock: CommandClock, end: float, on_progress: Count) -> Count:
    """`on_progress`, which raises TimeIsUp once the clock is past `end`."""

    def count(done: int, total: int, share: float | None = None, /) -> None:
        if clock.seconds() > end:
            raise TimeIsUp
        on_progress(done, total, share)

    return count


def sample_on_all_ranks(
    sampler: Sampler, model: nn.Module, ranks: Ranks, on_progress: Count = uncounted
) -> dict[int, Sample]:
    """A sample for each prompt, by its number, a part from each rank; without unfinished ones.

    All are Interrupted where one is.
    """
    own = replace(sampler, prompts=sampler.prompts[ranks.rank :: ranks.world_size])
    n = len(sampler.prompts)

    def count(done: int, total: int, share: float | None = None) -> None:
        on_progress(round(n * done / max(1, total)), n, share)  # the others do about as many

    written: list[tuple[int, dict[str, Any]]] | None = None
    with suppress(Interrupted):
        numbers = range(ranks.rank, n, ranks.world_size)
        written = [
            (numbers[i], asdict(sample)) for i, sample in own.by_number(model, count).items()
        ]
    shares = ranks.all_gather(written)
    if any(share is None for share in shares):
        raise Interrupted(LEFT)
    samples = {number: sample for share in shares for number, sample in share}
    return {number: Sample(**samples[number]) for number in sorted(samples)}


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
