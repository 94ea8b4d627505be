"""Every form of rows that other trainers read: where each field's text is in the decoded batch.

    python bench/quality/file_forms.py [--rows 40]

Each form has rows whose every field holds a word found nowhere else. They are written to a file, or
given from memory, and prepared by the configuration that `init` writes. A field passes when each of
its words is in the batches of an epoch or among the held-out rows, or when a sentence of the report
names it as one that no example holds. Quality fails when one is lost in silence.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

import toque
from toque.errors import ToqueError
from toque.workflows.diagnosis.show_batch import show_batch

Row = dict[str, Any]
DATA = "data"


def word(field: str, number: int) -> str:
    """The word of a field in a row."""
    return f"mark{field.replace('_', '')}{number:03}end"


def _said(field: str, number: int) -> str:
    return f"Here is {word(field, number)} for it"


def _alpaca(n: int) -> Row:
    return {name: _said(name, n) for name in ("instruction", "input", "output", "note")}


def _alpaca_bare(n: int) -> Row:
    return _alpaca(n) | {"input": ""}


def _dolly(n: int) -> Row:
    return {name: _said(name, n) for name in ("instruction", "context", "response", "category")}


def _squad(n: int) -> Row:
    texts = {name: _said(name, n) for name in ("id", "title", "context", "question")}
    return texts | {"answers": {"text": [_said("answers", n)], "answer_start": [n]}}


def _turns(n: int, role: str, text: str, roles: tuple[str, str, str]) -> list[Row]:
    first, second, third = roles
    asked = [(first, "system"), (second, "user"), (third, "answer")]
    more = [(second, "user2"), (third, "answer2")]
    return [{role: who, text: _said(field, n)} for who, field in asked + more]


def _messages(n: int) -> Row:
    roles = ("system", "user", "assistant")
    return {"messages": _turns(n, "role", "content", roles), "origin": _said("origin", n)}


def _sharegpt(n: int) -> Row:
    turns = _turns(n, "from", "value", ("system", "human", "gpt"))[1:]
    return {"conversations": turns, "system": _said("system", n), "id": _said("id", n)}


def _prompt_completion(n: int) -> Row:
    turns = _turns(n, "role", "content", ("system", "user", "assistant"))[:3]
    return {"prompt": turns[:2], "completion": turns[2:], "source": _said("source", n)}


def _preferences(n: int) -> Row:
    return {name: _said(name, n) for name in ("prompt", "chosen", "rejected")}


def _table(n: int) -> Row:
    return {name: _said(name, n) for name in ("question", "answer", "remark")}


def _lines(rows: list[Row], folder: Path) -> Path:
    path = folder / f"{DATA}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _csv(rows: list[Row], folder: Path) -> Path:
    path = folder / f"{DATA}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def _dataset(rows: list[Row], folder: Path) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(folder / DATA))
    return folder / DATA


def _dataset_dict(rows: list[Row], folder: Path) -> Path:
    import datasets

    splits = {"train": rows[:-8], "test": rows[-8:]}
    made = {name: datasets.Dataset.from_list(given) for name, given in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(folder / DATA))
    return folder / DATA


def _list(rows: list[Row], folder: Path) -> list[Row]:
    del folder
    return rows


def _frame(rows: list[Row], folder: Path) -> Any:
    del folder
    import pandas as pd

    return pd.DataFrame(rows)


FORMS: dict[str, tuple[Callable[[int], Row], Callable[[list[Row], Path], Any]]] = {
    "Alpaca with input": (_alpaca, _lines),
    "Alpaca without input": (_alpaca_bare, _lines),
    "Dolly": (_dolly, _lines),
    "SQuAD": (_squad, _lines),
    "messages": (_messages, _lines),
    "ShareGPT": (_sharegpt, _lines),
    "prompt and completion as messages": (_prompt_completion, _lines),
    "preferences": (_preferences, _lines),
    "CSV": (_table, _csv),
    "saved Dataset": (_messages, _dataset),
    "DatasetDict": (_alpaca, _dataset_dict),
    "list": (_messages, _list),
    "DataFrame": (_dolly, _frame),
}
"""Rows of each form, and how they are handed over."""


def read_form(name: str, n_rows: int, folder: Path) -> Row:
    """Where the words of each field went, or the sentence that refuses the form."""
    row_of, handed = FORMS[name]
    rows = [row_of(n) for n in range(n_rows)]
    given = handed(rows, folder)
    in_memory = not isinstance(given, Path)
    try:
        # What is in memory has no file to look at: its configuration names the model alone.
        made = toque.init(_lines(rows, folder) if in_memory else given, to=folder / "made.yaml")
        values: Row = {
            "data": {"store": str(folder / "store")},
            "train": {"batch": f"{n_rows} examples"},
        }
        if in_memory:
            values["data"]["sources"] = []
        config = toque.configure(made.file, **values)
        found = toque.prepare(config, data=given if in_memory else None)
    except ToqueError as error:
        return {"form": name, "refused": str(error).replace(f"{folder}/", "")}
    store, codec = found.store, found.store.codec()
    shown = show_batch(config, most=n_rows)
    text = str(shown) + "".join(
        codec.decode(list(side(row)))
        for row in store.rows("validation").tolist()
        for side in (store.prompt, store.target)
    )
    unused = {field for file in found.report.sources for field in file.unused}
    written = [json.dumps(row) for row in rows]
    fields = {f for f in _fields_of(rows[0]) if any(word(f, n) in w for n, w in enumerate(written))}
    places = {}
    for field in sorted(fields):
        n = sum(word(field, number) in text for number in range(n_rows))
        places[field] = "named as unused" if field in unused else f"{n} of {n_rows}"
    kept = ("named as unused", f"{n_rows} of {n_rows}")
    lost = [field for field, place in places.items() if place not in kept]
    return {"form": name, "read": found.report.read, "places": places, "lost": lost}


def _fields_of(row: Row) -> set[str]:
    return {*row, "system", "user", "answer", "user2", "answer2"}


def measure(a: argparse.Namespace) -> harness.Result:
    """Read every form."""
    forms = []
    for name in FORMS:
        with TemporaryDirectory() as folder:
            forms.append(read_form(name, a.rows, Path(folder)))
        harness.note(json.dumps(forms[-1]))
    lost = {form["form"]: form["lost"] for form in forms if form.get("lost")}
    refused = [form["form"] for form in forms if "refused" in form]
    passes = not lost and refused == ["preferences"]
    return harness.Result(ours=forms, quality={"passes": passes, "lost": lost, "refused": refused})


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--rows", type=int, default=40)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
