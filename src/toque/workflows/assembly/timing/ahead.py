"""Time ahead of a run, from one timed update and a few timed tokens; and a limit on all of it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from torch import nn

from toque.config import RunConfig
from toque.cooking.prompts import CLASSES, TASKS
from toque.errors import ConfigError
from toque.evaluation.heldout_loss import HeldOut, subset
from toque.evaluation.text_samples import Prompt, Sampler
from toque.reporter import Reporter, clock_text, heard
from toque.training.autotune.micro_batch import least_of
from toque.training.distributed.sharing import Alone
from toque.training.observers.time_left import TimeLeft
from toque.training.time_limit import CommandClock, TimeLimit
from toque.units import Cursor, Duration
from toque.workflows.asking.provenance import target_limit
from toque.workflows.assembly.evaluation import build_sampler, held_out_prompts
from toque.workflows.assembly.sample_writer import writing_in
from toque.workflows.assembly.setup import Setup
from toque.workflows.assembly.speed.autotune import Fitted
from toque.workflows.assembly.task_scores import classes_of

_FEW_TOKENS, _MORE_TOKENS = 2, 10
_FORWARD: Final = 1 / 3
"""Of an update's time: backward computes twice what forward does."""
_SHORT_SECONDS = 2.0
_BATCHES: Final = 2
"""Of the held-out examples, to time an evaluation by."""
_COPIES: Final = 5
"""Of the weights that are written at the end: a checkpoint with AdamW's state is three, the best
model one, the finished model one."""
_PROBE_BYTES: Final = 8 << 20


def time_left_of(
    setup: Setup,
    fitted: Fitted,
    heldout: HeldOut,
    looks: Sampler,
    reporter: Reporter,
    *,
    counts_evaluations: bool = False,
) -> TimeLeft | None:
    """The run's time as it can be foreseen; None where nobody hears it or nothing was timed.

    Args:
        setup: of the run.
        fitted: with the seconds of an update.
        heldout: what every evaluation computes.
        looks: what every evaluation writes.
        reporter: who is to hear of it.
        counts_evaluations: whether the run's length includes the evaluations between updates, as
            a limit on the whole command does; the one at the end then remains.
    """
    if not heard(reporter) or fitted.update_seconds is None:
        return None
    config, ranks = setup.config, setup.runtime.ranks
    stop, totals = config.train.stop_after, setup.stream.totals(config.train.stop_after)
    if stop.seconds is not None:
        training = stop.seconds
        totals = {"steps": training / fitted.update_seconds} | totals
    else:
        training = totals.get("steps", 0.0) * fitted.update_seconds
    tokens = setup.stream.at(Cursor()).batch.n_tokens  # of this rank, whose update was timed
    of_one = _FORWARD * fitted.update_seconds / max(1, tokens)
    evaluating = of_one * _held_out_tokens(setup, heldout) / ranks.world_size
    prompts = held_out_prompts(setup.store, config.evaluation.generate)
    scored = build_sampler(config, setup.store, prompts) if prompts else looks
    writing, looking = (
        _writing_seconds(
            setup, setup.model, replace(s, prompts=s.prompts[ranks.rank :: ranks.world_size])
        )
        for s in (scored, looks)
    )
    return TimeLeft(
        stop,
        None if counts_evaluations else config.train.evaluate_every,
        expected=totals,
        training_seconds=training,
        evaluation_seconds=evaluating + looking,
        final_seconds=evaluating + writing + of_one * _task_tokens(setup),
        n_texts=len(scored.prompts),
    )


def _held_out_tokens(setup: Setup, heldout: HeldOut) -> int:
    rows = [row for packed in heldout.rows for row in packed]
    store = setup.store
    return int(store.prompt_lengths[rows].sum() + store.target_lengths[rows].sum())


def _task_tokens(setup: Setup) -> float:
    """Tokens computed to choose among the classes of each task, and for each task's loss."""
    config, store = setup.config, setup.store
    if config.data.tasks == ("write",):
        return 0.0
    held_out, total = store.rows("validation"), 0.0
    numbers = np.asarray(store.column("task"))[held_out]
    for number, task in enumerate(TASKS):
        rows = subset(held_out[numbers == number], config.evaluation.max_examples)
        if task in config.data.tasks and len(rows):
            answers = len(classes_of(store, task)) if task in CLASSES else 0
            read = store.prompt_lengths[rows].sum(dtype=np.int64)
            total += float((1 + answers) * read + store.target_lengths[rows].sum(dtype=np.int64))
    return total


def _writing_seconds(setup: Setup, model: nn.Module, sampler: Sampler) -> float:
    """Until every text has the most tokens, as a model that has learnt little will write them."""
    if not sampler.prompts:
        return 0.0
    prompts = [prompt.ids for prompt in sampler.prompts]

    def timed(tokens: int) -> float:
        started = time.perf_counter()
        with writing_in(model, setup.runtime)():
            sampler.generate(model, prompts, max_new_tokens=tokens)
        return time.perf_counter() - started

    return seconds_of_texts(timed, target_limit(setup.config, setup.store.manifest))


def seconds_of_texts(timed: Callable[[int], float], most: int) -> float:
    """Seconds of writing texts of `most` tokens, by the seconds that a few tokens take.

    Reading the prompts is told apart from writing by two lengths. Later tokens take longer, by
    attention, which is left out.
    """
    few = least_of(lambda: timed(_FEW_TOKENS), budget_seconds=_SHORT_SECONDS)
    if few / _FEW_TOKENS * most < _SHORT_SECONDS or most <= _MORE_TOKENS:
        return few / _FEW_TOKENS * most
    more = least_of(lambda: timed(_MORE_TOKENS), at_least=1, budget_seconds=_SHORT_SECONDS)
    # Disturbed, more tokens may seem to take less than few: then one takes as much as can be.
    each = (more - few) / (_MORE_TOKENS - _FEW_TOKENS) if more > few else more / _MORE_TOKENS
    return few + each * (most - _FEW_TOKENS)


@dataclass(frozen=True)
class AfterTraining:
    """Seconds that the end of a run is expected to take."""

    evaluating: float
    """One evaluation, with the texts it writes."""
    ending: float
    """Writing texts, the last checkpoint and the finished model."""

    @property
    def seconds(self) -> float:
        """All of it: the end is evaluated, and then the best weights."""
        return 2 * self.evaluating + self.ending


@dataclass(frozen=True)
class Length:
    """How long a run trains, and who sees to it."""

    stop_after: Duration
    limit: TimeLimit | None = None
    """Where the setting means the whole command; on the first rank alone."""
    line: str = ""
    """What is expected, for people; empty where the setting means training alone."""


def length_of(
    setup: Setup, heldout: HeldOut, looks: Sampler, clock: CommandClock, reporter: Reporter
) -> Length:
    """The length that train.stop_after asks for; every rank is given the same.

    Raises:
        ConfigError: nothing would be left for training.
    """
    asked, ranks = setup.config.train.stop_after, setup.runtime.ranks
    whole = asked.seconds
    if whole is None or not asked.total:
        return Length(asked)
    with reporter.working("finding out how long evaluating and writing take"):
        after = measure_end(setup, heldout, looks)
    spent, after = ranks.broadcast((clock.seconds(), after))
    clock = replace(clock, began=clock.now() - spent)
    limit = TimeLimit(whole, clock, after.evaluating, after.ending)
    stop_after = ranks.broadcast(limit.stop_after)
    told = (
        f"{clock_text(spent)} of it went into reading and measuring, and evaluating and writing "
        f"will take about {clock_text(after.seconds)}"
    )
    if stop_after.amount <= 0:
        raise ConfigError(
            f'train.stop_after is "{asked}": {told}. Nothing is left for training; give more, or '
            "evaluate less (evaluation.max_examples, evaluation.generate)."
        )
    limit.stop_after = stop_after
    return Length(
        stop_after,
        limit if ranks.is_main else None,
        f": {told}; about {clock_text(60 * stop_after.amount)} of training",
    )


def with_length(config: RunConfig, length: Length) -> RunConfig:
    """The configuration that the rate and averages go by; what is written down stays as asked."""
    train = config.train.model_copy(update={"stop_after": length.stop_after})
    return config.model_copy(update={"train": train})


def measure_end(setup: Setup, heldout: HeldOut, looks: Sampler) -> AfterTraining:
    """Time a little of everything that comes after training; no number of the run changes."""
    config, store, model = setup.config, setup.store, setup.model
    rows = heldout.at_once.rows if heldout.at_once else heldout.rows_per_batch
    few = _BATCHES * rows * heldout.share[1]
    part = replace(
        heldout,
        rows=heldout.rows[:few],
        weights=None if heldout.weights is None else heldout.weights[:few],
    )

    def timed() -> float:
        began = time.perf_counter()
        part(model)
        return time.perf_counter() - began

    # As often on every rank: they add up what each computes.
    seconds = least_of(timed, budget_seconds=0.0)
    evaluating = seconds * len(heldout.rows) / max(1, len(part.rows))
    tasks = 1 if config.data.tasks == ("write",) else 2  # each task's share is evaluated once more
    writing, looking = (
        _texts_seconds(setup, prompts)
        for prompts in (held_out_prompts(store, config.evaluation.generate), looks.prompts)
    )
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    saving = _COPIES * n_bytes * _seconds_a_byte(Path(config.run_dir))
    ending = (tasks - 1) * evaluating + writing + saving
    return AfterTraining(evaluating + looking, ending)


def _texts_seconds(setup: Setup, prompts: Sequence[Prompt]) -> float:
    """Of writing a text of the most tokens for each prompt, by the first few tokens."""
    if not prompts:
        return 0.0
    sampler = build_sampler(setup.config, setup.store, prompts)
    with (setup.sharing or Alone(setup.model)).whole() as model:
        return _writing_seconds(setup, model, sampler)


def _seconds_a_byte(run: Path) -> float:
    """Of writing durably to the disk of the run; 0 where it takes nothing, which saves will say."""
    try:
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=run) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return 0.0
    return (time.perf_counter() - began) / _PROBE_BYTES
