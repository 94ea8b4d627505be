"""Length of a run, limited by the time of its command, with an estimate of its last steps."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from toque.config import RunConfig
from toque.data.loader.batch_stream import BatchStream
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.evaluation.evaluator import Evaluator
from toque.evaluation.text_samples import Sampler
from toque.reporter import Reporter, clock_text
from toque.runs.time_left import TimeLeft
from toque.training.micro_batch import least_of
from toque.training.stopping import CommandClock, TimeLimit
from toque.units import Duration
from toque.workflows.model_record import find_max_target_tokens

_FEW_TOKENS, _MORE_TOKENS = 2, 10
_SHORT_SECONDS: Final = 2.0
_TIMED_BATCHES: Final = 2
"""Batches of held-out examples in the measurement of an evaluation."""
_COPIES: Final = 5
"""Copies of the weights written at the end: a checkpoint with AdamW's state has three, the best
model one and the finished model one."""
_PROBE_BYTES: Final = 8 << 20
_PROBING_SHARE: Final = 0.01
"""Share of the time limit that the repetition of one measurement may take. A guess."""
_TEXTS_SHARE: Final = 0.25
"""Largest share of the time limit for the final texts. A guess."""


@dataclass(frozen=True)
class AfterTraining:
    """Estimated seconds for each part of a run's end."""

    evaluating: float
    """Seconds per held-out loss."""
    ending: float
    """Seconds of the final scores, the last checkpoint and the finished model."""
    texts: float = 0.0
    """Seconds for the texts per evaluation."""
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
    """Length of training, and the limit on the time of the command."""

    stop_after: Duration
    after: AfterTraining | None = None
    """Estimate of the end; None if it is not reported and the time is not limited."""
    limit: TimeLimit | None = None
    """Limit on the time of the command, on the first rank only."""
    line: str = ""
    """Text about the time limit for the banner; "" without a limit."""


def find_length(
    config: RunConfig,
    store: TokenStore,
    evaluator: Evaluator,
    scored: Sampler,
    clock: CommandClock,
    reporter: Reporter,
    *,
    over: bool,
) -> Length:
    """Return the length of training, the same on every rank.

    The time of the end is measured if it is reported or the time is limited.

    Args:
        config: The configuration.
        store: The store of the run.
        evaluator: The evaluator, which is timed.
        scored: The sampler of the final texts, which is timed.
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
        with reporter.working("measuring the time of evaluating and writing"):
            after = _measure_end(
                config, store, evaluator, scored, max_seconds=max_seconds
            )
    spent, after = ranks.broadcast((clock.seconds(), after))
    if total_seconds is None:
        return Length(stop_after, after)

    after = after.limit_texts(_TEXTS_SHARE * (total_seconds - spent))
    limit = TimeLimit(
        total_seconds,
        replace(clock, began=clock.now() - spent),
        after.evaluating,
        after.ending,
        after.texts,
        after.final_texts,
        after.each_text,
        from_scratch=config.model.start_from == "scratch",
        length=None if stop_after.total else stop_after,
    )
    remaining = ranks.broadcast(limit.stop_after)
    usage = (
        f"reading and measuring took {clock_text(spent)} of it, and the last scores and texts will "
        f"take about {clock_text(after.seconds)}"
    )
    if remaining.amount <= 0 and not over:
        setting, value = "train.stop_after", stop_after
        if config.train.time_limit and config.train.time_limit.seconds == total_seconds:
            setting, value = "train.time_limit", config.train.time_limit
        advice = "Increase the time"
        if spent < total_seconds:
            advice += (
                ", or evaluate less (evaluation.max_examples, evaluation.generate)"
            )
        raise ConfigError(
            f'{setting} is "{value}": {usage}. No time remains for training. {advice}.'
        )
    limit.stop_after = remaining
    minutes = (
        f"about {clock_text(60 * remaining.amount)} remain for training and evaluation"
    )
    at_most = ""
    if not stop_after.total:
        at_most = f", or {clock_text(total_seconds)} for the entire command"
    return Length(
        remaining if stop_after.total else stop_after,
        after,
        limit if ranks.is_main else None,
        f"{at_most}: {usage}; {minutes}",
    )


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
    """Predict the time of a run with `n_texts` at its end. None: nothing was measured."""
    if length.after is None or update_seconds is None:
        return None
    stop = length.stop_after
    totals = stream.totals(stop)
    training = totals.get("steps", 0.0) * update_seconds
    if stop.seconds is not None:
        training = stop.seconds
        totals = {"steps": training / update_seconds} | totals
    totals = {"minutes": training / 60} | totals
    after = length.after
    return TimeLeft(
        stop,
        evaluate_every,
        expected=totals,
        training_seconds=training,
        evaluation_seconds=after.evaluating + after.texts,
        final_seconds=after.evaluating + after.final_texts + after.ending,
        n_texts=n_texts,
        counts_evaluations=length.limit is not None and length.limit.length is None,
    )


def _measure_end(
    config: RunConfig,
    store: TokenStore,
    evaluator: Evaluator,
    scored: Sampler,
    *,
    max_seconds: float,
) -> AfterTraining:
    """Estimate the time of the end of a run from small measurements, which do not change the run.

    A measurement that took `max_seconds` is not repeated.
    """
    heldout, model = evaluator.heldout, evaluator.model
    rows = (
        heldout.rows_per_step.rows if heldout.rows_per_step else heldout.rows_per_batch
    )
    n_timed = _TIMED_BATCHES * rows * heldout.share[1]
    weights = None if heldout.weights is None else heldout.weights[:n_timed]
    part = replace(heldout, rows=heldout.rows[:n_timed], weights=weights)

    def time_part() -> float:
        began = time.perf_counter()
        part(model)
        return time.perf_counter() - began

    seconds = least_of(time_part, budget_seconds=0.0, most_seconds=max_seconds)
    evaluating = seconds * len(heldout.rows) / max(1, len(part.rows))
    # The final scores evaluate each example once, or twice if there are other tasks.
    n_evaluations = 1 if config.data.tasks == ("write",) else 2

    limit = find_max_target_tokens(config, store.manifest)
    final_texts = estimate_texts_seconds(
        evaluator, scored, limit, max_seconds=max_seconds
    )
    texts = estimate_texts_seconds(
        evaluator, evaluator.sampler, limit, max_seconds=max_seconds
    )

    n_bytes = sum(
        p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
    )
    try:
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=config.run_dir) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        saving = _COPIES * n_bytes * (time.perf_counter() - began) / _PROBE_BYTES
    except OSError:  # a full disk is reported when the run saves
        saving = 0.0

    n_texts = len(scored.prompts) + len(evaluator.sampler.prompts)
    return AfterTraining(
        evaluating,
        n_evaluations * evaluating + saving,
        texts=texts,
        final_texts=final_texts,
        each_text=(final_texts + texts) / max(1, n_texts),
    )


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
    # All ranks gather the model, also a rank without texts.
    with evaluator.sharing.full_model() as model:

        def time_texts(tokens: int) -> float:
            began = time.perf_counter()
            sampler.generate(model, ids, tokens)
            return time.perf_counter() - began

        return (
            extrapolate_seconds(time_texts, limit, max_seconds=max_seconds)
            if ids
            else 0.0
        )


def extrapolate_seconds(
    time_texts: Callable[[int], float], n_tokens: int, *, max_seconds: float = math.inf
) -> float:
    """Estimate the seconds of texts with `n_tokens`, from the times of two short lengths.

    The difference of the two times is free of the time to read the prompts. A measurement that took
    `max_seconds` is not repeated.
    """
    budget = min(_SHORT_SECONDS, max_seconds)
    few = least_of(
        lambda: time_texts(_FEW_TOKENS), budget_seconds=budget, most_seconds=max_seconds
    )
    upper_bound = few / _FEW_TOKENS * n_tokens
    if upper_bound < _SHORT_SECONDS or n_tokens <= _MORE_TOKENS:
        return upper_bound
    more = least_of(lambda: time_texts(_MORE_TOKENS), at_least=1, budget_seconds=budget)
    # A disturbed measurement may be shorter for more tokens. Then assume the slowest token.
    per_token = (
        (more - few) / (_MORE_TOKENS - _FEW_TOKENS)
        if more > few
        else more / _MORE_TOKENS
    )
    return few + per_token * (n_tokens - _FEW_TOKENS)
