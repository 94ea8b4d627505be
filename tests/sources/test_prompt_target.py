"""Records of prompts and answers: recognised, read whole, counted, split by prompt."""

import json
from pathlib import Path

import pytest
import xxhash

from toque.cooking.schemas import RecipeReader, TextRecordsError, reader_for
from toque.errors import ConfigError, DataError
from toque.sources.documents import PairReader
from toque.sources.records import Block, BlockExamples


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


def test_records_read_together_are_read_as_one_by_one(tmp_path: Path) -> None:
    """A block of plain pairs is decoded at once; anything odd in it sends it the long way."""
    plain: list[object] = [
        {"prompt": "Crème BRÛLÉE 1½", "target": "Straße\n\t½ ’x’ \u0130", "id": 3, "more": [1, {}]},
        {"target": "t", "prompt": "p"},
        {"prompt": " ", "target": "t"},
        {"prompt": "p", "target": None},
        {"target": "t"},
    ]
    # 7 is no text, so the records of this block are looked at one by one.
    odd = [*plain, {"prompt": "p", "target": 7}]
    reader = PairReader("prompt", "target")
    together, one_by_one = (read(written(tmp_path, records), reader) for records in (plain, odd))
    assert one_by_one.examples[:-1] == together.examples
    assert (together.read, together.kept, one_by_one.read) == (5, 2, 6)
    assert together.dropped == one_by_one.dropped == {"no prompt": [3, 5], "no target": [4]}
    assert together.texts == one_by_one.texts
    first = together.examples[0]
    body = f"{first.prompt}\0{first.target}".casefold().encode()
    assert first.record_key == xxhash.xxh3_64_intdigest(body)
    assert first.key == xxhash.xxh3_64_intdigest(first.prompt.casefold().encode())


@pytest.mark.parametrize(
    ("text", "kept", "dropped"),
    [
        ('{"prompt": "p", "target": "t"}\n\n{"prompt": "q"}\n', 1, {"no target": [3]}),
        (
            '{"prompt": "p", "target": "t"}{"prompt": "q"}\n\n{}',
            0,
            {"not JSON": [1], "no prompt": [3]},
        ),
        ('{"prompt": "p", "target": "t"}\n{"prompt": "q", "targ', 1, {"not JSON": [2]}),
        ('{"prompt": "p", "target": "t"}\n[1]\n', 1, {"not an object": [2]}),
        ('{"prompt": "p", "target": "t\\ud800"}\r\n{"prompt": "a\\u0007", "target": NaN}', 2, {}),
        ('{"prompt": "p", "target": "t"}\r{"prompt": "q"}', 1, {"no target": [2]}),
    ],
)
def test_what_is_no_plain_json_is_counted_by_its_line(
    tmp_path: Path, text: str, kept: int, dropped: dict[str, list[int]]
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(text, newline="")
    found = PairReader("prompt", "target").examples(Block(0, str(path), 1, path.read_bytes()))
    assert (found.kept, found.dropped) == (kept, dropped)
    assert found.read == found.kept + sum(map(len, found.dropped.values()))


def test_of_a_key_written_twice_the_last_value_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "p", "target": "old", "target": "new"}\n')
    reader = PairReader("prompt", "target")
    assert [e.target for e in read(path, reader).examples] == ["new"]
    path.write_text(path.read_text() + '{"prompt": 7, "prompt": 8, "target": "t"}\n')
    assert [e.prompt for e in read(path, reader).examples] == ["p", "8"]


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
        reader_for({"prompt": "a", "text": "b"})


def test_a_record_that_only_one_decoder_can_read_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = '{"prompt": "a question", "target": "an answer"}'
    path.write_text(f'{good}\n{{"prompt": "", "n": {"7" * 4400}, "target": "b"}}\n{good}\n')
    found = read(path, PairReader("prompt", "target"))
    assert len(found.examples) == 2
    assert found.dropped == {"not JSON": [2]}
