"""No column of text goes missing: it stands in an example, or its name in what is printed.

Files of every form carry a word of its own in every column of text. The words are looked for in the
examples as the model reads them, and the columns without in the output of `init`, of `prepare` and
of `report`.
"""

import csv
import html
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fixtures.recipe_files import as_lines
from toque.cli import main
from toque.data.store.token_store import TokenStore

N = 24
Record = dict[str, Any]
WORDS = (
    "amber",
    "birch",
    "cedar",
    "dusky",
    "ebony",
    "fjord",
    "gauze",
    "hazel",
    "ivory",
    "jetty",
)
"""Marks of the columns of a record, in their order, before the record's number."""


def mark(at: int) -> str:
    return f"{WORDS[at]}mark"


def recipe(n: int, *names: str, printed: bool = False) -> Record:
    """A recipe under these names, then one marked text for each further name."""
    lists: list[Any] = [
        [f"{n + 1} cups {mark(1)} lentils", "1/2 lemon, juiced"],
        [
            "Rinse the lentils in cold water.",
            f"Simmer with {mark(2)} for {n + 5} minutes.",
        ],
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


def as_json(records: Sequence[Record]) -> bytes:
    return json.dumps(records).encode()


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
    page = (
        f'<html><script type="application/ld+json">{script}</script><p>Hello</p></html>'
    )
    return page.encode()


@dataclass(frozen=True)
class Form:
    """A file, and which of its columns are not in the examples: all others must be."""

    written: Callable[[Sequence[Record]], bytes | list[bytes]]
    """The bytes of the file, or of the files of a folder."""
    record: Callable[[int], Record]
    named: tuple[str, ...] = ()
    columns: Mapping[str, Any] | None = None


def dish(
    written: Any, names: str, named: str = "", *, printed: bool = False, **more: Any
) -> Form:
    """A form of recipes with these columns."""
    record = partial(recipe, printed=printed)
    return Form(
        written, lambda n: record(n, *names.split()), tuple(named.split()), **more
    )


def worded(written: Any, names: str, named: str = "", **more: Any) -> Form:
    """A form of texts with these columns."""
    return Form(
        written, lambda n: texts(n, *names.split()), tuple(named.split()), **more
    )


TITLE = "title ingredients directions"
SCHEMA_ORG = ("name", "recipeIngredient", "recipeInstructions", "description", "keywords",
              "recipeCategory", "headline")  # fmt: skip
NODE = {"@type": "Recipe", "author": {"@type": "Person", "name": "jettymark"}}
FORMS = {
    "recipes in csv": dish(
        as_csv, f"{TITLE} description notes", "description notes", printed=True
    ),
    "recipes in json": dish(as_json, f"{TITLE} notes", "notes"),
    "recipes in json lines": dish(
        as_lines, f"{TITLE} tags cuisine source notes", "tags cuisine source notes"
    ),
    "recipes in parquet": dish(as_parquet, f"{TITLE} story", "story"),
    "two columns of steps": dish(as_lines, f"{TITLE} method recipe", "method recipe"),
    "recipenlg": dish(as_csv, f"{TITLE} link source NER", "link source NER", printed=True),
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
    "spoonacular": dish(as_lines, "title extendedIngredients instructions summary", "summary"),
    "own column names": dish(
        as_csv,
        "dish needs how story",
        "story",
        printed=True,
        columns={"title": "dish", "ingredients": "needs", "steps": "how"},
    ),
    "alpaca": worded(as_json, "instruction input output"),
    "alpaca with the whole text": worded(as_parquet, "instruction input output text", "text"),
    "dolly": worded(as_lines, "instruction context response category", "category"),
    "squad": Form(
        as_parquet,
        lambda n: texts(n, "question", "context", "id", "title")
        | {"answers": {"text": [f"{mark(4)} {n}"], "answer_start": [n]}},
        ("id", "title"),
    ),
    "squad, flat": worded(as_csv, "context question answer"),
    "system, prompt, response": worded(as_lines, "system prompt response"),
    "text and label": worded(as_csv, "text label", "label"),
    "text and a number": Form(
        as_lines, lambda n: texts(n, "text") | {"label": n % 2}, ("label",)
    ),
    "documents in parquet": worded(as_parquet, "text url", "url"),
    "pairs in tsv": worded(partial(as_csv, delimiter="\t"), "source target note", "note"),
    "pairs in arrow": worded(as_arrow, "input output topic", "topic"),
    "columns for prompts": worded(
        as_lines,
        "rules ask facts reply topic",
        "topic",
        columns={"prompt": ["rules", "ask", "facts"], "target": "reply"},
    ),
    "told to leave the input": worded(
        as_lines,
        "instruction input output",
        "input",
        columns={"prompt": "instruction", "target": "output"},
    ),
    "plain texts in a folder": Form(
        lambda records: [str(record["line"]).encode() for record in records],
        lambda n: {"line": f"It was a {mark(0)} night, number {n}, and nobody slept."},
    ),
    "recipes in a folder": dish(
        lambda records: [json.dumps(record).encode() for record in records],
        f"{TITLE} story",
        "story",
    ),
}  # fmt: skip


def examples_of(store: Path) -> str:
    """All examples of a store, as the model reads them."""
    opened = TokenStore.open(store)
    codec = opened.codec()
    rows = [int(row) for split in ("train", "validation") for row in opened.rows(split)]
    ids = [
        side(row).tolist() for row in rows for side in (opened.prompt, opened.target)
    ]
    return "\n".join(map(codec.decode, ids))


@pytest.mark.parametrize("name", FORMS)
def test_every_word_is_in_an_example_or_its_column_is_named(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    form = FORMS[name]
    records = [form.record(n) for n in range(N)]
    written = form.written(records)
    if isinstance(written, list):
        Path("data").mkdir()
    for n, content in enumerate(written if isinstance(written, list) else [written]):
        Path(f"data/{n:02}" if isinstance(written, list) else "data").write_bytes(
            content
        )
    said: dict[str, str] = {}
    commands = {
        "init": ["init", "data"],
        "prepare": [
            "prepare",
            "my.yaml",
            "model.tokenizer=trained:512",
            "data.store=s",
        ],
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
    for command, out in said.items():
        found = re.search(
            r"Unused fields of data\S*(?: and 23 more)?: (.*?)\.(?= |\n|<|$)", out
        )
        names = re.findall(r"'([^']+)'", found[1]) if found else []
        assert sorted(names) == sorted(form.named), (command, out)
    examples = examples_of(Path("s"))
    for column, value in records[0].items():
        marks = [
            word for word in map(mark, range(len(WORDS))) if word in json.dumps(value)
        ]
        in_examples = bool(marks) and all(word in examples for word in marks)
        figures = not marks and column not in form.named
        assert in_examples or figures or column in form.named, (
            column,
            marks,
            examples[:400],
        )
        assert not (in_examples and column in form.named), column
