"""Curriculum (Bengio, Louradour, Collobert, Weston, "Curriculum learning", ICML 2009): stages.

A stage has filters over the store's columns, a share of the run, and its own `EpochPlan` over what
its filters select. Which stage an update is in is a function of the cursor alone, so a run
continues exactly within a stage and across the borders.
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

_STAGE = 3  # sets the keys of later stages apart from the others
_DIGITS = 9  # digits of passes: sums of shares must not miss a whole number by their last bit
_DIFFICULTIES: Final = get_args(DifficultyName)  # a store's codes, the easiest first


def _bounds_of(stage: StageFilters) -> list[tuple[str, float, float, str]]:
    """The least and most that columns may hold in a stage, each with its words."""
    found: list[tuple[str, float, float, str]] = []
    if (hardest := stage.max_difficulty) is not None:
        most = _DIFFICULTIES.index(hardest)
        found.append(("difficulty", -np.inf, most, f"difficulty up to {hardest}"))
    if stage.min_quality > 0:
        words = f"quality from {stage.min_quality:g}"
        found.append(("quality", stage.min_quality, np.inf, words))
    for what in ("ingredients", "steps"):
        most = getattr(stage, f"max_{what}")
        if most is not None:
            found.append((f"n_{what}", -np.inf, most, f"up to {most} {what}"))
    return found


def stage_in_words(stage: StageFilters) -> str:
    """The filters of a stage, for people."""
    return ", ".join(words for *_, words in _bounds_of(stage)) or "everything"


def selected(store: TokenStore, rows: NDArray[np.int64], stage: StageFilters) -> NDArray[np.int64]:
    """Positions in `rows` of the examples of a stage; a value that is missing passes its filter."""
    keep = np.ones(len(rows), np.bool_)
    for column, least, most, _ in _bounds_of(stage):
        # Stored as float32, 0.7 is less than 0.7; so bounds are rounded as the values were.
        values = np.asarray(store.column(column))[rows].astype(np.float32)
        inside = (values >= np.float32(least)) & (values <= np.float32(most))
        keep &= inside | np.isnan(values)
    return np.flatnonzero(keep)


def stage_seed(seed: int, stage: int) -> int:
    """The seed of a stage's order: two stages of the same examples see them in two orders."""
    return key_of(seed, stage, _STAGE) if stage else seed


@dataclass(frozen=True)
class StagedPlan:
    """One plan after the other, like a single `EpochPlan`; each lasts for an update or more."""

    stages: Sequence[EpochPlan]
    begins: Sequence[float]  # where each begins, as a share of the run; ascending from 0
    whole: Duration  # the length of the run; in tokens a stage ends about there, by mean lengths
    source_lengths: NDArray[np.int64]  # [N] of all training examples; so are the target lengths
    target_lengths: NDArray[np.int64]

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
        """The stages over store rows [N]; `make` plans positions in them by a seed."""
        stages = curriculum.stages
        chosen = [selected(store, rows, stage) for stage in stages]
        if not all(map(len, chosen)):
            empty = next(i for i, positions in enumerate(chosen) if not len(positions))
            counts = ", ".join(f"stage {i}: {len(p):,}" for i, p in enumerate(chosen, start=1))
            raise ConfigError(
                f"Stage {empty + 1} of the curriculum ({stage_in_words(stages[empty])}) selects "
                f"none of the {len(rows):,} training examples ({counts}). Widen its bounds; "
                "`toque prepare` and `toque report` show how difficulty and quality are spread."
            )
        everything = make(np.arange(len(rows)), seed)
        return cls(
            stages=[make(p, stage_seed(seed, i)) for i, p in enumerate(chosen)],
            begins=[share_of(stage.begins, stop_after) or 0.0 for stage in stages],
            whole=stop_after,
            source_lengths=everything.source_lengths,
            target_lengths=everything.target_lengths,
        )

    def __post_init__(self) -> None:
        for number, updates in enumerate(self.updates, start=1):
            if updates < 0.5:
                raise ConfigError(
                    f"Stage {number} of the curriculum would last {updates:.2f} updates of a run "
                    f"of {self.whole}. Let the next one begin later, or the run last longer."
                )

    @cached_property
    def updates(self) -> list[float]:
        """Updates of each stage: exact where the run is given in steps, else expected."""
        if self.whole.unit == "steps":
            borders = [round(begin * self.whole.amount) for begin in (*self.begins, 1.0)]
            return [float(end - start) for start, end in pairwise(borders)]
        passes = zip(self.passes, self.stages, strict=True)
        return [n * plan.updates_per_epoch() for n, plan in passes]

    @cached_property
    def passes(self) -> list[float]:
        """Passes each stage makes over its examples."""
        if self.whole.unit == "steps":
            found = zip(self.updates, self.stages, strict=True)
            return [n / plan.updates_per_epoch() for n, plan in found]
        sizes = [plan.amounts[self.whole.unit] for plan in self.stages]
        bounds = zip(pairwise((*self.begins, 1.0)), sizes, strict=True)
        return [(end - start) * self.whole.amount / size for (start, end), size in bounds]

    @cached_property
    def _before(self) -> list[float]:
        """Passes made when each stage begins, and when the last one ends."""
        return [round(n, _DIGITS) for n in accumulate(self.passes, initial=0.0)]

    @property
    def totals(self) -> dict[str, float]:
        """Steps, epochs, examples and tokens of the whole run."""
        amounts = [plan.amounts for plan in self.stages]
        return {"steps": sum(self.updates)} | {
            unit: sum(n * of[unit] for n, of in zip(self.passes, amounts, strict=True))
            for unit in ("epochs", "examples", "tokens")
        }

    def in_words(self, curriculum: CurriculumConfig) -> list[str]:
        """A line for each stage, with its examples and updates."""
        about = "" if self.whole.unit == "steps" else "about "
        stages = zip(curriculum.stages, self.stages, self.passes, self.updates, strict=True)
        return [
            f"stage {number} from {stage.begins}: {len(own.examples):,} of "
            f"{len(self.target_lengths):,} examples ({stage_in_words(stage)}), {passes:.3g} "
            f"passes, {about}{updates:,.0f} steps"
            for number, (stage, own, passes, updates) in enumerate(stages, start=1)
        ]

    def epoch_key(self, cursor: Cursor) -> int:
        """Key of the random changes to examples in the epoch of `cursor`."""
        return self.stages[cursor.stage].epoch_key(cursor)

    def at(self, cursor: Cursor) -> Update:
        """The update that begins at `cursor`."""
        stage = cursor.stage
        update = self.stages[stage].at(replace(cursor, stage=0, updates=0))
        made, last = cursor.updates + 1, stage == len(self.stages) - 1
        in_steps = self.whole.unit == "steps"
        passes = round(update.epoch, _DIGITS)
        length = round(self._before[stage + 1] - self._before[stage], _DIGITS)
        over = made >= self.updates[stage] if in_steps else passes >= length
        if over and not last:
            return replace(update, cursor=Cursor(stage=stage + 1), epoch=self._before[stage + 1])
        epoch = round(self._before[stage] + passes, _DIGITS)
        if not last:  # an expected length may be a little short, and epochs never go back
            epoch = min(epoch, self._before[stage + 1])
        following = replace(update.cursor, stage=stage, updates=made if in_steps else 0)
        return replace(update, cursor=following, epoch=epoch)
