"""No column of text goes missing: it stands in an example, or its name in what is printed.

Files of every form carry a word of its own in every column of text. The words are looked for in the
examples as the model reads them, and the columns without in the output of `init`, of `prepare` and
of `report`.
"""

from __future__ import annotations

import csv
import gzip
import html
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from toque.cli import main
from toque.config import SourceConfig
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.sources.files import located
from toque.sources.records import BlockExamples
from toque.workflows.assembly.sources.file_kinds import judged
from toque.workflows.prompt_files import read_prompts

N = 24
Record = dict[str, Any]
WORDS = ("amber", "birch", "cedar", "dusky", "ebony", "fjord", "gauze", "hazel", "ivory", "jetty")
"""Marks of the columns of a record, in their order, before the record's number."""


def mark(at: int) -> str:
    return f"{WORDS[at]}mark"


def recipe(n: int, *names: str, printed: bool = False) -> Record:
    """A recipe under these names, then one marked text for each further name."""
    lists: list[Any] = [
        [f"{n + 1} cups {mark(1)} lentils", "1/2 lemon, juiced"],
        ["Rinse the lentils in cold water.", f"Simmer with {mark(2)} for {n + 5} minutes."],
    ]
    values = [f"Pot {mark(0)} {n}", *(map(repr, lists) if printed else lists)]
    values += [f"Some {mark(at)} words of {n}." for at in range(3, len(names))]
    return dict(zip(names, values, strict=True))


def texts(n: int, *names: str) -> Record:
    return {name: f"{name} {mark(at)} number {n}" for at, name in enumerate(names)}


def as_csv(records: Sequence[Record], delimiter: str = ",") -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(records[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue().encode()


def as_lines(records: Sequence[Record]) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


def as_json(records: Sequence[Record]) -> bytes:
    return json.dumps(records).encode()


def as_gzip(records: Sequence[Record]) -> bytes:
    return gzip.compress(as_lines(records))


def as_parquet(records: Sequence[Record]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(records), file)
    return file.getvalue()


def as_arrow(records: Sequence[Record]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(records)
    file = io.BytesIO()
    with pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def as_page(records: Sequence[Record]) -> bytes:
    script = json.dumps({"@context": "https://schema.org", "@graph": records})
    page = f'<html><script type="application/ld+json">{script}</script><p>Hello</p></html>'
    return page.encode()


@dataclass(frozen=True)
class Form:
    """A file, and which of its columns are not in the examples: all others must be."""

    written: Callable[[Sequence[Record]], bytes | list[bytes]]
    """The bytes of the file, or of the files of a folder."""
    record: Callable[[int], Record]
    named: tuple[str, ...] = ()
    columns: Mapping[str, Any] | None = None


TITLE = ("title", "ingredients", "directions")
SCHEMA_ORG = ("name", "recipeIngredient", "recipeInstructions", "description", "keywords",
              "recipeCategory", "headline")  # fmt: skip
NODE = {"@type": "Recipe", "author": {"@type": "Person", "name": "jettymark"}}
FORMS = {
    "recipes in csv": Form(
        as_csv,
        lambda n: recipe(n, *TITLE, "description", "notes", printed=True),
        ("description", "notes"),
    ),
    "recipes in json": Form(as_json, lambda n: recipe(n, *TITLE, "notes"), ("notes",)),
    "recipes in json lines": Form(
        as_lines,
        lambda n: recipe(n, *TITLE, "tags", "cuisine", "source", "notes"),
        ("tags", "cuisine", "source", "notes"),
    ),
    "recipes in gz": Form(as_gzip, lambda n: recipe(n, *TITLE, "story"), ("story",)),
    "recipes in parquet": Form(as_parquet, lambda n: recipe(n, *TITLE, "story"), ("story",)),
    "two columns of steps": Form(
        as_lines, lambda n: recipe(n, *TITLE, "method", "recipe"), ("method", "recipe")
    ),
    "recipenlg": Form(
        as_csv,
        lambda n: recipe(n, *TITLE, "link", "source", "NER", printed=True),
        ("link", "source", "NER"),
    ),
    "food.com": Form(
        as_csv,
        lambda n: recipe(
            n, "name", "ingredients", "steps", "contributor_id", "description", "tags", printed=True
        )
        | {"n_steps": 2},
        ("description", "tags", "contributor_id", "n_steps"),  # in a table all is text
    ),
    "food.com, the other": Form(
        as_csv,
        lambda n: {
            "Name": f"Pot {mark(0)} {n}",
            "RecipeIngredientParts": f'c("{mark(1)} lentils", "lemon")',
            "RecipeIngredientQuantities": f'c("{n + 1} {mark(2)} cups", "1/2")',
            "RecipeInstructions": f'c("Rinse in cold water.", "Simmer {mark(3)} {n} minutes.")',
            "Description": f"{mark(4)} {n}",
            "RecipeCategory": mark(5),
        },
        ("Description", "RecipeCategory"),
    ),
    "schema.org": Form(
        as_lines, lambda n: recipe(n, *SCHEMA_ORG) | NODE, (*SCHEMA_ORG[3:], "author")
    ),
    "web page": Form(as_page, lambda n: recipe(n, *SCHEMA_ORG) | NODE, (*SCHEMA_ORG[3:], "author")),
    "spoonacular": Form(
        as_lines,
        lambda n: recipe(n, "title", "extendedIngredients", "instructions", "summary"),
        ("summary",),
    ),
    "own column names": Form(
        as_csv,
        lambda n: recipe(n, "dish", "needs", "how", "story", printed=True),
        ("story",),
        {"title": "dish", "ingredients": "needs", "steps": "how"},
    ),
    "alpaca": Form(as_json, lambda n: texts(n, "instruction", "input", "output")),
    "alpaca with the whole text": Form(
        as_parquet, lambda n: texts(n, "instruction", "input", "output", "text"), ("text",)
    ),
    "dolly": Form(
        as_lines,
        lambda n: texts(n, "instruction", "context", "response", "category"),
        ("category",),
    ),
    "squad": Form(
        as_parquet,
        lambda n: texts(n, "question", "context", "id", "title")
        | {"answers": {"text": [f"{mark(4)} {n}"], "answer_start": [n]}},
        ("id", "title"),
    ),
    "squad, flat": Form(as_csv, lambda n: texts(n, "context", "question", "answer")),
    "system, prompt, response": Form(as_lines, lambda n: texts(n, "system", "prompt", "response")),
    "text and label": Form(as_csv, lambda n: texts(n, "text", "label"), ("label",)),
    "text and a number": Form(
        as_lines, lambda n: texts(n, "text") | {"label": n % 2}, ("label",)
    ),
    "documents in parquet": Form(as_parquet, lambda n: texts(n, "text", "url"), ("url",)),
    "prompt and completion": Form(
        as_lines, lambda n: texts(n, "prompt", "completion", "topic"), ("topic",)
    ),
    "pairs in tsv": Form(
        lambda records: as_csv(records, "\t"),
        lambda n: texts(n, "source", "target", "note"),
        ("note",),
    ),
    "pairs in arrow": Form(as_arrow, lambda n: texts(n, "input", "output", "topic"), ("topic",)),
    "columns for prompts": Form(
        as_lines,
        lambda n: texts(n, "rules", "ask", "facts", "reply", "topic"),
        ("topic",),
        {"prompt": ["rules", "ask", "facts"], "target": "reply"},
    ),
    "told to leave the input": Form(
        as_lines,
        lambda n: texts(n, "instruction", "input", "output"),
        ("input",),
        {"prompt": "instruction", "target": "output"},
    ),
    "plain texts in a folder": Form(
        lambda records: [str(record["line"]).encode() for record in records],
        lambda n: {"line": f"It was a {mark(0)} night, number {n}, and nobody slept."},
    ),
    "recipes in a folder": Form(
        lambda records: [json.dumps(record).encode() for record in records],
        lambda n: recipe(n, *TITLE, "story"),
        ("story",),
    ),
}  # fmt: skip


def examples_of(store: Path) -> str:
    """All examples of a store, as the model reads them."""
    opened = TokenStore.open(store)
    codec = opened.codec()
    rows = [int(row) for split in ("train", "validation") for row in opened.rows(split)]
    ids = [side(row).tolist() for row in rows for side in (opened.prompt, opened.target)]
    return "\n".join(map(codec.decode, ids))


@pytest.mark.parametrize("name", FORMS)
def test_every_word_is_in_an_example_or_its_column_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    form = FORMS[name]
    records = [form.record(n) for n in range(N)]
    written = form.written(records)
    if isinstance(written, list):
        Path("data").mkdir()
    for n, content in enumerate(written if isinstance(written, list) else [written]):
        Path(f"data/{n:02}" if isinstance(written, list) else "data").write_bytes(content)
    said: dict[str, str] = {}
    commands = {
        "init": ["init", "data", "--yes"],
        "prepare": ["prepare", "my.yaml", "model.tokenizer=trained:512", "data.store=s"],
        "report": ["report", "s", "--out", "page.html"],
    }
    if form.columns:
        Path("my.yaml").write_text("model: {family: gpt2}")
        given = [{"path": "data", "columns": form.columns}]
        commands["prepare"].append(f"data.sources={json.dumps(given)}")
        del commands["init"]
    for command, words in commands.items():
        code = main(words)
        printed = capsys.readouterr()
        assert code == 0, printed.err
        said[command] = " ".join(printed.out.split())
    said["report"] = html.unescape(Path("page.html").read_text())
    said["report.md"] = Path("s/report.md").read_text()
    for command, out in said.items():
        found = re.search(
            r"Fields of data\S*(?: and 23 more)? that no example holds: (.*?)\.(?= |\n|<|$)", out
        )
        names = re.findall(r"'([^']+)'", found[1]) if found else []
        assert sorted(names) == sorted(form.named), (command, out)
    examples = examples_of(Path("s"))
    for column, value in records[0].items():
        marks = [word for word in map(mark, range(len(WORDS))) if word in json.dumps(value)]
        in_examples = bool(marks) and all(word in examples for word in marks)
        figures = not marks and column not in form.named
        assert in_examples or figures or column in form.named, (column, marks, examples[:400])
        assert not (in_examples and column in form.named), column


ALPACA = {"instruction": "Say it in German.", "input": "bread", "output": "Brot"}
SQUAD = {"question": "Who bakes?", "context": "Anna bakes.", "answers": {"text": ["Anna", "she"]}}


def read_in(path: Path) -> BlockExamples:
    """What the first block of a file gives, by the reader that `auto` finds for it."""
    source = SourceConfig(path=str(path))
    found = judged(source, located(str(path)), encoding="utf-8", say=print)
    return found.reader.examples(next(iter(found.reader.blocks(path))))


def test_the_parts_of_a_prompt_stand_in_the_usual_order(tmp_path: Path) -> None:
    path = tmp_path / "data"
    system = {"system": "Be brief.", "question": "Who?", "context": "Anna bakes.", "answer": "Anna"}
    for record, prompt in (
        (ALPACA, "Say it in German.\n\nbread"),
        (ALPACA | {"input": " "}, "Say it in German."),
        (ALPACA | {"input": None}, "Say it in German."),
        (SQUAD, "Who bakes?\n\nAnna bakes."),
        (system, "Be brief.\n\nWho?\n\nAnna bakes."),
    ):
        path.write_bytes(as_lines([record] * 2))
        assert [e.prompt for e in read_in(path).examples] == [prompt] * 2


def test_only_the_first_of_several_answers_is_read_and_the_others_are_counted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    path.write_bytes(as_lines([SQUAD, SQUAD | {"answers": {"text": []}}]))
    found = read_in(path)
    assert [e.target for e in found.examples] == ["Anna"]
    assert found.notes["answers beside a question's first left out"] == 1
    assert found.dropped == {"no target": [2]}


def test_a_record_whose_context_is_no_text_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(as_lines([ALPACA, ALPACA | {"input": {"de": "Brot"}}]))
    found = read_in(path)
    assert len(found.examples) == 1
    assert found.dropped == {"input holds no text": [2]}


def test_a_field_that_comes_late_is_named_and_of_many_the_first_hundred(tmp_path: Path) -> None:
    path = tmp_path / "data"
    late: list[Record] = [{"prompt": "p", "target": "t"}] * 40
    path.write_bytes(as_lines([*late, {"prompt": "p", "target": "t", "aside": "x", "empty": ""}]))
    assert read_in(path).unused == {"aside": 1}
    path.write_bytes(as_lines([late[0] | {f"k{n}": n for n in range(300)}, late[0] | {"k7": 1}]))
    unused = read_in(path).unused
    assert (len(unused), unused["k7"], unused["(others)"]) == (101, 2, 1)


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ({"options": ["a", "b"]}, None),
        ({"choices": ["a", "b"]}, {"prompt": ["question", "choices"], "target": "answer"}),
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
    words = ("soup", "bread", "stew", "pie")  # the sides of the split are chosen by the text
    records = [
        {"question": f"Who makes {words[n % 4]} {n}?", "answer": f"Anna {n}."} | beside
        for n in range(30)
    ]
    for n, record in enumerate(records):
        if name == "text":
            record["text"] = f"Anna makes {words[n % 4]} number {n}."
    Path("qa.jsonl").write_bytes(as_lines(records))
    assert main(["init", "qa.jsonl", "--yes"]) == 3
    error = capsys.readouterr().err
    assert "qa.jsonl is a file of JSON lines of prompts and answers (its columns" in error
    assert f"with a column {name!r} beside them" in error
    assert "columns: {prompt: question, target: answer} without" in error
    Path("my.yaml").write_text("model: {family: gpt2, tokenizer: 'trained:512'}")
    given = json.dumps([{"path": "qa.jsonl"} | ({"columns": told} if told else {})])
    code = main(["prepare", "my.yaml", "data.store=s", f"data.sources={given}"])
    assert code == (0 if told else 3), capsys.readouterr().err
    if name == "choices":
        assert "?\n\na\nb\n" in examples_of(Path("s"))


def test_of_two_columns_with_one_name_both_are_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("prompt,note,target,note\np,first,t,last\n")
    found = read_in(path)
    assert [(e.prompt, e.target) for e in found.examples] == [("p", "t")]
    assert found.unused == {"note (column 2)": 1, "note": 1}


def test_what_is_empty_everywhere_is_not_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(as_lines([ALPACA | {"history": [], "system": ""}]))
    found = read_in(path)
    assert [e.prompt for e in found.examples] == ["Say it in German.\n\nbread"]
    assert found.unused == {}


def test_a_list_of_columns_is_for_a_prompt_only(tmp_path: Path) -> None:
    source = SourceConfig.model_validate(
        {"path": "x", "columns": {"title": ["a", "b"], "steps": "c"}}
    )
    (tmp_path / "x").write_text("{}")
    with pytest.raises(ConfigError, match="a list for title; only a prompt"):
        judged(source, located(str(tmp_path / "x")), encoding="utf-8", say=print)


def test_a_line_of_a_prompt_file_is_sent_with_its_context(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(
        as_lines([{"context": "Anna bakes.", "prompt": "Who?", "system": "Be brief."}])
    )
    asked = read_prompts((), file, task=None, raw=False)
    assert asked == ["Be brief.\n\nWho?\n\nAnna bakes."]
    file.write_bytes(as_lines([{"title": "Toast", "ingredients": "bread\nbutter"}]))
    (asked_for,) = read_prompts((), file, task="write", raw=False)
    assert "bread, butter" in asked_for
