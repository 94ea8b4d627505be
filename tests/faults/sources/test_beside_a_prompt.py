"""What stands beside a prompt and its answer: joined, named or asked for, never left out unsaid."""

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.asked import texts_asked
from fixtures.recipe_files import as_lines
from toque.cli import main
from toque.config import SourceConfig
from toque.cooking.schemas.reader import reader_for
from toque.errors import ConfigError
from toque.sources.file_kinds import FileJudge
from toque.sources.records import BlockExamples
from toque.sources.source_files import locate_files

Record = dict[str, Any]
ALPACA = {"instruction": "Say it in German.", "input": "bread", "output": "Brot"}
SQUAD = {
    "question": "Who bakes?",
    "context": "Anna bakes.",
    "answers": {"text": ["Anna", "she"]},
}


def read_in(path: Path, columns: Record | None = None) -> BlockExamples:
    """What the first block of a file gives, by the reader that `auto` finds for it."""
    source = SourceConfig.model_validate({"path": str(path), "columns": columns or {}})
    found = FileJudge(source, "utf-8", reader_for).judge(locate_files(str(path)), print)
    return found.reader.examples(next(iter(found.reader.blocks(path))))


def given(folder: Path, *records: Record) -> BlockExamples:
    """What a file of these records gives."""
    (folder / "data").write_bytes(as_lines(records))
    return read_in(folder / "data")


def test_the_parts_of_a_prompt_stand_in_the_usual_order(tmp_path: Path) -> None:
    system = {
        "system": "Be brief.",
        "question": "Who?",
        "context": "Anna bakes.",
        "answer": "Anna",
    }
    for record, prompt in (
        (ALPACA, "Say it in German.\n\nbread"),
        (ALPACA | {"input": " "}, "Say it in German."),
        (ALPACA | {"input": None}, "Say it in German."),
        (SQUAD, "Who bakes?\n\nAnna bakes."),
        (system, "Be brief.\n\nWho?\n\nAnna bakes."),
    ):
        assert [e.prompt for e in given(tmp_path, record, record).examples] == [
            prompt
        ] * 2


def test_only_the_first_of_several_answers_is_read_and_the_others_are_counted(
    tmp_path: Path,
) -> None:
    found = given(tmp_path, SQUAD, SQUAD | {"answers": {"text": []}})
    assert [e.target for e in found.examples] == ["Anna"]
    assert found.notes["answers beside a question's first left out"] == 1
    assert found.dropped == {"no target": [2]}


def test_a_record_whose_context_is_no_text_is_dropped_and_counted(
    tmp_path: Path,
) -> None:
    found = given(tmp_path, ALPACA, ALPACA | {"input": {"de": "Brot"}})
    assert len(found.examples) == 1
    assert found.dropped == {"input is not a text": [2]}


def test_a_field_that_comes_late_is_named_and_of_many_the_first_hundred(
    tmp_path: Path,
) -> None:
    pair: Record = {"prompt": "p", "target": "t"}
    late = pair | {"aside": "x", "empty": ""}
    assert given(tmp_path, *[pair] * 40, late).unused == {"aside": 1}
    unused = given(
        tmp_path, pair | {f"k{n}": n for n in range(300)}, pair | {"k7": 1}
    ).unused
    assert (len(unused), unused["k7"], unused["(others)"]) == (101, 2, 1)


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ({"options": ["a", "b"]}, None),
        (
            {"choices": ["a", "b"]},
            {"prompt": ["question", "choices"], "target": "answer"},
        ),
        ({"history": [["Hi", "Hello"]]}, {"prompt": "question", "target": "answer"}),
        ({"text": "Anna bakes."}, {"prompt": ["question", "text"], "target": "answer"}),
        ({"text": "Anna bakes."}, {"text": "text"}),
    ],
)
def test_a_question_whose_context_would_be_ignored_is_refused_unless_told(
    beside: Record,
    told: Record | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (name,) = beside
    words = (
        "soup",
        "bread",
        "stew",
        "pie",
    )  # the sides of the split are chosen by the text
    records = [
        {"question": f"Who makes {words[n % 4]} {n}?", "answer": f"Anna {n}."} | beside
        for n in range(30)
    ]
    for n, record in enumerate(records):
        if name == "text":
            record["text"] = f"Anna makes {words[n % 4]} number {n}."
    Path("qa.jsonl").write_bytes(as_lines(records))
    assert main(["init", "qa.jsonl"]) == 3
    error = capsys.readouterr().err
    assert "qa.jsonl is a JSON lines file of prompts and answers (its columns" in error
    assert f"with a column {name!r} next to them" in error
    assert "--columns prompt=question --columns target=answer without" in error
    Path("my.yaml").write_text("model: {family: gpt2, tokenizer: 'trained:512'}")
    given = json.dumps([{"path": "qa.jsonl"} | ({"columns": told} if told else {})])
    code = main(["prepare", "my.yaml", "data.store=s", f"data.sources={given}"])
    assert code == (0 if told else 3), capsys.readouterr().err
    if name == "choices":
        assert (
            read_in(Path("qa.jsonl"), told).examples[0].prompt
            == "Who makes soup 0?\n\na\nb"
        )


def test_of_two_columns_with_one_name_both_are_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("prompt,note,target,note\np,first,t,last\n")
    found = read_in(path)
    assert [(e.prompt, e.target) for e in found.examples] == [("p", "t")]
    assert found.unused == {"note (column 2)": 1, "note": 1}


def test_what_is_empty_everywhere_is_not_asked_for(tmp_path: Path) -> None:
    found = given(tmp_path, ALPACA | {"history": [], "system": ""})
    assert [e.prompt for e in found.examples] == ["Say it in German.\n\nbread"]
    assert found.unused == {}


def test_a_list_of_columns_is_for_a_prompt_only(tmp_path: Path) -> None:
    source = SourceConfig.model_validate(
        {"path": "x", "columns": {"title": ["a", "b"], "steps": "c"}}
    )
    (tmp_path / "x").write_text("{}")
    with pytest.raises(ConfigError, match=r"a list for title\. Only a prompt"):
        FileJudge(source, "utf-8", reader_for).judge(
            locate_files(str(tmp_path / "x")), print
        )


def test_a_line_of_a_prompt_file_is_sent_with_its_context(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(
        as_lines([{"context": "Anna bakes.", "prompt": "Who?", "system": "Be brief."}])
    )
    asked = texts_asked((), file, task=None, raw=False)
    assert asked == ["Be brief.\n\nWho?\n\nAnna bakes."]
    file.write_bytes(as_lines([{"title": "Toast", "ingredients": "bread\nbutter"}]))
    (asked_for,) = texts_asked((), file, task="write", raw=False)
    assert "bread, butter" in asked_for
