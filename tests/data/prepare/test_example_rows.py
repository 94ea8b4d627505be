import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.data.prepare.shard_builder import TokenRows, pieces, wrap

ROWS = st.lists(st.lists(st.integers(5, 99), max_size=9), max_size=6)


def side(rows: list[list[int]]) -> TokenRows:
    return TokenRows.joined([np.array(row, np.uint32) for row in rows])


def listed(given: TokenRows) -> list[list[int]]:
    return [given.row(i).tolist() for i in range(len(given.ends))]


@given(
    rows=ROWS,
    limit=st.integers(4, 8),
    begin=st.sampled_from([None, 0]),
    end_after_cut=st.booleans(),
)
def test_wrap_is_what_it_would_be_row_by_row(
    rows: list[list[int]], limit: int, begin: int | None, *, end_after_cut: bool
) -> None:
    wrapped = wrap(side(rows), limit=limit, begin=begin, end=1, end_after_cut=end_after_cut)
    for i, row in enumerate(rows):
        whole = [*([] if begin is None else [begin]), *row, 1]
        cut = [*whole[: limit - 1], 1] if end_after_cut else whole[:limit]
        expected = whole if len(whole) <= limit else cut
        assert listed(wrapped.side)[i] == expected
        assert wrapped.cut[i] == (len(whole) > limit)
        assert wrapped.lost[i] == len(set(enumerate(whole[:-1])) - set(enumerate(expected)))


def test_a_cut_target_has_no_end_and_a_cut_prompt_keeps_it() -> None:
    rows = side([[5, 6], [7, 8, 9]])
    target = wrap(rows, limit=3, begin=None, end=1, end_after_cut=False)
    assert listed(target.side) == [[5, 6, 1], [7, 8, 9]]
    assert (target.cut.tolist(), target.lost.tolist()) == ([False, True], [0, 0])
    prompt = wrap(rows, limit=3, begin=None, end=1, end_after_cut=True)
    assert listed(prompt.side) == [[5, 6, 1], [7, 8, 1]]
    assert prompt.lost.tolist() == [0, 1]


@given(rows=ROWS, keep=st.lists(st.booleans(), min_size=6, max_size=6))
def test_select_keeps_the_chosen_rows(rows: list[list[int]], keep: list[bool]) -> None:
    chosen = np.array(keep[: len(rows)], np.bool_)
    expected = [row for row, wanted in zip(rows, keep, strict=False) if wanted]
    assert listed(side(rows).select(chosen)) == expected


def cut(n: int, family: str, *, bos: int | None = 0, whole: bool = True) -> list[tuple]:
    ids = np.arange(10, 10 + n, dtype=np.uint32)
    given = pieces(
        ids, family_kind=family, max_prompt=4, max_target=5, bos_id=bos, eos_id=1, whole=whole
    )
    return [(prompt.tolist(), target.tolist()) for prompt, target in given]


def test_decoder_pieces_as_written_in_the_docstring() -> None:
    assert cut(7, "decoder") == [([0], [10, 11, 12, 13, 14]), ([14], [15, 16, 1])]
    assert cut(7, "decoder", bos=None)[0] == ([], [10, 11, 12, 13, 14])
    assert cut(7, "decoder", whole=False)[1] == ([14], [15, 16])
    assert cut(5, "decoder") == [([0], [10, 11, 12, 13, 14]), ([14], [1])]


def test_encoder_decoder_pieces_begin_with_their_prefix() -> None:
    assert cut(7, "encoder-decoder") == [([10, 11, 12, 1], [13, 14, 15, 16, 1])]
    assert cut(11, "encoder-decoder")[1] == ([18, 1], [19, 20, 1])


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("n", range(1, 40))
def test_no_token_of_a_document_is_lost_or_doubled(family: str, n: int, *, whole: bool) -> None:
    text = [*range(10, 10 + n), *([1] if whole else [])]
    rows = cut(n, family, whole=whole)
    targets = [token for _, target in rows for token in target]
    if family == "decoder":
        assert targets == text
    else:
        assert [t for prompt, target in rows for t in prompt[:-1] + target] == text
        assert all(prompt[-1] == 1 for prompt, _ in rows)
    assert all(1 <= len(target) <= 5 and len(prompt) <= 4 for prompt, target in rows)
