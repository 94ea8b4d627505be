from itertools import pairwise

import numpy as np
import pytest

from fixtures.epoch_plans import one_epoch, plan, walk
from toque.data.loader.epoch_plan import EpochPlan
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


def test_a_fresh_plan_continues_from_any_cursor() -> None:
    whole = walk(plan(), Cursor(), 120)  # crosses two epoch ends
    assert whole[-1][1].epoch >= 2
    cursors = [Cursor()] + [cursor for _, cursor in whole[:-1]]
    for i in (0, 1, 17, 40, 41, 99):
        assert walk(plan(), cursors[i], 5) == whole[i : i + 5]


def test_epochs_and_seeds_differ() -> None:
    p = plan()
    assert one_epoch(p, 0) != one_epoch(p, 1)
    assert one_epoch(plan(seed=4)) != one_epoch(plan(seed=3))


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
    with pytest.raises(
        ConfigError, match=r"row_tokens.*longest example has 29 source and 120 target"
    ):
        EpochPlan(
            examples=np.arange(3),
            source_lengths=np.array([3, 29, 4]),
            target_lengths=np.array([5, 6, 120]),
            shape=RowShape(64, 96),
            seed=0,
            update_rows=2,
        )


def test_an_empty_selection_is_refused() -> None:
    with pytest.raises(ConfigError, match="No training example"):
        plan(n=0)
