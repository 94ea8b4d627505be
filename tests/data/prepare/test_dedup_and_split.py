import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toque.data.prepare.duplicates import Division, RowKeys, divide
from toque.data.prepare.store_plan import PrepareSettings

Row = tuple[int, int, int]  # record_key, task, 1 where a record starts


def columns(rows: list[Row]) -> RowKeys:
    record_key, task, starts = (
        np.array([row[i] for row in rows], dtype)
        for i, dtype in enumerate((np.uint64, np.uint8, np.uint8))
    )
    titles = record_key % np.uint64(3)
    return RowKeys(record_key, titles, record_key, task, starts)


def divided(rows: list[Row], **changes: object) -> Division:
    settings = PrepareSettings(family_kind="decoder", tokenizer="unused", **changes)
    return divide(columns(rows), settings)


def test_the_first_of_equal_records_is_kept_with_all_its_tasks() -> None:
    rows = [(7, 0, 1), (7, 1, 0), (8, 0, 1), (7, 0, 1), (7, 1, 0), (8, 0, 1), (8, 1, 0)]
    division = divided(rows, validation_fraction=0.0)
    assert (division.split == 255).tolist() == [False, False, False, True, True, True, False]
    assert division.dropped == {"duplicate": 1}  # the last record still gives its second task
    assert division.records == 3


def test_pieces_of_one_document_are_no_duplicates_of_each_other() -> None:
    rows = [(7, 0, 1), (7, 0, 0), (7, 0, 0), (7, 0, 1), (7, 0, 0)]
    division = divided(rows, validation_fraction=0.0)
    assert (division.split == 255).tolist() == [False, False, False, True, True]
    assert not divided(rows, dedup="none", validation_fraction=0.0).dropped


@given(
    keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40),
    limit=st.integers(1, 50),
    fraction=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_every_record_is_kept_or_counted(keys: list[int], limit: int, fraction: float) -> None:
    rows = [(key, 0, 1) for key in keys]
    division = divided(rows, max_examples=limit, validation_fraction=fraction)
    used = division.split != 255
    assert int(used.sum()) == min(limit, len(set(keys))) == division.records
    assert division.records + sum(division.dropped.values()) == len(keys)
    assert division.leaked_bodies == 0
    sides = set(division.split[used].tolist())
    if fraction == 0.0 or division.records == 1:
        assert sides == {0}
    else:
        assert sides == {0, 1}


def test_adding_recipes_moves_none_to_the_other_side() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**63, 2000)
    rows = [(int(key), 0, 1) for key in keys]
    few, many = divided(rows[:500]), divided(rows)
    assert few.split.tolist() == many.split[:500].tolist()
    assert 0.08 < (many.split == 1).mean() < 0.12


def test_titles_on_both_sides_are_counted() -> None:
    division = divided([(key, 0, 1) for key in range(3, 203)], validation_fraction=0.3)
    titles = np.arange(3, 203) % 3
    held_out = division.split == 1
    assert division.leaked_titles == int((held_out & (titles != 0)).sum()) > 0
