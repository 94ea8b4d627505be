"""Token files: what they give, that the ids are not tokenised again, and every refusal."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from toque.data.tokenizer.codec import load_codec
from toque.errors import DataError
from toque.sources import token_arrays as token_files
from toque.sources.layouts import is_pickle
from toque.sources.token_arrays import TokenReader, is_array_file

DOCUMENTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
FLAT = np.concatenate([np.array(d, np.uint16) for d in DOCUMENTS])
ENDS = np.cumsum([len(d) for d in DOCUMENTS])


def documents_of(path: Path) -> list[tuple[list[int], bool]]:
    found = []
    for block in TokenReader().blocks(path):
        given = TokenReader().examples(block)
        assert given.read == given.kept + sum(map(len, given.dropped.values()))
        found += [
            (np.frombuffer(e.ids, "<u4").tolist(), e.ends) for e in given.examples
        ]
    return found


def saved(tmp_path: Path, name: str = "tokens.npz", **arrays: np.ndarray) -> Path:
    path = tmp_path / name
    np.savez_compressed(path, **arrays)
    return path


@pytest.mark.parametrize(
    "arrays",
    [
        {"ids": FLAT, "ends": ENDS},
        {"tokens": FLAT.astype(">i8"), "ends": ENDS.astype(np.uint32)},
        {"whatever": FLAT.astype(np.int32), "ends": ENDS},
    ],
)
def test_documents_come_as_they_were_saved(tmp_path, arrays):
    wanted = [(document, True) for document in DOCUMENTS]
    assert documents_of(saved(tmp_path, **arrays)) == wanted


def test_rows_are_stretches(tmp_path):
    np.save(tmp_path / "flat.npy", FLAT)
    assert documents_of(tmp_path / "flat.npy") == [(FLAT.tolist(), True)]
    rows = np.array([[5, 6, 7], [8, 9, 0], [0, 0, 0]])
    np.save(tmp_path / "rows.npy", rows)
    assert documents_of(tmp_path / "rows.npy") == [
        (row, False) for row in rows.tolist()
    ]


def test_long_documents_are_read_in_parts_and_short_ones_together(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(token_files, "PART_TOKENS", 4)
    path = saved(tmp_path, ids=np.arange(14), ends=np.array([2, 3, 12, 14]))
    blocks = list(TokenReader().blocks(path))
    assert [block.first_line for block in blocks] == [1, 3, 3, 3]
    assert documents_of(path) == [
        ([0, 1], True),
        ([2], True),
        ([3, 4, 5, 6], False),
        ([7, 8, 9, 10], False),
        ([11], True),
        ([12, 13], True),
    ]


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_a_store_holds_the_ids_of_the_file(made, tmp_path, tokenizers_at, family):
    codec = load_codec(tokenizers_at[family])
    rng = np.random.default_rng(0)
    documents = [
        rng.integers(10, codec.vocab_size, n).astype(np.uint32) for n in (30, 5, 60)
    ]
    marked = [np.append(d, codec.eos_id) for d in documents]
    path = saved(
        tmp_path, ids=np.concatenate(marked), ends=np.cumsum([len(d) for d in marked])
    )
    result = made("store", family, of=path, reader=TokenReader(), max_target_tokens=100)
    shard = result.store.path / "shards" / "00000"
    prompts, targets = (
        np.split(
            np.load(shard / f"{side}_tokens.npy"),
            np.load(shard / f"{side}_ends.npy")[:-1],
        )
        for side in ("prompt", "target")
    )
    assert result.report.read == result.report.kept == 3
    special = [codec.eos_id] + ([] if codec.bos_id is None else [codec.bos_id])
    for document, prompt, target in zip(documents, prompts, targets, strict=True):
        joined = [i for i in [*prompt.tolist(), *target.tolist()] if i not in special]
        assert joined == document.tolist()
        assert target[-1] == codec.eos_id
        assert target[-2] != codec.eos_id  # the file's own mark is not doubled


def test_ids_of_another_tokenizer_are_refused(made, tmp_path):
    path = saved(tmp_path, ids=np.array([3, 4, 50_000]), ends=np.array([1, 3]))
    with pytest.raises(
        DataError, match=r"tokens.npz has the token id 50,000 \(document 2\)"
    ):
        made("s", of=path, reader=TokenReader())


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (
            {"ids": np.array([[1], [2, 3]], dtype=object)},
            "unpickling may run code.*numpy.savez",
        ),
        ({"ids": FLAT / 2}, "has the type float64. Token ids are integers"),
        ({"ids": FLAT > 0}, "has the type bool"),
        ({"ids": np.array([4, -100, 5])}, "has -100 at position 1"),
        ({"ids": np.array([4, 1 << 40])}, "has 1099511627776 at position 1"),
        ({"ids": np.zeros((2, 2, 2), int)}, r"shape \(2, 2, 2\)"),
        ({"ids": np.zeros((0,), int)}, "has no token ids"),
        ({"ids": np.zeros((3, 0), int)}, "Rows must have 1 to"),
        ({"x": FLAT, "y": FLAT}, "has the arrays x, y, but none has"),
        ({"ends": ENDS}, "none has a known name for token ids"),
        ({"ids": FLAT, "ends": ENDS[:-1]}, "its last value is 5, but there are 9 ids"),
        ({"ids": FLAT, "ends": np.array([3, 2, 9])}, "it decreases to 2 at document 2"),
        ({"ids": FLAT, "ends": np.array([3, 99])}, "its last value is 99"),
        ({"ids": FLAT, "ends": np.zeros(0, int)}, r"its shape is \(0,\)"),
        ({"ids": FLAT, "ends": np.arange(500)}, r"its shape is \(500,\)"),
        (
            {"ids": FLAT, "offsets": ENDS},
            "the array offsets, which is not supported. Use flat ids",
        ),
        (
            {"ids": FLAT, "attention_mask": FLAT > 0},
            "the array attention_mask.*rows of ids",
        ),
    ],
)
def test_arrays_that_are_no_tokens_are_refused(tmp_path, arrays, words):
    with pytest.raises(DataError, match=words):
        documents_of(saved(tmp_path, **arrays))


def test_damaged_files_are_refused(tmp_path):
    np.save(tmp_path / "whole.npy", np.arange(1000))
    whole = (tmp_path / "whole.npy").read_bytes()
    packed = saved(tmp_path, ids=np.arange(5000) % 321).read_bytes()
    flipped = bytearray(packed)
    flipped[300] ^= 255
    for name, data, words in (
        ("cut.npy", whole[:-100], "has 7,900 bytes"),
        ("long.npy", whole + b"x", "has 8,001 bytes"),
        ("header.npy", whole[:40], "header of the array .* is damaged"),
        ("literal.npy", whole.replace(b"{", b"("), "header of the array .* is damaged"),
        (
            "huge.npy",
            whole.replace(b"(1000,)", b"(9" + b"9" * 4 + b",)"),
            "for the shape",
        ),
        ("cut.npz", packed[:-40], "cannot be read"),
        ("flip.npz", bytes(flipped), "cannot be read|ends inside"),
        (
            "text.npy",
            b"a recipe for soup",
            "is not a token file, because it begins with b'a reci'",
        ),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=words):
            documents_of(tmp_path / name)
    with pytest.raises(DataError, match="cannot be read"):
        documents_of(tmp_path / "absent.npz")


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("toque.sources.token_arrays.MIN_BOMB_BYTES", 1 << 16)
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ids.npy", bytes(1 << 22))
    with pytest.raises(DataError, match="decompression bomb"):
        documents_of(path)


@pytest.mark.parametrize(
    ("at", "value"),
    [(6, 200), (46, 0xFF)],
    ids=["a newer format", "a name that is no text"],
)
def test_an_archive_that_cannot_be_listed_is_refused(tmp_path, at, value):
    path = saved(tmp_path, ids=FLAT)
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + 9] |= 8  # its name is UTF-8
    data[entry + at] = value
    path.write_bytes(data)
    assert not is_array_file(path)
    assert not is_pickle(path)
    with pytest.raises(DataError, match="cannot be read"):
        documents_of(path)
