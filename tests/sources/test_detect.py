"""Layouts of files whose columns the user has named: documents, and prompts with targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toque.errors import DataError
from toque.sources.documents import DocumentReader, PairReader
from toque.sources.layouts import UnknownFormatError, layout_with


def written(folder: Path, text: str) -> Path:
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
def test_the_named_columns_choose_the_layout(tmp_path: Path, text: str, name: str | None) -> None:
    path = written(tmp_path, text)
    columns = {"prompt": "question", "target": "answer"}
    if name is None:
        with pytest.raises(DataError, match="without the column named for"):
            layout_with(path, columns)
    else:
        assert layout_with(path, columns).name == name


def test_the_delimiter_of_the_named_column_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path, "id;text;a,b,c,d\n1;Stir the soup.;e,f,g,h\n")
    reader = DocumentReader("text")
    (block,) = reader.blocks(path)
    assert [e.target for e in reader.examples(block).examples] == ["Stir the soup."]


def test_prose_and_pages_are_no_records(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormatError, match="is no file of records: it begins b'Stir it"):
        PairReader("a", "b").schema(written(tmp_path, "Stir it.\nServe it.\n"))
    with pytest.raises(DataError, match=r"without the column named for text: body|no file of rec"):
        DocumentReader("body").schema(written(tmp_path, "<!DOCTYPE html>\n<html></html>\n"))
