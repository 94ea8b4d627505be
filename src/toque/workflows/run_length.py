"""Length of a run, with the time limit of its command and an estimate of the run's end."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from torch import nn

from toque.config import RunConfig
from toque.data.loader.batch_stream import BatchStream
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.evaluation.evaluator import Evaluator
from toque.evaluation.text_samples import Sampler
from toque.reporter import Reporter, clock_text
from toque.runs.time_left import TimeLeft
from toque.training.micro_batch import shortest_time
from toque.training.stopping import CommandClock, TimeLimit
from toque.units import Duration
from toque.workflows.trained_model.training_record import find_max_target_tokens

_FEW_TOKENS, _MORE_TOKENS = 2, 10
"""Lengths of generated texts in the two measurements that are compared."""
_SHORT_SECONDS = 2.0
"""Minimum seconds for a second measurement, and maximum seconds for repeating one measurement.
"""
_TIMED_BATCHES = 2
"""Number of held-out batches for which an evaluation is timed."""
_COPIES = 5
"""Number of copies of the weights that are written at the end: three in a checkpoint with AdamW's
state, one in the best model, and one in the finished model."""
_PROBE_BYTES = 8 << 20
"""Size in bytes of the file with which the disk's speed is measured."""
_PROBING_SHARE = 0.01
"""Fraction of the time limit that repetitions of one measurement may take. Not tuned."""
_TEXTS_SHARE = 0.25
"""Maximum fraction of the time limit for generated texts. Not tuned."""


@dataclass(frozen=True)
class AfterTraining:
    """Estimated seconds for each part of a run's end."""

    evaluating: float
    """Seconds per held-out loss."""
    ending: float
    """Seconds for the final scores, the last checkpoint and the finished model."""
    texts: float = 0.0
    """Seconds for the texts of an evaluation during training."""
    final_texts: float = 0.0
    """Seconds for the final texts."""
    each_text: float = 0.0
    """Seconds per text."""

    @property
    def seconds(self) -> float:
        """Seconds from the last update to the end of the command."""
        return 2 * self.evaluating + self.texts + self.final_texts + self.ending

    def limit_texts(self, seconds: float) -> AfterTraining:
        """Return the estimate with fewer texts if they take longer than `seconds`."""
        share = min(1.0, max(0.0, seconds) / max(self.texts + self.final_texts, 1e-9))
        return replace(
            self, texts=share * self.texts, final_texts=share * self.final_texts
        )


@dataclass(frozen=True)
class Length:
    """Length of training, and the time limit of the command."""

    stop_after: Duration
    after: AfterTraining | None = None
    """Estimate of the end; None if it is not reported and the time is not limited."""
    limit: TimeLimit | None = None
    """Time limit of the command, on the first rank only."""
    line: str = ""
    """Description of the time limit for the banner; "" without a limit."""


def find_length(
    config: RunConfig,
    store: TokenStore,
    evaluator: Evaluator,
    final_sampler: Sampler,
    clock: CommandClock,
    reporter: Reporter,
    *,
    over: bool,
) -> Length:
    """Return the length of training, the same on every rank.

    The duration of the run's end is measured if a reporter displays it or the time is limited.

    Args:
        config: Configuration of the run.
        store: The store of the run.
        evaluator: The evaluator, which is timed.
        final_sampler: The sampler of the final texts, which is timed.
        clock: The clock of the command.
        reporter: Receives the progress.
        over: Whether training is already over.

    Raises:
        ConfigError: The time limit leaves no time for training.
    """
    stop_after = config.train.stop_after
    ranks = evaluator.ranks
    total_seconds = config.train.command_seconds
    if total_seconds is None and (over or not ranks.broadcast(reporter.heard)):
        return Length(stop_after)

    after = AfterTraining(0.0, 0.0)
    if not over:
        # Every rank must repeat a measurement equally often, because the ranks add their results.
        max_seconds = (
            math.inf if ranks.is_distributed else probing_seconds(config, clock)
        )
        with reporter.working("measuring the time of evaluations and texts"):
            after = _measure_end(
                config, store, evaluator, final_sampler, max_seconds=max_seconds
            )
    spent, after = ranks.broadcast((clock.seconds(), after))
    if total_seconds is None:
        return Length(stop_after, after)

    after = after.limit_texts(_TEXTS_SHARE * (total_seconds - spent))
    # All ranks use the first rank's clock.
    shared_clock = replace(clock, began=clock.now() - spent)
    limit = _build_limit(config, total_seconds, shared_clock, after)
    remaining = ranks.broadcast(limit.stop_after)
    usage = (
        f"reading and measuring took {clock_text(spent)} of it, and the last scores and texts will "
        f"take about {clock_text(after.seconds)}"
    )
    if remaining.amount <= 0 and not over:
        _refuse_time_limit(config, total_seconds, spent, usage)
    limit.stop_after = remaining
    return Length(
        remaining if stop_after.total else stop_after,
        after,
        limit if ranks.is_main else None,
        _describe_limit(stop_after, total_seconds, remaining, usage),
    )


def _build_limit(
    config: RunConfig, total_seconds: float, clock: CommandClock, after: AfterTraining
) -> TimeLimit:
    """Build a command's time limit, which reserves time for the work `after` training."""
    stop_after = config.train.stop_after
    return TimeLimit(
        total_seconds,
        clock,
        after.evaluating,
        after.ending,
        after.texts,
        after.final_texts,
        after.each_text,
        from_scratch=config.model.start_from == "scratch",
        length=None if stop_after.total else stop_after,
    )


def _refuse_time_limit(
    config: RunConfig, total_seconds: float, spent: float, usage: str
) -> NoReturn:
    """Raise the ConfigError about a time limit that leaves no time for training."""
    train = config.train
    setting, value = "train.stop_after", train.stop_after
    if train.time_limit is not None and train.time_limit.seconds == total_seconds:
        setting, value = "train.time_limit", train.time_limit
    advice = "Increase the time"
    if spent < total_seconds:
        advice += ", or evaluate less (evaluation.max_examples, evaluation.generate)"
    raise ConfigError(
        f'{setting} is "{value}": {usage}. No time remains for training. {advice}.'
    )


def _describe_limit(
    stop_after: Duration, total_seconds: float, remaining: Duration, usage: str
) -> str:
    """Describe the time limit. The banner prints it after the length of training."""
    at_most = ""
    if not stop_after.total:
        at_most = f", or {clock_text(total_seconds)} for the entire command"
    minutes = clock_text(60 * remaining.amount)
    return f"{at_most}: {usage}; about {minutes} remain for training and evaluation"


def probing_seconds(config: RunConfig, clock: CommandClock) -> float:
    """Return the longest time of a measurement that may be repeated, in seconds."""
    total_seconds = config.train.command_seconds
    if total_seconds is None:
        return math.inf
    return _PROBING_SHARE * max(0.0, total_seconds - clock.seconds())


def predict_time(
    stream: BatchStream,
    length: Length,
    evaluate_every: Duration,
    update_seconds: float | None,
    *,
    n_texts: int,
) -> TimeLeft | None:
    """Predict the time of a run with `n_texts` final texts. Return None if nothing was measured."""
    if length.after is None or update_seconds is None:
        return None
    stop = length.stop_after
    totals = stream.totals(stop)
    if stop.seconds is None:
        training_seconds = totals.get("steps", 0.0) * update_seconds
    else:
        training_seconds = stop.seconds
        totals = {"steps": training_seconds / update_seconds} | totals
    after = length.after
    limit_ends_run = length.limit is not None and length.limit.length is None
    return TimeLeft(
        stop,
        evaluate_every,
        expected={"minutes": training_seconds / 60} | totals,
        training_seconds=training_seconds,
        evaluation_seconds=after.evaluating + after.texts,
        final_seconds=after.evaluating + after.final_texts + after.ending,
        n_texts=n_texts,
        counts_evaluations=limit_ends_run,
    )


def _measure_end(
    config: RunConfig,
    store: TokenStore,
    evaluator: Evaluator,
    final_sampler: Sampler,
    *,
    max_seconds: float,
) -> AfterTraining:
    """Estimate the duration of a run's end from small measurements, which do not change the run.

    A measurement that took `max_seconds` is not repeated.
    """
    evaluating = _measure_evaluation(evaluator, max_seconds)
    # The final scores evaluate each example once, or twice if there are other tasks.
    n_evaluations = 1 if config.data.tasks == ("write",) else 2

    limit = find_max_target_tokens(config, store.manifest)
    final_texts = estimate_texts_seconds(
        evaluator, final_sampler, limit, max_seconds=max_seconds
    )
    texts = estimate_texts_seconds(
        evaluator, evaluator.sampler, limit, max_seconds=max_seconds
    )
    n_texts = len(final_sampler.prompts) + len(evaluator.sampler.prompts)
    return AfterTraining(
        evaluating,
        n_evaluations * evaluating + _measure_saving(config, evaluator.model),
        texts=texts,
        final_texts=final_texts,
        each_text=(final_texts + texts) / max(1, n_texts),
    )


def _measure_evaluation(evaluator: Evaluator, max_seconds: float) -> float:
    """Estimate the seconds for a held-out loss from a few batches."""
    heldout, model = evaluator.heldout, evaluator.model
    rows = (
        heldout.rows_per_step.rows if heldout.rows_per_step else heldout.rows_per_batch
    )
    n_ranks = heldout.share[1]
    n_timed = _TIMED_BATCHES * rows * n_ranks
    weights = None if heldout.weights is None else heldout.weights[:n_timed]
    part = replace(heldout, rows=heldout.rows[:n_timed], weights=weights)

    def time_part() -> float:
        began = time.perf_counter()
        part(model)
        return time.perf_counter() - began

    seconds = shortest_time(time_part, budget_seconds=0.0, most_seconds=max_seconds)
    return seconds * len(heldout.rows) / max(1, len(part.rows))


def _measure_saving(config: RunConfig, model: nn.Module) -> float:
    """Estimate the seconds for the last files from the time for a small file on the same disk."""
    trained = [p for p in model.parameters() if p.requires_grad]
    n_bytes = sum(p.numel() * p.element_size() for p in trained)
    try:
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=config.run_dir) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        seconds_per_byte = (time.perf_counter() - began) / _PROBE_BYTES
    except OSError:
        return 0.0  # a full disk is reported when the run saves
    return _COPIES * n_bytes * seconds_per_byte


def estimate_texts_seconds(
    evaluator: Evaluator, sampler: Sampler, limit: int, *, max_seconds: float = math.inf
) -> float:
    """Estimate the seconds until every text of a sampler has `limit` tokens.

    A measurement that took `max_seconds` is not repeated.
    """
    if not sampler.prompts:
        return 0.0
    ranks = evaluator.ranks
    ids = [prompt.ids for prompt in sampler.prompts[ranks.rank :: ranks.world_size]]
    # All ranks gather the model, including ranks without texts.
    with evaluator.sharing.full_model() as model:

        def time_texts(tokens: int) -> float:
            began = time.perf_counter()
            sampler.generate(model, ids, tokens)
            return time.perf_counter() - began

        if not ids:
            return 0.0
        return extrapolate_seconds(time_texts, limit, max_seconds=max_seconds)


def extrapolate_seconds(
    time_texts: Callable[[int], float], n_tokens: int, *, max_seconds: float = math.inf
) -> float:
    """Estimate the seconds for texts with `n_tokens`, from the times for two short lengths.

    The difference between the two times does not contain the time to read the prompts. A
    measurement that took `max_seconds` is not repeated.
    """
    budget = min(_SHORT_SECONDS, max_seconds)
    few = shortest_time(
        lambda: time_texts(_FEW_TOKENS), budget_seconds=budget, most_seconds=max_seconds
    )
    upper_bound = few / _FEW_TOKENS * n_tokens
    if upper_bound < _SHORT_SECONDS or n_tokens <= _MORE_TOKENS:
        return upper_bound
    more = shortest_time(
        lambda: time_texts(_MORE_TOKENS), at_least=1, budget_seconds=budget
    )
    per_token = (more - few) / (_MORE_TOKENS - _FEW_TOKENS)
    if more <= few:
        # A disturbed measurement may be shorter for more tokens. Then assume the slowest token.
        per_token = more / _MORE_TOKENS
    return few + per_token * (n_tokens - _FEW_TOKENS)
