"""Stages of a run: what each sees, where it ends, and continuing within and across them."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from toque.config.schema_methods import StageFilters
from toque.data.loader.curriculum import StagedPlan, select_examples, stage_seed
from toque.data.loader.epoch_plan import EpochPlan, Update
from toque.data.loader.packing import RowShape
from toque.errors import CheckpointError, ConfigError
from toque.training.checkpoint.resume import TrainerState
from toque.units import Cursor, Duration, Progress

RNG = np.random.default_rng(0)
SOURCE, TARGET = RNG.integers(4, 30, 400), RNG.integers(4, 60, 400)
PARTS = [np.arange(120), np.arange(250), np.arange(400)]


def staged(
    whole: str,
    *,
    begins: tuple[float, ...] = (0.0, 0.3, 0.7),
    update_rows: int | None = 4,
) -> StagedPlan:
    stages = [
        EpochPlan(
            examples=part * 2,
            source_lengths=SOURCE[part],
            target_lengths=TARGET[part],
            shape=RowShape(64, 96),
            seed=stage_seed(3, number),
            update_rows=update_rows,
            window=64 if update_rows else 16,
        )
        for number, part in enumerate(PARTS[: len(begins)])
    ]
    return StagedPlan(stages, begins, Duration.parse(whole), SOURCE, TARGET)


def walk(plan: StagedPlan, n: int, cursor: Cursor | None = None) -> list[Update]:
    updates, at = [], cursor or Cursor()
    for _ in range(n):
        updates.append(plan.at(at))
        at = updates[-1].cursor
    return updates


@pytest.mark.parametrize("update_rows", [4, None])
def test_in_steps_a_stage_ends_at_its_step(update_rows: int | None) -> None:
    plan = staged("50 steps", update_rows=update_rows)
    stages = [u.cursor.stage for u in walk(plan, 50)]
    assert plan.updates == [15, 20, 15]
    assert stages == [0] * 14 + [1] * 20 + [2] * 16
    assert plan.totals["steps"] == 50


@pytest.mark.parametrize(
    "whole", ["6 epochs", "700 examples", "9000 tokens", "40 steps"]
)
def test_each_stage_sees_its_own_examples_and_time_only_rises(whole: str) -> None:
    plan = staged(whole)
    updates = walk(plan, 120)
    stages = [0] + [u.cursor.stage for u in updates[:-1]]
    assert set(stages) == {0, 1, 2}
    for stage, update in zip(stages, updates, strict=True):
        assert {e for row in update.rows for e in row} <= set(
            (PARTS[stage] * 2).tolist()
        )
    epochs = [u.epoch for u in updates]
    assert all(a <= b for a, b in pairwise(epochs))


def of_short_epochs() -> StagedPlan:
    """Stages whose epochs are one whole update and a small one, of a run in steps."""
    lengths = np.full(64, 80)
    stages = [
        EpochPlan(
            np.arange(n),
            0 * lengths[:n],
            lengths[:n],
            RowShape(0, 96),
            3,
            update_rows=32,
        )
        for n in (36, 60)
    ]
    return StagedPlan(stages, (0.0, 0.5), Duration.parse("200 steps"), lengths, lengths)


def test_in_steps_the_epochs_of_a_stage_are_those_it_makes() -> None:
    plan = of_short_epochs()
    epochs = [0.0, *(u.epoch for u in walk(plan, 200))]
    assert max(after - before for before, after in pairwise(epochs)) < 1.0
    assert epochs[100] == 50.0
    assert epochs[-1] == 100.0


@pytest.mark.parametrize("estimate", [None, 1.1])
def test_a_run_is_continued_from_any_step_though_its_epochs_were_expected_otherwise(
    estimate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if estimate is not None:
        monkeypatch.setattr(EpochPlan, "updates_per_epoch", lambda _: estimate)
    plan = of_short_epochs()
    for update in walk(plan, 199):
        at = TrainerState(Progress(epoch=update.epoch), update.cursor, None, False)
        at.refuse_other_data(SimpleNamespace(plan_update=plan.at), where="here")
    earlier = replace(
        at, progress=Progress(epoch=at.progress.epoch + 45.0)
    )  # of version 0.1.0
    earlier.refuse_other_data(SimpleNamespace(plan_update=plan.at), where="here")
    far = replace(at, progress=Progress(epoch=at.progress.epoch - 1.1))
    with pytest.raises(
        CheckpointError, match="a position that this data does not have"
    ):
        far.refuse_other_data(SimpleNamespace(plan_update=plan.at), where="here")


def test_in_epochs_the_run_ends_where_it_should() -> None:
    plan = staged("6 epochs", begins=(0.0, 1 / 3, 2 / 3), update_rows=None)
    updates = walk(plan, int(plan.totals["steps"]))
    # 120, 250 and 400 examples, each seen twice, 16 at a time.
    assert plan.updates == [pytest.approx(2 * n) for n in (8, 16, 25)]
    assert updates[-1].epoch == 6.0
    assert updates[-2].epoch < 6.0
    seen = np.bincount([e // 2 for u in updates for row in u.rows for e in row])
    assert set(seen[:120]) == {6}
    assert set(seen[250:]) == {2}
    assert plan.totals["examples"] == pytest.approx(2 * (120 + 250 + 400))


@pytest.mark.parametrize("whole", ["50 steps", "6 epochs", "9000 tokens"])
def test_a_fresh_plan_continues_from_any_cursor(whole: str) -> None:
    updates = walk(staged(whole), 60)
    borders = [i for i, u in enumerate(updates) if u.cursor.row == u.cursor.window == 0]
    for i in {0, 3, 17, 40, *borders, *(i - 1 for i in borders if i)}:
        assert (
            walk(staged(whole), 5, updates[i].cursor)[:5]
            == walk(staged(whole), i + 6)[i + 1 :]
        )


def test_two_stages_of_the_same_examples_have_two_orders() -> None:
    plan = staged("4 epochs", begins=(0.0, 0.5))
    again = replace(plan.stages[0], seed=stage_seed(3, 1))
    assert plan.stages[0].at(Cursor()).rows != again.at(Cursor()).rows


def test_a_stage_without_an_update_is_refused() -> None:
    with pytest.raises(ConfigError, match="Stage 2 of the curriculum would last 0"):
        staged("10 steps", begins=(0.0, 0.5, 0.51))


def test_a_bound_is_rounded_as_the_values_are_and_lets_the_unknown_pass() -> None:
    columns = {
        "quality": np.array([0.7, 0.6999, np.nan, 0.9], np.float32),
        "n_steps": np.array([6, 6, 6, 7]),
    }
    store, rows = SimpleNamespace(column=columns.get), np.arange(4)
    assert select_examples(store, rows, StageFilters(min_quality=0.7)).tolist() == [
        0,
        2,
        3,
    ]
    assert select_examples(
        store, rows, StageFilters(min_quality=0.7, max_steps=6)
    ).tolist() == [0, 2]
