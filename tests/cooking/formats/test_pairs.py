"""Records of prompts and answers: recognised, read whole, counted, split by prompt."""

import json
from pathlib import Path

import pytest

from toque.cooking.formats import TextRecordsError, reader_spec, schema_of
from toque.cooking.formats.pairs import PairReader
from toque.data.example import BlockExamples
from toque.data.worker import load_reader
from toque.errors import ConfigError, DataError


def written(folder: Path, records: list[object]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, reader: PairReader) -> BlockExamples:
    (block,) = reader.blocks(path)
    return reader.examples(block)


@pytest.mark.parametrize(("prompt", "target"), [("prompt", "completion"), ("Question", "Answer")])
def test_pairs_are_recognised_by_their_fields(tmp_path: Path, prompt: str, target: str) -> None:
    path = written(tmp_path, [{prompt: "2 + 2", target: "4"}])
    with pytest.raises(TextRecordsError) as found:
        schema_of(path)
    assert found.value.columns == {"prompt": prompt, "target": target}
    reader = load_reader(reader_spec(found.value.columns), ("write",))
    assert reader == PairReader(prompt=prompt, target=target)


def test_a_recipe_with_a_prompt_stays_a_recipe(tmp_path: Path) -> None:
    recipe = {"title": "Toast", "ingredients": ["bread"], "steps": ["Toast it."]}
    path = written(tmp_path, [recipe | {"prompt": "p", "target": "t"}] * 2)
    assert schema_of(path) == "json-lines"


def test_texts_are_taken_as_they_are(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": " Say  hi\n", "target": "<b>hi</b>\n\n1. ½"}])
    found = read(path, PairReader("prompt", "target"))
    assert [(e.prompt, e.target) for e in found.examples] == [(" Say  hi\n", "<b>hi</b>\n\n1. ½")]


def test_what_is_no_pair_is_counted_with_its_line(tmp_path: Path) -> None:
    records: list[object] = [
        {"prompt": "a", "target": "b"},
        {"prompt": "", "target": "b"},
        {"prompt": "a", "target": None},
        {"prompt": "a\0", "target": 7},
    ]
    found = read(written(tmp_path, records), PairReader("prompt", "target"))
    assert (found.read, found.kept) == (4, 2)
    assert found.dropped == {"no prompt": [2], "no target": [3]}
    assert found.notes == {"control characters removed": 1}
    assert [e.target for e in found.examples] == ["b", "7"]


def test_one_prompt_is_on_one_side_of_the_split(tmp_path: Path) -> None:
    records: list[object] = [{"prompt": "a", "target": "b"}, {"prompt": "A", "target": "c"}]
    first, second = read(written(tmp_path, records), PairReader("prompt", "target")).examples
    assert first.key == second.key
    assert first.record_key != second.record_key


def test_missing_columns_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": "a", "target": "b"}])
    with pytest.raises(DataError, match="target: answer"):
        list(PairReader("prompt", "answer").blocks(path))
    with pytest.raises(ConfigError, match="prompt and target"):
        reader_spec({"prompt": "a", "text": "b"})
