"""Span corruption: nothing is lost, the counts are T5's, and what is cut is a pure function."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.data.loader.span_corruption import SHORTEST, SpanCorruption
from toque.data.loader.span_corruption import _split_randomly as segments
from toque.keyed_random import key_of

END = 1
FIRST = 1000
NO_PROMPT = np.array([], np.int64)


def spans(
    density: float = 0.15, mean_length: float = 3.0, n: int = 99
) -> SpanCorruption:
    return SpanCorruption(density, mean_length, list(range(FIRST, FIRST + n)), END)


def text(n: int) -> np.ndarray:
    return np.arange(10, 10 + n)


def filled(source: np.ndarray, target: np.ndarray) -> list[int]:
    """The text: what stands behind each mark of the target, in the place of the source's mark."""
    lost: dict[int, list[int]] = {}
    for token in target[:-1].tolist():
        if token >= FIRST:
            lost[mark := token] = []
        else:
            lost[mark].append(token)
    return [t for token in source[:-1].tolist() for t in lost.get(token, [token])]


@given(
    n=st.integers(SHORTEST, 300),
    prompt=st.integers(0, 60),
    ended=st.booleans(),
    density=st.floats(0.05, 0.5),
    mean_length=st.floats(1.0, 9.0),
    key=st.integers(0, 2**64 - 1),
)
def test_filling_the_gaps_gives_the_text(
    n: int, prompt: int, ended: bool, density: float, mean_length: float, key: int
) -> None:
    # What is stored: a prompt with its end token, a target with one unless it was cut.
    asked = np.append(text(prompt), END) if prompt else NO_PROMPT
    written = np.append(500 + text(n), END) if ended else 500 + text(n)
    corrupt = spans(density, mean_length, 300)
    source, target = corrupt(asked, written, key)
    whole = [*text(prompt).tolist(), *(500 + text(n)).tolist()]
    assert filled(source, target) == whole
    assert source[-1] == target[-1] == END
    most = corrupt.longest(np.array([len(asked)]), np.array([len(written)]))
    assert len(source) <= most[0][0]
    assert len(target) <= most[1][0]
    marks = [t for t in target.tolist() if t >= FIRST]
    assert marks == list(range(FIRST, FIRST + len(marks)))  # in order, none left out
    assert [t for t in source.tolist() if t >= FIRST] == marks


def test_counts_are_those_of_t5() -> None:
    # t5.data.preprocessors.random_spans_helper: 512 tokens of input come from 568 of text,
    # 85 of them lost in 28 spans, and the target has 114 (Raffel et al. 2020, section 3.1.4).
    source, target = spans()(NO_PROMPT, text(568), 3)
    assert (len(source), len(target)) == (512, 114)
    # It begins kept and ends lost.
    assert source[0] == 10
    assert source[-2] >= FIRST
    assert target[-2] == 577


def test_a_key_decides_and_another_differs() -> None:
    one, again, other = (spans()(NO_PROMPT, text(100), key) for key in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not np.array_equal(one[0], other[0])


def test_a_short_example_stays_as_it_is() -> None:
    source, target = spans()(NO_PROMPT, text(SHORTEST - 1), 1)
    assert (len(source), target.tolist()) == (0, text(SHORTEST - 1).tolist())
    longest = spans().longest(np.array([0, 0]), np.array([SHORTEST - 1, 40]))
    assert (longest[0][0], longest[1][0]) == (0, SHORTEST - 1)


def test_every_segmentation_is_as_likely() -> None:
    found = [tuple(segments(5, 3, key_of(n))) for n in range(6000)]
    counts = {sums: found.count(sums) for sums in set(found)}
    assert set(map(sum, counts)) == {5}
    assert len(counts) == 6  # 4 choose 2
    assert min(counts.values()) > 850  # 1,000 each, a deviation of 29


@pytest.mark.parametrize("n_sentinels", [1, 9, 99])
def test_the_longest_text_is_the_last_that_the_sentinels_suffice_for(
    n_sentinels: int,
) -> None:
    corrupt = spans(n=n_sentinels)
    longest = corrupt.longest_text
    corrupt(NO_PROMPT, text(longest), 1)
    with pytest.raises(IndexError):
        corrupt(NO_PROMPT, text(longest + 1), 1)
