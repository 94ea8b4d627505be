"""Counts of the fields of records."""

from collections import Counter

from toque.sources.records import most_frequent


def test_long_names_that_start_equally_are_counted_together():
    start = "n" * 100
    counts = Counter({"title": 4, f"{start}1": 3, f"{start}2": 2})
    assert most_frequent(counts) == {start: 5, "title": 4}


def test_the_other_fields_have_an_upper_limit():
    counts = Counter({f"field {n}": n for n in range(1, 121)})
    frequent = most_frequent(counts)
    assert len(frequent) == 101
    assert frequent["(others)"] == 21
