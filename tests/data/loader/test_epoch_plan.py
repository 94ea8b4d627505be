from collections import Counter
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from fixtures.epoch_plans import one_epoch, plan, walk
from toque.data.loader.epoch_plan import EpochPlan, Mixture
from toque.data.loader.packing import RowShape
from toque.errors import ConfigError
from toque.units import Cursor


@pytest.mark.parametrize(
    ("update_rows", "window"), [(4, 128), (None, 64), (1, 500), (7, 10), (1000, 128)]
)
def test_an_epoch_sees_every_example_once(update_rows: int | None, window: int) -> None:
    p = plan(update_rows=update_rows, window=window)
    seen = [e for rows in one_epoch(p) for row in rows for e in row]
    assert sorted(seen) == (np.arange(500) * 2).tolist()


@pytest.mark.parametrize("weights", [(), (0.5, 2.5, 1.0)], ids=["plain", "weighted"])
def test_a_fresh_plan_continues_from_any_cursor(weights: tuple[float, ...]) -> None:
    def fresh() -> EpochPlan:
        return mixed_plan(*weights) if weights else plan()

    whole = walk(fresh(), Cursor(), 150)  # crosses two epoch ends
    assert whole[-1][1].epoch >= 2
    cursors = [Cursor()] + [cursor for _, cursor in whole[:-1]]
    for i in (0, 1, 17, 40, 41, 63, 64, 65, 99, 140):
        assert walk(fresh(), cursors[i], 5) == whole[i : i + 5]


def test_a_batch_in_examples_is_exactly_that_many() -> None:
    p = plan(update_rows=None, window=64)
    sizes = [sum(len(row) for row in rows) for rows in one_epoch(p)]
    assert sizes == [64] * 7 + [52]
    assert p.updates_per_epoch() == 8


def test_epoch_fraction_rises_and_ends_whole() -> None:
    p, cursor, epochs = plan(), Cursor(), [0.0]
    while cursor.epoch == 0:
        update = p.at(cursor)
        cursor = update.cursor
        epochs.append(update.epoch)
    assert all(a < b for a, b in pairwise(epochs))
    assert epochs[-1] == 1.0


def test_the_estimate_of_updates_is_close() -> None:
    p = plan(n=3000, window=512)
    assert p.updates_per_epoch() == pytest.approx(len(one_epoch(p)), rel=0.03)


def test_an_example_longer_than_a_row_is_refused() -> None:
    source, target = np.array([3, 29, 4]), np.array([5, 6, 120])
    with pytest.raises(
        ConfigError, match=r"row_tokens.*longest example has 29 source and 120 tar"
    ):
        EpochPlan(np.arange(3), source, target, RowShape(64, 96), seed=0, update_rows=2)


def test_an_empty_selection_is_refused() -> None:
    with pytest.raises(ConfigError, match="No training examples"):
        plan(n=0)


# Weights: exact shares, exact coverage.

N = 500
SOURCE = np.repeat([0, 1, 2], [300, 150, 50])


def mixed_plan(*weights: float, seed: int = 3, **changes: int | None) -> EpochPlan:
    made = plan(N, seed=seed, **changes)
    made.mixture = Mixture(group=SOURCE, weights=weights, seed=seed)
    return made


def seen(p: EpochPlan, epoch: int = 0) -> Counter[int]:
    """How often an epoch sees each example; the plan's store rows are even numbers."""
    return Counter(e // 2 for rows in one_epoch(p, epoch) for row in rows for e in row)


@pytest.mark.parametrize(
    ("update_rows", "window"), [(4, 128), (None, 64), (7, 10), (1000, 2000)]
)
def test_an_epoch_draws_in_proportion(update_rows: int | None, window: int) -> None:
    p = mixed_plan(1.0, 2.0, 0.5, update_rows=update_rows, window=window)
    counts = seen(p)
    assert p.n_drawn == 300 + 300 + 25 == counts.total()
    assert all(counts[i] == 1 for i in range(300))
    assert all(counts[i] == 2 for i in range(300, 450))
    assert sum(counts[i] for i in range(450, 500)) == 25
    assert max(counts[i] for i in range(450, 500)) == 1


def test_half_a_source_is_another_half_each_epoch() -> None:
    p = mixed_plan(1.0, 1.0, 0.5)
    first, second, third = (set(seen(p, e)) & set(range(450, 500)) for e in range(3))
    assert first | second == set(range(450, 500))
    assert not first & second
    assert third not in (first, second)  # a new pass has a new order


def test_fractions_even_out_over_epochs() -> None:
    p = mixed_plan(0.3, 1.7, 1.0)
    total = sum((seen(p, epoch) for epoch in range(10)), Counter())
    for members, expected in (
        (range(300), 3),
        (range(300, 450), 17),
        (range(450, 500), 10),
    ):
        assert {total[i] for i in members} == {expected}


def test_a_source_without_training_examples_is_no_error() -> None:
    p = plan(N)
    p.mixture = Mixture(group=np.zeros(N, np.int64), weights=(2.0, 3.0), seed=3)
    assert p.mixture.draws == [1000, 0]
    assert set(seen(p).values()) == {2}


def test_seeds_and_epochs_differ_and_sources_are_spread() -> None:
    for make in (plan, partial(mixed_plan, 1.0, 2.0, 0.5)):
        assert (
            one_epoch(make(seed=4))
            != one_epoch(make(seed=3))
            != one_epoch(make(seed=3), 1)
        )
    p = mixed_plan(1.0, 2.0, 0.5, update_rows=None, window=125)
    for rows in one_epoch(p):  # 60 of 125 come from the repeated source, give or take
        n = sum(300 <= e // 2 < 450 for row in rows for e in row)
        assert 40 <= n <= 80


def test_tokens_of_an_epoch_count_repeats() -> None:
    p, once = mixed_plan(2.0, 2.0, 2.0), plan(N)
    assert p.n_tokens == pytest.approx(2 * once.n_tokens)
    assert p.updates_per_epoch() == pytest.approx(len(one_epoch(p)), rel=0.1)
