import gzip
import json
import time
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
import xxhash
from hypothesis import given as given_any
from hypothesis import strategies as st

from toque.cooking.schemas.reader import RecipeReader, reader_for
from toque.errors import ConfigError, DataError
from toque.sources import documents as text_module
from toque.sources.documents import (
    HALF_CHARACTERS,
    SEPARATORS,
    DocumentReader,
    PairReader,
    TextReader,
    clean_document,
    to_nfc,
)
from toque.sources.layouts import TextRecordsError, UnknownFormatError, layout_with
from toque.sources.records import Block, BlockExamples


def read(path: Path) -> list[BlockExamples]:
    return [TextReader().examples(block) for block in TextReader().blocks(path)]


@pytest.mark.parametrize("name", ["book.txt", "book.txt.gz"])
def test_a_file_is_one_document(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = "\ufeffTo roast beef.\r\n\x0cTake a\x00 joint.  \r\n".encode()
    path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    (given,) = read(path)
    (example,) = given.examples
    assert (example.prompt, example.target) == ("", "To roast beef.\n\nTake a joint.")
    assert example.document
    assert example.ends
    assert (given.read, given.kept) == (1, 1)
    assert given.notes == {"control characters removed": 1, SEPARATORS: 1}


def test_a_licence_of_project_gutenberg_and_bytes_of_another_encoding_are_counted() -> (
    None
):
    book = (
        "The Project Gutenberg eBook of Soup\nProduced by a volunteer\n"
        "*** START OF THE PROJECT GUTENBERG EBOOK SOUP ***\n\nBrûlée.\n\n"
        "*** END OF THE PROJECT GUTENBERG EBOOK SOUP ***\nSection 1. Terms\nMore\n"
    )
    notes: Counter[str] = Counter()
    assert clean_document(book.encode("latin-1"), notes) == "Br\ufffdl\ufffde."
    assert notes == {
        "lines of Project Gutenberg's licence": 6,
        "bytes that are not UTF-8": 2,
    }


@pytest.mark.parametrize(
    ("begins", "first"), [("The Project", 0), ("Boil it 0", 0), ("Terms", 1)]
)
def test_of_several_books_in_one_file_the_licences_alone_are_removed(
    begins: str, first: int
) -> None:
    books = "".join(
        f"The Project Gutenberg eBook of Soup, {n}\n"
        f"***START OF THIS PROJECT GUTENBERG EBOOK SOUP,\nPART {n}***\nBoil it {n} times.\n"
        f"*** END OF THE PROJECT GUTENBERG EBOOK SOUP {n} ***\nTerms\nMore\n"
        for n in range(4)
    )
    notes: Counter[str] = Counter()
    # As the reader cuts a large file, the text may begin inside a book or a licence.
    text = books[books.index(begins) :]
    found = clean_document(text.encode(), notes).splitlines()
    assert found == [f"Boil it {n} times." for n in range(first, 4)]
    assert notes == {
        "lines of Project Gutenberg's licence": text.count("\n") - len(found)
    }


def test_another_text_may_tell_of_its_starts_and_ends() -> None:
    text = "*** START OF THE MENU ***\nSoup.\n*** END OF THE MENU ***\nBread.\n*** END OF IT"
    assert clean_document(text.encode(), notes := Counter()) == text
    assert not notes


@pytest.mark.parametrize(
    "line", ["*** %s OF THE PROJECT GUTENBERG ", "*** %s OF THE PROJECT\n"]
)
def test_licences_without_an_end_take_no_long_time(line: str) -> None:
    for mark in ("START", "END"):
        started = time.perf_counter()
        clean_document((line % mark).encode() * 100_000, Counter())
        assert time.perf_counter() - started < 5


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
        earlier = blocks[: blocks.index(block)]
        assert block.first_line == 1 + sum(b.payload.count(b"\n") for b in earlier)
        (example,) = TextReader().examples(block).examples
        assert "\ufffd" not in example.target
        assert example.ends == block.last


def test_an_empty_document_is_dropped_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "blank.txt"
    path.write_text(" \n\n\n")
    (given,) = read(path)
    assert (given.read, given.kept, given.dropped) == (1, 0, {"no text": [1]})


MARKS = "\u0301\u0323\u0308\u0344\u0f71\u0f73\u0f75\u05b0\u3099\u0345\u1dca!e\u00e9 "


@given_any(st.text(alphabet=MARKS, max_size=80) | st.text())
def test_every_text_is_composed_as_the_standard_library_does(text: str) -> None:
    assert to_nfc(text) == unicodedata.normalize("NFC", text)


def test_a_long_run_loses_no_mark() -> None:
    text = "e" + "\u0301\u0323" * 500
    assert to_nfc(text) == unicodedata.normalize("NFC", text)
    assert (
        len(to_nfc(text)) == len(text) - 1
    )  # the letter and one mark are one character


# Records of prompts and answers: recognised, read whole, counted, split by prompt.


def written(folder: Path, records: list[object]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def pairs_in(path: Path, reader: PairReader) -> BlockExamples:
    (block,) = reader.blocks(path)
    return reader.examples(block)


@pytest.mark.parametrize(
    ("prompt", "target"), [("prompt", "completion"), ("Question", "Answer")]
)
def test_pairs_are_recognised_by_their_fields(
    tmp_path: Path, prompt: str, target: str
) -> None:
    path = written(tmp_path, [{prompt: "2 + 2", target: "4"}])
    with pytest.raises(TextRecordsError) as found:
        RecipeReader().schema(path)
    assert found.value.columns == {"prompt": prompt, "target": target}
    reader = reader_for(found.value.columns)
    assert reader == PairReader(prompt=prompt, target=target)


def test_a_recipe_with_a_prompt_stays_a_recipe(tmp_path: Path) -> None:
    recipe = {"title": "Toast", "ingredients": ["bread"], "steps": ["Toast it."]}
    path = written(tmp_path, [recipe | {"prompt": "p", "target": "t"}] * 2)
    assert RecipeReader().schema(path) == "json-lines"


def test_texts_are_taken_as_they_are(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": " Say  hi\n", "target": "<b>hi</b>\n\n1. ½"}])
    found = pairs_in(path, PairReader("prompt", "target"))
    assert [(e.prompt, e.target) for e in found.examples] == [
        (" Say  hi\n", "<b>hi</b>\n\n1. ½")
    ]


def test_what_is_no_pair_is_counted_with_its_line(tmp_path: Path) -> None:
    records: list[object] = [
        {"prompt": "a", "target": "b"},
        {"prompt": "", "target": "b"},
        {"prompt": "a", "target": None},
        {"prompt": "a\0", "target": 7},
    ]
    found = pairs_in(written(tmp_path, records), PairReader("prompt", "target"))
    assert (found.read, found.kept) == (4, 2)
    assert found.dropped == {"no prompt": [2], "no target": [3]}
    assert found.notes == {"control characters removed": 1}
    assert [e.target for e in found.examples] == ["b", "7"]


def test_pairs_that_differ_in_capitals_are_two_records_on_one_side_of_the_split(
    tmp_path: Path,
) -> None:
    pairs = [
        ("POLISH", "either"),
        ("Polish", "Either"),
        ("Polish", "either"),
        ("POLISH", "either"),
    ]
    records: list[object] = [
        {"prompt": p, "target": t, "more": [1, {}]} for p, t in pairs
    ]
    found = pairs_in(written(tmp_path, records), PairReader("prompt", "target"))
    body = xxhash.xxh3_64_intdigest(b"POLISH\0either")
    assert [e.record_key == body for e in found.examples] == [True, False, False, True]
    assert len({e.record_key for e in found.examples}) == 3
    assert {e.key for e in found.examples} == {xxhash.xxh3_64_intdigest(b"polish")}


@pytest.mark.parametrize("separator", list("\x0b\x0c\x1c\x1d\x1e\x1f\x85\u2028\u2029"))
def test_separators_become_line_breaks_in_pairs_and_documents(
    tmp_path: Path, separator: str
) -> None:
    text = f"two eggs{separator}one onion"
    path = written(tmp_path, [{"prompt": text, "target": "t", "text": text}])
    found = pairs_in(path, PairReader("prompt", "target"))
    (block,) = DocumentReader("text").blocks(path)
    documents = DocumentReader("text").examples(block)
    assert [found.examples[0].prompt, documents.examples[0].target] == [
        "two eggs\none onion"
    ] * 2
    assert found.notes == documents.notes == {SEPARATORS: 1}


@pytest.mark.parametrize(
    ("escaped", "text", "n"),
    [
        ("beans \\ud83c and", "beans \ufffd and", 1),
        ("beans \\udf72 and \\ud83c", "beans \ufffd and \ufffd", 1),
        ("beans \\ud83c\\udf72", "beans \U0001f372", 0),
        ("beans \ufffd and?", "beans \ufffd and?", 0),
    ],
)
def test_half_a_character_is_replaced_and_counted(
    tmp_path: Path, escaped: str, text: str, n: int
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f'{{"prompt": "{escaped}", "target": "t", "text": "{escaped}"}}\n')
    found = pairs_in(path, PairReader("prompt", "target"))
    (block,) = DocumentReader("text").blocks(path)
    documents = DocumentReader("text").examples(block)
    assert [found.examples[0].prompt, documents.examples[0].target] == [text] * 2
    assert [
        found.notes.get(HALF_CHARACTERS, 0),
        documents.notes.get(HALF_CHARACTERS, 0),
    ] == [n] * 2


@pytest.mark.parametrize(
    ("target", "text", "left_out"),
    [
        ("answers", "Paris", 1),
        ("{answers}", "Paris", 1),
        ("Answer: {answers}.", "Answer: Paris.", 1),
        ("{answers}\n\n{why}", "Paris\nThe city of Paris\n\nIt is.", 0),
    ],
)
def test_a_list_in_the_only_field_of_a_target_holds_alternatives(
    tmp_path: Path, target: str, text: str, left_out: int
) -> None:
    answers = ["Paris", "The city of Paris"]
    records: list[object] = [{"q": "Where?", "answers": answers, "why": "It is."}]
    found = pairs_in(written(tmp_path, records), PairReader("q", target))
    assert [example.target for example in found.examples] == [text]
    assert found.notes.get("answers beside a question's first left out", 0) == left_out


def test_a_target_of_which_a_field_holds_no_text_is_dropped(tmp_path: Path) -> None:
    records: list[object] = [{"q": "Where?", "a": "Paris", "why": {"de": "So."}}]
    found = pairs_in(written(tmp_path, records), PairReader("q", "{a}\n\n{why}"))
    assert found.dropped == {"why is not a text": [1]}


@pytest.mark.parametrize(
    ("text", "kept", "dropped"),
    [
        ('{"prompt": "p", "target": "t"}\n\n{"prompt": "q"}\n', 1, {"no target": [3]}),
        (
            '{"prompt": "p", "target": "t"}{}\n\n{}',
            0,
            {"not JSON": [1], "no prompt": [3]},
        ),
        ('{"prompt": "p", "target": "t"}\n{"prompt": "q", "targ', 1, {"not JSON": [2]}),
        ('{"prompt": "p", "target": "t"}\n[1]\n', 1, {"not an object": [2]}),
        (
            '{"prompt": "p", "target": "t\\ud800"}\r\n{"prompt": "a\\u0007", "target": NaN}',
            1,
            {"no target": [2]},
        ),
        ('{"prompt": "p", "target": "t"}\r{"prompt": "q"}', 1, {"no target": [2]}),
        # A number that only one of the decoders can read.
        (f'{{"prompt": "", "n": {"7" * 4400}, "target": "b"}}\n', 0, {"not JSON": [1]}),
    ],
)
def test_what_is_no_plain_json_is_counted_by_its_line(
    tmp_path: Path, text: str, kept: int, dropped: dict[str, list[int]]
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(text, newline="")
    found = PairReader("prompt", "target").examples(
        Block(0, str(path), 1, path.read_bytes())
    )
    assert (found.kept, found.dropped) == (kept, dropped)
    assert found.read == found.kept + sum(map(len, found.dropped.values()))


def test_of_a_key_written_twice_the_last_value_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "p", "target": "old", "target": "new"}\n')
    reader = PairReader("prompt", "target")
    assert [e.target for e in pairs_in(path, reader).examples] == ["new"]
    path.write_text(path.read_text() + '{"prompt": 7, "prompt": 8, "target": "t"}\n')
    assert [e.prompt for e in pairs_in(path, reader).examples] == ["p", "8"]


def test_numbers_that_are_not_finite_are_empty(tmp_path: Path) -> None:
    """As rows from Python have them: pandas and json.dumps write NaN for a missing value."""
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"prompt": "p", "target": NaN}\n{"prompt": "p", "target": 1e400}\n'
        '{"prompt": -Infinity, "target": "t"}\n{"prompt": "p", "target": 1.5}\n'
    )
    found = pairs_in(path, PairReader("prompt", "target"))
    assert [e.target for e in found.examples] == ["1.5"]
    assert found.dropped == {"no target": [1, 2], "no prompt": [3]}


def test_missing_columns_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": "a", "target": "b"}])
    with pytest.raises(DataError, match="target: answer"):
        list(PairReader("prompt", "answer").blocks(path))
    with pytest.raises(ConfigError, match="prompt and target"):
        reader_for({"prompt": "a", "text": "b"})


# Layouts of files whose columns the user has named: documents, and prompts with targets.


def file_of(folder: Path, text: str) -> Path:
    path = folder / "file"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"question": "a", "answer": "b"}\n' * 2, "json-lines"),
        (json.dumps([{"question": "a", "answer": "b"}]), "json"),
        ("question,answer\na,b\n", "csv"),
        ("question\tanswer\na, or b\tb\n", "tsv"),
        # More columns by semicolon, but not the named ones.
        ("question,answer;x;y\na,b;c;d\n", None),
        ("question;answer,x,y,z\na;b,c,d,e\n", None),
        ("id,question;answer,text\n1,2;3,4\n", None),
    ],
)
def test_the_named_columns_choose_the_layout(
    tmp_path: Path, text: str, name: str | None
) -> None:
    path = file_of(tmp_path, text)
    columns = {"prompt": "question", "target": "answer"}
    if name is None:
        with pytest.raises(DataError, match="has no column for"):
            layout_with(path, columns)
    else:
        assert layout_with(path, columns).name == name


@pytest.mark.parametrize("form", ["lines", "array"])
def test_a_column_that_the_first_records_lack_is_no_missing_one(
    tmp_path: Path, form: str
) -> None:
    rows = [
        {"q": f"Why {n}?", "a": "So."} | ({"hint": "Heat."} if n > 40 else {})
        for n in range(50)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path = file_of(tmp_path, lines if form == "lines" else json.dumps(rows))
    found = pairs_in(path, PairReader("{q}\n\n{hint}", "a"))
    assert [found.examples[n].prompt for n in (40, 41)] == [
        "Why 40?",
        "Why 41?\n\nHeat.",
    ]
    with pytest.raises(
        DataError, match=r"prompt, part 2: hnt\. Its columns are 'q', 'a'"
    ):
        pairs_in(path, PairReader("{q}\n\n{hnt}", "a"))


def test_of_damaged_records_alone_the_reasons_are_told_and_no_column_is_missed(
    tmp_path: Path,
) -> None:
    found = pairs_in(
        file_of(tmp_path, '{"q": "Why?", "a"}\n' * 3), PairReader("q", "a")
    )
    assert found.dropped == {"not JSON": [1, 2, 3]}


def test_the_delimiter_of_the_named_column_is_taken(tmp_path: Path) -> None:
    path = file_of(tmp_path, "id;text;a,b,c,d\n1;Stir the soup.;e,f,g,h\n")
    reader = DocumentReader("text")
    (block,) = reader.blocks(path)
    assert [e.target for e in reader.examples(block).examples] == ["Stir the soup."]


def test_prose_and_pages_are_no_records(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownFormatError, match=r"not a file of records\. It begins with b'Stir it"
    ):
        PairReader("a", "b").schema(file_of(tmp_path, "Stir it.\nServe it.\n"))
    with pytest.raises(DataError, match=r"has no column for text: body|not a file of"):
        DocumentReader("body").schema(
            file_of(tmp_path, "<!DOCTYPE html>\n<html></html>\n")
        )
