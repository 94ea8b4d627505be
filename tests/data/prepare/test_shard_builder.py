from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.data.loader.collate import decoder_batch
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.prepare.token_rows import TokenRows, pieces, wrap
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.codec import load_codec
from toque.data.tokenizer.tokenizer_training import train_codec
from toque.sources import token_arrays
from toque.sources.documents import TextReader
from toque.sources.records import Source
from toque.sources.token_arrays import TokenReader

ROWS = st.lists(st.lists(st.integers(5, 99), max_size=9), max_size=6)


def side(rows: list[list[int]]) -> TokenRows:
    return TokenRows.concatenate([np.array(row, np.uint32) for row in rows])


def listed(given: TokenRows) -> list[list[int]]:
    return [row.tolist() for row in given.split()]


@given(
    rows=ROWS,
    limit=st.integers(4, 8),
    begin=st.sampled_from([None, 0]),
    end_after_cut=st.booleans(),
)
def test_wrap_is_what_it_would_be_row_by_row(
    rows: list[list[int]], limit: int, begin: int | None, *, end_after_cut: bool
) -> None:
    wrapped = wrap(
        side(rows), limit=limit, begin=begin, end=1, end_after_cut=end_after_cut
    )
    for i, row in enumerate(rows):
        whole = [*([] if begin is None else [begin]), *row, 1]
        cut = [*whole[: limit - 1], 1] if end_after_cut else whole[:limit]
        expected = whole if len(whole) <= limit else cut
        assert listed(wrapped.side)[i] == expected
        assert wrapped.cut[i] == (len(whole) > limit)
        assert wrapped.lost[i] == len(
            set(enumerate(whole[:-1])) - set(enumerate(expected))
        )


@given(rows=ROWS, keep=st.lists(st.booleans(), min_size=6, max_size=6))
def test_select_keeps_the_chosen_rows(rows: list[list[int]], keep: list[bool]) -> None:
    chosen = np.array(keep[: len(rows)], np.bool_)
    expected = [row for row, wanted in zip(rows, keep, strict=False) if wanted]
    assert listed(side(rows).select(chosen)) == expected


def cut(n: int, family: str, *, bos: int | None = 0, whole: bool = True) -> list[tuple]:
    ids = np.arange(10, 10 + n, dtype=np.uint32)
    given = pieces(
        ids,
        family_kind=family,
        max_prompt=4,
        max_target=5,
        bos_id=bos,
        eos_id=1,
        ends=whole,
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
def test_no_token_of_a_document_is_lost_or_doubled(
    family: str, n: int, *, whole: bool
) -> None:
    text = [*range(10, 10 + n), *([1] if whole else [])]
    rows = cut(n, family, whole=whole)
    targets = [token for _, target in rows for token in target]
    if family == "decoder":
        assert targets == text
    else:
        assert [t for prompt, target in rows for t in prompt[:-1] + target] == text
        assert all(prompt[-1] == 1 for prompt, _ in rows)
    assert all(1 <= len(target) <= 5 and len(prompt) <= 4 for prompt, target in rows)


# Long documents cut into rows: no token lost, none predicted twice, none that sees another's.


LIMIT = 8
LENGTHS = (1, 6, 7, 8, 9, 16, 17, 100, 3)
TEXTS = [
    "Onions, butter and a spoon of crème fraîche.\n" * 8 + "Serve.",
    "Salt.",
    "½ cup jalapeños, " * 4 + "½.",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split") / "tokenizer"
    folder.mkdir()
    train_codec(
        ["Onions and butter, fried slowly."] * 4, vocab_size=300, kind="bpe"
    ).save(folder)
    return folder


def store_of(source: Source, folder: Path, tokenizer: Path) -> TokenStore:
    settings = PrepareSettings(
        family_kind="decoder",
        tokenizer=str(tokenizer),
        max_target_tokens=LIMIT,
        on_overlong="split",
        validation_fraction=0.0,
        dedup="none",
    )
    return prepare([source], store=folder, settings=settings, workers=1).store


def joined(store: TokenStore) -> list[int]:
    """All targets, in the order of the rows."""
    return [int(token) for row in range(store.n_rows) for token in store.target(row)]


@pytest.mark.parametrize(
    "part", [1 << 19, 16], ids=["whole documents", "read in parts"]
)
def test_token_files_keep_every_id_in_order(tmp_path, tokenizer, monkeypatch, part):
    monkeypatch.setattr(token_arrays, "PART_TOKENS", part)
    documents = [np.arange(n) % 200 + 20 for n in LENGTHS]
    ends = np.cumsum(LENGTHS)
    np.savez(tmp_path / "a.npz", ids=np.concatenate(documents), ends=ends)
    source = Source(str(tmp_path / "a.npz"), TokenReader())
    store = store_of(source, tmp_path / "store", tokenizer)
    end = store.codec().eos_id
    assert joined(store) == [int(i) for document in documents for i in (*document, end)]
    assert store.manifest.tokens.target == sum(LENGTHS) + len(LENGTHS)
    assert max(store.target_lengths) == LIMIT


def test_texts_keep_every_token_and_every_byte(tmp_path, tokenizer):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    store = store_of(
        Source(f"{tmp_path}/*.txt", TextReader()), tmp_path / "store", tokenizer
    )
    codec = load_codec(tokenizer)
    assert joined(store) == [
        i for text in TEXTS for i in (*codec.encode(text), codec.eos_id)
    ]
    # A piece may end inside a character: what its tokens write is counted, not what is readable.
    each = codec.token_bytes
    assert each is not None
    assert each[joined(store)].sum() == sum(len(text.encode()) for text in TEXTS)
    assert sum(
        len(codec.decode(store.target(row)).encode()) for row in range(store.n_rows)
    ) > sum(len(text.encode()) for text in TEXTS)


def test_pieces_in_one_row_are_apart_and_each_token_is_predicted_once(
    tmp_path, tokenizer
):
    np.save(tmp_path / "a.npy", np.arange(30) + 20)
    store = store_of(
        Source(str(tmp_path / "a.npy"), TokenReader()), tmp_path / "s", tokenizer
    )
    pieces = tuple(range(store.n_rows))
    batch = decoder_batch(store, [pieces], length=64, pad_id=0)
    predicted = batch.labels[batch.labels >= 0].tolist()
    assert predicted == [*range(20, 50), store.codec().eos_id]
    segments, positions = batch.segments[0].tolist(), batch.positions[0].tolist()
    for number in range(1, store.n_rows + 1):
        own = [p for p, s in zip(positions, segments, strict=True) if s == number]
        assert own == list(range(len(own)))
    # The first input of a later piece is the last token of the piece before, and is no target.
    inputs = batch.tokens[0].tolist()
    begins = [segments.index(number) for number in range(2, store.n_rows + 1)]
    assert [inputs[at] for at in begins] == [
        store.target(row)[-1] for row in pieces[:-1]
    ]
