import gzip
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given as given_any
from hypothesis import strategies as st

from toque.errors import DataError
from toque.sources import documents as text_module
from toque.sources.documents import TextReader, clean_document, composed
from toque.sources.records import BlockExamples


def read(path: Path) -> list[BlockExamples]:
    return [TextReader().examples(block) for block in TextReader().blocks(path)]


@pytest.mark.parametrize("name", ["book.txt", "book.txt.gz"])
def test_a_file_is_one_document(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = "\ufeffTo roast beef.\r\n\r\nTake a joint\x0c.  \r\n".encode()
    path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    (given,) = read(path)
    (example,) = given.examples
    assert (example.prompt, example.target) == ("", "To roast beef.\n\nTake a joint.")
    assert example.document
    assert example.ends
    assert (given.read, given.kept) == (1, 1)
    assert given.notes == {"control characters removed": 1}


def test_the_licence_of_project_gutenberg_is_taken_off_and_counted() -> None:
    book = (
        "The Project Gutenberg eBook of Soup\nProduced by a volunteer\n"
        "*** START OF THE PROJECT GUTENBERG EBOOK SOUP ***\n\nBoil water.\n\n"
        "*** END OF THE PROJECT GUTENBERG EBOOK SOUP ***\nSection 1. Terms\nMore\n"
    )
    notes: Counter[str] = Counter()
    assert clean_document(book.encode(), notes) == "Boil water."
    assert notes == {"lines of Project Gutenberg's licence": 6}


def test_bytes_of_another_encoding_are_counted() -> None:
    notes: Counter[str] = Counter()
    assert clean_document("crème brûlée".encode("latin-1"), notes) == "cr\ufffdme br\ufffdl\ufffde"
    assert notes == {"bytes that are not UTF-8": 3}


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ", ""])
def test_a_large_file_comes_in_parts_that_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    monkeypatch.setattr(text_module, "PART_BYTES", 64)
    whole = mark.join(f"Soupe à l'œuf {i}" for i in range(40))
    path = tmp_path / "large.txt"
    path.write_text(whole, encoding="utf-8")
    blocks = list(TextReader().blocks(path))
    assert len(blocks) > 5
    assert b"".join(block.payload for block in blocks).decode() == whole
    assert [block.last for block in blocks] == [False] * (len(blocks) - 1) + [True]
    assert all(len(block.payload) <= 65 + 40 for block in blocks)
    for block in blocks:
        assert block.first_line == 1 + whole.encode().index(block.payload) * 0 + sum(
            earlier.payload.count(b"\n") for earlier in blocks[: blocks.index(block)]
        )
        (example,) = TextReader().examples(block).examples
        assert "\ufffd" not in example.target
        assert example.ends == block.last


def test_an_empty_document_is_dropped_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "blank.txt"
    path.write_text(" \n\n\n")
    (given,) = read(path)
    assert (given.read, given.kept, given.dropped) == (1, 0, {"no text": [1]})


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.txt does not exist"):
        list(TextReader().blocks(tmp_path / "absent.txt"))


def test_a_text_compressed_with_zstd_is_one_document(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "soup.txt.zst"
    with arrow.CompressedOutputStream(str(path), "zstd") as file:
        file.write(b"Boil the water.\n")
    (block,) = TextReader().blocks(path)
    assert block.payload == b"Boil the water.\n"


MARKS = "\u0301\u0323\u0308\u0344\u0f71\u0f73\u0f75\u05b0\u3099\u0345\u1dca!e\u00e9 "


@given_any(st.text(alphabet=MARKS, max_size=80) | st.text())
def test_every_text_is_composed_as_the_standard_library_does(text: str) -> None:
    assert composed(text) == unicodedata.normalize("NFC", text)


def test_a_long_run_loses_no_mark() -> None:
    text = "e" + "\u0301\u0323" * 500
    assert composed(text) == unicodedata.normalize("NFC", text)
    assert len(composed(text)) == len(text) - 1  # the letter and one mark are one character
