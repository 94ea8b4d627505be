"""Curriculum of stages (Bengio, Louradour, Collobert, Weston, "Curriculum learning", ICML 2009).

A stage has filters on the store's columns, a share of the run, and an `EpochPlan` of the examples
that pass its filters. The cursor alone determines the stage of an update, so a run can resume at
any update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final, Self, get_args

import numpy as np
from numpy.typing import NDArray

from toque.config.cross_checks import share_of
from toque.config.field_types import DifficultyName
from toque.config.schema_methods import CurriculumConfig, StageFilters
from toque.data.loader.epoch_plan import EpochPlan, Update
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.keyed_random import key_of
from toque.units import Cursor, Duration

_STAGE = 3  # separates the keys of stages from other keys
_DIGITS = 9  # decimals of passes, so that sums of shares give exact integers
_DIFFICULTIES: Final = get_args(DifficultyName)  # in the order of their codes


def _filters(stage: StageFilters) -> list[tuple[str, float, float, str]]:
    """List the filters of a stage: column, minimum, maximum, and text."""
    filters: list[tuple[str, float, float, str]] = []
    if (hardest := stage.max_difficulty) is not None:
        maximum = _DIFFICULTIES.index(hardest)
        filters.append(("difficulty", -np.inf, maximum, f"difficulty up to {hardest}"))
    if stage.min_quality > 0:
        text = f"quality from {stage.min_quality:g}"
        filters.append(("quality", stage.min_quality, np.inf, text))
    for what in ("ingredients", "steps"):
        maximum = getattr(stage, f"max_{what}")
        if maximum is not None:
            filters.append((f"n_{what}", -np.inf, maximum, f"up to {maximum} {what}"))
    return filters


def stage_in_words(stage: StageFilters) -> str:
    """Describe the filters of a stage."""
    return ", ".join(text for *_, text in _filters(stage)) or "everything"


def selected(
    store: TokenStore, rows: NDArray[np.int64], stage: StageFilters
) -> NDArray[np.int64]:
    """Find the positions in `rows` of a stage's examples. A missing value passes a filter."""
    passes = np.ones(len(rows), np.bool_)
    for column, minimum, maximum, _ in _filters(stage):
        # Round the bounds like the stored values: 0.7 in float32 is less than 0.7 in float64.
        values = np.asarray(store.column(column))[rows].astype(np.float32)
        is_inside = (values >= np.float32(minimum)) & (values <= np.float32(maximum))
        passes &= is_inside | np.isnan(values)
    return np.flatnonzero(passes)


def stage_seed(seed: int, stage: int) -> int:
    """Derive a stage's seed, so that stages with the same examples have different orders."""
    return key_of(seed, stage, _STAGE) if stage else seed


@dataclass(frozen=True)
class StagedPlan:
    """Sequence of epoch plans, with the methods of a single one. Each lasts at least an update."""

    stages: Sequence[EpochPlan]
    # Start of each stage as a share of the run; ascending from 0.
    begins: Sequence[float]
    run_length: Duration  # if in tokens, stages end approximately, by mean lengths
    source_lengths: NDArray[np.int64]  # [N] lengths of all training examples
    target_lengths: NDArray[np.int64]  # [N]

    @classmethod
    def from_settings(
        cls,
        curriculum: CurriculumConfig,
        store: TokenStore,
        rows: NDArray[np.int64],
        make: Callable[[NDArray[np.int64], int], EpochPlan],
        *,
        stop_after: Duration,
        seed: int,
    ) -> Self:
        """Create the plans of the stages.

        Args:
            curriculum: The settings.
            store: The store.
            rows: Store rows to train on, [N].
            make: Function that plans the rows at some positions with a seed.
            stop_after: The length of the run.
            seed: The seed of the run.

        Raises:
            ConfigError: A stage has no example, or is shorter than an update.
        """
        stages = curriculum.stages
        positions = [selected(store, rows, stage) for stage in stages]
        for number, (stage, chosen) in enumerate(
            zip(stages, positions, strict=True), start=1
        ):
            if not len(chosen):
                counts = ", ".join(
                    f"stage {i}: {len(p):,}" for i, p in enumerate(positions, 1)
                )
                raise ConfigError(
                    f"Stage {number} of the curriculum ({stage_in_words(stage)}) selects none of "
                    f"the {len(rows):,} training examples ({counts}). Widen its filters. `toque "
                    "report` shows the distributions of difficulty and quality."
                )
        everything = make(np.arange(len(rows)), seed)
        return cls(
            stages=[
                make(chosen, stage_seed(seed, i)) for i, chosen in enumerate(positions)
            ],
            begins=[share_of(stage.begins, stop_after) or 0.0 for stage in stages],
            run_length=stop_after,
            source_lengths=everything.source_lengths,
            target_lengths=everything.target_lengths,
        )

    def __post_init__(self) -> None:
        for number, updates in enumerate(self.updates, start=1):
            if updates < 0.5:
                raise ConfigError(
                    f"Stage {number} of the curriculum would last {updates:.2f} updates in a run "
                    f"of {self.run_length}. Begin the next stage later, or make the run longer."
                )

    @property
    def _is_in_steps(self) -> bool:
        return self.run_length.unit == "steps"

    @cached_property
    def updates(self) -> list[float]:
        """Updates per stage. Expected numbers, unless the run's length is in steps."""
        if self._is_in_steps:
            bounds = [
                round(begin * self.run_length.amount) for begin in (*self.begins, 1.0)
            ]
            return [float(end - start) for start, end in pairwise(bounds)]
        return [
            passes * plan.updates_per_epoch()
            for passes, plan in zip(self.passes, self.stages, strict=True)
        ]

    @cached_property
    def passes(self) -> list[float]:
        """Passes of each stage over its examples."""
        if self._is_in_steps:
            return [
                updates / plan.updates_per_epoch()
                for updates, plan in zip(self.updates, self.stages, strict=True)
            ]
        shares = [end - start for start, end in pairwise((*self.begins, 1.0))]
        return [
            share * self.run_length.amount / plan.amounts[self.run_length.unit]
            for share, plan in zip(shares, self.stages, strict=True)
        ]

    @cached_property
    def _epochs(self) -> list[float]:
        """Epochs of the run at the start of each stage and at the end."""
        return [round(n, _DIGITS) for n in accumulate(self.passes, initial=0.0)]

    @property
    def totals(self) -> dict[str, float]:
        """Steps, epochs, examples and tokens of the run."""
        totals = {"steps": sum(self.updates)}
        for unit in ("epochs", "examples", "tokens"):
            pairs = zip(self.passes, self.stages, strict=True)
            totals[unit] = sum(passes * plan.amounts[unit] for passes, plan in pairs)
        return totals

    def in_words(self, curriculum: CurriculumConfig) -> list[str]:
        """Describe each stage in a line, with its examples and updates."""
        about = "" if self._is_in_steps else "about "
        stages = zip(
            curriculum.stages, self.stages, self.passes, self.updates, strict=True
        )
        return [
            f"stage {number} from {stage.begins}: {len(plan.examples):,} of "
            f"{len(self.target_lengths):,} examples ({stage_in_words(stage)}), {passes:.3g} "
            f"passes, {about}{updates:,.0f} steps"
            for number, (stage, plan, passes, updates) in enumerate(stages, start=1)
        ]

    def epoch_key(self, cursor: Cursor) -> int:
        """Return the key of random changes to examples in the epoch of `cursor`."""
        return self.stages[cursor.stage].epoch_key(cursor)

    def at(self, cursor: Cursor) -> Update:
        """Plan the update at `cursor`."""
        stage = cursor.stage
        update = self.stages[stage].at(replace(cursor, stage=0, updates=0))
        start, end = self._epochs[stage : stage + 2]
        updates = cursor.updates + 1
        passes = round(update.epoch, _DIGITS)
        if self._is_in_steps:
            is_over = updates >= self.updates[stage]
        else:
            is_over = passes >= round(end - start, _DIGITS)

        is_last = stage == len(self.stages) - 1
        if is_over and not is_last:
            return replace(update, cursor=Cursor(stage=stage + 1), epoch=end)
        epoch = round(start + passes, _DIGITS)
        if (
            not is_last
        ):  # the expected end may come too early, and epochs must never decrease
            epoch = min(epoch, end)
        next_cursor = replace(
            update.cursor, stage=stage, updates=updates if self._is_in_steps else 0
        )
        return replace(update, cursor=next_cursor, epoch=epoch)
