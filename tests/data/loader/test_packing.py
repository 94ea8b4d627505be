import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.data.loader.packing import (
    RowShape,
    choose_shape,
    pack,
    pack_windows,
    useful_share,
)

pairs = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=120
)


@given(pairs, st.booleans())
def test_rows_hold_every_example_once_and_never_overflow(
    lengths: list[tuple[int, int]], encoder: bool
) -> None:
    source, target = np.array(lengths).T
    shape = RowShape(48 if encoder else 0, 64)
    rows = pack(source, target, shape)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(target[row].sum() <= shape.target for row in rows)
    assert all(source[row].sum() <= shape.source for row in rows if encoder)


def test_one_dimension_is_best_fit_decreasing() -> None:
    rows = pack(np.zeros(5, np.int64), np.array([6, 4, 5, 5, 3]), RowShape(0, 10))
    assert rows == [[0, 1], [2, 3], [4]]


def one_by_one(
    source: np.ndarray, target: np.ndarray, shape: RowShape
) -> list[list[int]]:
    """Best fit in two dimensions as one would write it down."""
    s, t = source / shape.source, target / shape.target
    rows: list[list[int]] = []
    room: list[tuple[float, float]] = []
    for item in np.lexsort((-(s + t), -np.maximum(s, t))).tolist():
        left = [(a - s[item], b - t[item]) for a, b in room]
        waste = [
            a + b + 0.5 * abs(a - b) if min(a, b) >= -1e-9 else float("inf")
            for a, b in left
        ]
        best = min(range(len(rows)), key=waste.__getitem__, default=-1)
        if best < 0 or waste[best] == float("inf"):
            rows.append([item])
            room.append((1.0 - s[item], 1.0 - t[item]))
        else:
            rows[best].append(item)
            room[best] = left[best]
    return rows


@given(pairs)
def test_two_dimensions_are_best_fit_example_by_example(
    lengths: list[tuple[int, int]],
) -> None:
    source, target = np.array(lengths).T
    shape = RowShape(48, 64)
    assert pack(source, target, shape) == one_by_one(source, target, shape)


@pytest.mark.parametrize("shape", [RowShape(0, 1024), RowShape(304, 704)])
def test_windows_packed_at_once_are_packed_as_each_alone(shape: RowShape) -> None:
    source, target = (
        lengths.reshape(20, 100) for lengths in recipe_lengths(2000, seed=4)
    )
    placed = pack_windows(source, target, shape)
    items, counts = placed.sort_by_row()
    for window in range(20):
        alone = pack(source[window], target[window], shape)
        assert placed.n_rows[window] == len(alone)
        assert items[window].tolist() == [item for row in alone for item in row]
        assert [n for n in counts[window].tolist() if n] == [len(row) for row in alone]


def recipe_lengths(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths with the spread of real recipes: log-normal, cut at the usual limits."""
    rng = np.random.default_rng(seed)
    source = np.clip(rng.lognormal(3.9, 0.45, n), 8, 256).astype(np.int64)
    return source, np.clip(source * rng.lognormal(1.5, 0.5, n), 16, 512).astype(
        np.int64
    )


@pytest.mark.parametrize(("encoder", "most_padding"), [(True, 0.08), (False, 0.03)])
def test_little_padding_on_recipe_like_lengths(
    encoder: bool, most_padding: float
) -> None:
    source, target = recipe_lengths(2048, seed=1)
    if not encoder:
        source, target = np.zeros_like(source), source + target
    shape = choose_shape(source, target, encoder=encoder)
    assert 1 - useful_share(source, target, shape) < most_padding


def test_a_chosen_row_holds_the_longest_example() -> None:
    source, target = np.array([3, 200, 5]), np.array([7, 9, 1500])
    shape = choose_shape(source, target, encoder=True)
    assert shape.source >= 200
    assert shape.target >= 1500
    assert choose_shape(source, target, encoder=False).target >= 1500


def test_a_row_of_lopsided_examples_stays_within_an_update() -> None:
    """Answers of three tokens and one recipe: their ratio asks for 192 x 30 of source."""
    source, target = np.full(500, 150), np.append(np.full(499, 3), 192)
    assert choose_shape(source, target, encoder=True).tokens > 4096
    shape = choose_shape(source, target, encoder=True, at_most=4096)
    assert shape == RowShape(4096 - 192, 192)
    assert choose_shape(source, target, encoder=True, at_most=300).tokens == 160 + 192
