"""Records that raise: each costs itself alone, and its reason and line are told (fault 54)."""

import json
from collections import Counter
from pathlib import Path

import pytest

from fixtures.recipe_files import STEPS, Prepare, as_lines
from fixtures.recipe_files import pot as record
from toque.cooking.recipe import Recipe
from toque.cooking.schemas.reader import RecipeReader
from toque.data.prepare.data_report import Report
from toque.errors import DataError
from toque.evaluation.text_samples import Sample
from toque.evaluation.text_scores import TextScores

HOSTILE = {
    "a million": record(3, ingredients=["1,000,000 grains of rice", "1 egg"]),
    "nested brackets": record(
        4, ingredients=["1 cup rice " + "(" * 500 + "a" + ")" * 500]
    ),
    "brackets in a row": record(5, ingredients=["1 cup rice" + " (a)" * 2000]),
    "a character of 5,000 digits": record(
        6, directions=[*STEPS, "Bake at 350&#" + "9" * 5000]
    ),
    "5,000 digits": record(
        7, ingredients=["9" * 5000 + " 1/2 cups rice", "9" * 5000 + " eggs"]
    ),
    "days": record(8, minutes="9" * 5000 + " hours", cook_time="P" + "9" * 5000 + "D"),
    "deep": record(9, nutrition=json.loads("[" * 900 + "]" * 900)),
    "deep tags": record(10, tags=json.loads("[" * 900 + '"a"' + "]" * 900)),
    "a field of a megabyte": record(11, title="Pot " + "a" * (1 << 20)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_fault_54_a_hostile_record_is_read_or_dropped(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(record(0)), json.dumps(HOSTILE[name]), json.dumps(record(1))]
    path.write_text("\n".join(lines))
    reader = RecipeReader(tasks=("write", "nutrition", "difficulty"))
    given = [reader.examples(block) for block in reader.blocks(path)]
    assert sum(g.read for g in given) == 3
    assert sum(g.kept for g in given) >= 2
    reasons = {reason for g in given for reason in g.dropped}
    assert not any(reason.startswith("raised") for reason in reasons), reasons


def test_fault_54_whatever_raises_is_dropped_with_its_place_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare_files: Prepare
) -> None:
    from toque.cooking import examples

    def spoilt(recipe: Recipe) -> object:
        if recipe.title == "Pot 7":
            raise RecursionError("as deep as can be")
        return whole(recipe)

    whole = examples.read_features
    monkeypatch.setattr(examples, "read_features", spoilt)
    (tmp_path / "a.jsonl").write_bytes(as_lines([record(n) for n in range(20)]))
    code, said, err = prepare_files(tmp_path / "a.jsonl")
    assert code == 0, err
    report = Report.read_from(tmp_path / "store")
    assert report is not None
    reason = "raised RecursionError in toque.cooking.examples.examples_of"
    assert report.dropped[reason] == 1
    assert report.lines[reason] == ["a.jsonl:8"]
    assert report.read == report.kept + sum(report.dropped.values())
    assert "raised RecursionError" in said
    assert any("Pot 7" in shown.text for shown in report.dropped_examples)


def test_fault_54_a_reader_that_raises_between_records_is_refused_in_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare_files: Prepare,
    tokenizers_at: dict[str, Path],
) -> None:
    def spoilt(*_: object) -> object:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(RecipeReader, "examples", spoilt)
    (tmp_path / "a.jsonl").write_bytes(as_lines([record(n) for n in range(20)]))
    own = f"model.tokenizer={tokenizers_at['decoder']}"
    code, _, said = prepare_files(tmp_path / "a.jsonl", own)
    assert code == DataError.exit_code
    assert "raised ZeroDivisionError in the block from line 1" in said
    assert "Traceback" not in said


def test_fault_54_a_text_that_cannot_be_scored_costs_its_score() -> None:
    scores = TextScores(("recipe",))
    good = Sample("p", "text", 1, None, {"recipe_score": 0.5})
    bad = Sample("p", "text", 1, None, {}, failed="raised ValueError in toque.x.y")
    scores.add([good, bad, good])
    found = scores.result(resamples=10)
    assert found.overall["recipe_score"].n == 2
    assert found.failed == {
        "recipe": "left out 1 of 3 texts: 1 raised ValueError in toque.x.y"
    }


def test_fields_are_cut_at_a_stated_length_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    deep: object = "a"
    for _ in range(150):
        deep = [deep]
    long = record(1, directions=[*STEPS, "Stir. " * 100_000], notes=deep)
    path.write_text(
        json.dumps(long) + "\n" + json.dumps(record(2, ingredients=["rice " * 500]))
    )
    reader = RecipeReader()
    notes: Counter[str] = Counter()
    for block in reader.blocks(path):
        notes.update(reader.examples(block).notes)
    assert notes["fields over 200,000 characters cut"] == 1
    assert notes["values nested over 100 deep left out"] == 1
    assert (
        notes["ingredient lines over 2,000 characters, only their beginning parsed"]
        == 1
    )
