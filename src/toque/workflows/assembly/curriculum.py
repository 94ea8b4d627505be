"""Curriculum, assembled: a plan of stages, with their counts in words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from toque.config import RunConfig
from toque.config.cross_checks import share_of
from toque.config.schema_methods import StageFilters
from toque.cooking.recipe import DIFFICULTIES
from toque.data.loader.curriculum import Bound, StagedPlan, selected, stage_seed
from toque.data.loader.epoch_plan import EpochPlan
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError

Positions = NDArray[np.int64]


def plan_of_stages(
    config: RunConfig,
    store: TokenStore,
    rows: Positions,
    make: Callable[[Positions, int], EpochPlan],
) -> EpochPlan | StagedPlan:
    """The plan of the run: of one stage without a curriculum.

    Args:
        config: names the stages.
        store: its columns are what stages filter by.
        rows: [N] store rows to train on.
        make: from positions in `rows` and a seed to the plan over them.

    Raises:
        ConfigError: a stage selects nothing; what each selects is listed.
        DataError: the store lacks a column that a stage filters by.
    """
    if config.curriculum is None:
        return make(np.arange(len(rows)), config.seed)
    stages = config.curriculum.stages
    chosen = [selected(store, rows, [bound for bound, _ in filters_of(stage)]) for stage in stages]
    if not all(map(len, chosen)):
        empty = next(i for i, positions in enumerate(chosen) if not len(positions))
        counts = ", ".join(f"stage {i}: {len(p):,}" for i, p in enumerate(chosen, start=1))
        raise ConfigError(
            f"Stage {empty + 1} of the curriculum ({in_words(stages[empty])}) selects none of the "
            f"{len(rows):,} training examples ({counts}). Widen its bounds; `toque prepare` and "
            "`toque report` show how difficulty and quality are spread."
        )
    plans = [make(p, stage_seed(config.seed, i)) for i, p in enumerate(chosen)]
    stop_after = config.train.stop_after
    everything = make(np.arange(len(rows)), config.seed)
    return StagedPlan(
        stages=plans,
        begins=[share_of(stage.begins, stop_after) or 0.0 for stage in stages],
        whole=stop_after,
        source_lengths=everything.source_lengths,
        target_lengths=everything.target_lengths,
    )


def filters_of(stage: StageFilters) -> list[tuple[Bound, str]]:
    """A stage's filters over the store's columns, each with its words."""
    found = []
    if stage.max_difficulty is not None:
        bound = Bound("difficulty", most=DIFFICULTIES.index(stage.max_difficulty))
        found.append((bound, f"difficulty up to {stage.max_difficulty}"))
    if stage.min_quality > 0:
        bound = Bound("quality", least=stage.min_quality)
        found.append((bound, f"quality from {stage.min_quality:g}"))
    for what in ("ingredients", "steps"):
        most = getattr(stage, f"max_{what}")
        if most is not None:
            found.append((Bound(f"n_{what}", most=most), f"up to {most} {what}"))
    return found


def in_words(stage: StageFilters) -> str:
    """What a stage asks of an example."""
    return ", ".join(words for _, words in filters_of(stage)) or "everything"


def stages_in_words(config: RunConfig, plan: EpochPlan | StagedPlan) -> str:
    """A line for each stage, with its examples and updates; "" without a curriculum."""
    if config.curriculum is None or not isinstance(plan, StagedPlan):
        return ""
    lines = [
        f"stage {number} from {stage.begins}: {len(own.examples):,} of "
        f"{len(plan.target_lengths):,} examples ({in_words(stage)}), {passes:.3g} passes, "
        f"{'' if plan.whole.unit == 'steps' else 'about '}{updates:,.0f} steps\n"
        for number, (stage, own, passes, updates) in enumerate(
            zip(config.curriculum.stages, plan.stages, plan.passes, plan.updates, strict=True),
            start=1,
        )
    ]
    return "".join(lines)
