"""Time ahead of a run: a forecast from one timed update and a few timed tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import numpy as np

from toque.cooking.prompts import CLASSES, TASKS
from toque.evaluation.heldout_loss import HeldOut, subset
from toque.evaluation.text_samples import Sampler
from toque.reporter import SILENT, Reporter
from toque.training.observers.time_left import TimeLeft
from toque.units import Cursor
from toque.workflows.asking.provenance import target_limit
from toque.workflows.assembly.autotune import Fitted
from toque.workflows.assembly.batches import expected_totals
from toque.workflows.assembly.evaluation import build_sampler, held_out_prompts
from toque.workflows.assembly.sample_writer import writing_in
from toque.workflows.assembly.setup import Setup
from toque.workflows.assembly.task_scores import classes_of

_FEW_TOKENS, _MORE_TOKENS = 2, 10
_FORWARD: Final = 1 / 3
"""Of an update's time: backward computes twice what forward does."""
_SHORT_SECONDS, _LONG_SECONDS = 2.0, 1.0


def time_left_of(
    setup: Setup, fitted: Fitted, heldout: HeldOut, looks: Sampler, reporter: Reporter
) -> TimeLeft | None:
    """The run's time as it can be foreseen; None where nobody hears it or nothing was timed.

    Args:
        setup: of the run.
        fitted: with the seconds of an update.
        heldout: what every evaluation computes.
        looks: what every evaluation writes.
        reporter: who is to hear of it.
    """
    if reporter is SILENT or fitted.update_seconds is None:
        return None
    config, ranks = setup.config, setup.runtime.ranks
    stop, totals = config.train.stop_after, expected_totals(config, setup.stream)
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
    mine = replace(scored, prompts=scored.prompts[ranks.rank :: ranks.world_size])
    writing = _writing_seconds(setup, mine)
    return TimeLeft(
        stop,
        config.train.evaluate_every,
        expected=totals,
        training_seconds=training,
        evaluation_seconds=evaluating + _writing_seconds(setup, looks),
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


def _writing_seconds(setup: Setup, sampler: Sampler) -> float:
    """Until every text has the most tokens, as a model that has learnt little will write them.

    The first few tokens are timed. Later ones take longer, by attention, which is left out.
    """
    if not sampler.prompts:
        return 0.0
    prompts, most = (
        [prompt.ids for prompt in sampler.prompts],
        target_limit(setup.config, setup.store.manifest),
    )

    def timed(tokens: int) -> float:
        started = time.perf_counter()
        with writing_in(setup.model, setup.runtime)():
            sampler.generate(setup.model, prompts, max_new_tokens=tokens)
        return time.perf_counter() - started

    few = timed(_FEW_TOKENS)
    if few / _FEW_TOKENS * most < _SHORT_SECONDS or few > _LONG_SECONDS or most <= _MORE_TOKENS:
        return few / _FEW_TOKENS * most
    each = max(0.0, timed(_MORE_TOKENS) - few) / (_MORE_TOKENS - _FEW_TOKENS)
    return few + each * (most - _FEW_TOKENS)
