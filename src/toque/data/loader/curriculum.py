"""Curriculum of stages (Bengio, Louradour, Collobert, Weston, "Curriculum learning", ICML 2009).

A stage has filters on the store's columns, a part of the run, and an `EpochPlan` of the examples
that pass its filters. The cursor alone determines the stage of an update, so a run can resume at
any update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Self, get_args

import numpy as np

from toque.config.cross_checks import share_of
from toque.config.field_types import DifficultyName
from toque.config.schema_methods import CurriculumConfig, StageFilters
from toque.data.array_types import Ints
from toque.data.loader.epoch_plan import EpochPlan, Update
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.keyed_random import key_of
from toque.units import Cursor, Duration

_STAGE = 3  # separates the keys of stages from other keys
_DIGITS = 9  # decimal places of passes, so that sums of fractions give exact integers
_DIFFICULTIES = get_args(DifficultyName)  # in the order of their codes


class _Filter(NamedTuple):
    """Bounds on a column of the store."""

    column: str
    minimum: float
    maximum: float
    description: str


def _list_filters(stage: StageFilters) -> list[_Filter]:
    """List the filters of a stage."""
    filters: list[_Filter] = []
    hardest = stage.max_difficulty
    if hardest is not None:
        code = _DIFFICULTIES.index(hardest)
        filters.append(
            _Filter("difficulty", -np.inf, code, f"difficulty up to {hardest}")
        )
    if stage.min_quality > 0:
        description = f"quality from {stage.min_quality:g}"
        filters.append(_Filter("quality", stage.min_quality, np.inf, description))
    for unit in ("ingredients", "steps"):
        maximum = getattr(stage, f"max_{unit}")
        if maximum is not None:
            description = f"up to {maximum} {unit}"
            filters.append(_Filter(f"n_{unit}", -np.inf, maximum, description))
    return filters


def describe_stage(stage: StageFilters) -> str:
    """Describe the filters of a stage."""
    descriptions = [f.description for f in _list_filters(stage)]
    return ", ".join(descriptions) or "everything"


def select_examples(store: TokenStore, rows: Ints, stage: StageFilters) -> Ints:
    """Find a stage's examples, as positions in `rows`. A missing value passes a filter."""
    passes = np.ones(len(rows), np.bool_)
    for column, minimum, maximum, _ in _list_filters(stage):
        # Round the bounds like the stored values: 0.7 in float32 is less than 0.7 in float64.
        values = np.asarray(store.column(column))[rows].astype(np.float32)
        is_inside = (values >= np.float32(minimum)) & (values <= np.float32(maximum))
        passes &= is_inside | np.isnan(values)
    return np.flatnonzero(passes)


def _refuse_filters_of_recipes(
    stages: Sequence[StageFilters], store: TokenStore
) -> None:
    """Refuse filters on columns that the store does not have, because it has no recipes."""
    for number, stage in enumerate(stages, start=1):
        for condition in _list_filters(stage):
            if condition.column not in store.manifest.columns:
                raise ConfigError(
                    f"Stage {number} of the curriculum selects examples with "
                    f"{condition.description}, but the store {store.path} has no recipes, and only "
                    "recipes have these values. Remove the filter."
                )


def _refuse_empty_stages(
    stages: Sequence[StageFilters],
    selections: Sequence[Ints],
    n_examples: int,
) -> None:
    """Refuse a stage that selects none of the training examples."""
    for number, stage in enumerate(stages, start=1):
        if not len(selections[number - 1]):
            counts = ", ".join(
                f"stage {i}: {len(s):,}" for i, s in enumerate(selections, start=1)
            )
            raise ConfigError(
                f"Stage {number} of the curriculum ({describe_stage(stage)}) selects none of the "
                f"{n_examples:,} training examples ({counts}). Widen its filters. `toque report` "
                "shows the distributions of difficulty and quality."
            )


def stage_seed(seed: int, stage: int) -> int:
    """Derive a stage's seed. Stages with the same examples get different orders."""
    return key_of(seed, stage, _STAGE) if stage else seed


@dataclass(frozen=True)
class StagedPlan:
    """Sequence of epoch plans, one per stage, with the interface of an `EpochPlan`.

    Each stage lasts at least one update.
    """

    stages: Sequence[EpochPlan]
    # Start of each stage as a fraction of the run, ascending from 0.
    begins: Sequence[float]
    # If the length is in tokens, stages end approximately, because mean lengths are used.
    run_length: Duration
    source_lengths: Ints  # [N] lengths of all training examples
    target_lengths: Ints  # [N]

    @classmethod
    def from_curriculum(
        cls,
        curriculum: CurriculumConfig,
        store: TokenStore,
        rows: Ints,
        make_plan: Callable[[Ints, int], EpochPlan],
        *,
        stop_after: Duration,
        seed: int,
    ) -> Self:
        """Create the plans of the stages.

        Args:
            curriculum: The `curriculum` section.
            store: Store with the columns that the filters use.
            rows: Store rows to train on, [N].
            make_plan: Function of positions in `rows` and a seed that returns their plan.
            stop_after: The run's length.
            seed: The run's seed.

        Raises:
            ConfigError: A stage has no example or is shorter than an update, or a filter needs
                recipes.
        """
        stages = curriculum.stages
        _refuse_filters_of_recipes(stages, store)
        selections = [select_examples(store, rows, stage) for stage in stages]
        _refuse_empty_stages(stages, selections, len(rows))
        full_plan = make_plan(np.arange(len(rows)), seed)
        return cls(
            stages=[
                make_plan(selection, stage_seed(seed, i))
                for i, selection in enumerate(selections)
            ],
            # The checks of the configuration exclude None, a start in another unit than the run.
            begins=[share_of(stage.begins, stop_after) or 0.0 for stage in stages],
            run_length=stop_after,
            source_lengths=full_plan.source_lengths,
            target_lengths=full_plan.target_lengths,
        )

    def __post_init__(self) -> None:
        for number, updates in enumerate(self.updates, start=1):
            # An expected number below 0.5 rounds to no update.
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
        """Updates per stage. The numbers are estimates, unless the run's length is in steps."""
        if self._is_in_steps:
            n_steps = self.run_length.amount
            bounds = [round(begin * n_steps) for begin in (*self.begins, 1.0)]
            return [float(end - start) for start, end in pairwise(bounds)]
        return [
            passes * plan.updates_per_epoch()
            for passes, plan in zip(self.passes, self.stages, strict=True)
        ]

    @cached_property
    def passes(self) -> list[float]:
        """Number of passes of each stage over its examples."""
        if self._is_in_steps:
            return [
                updates / plan.updates_per_epoch()
                for updates, plan in zip(self.updates, self.stages, strict=True)
            ]
        unit = self.run_length.unit
        shares = [end - start for start, end in pairwise((*self.begins, 1.0))]
        return [
            share * self.run_length.amount / plan.amounts[unit]
            for share, plan in zip(shares, self.stages, strict=True)
        ]

    @cached_property
    def _epochs(self) -> list[float]:
        """Epochs of the run at the start of each stage, and at the end of the run."""
        return [round(n, _DIGITS) for n in accumulate(self.passes, initial=0.0)]

    @property
    def totals(self) -> dict[str, float]:
        """Steps, epochs, examples and tokens of the run."""
        totals = {"steps": sum(self.updates)}
        for unit in ("epochs", "examples", "tokens"):
            pairs = zip(self.passes, self.stages, strict=True)
            totals[unit] = sum(passes * plan.amounts[unit] for passes, plan in pairs)
        return totals

    def describe(self, curriculum: CurriculumConfig) -> list[str]:
        """Describe each stage in one line, with its numbers of examples and updates."""
        about = "" if self._is_in_steps else "about "
        stages = zip(
            curriculum.stages, self.stages, self.passes, self.updates, strict=True
        )
        return [
            f"stage {number} from {stage.begins}: {len(plan.examples):,} of "
            f"{len(self.target_lengths):,} examples ({describe_stage(stage)}), {passes:.3g} "
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
        passes = round(update.epoch, _DIGITS)
        updates = 0  # counted only if the run's length is in steps
        if self._is_in_steps:
            updates = cursor.updates + 1
            is_over = updates >= self.updates[stage]
        else:
            is_over = passes >= round(end - start, _DIGITS)

        is_last = stage == len(self.stages) - 1
        if is_over and not is_last:
            return replace(update, cursor=Cursor(stage=stage + 1), epoch=end)
        epoch = round(start + passes, _DIGITS)
        if not is_last:
            # A stage may last longer than expected. The next stage starts at `end`, and epochs
            # must never decrease.
            epoch = min(epoch, end)
        next_cursor = replace(update.cursor, stage=stage, updates=updates)
        return replace(update, cursor=next_cursor, epoch=epoch)
