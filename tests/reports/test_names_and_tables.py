"""Classes by their names, confusion tables that fit, and the order of a page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from toque.cli.console import print_page
from toque.cooking.labels.origins import CUISINES
from toque.cooking.schemas.reader import RecipeReader
from toque.data.prepare.data_report import Report
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.store_plan import PrepareSettings
from toque.evaluation.classification import class_scores
from toque.evaluation.memorisation import Memorisation, SharedRun
from toque.reports.run_page import SECTIONS, build_run_page
from toque.reports.score_tables import make_score_grids
from toque.reports.store_page import build_store_page
from toque.runs.history import METRICS
from toque.runs.places import FolderPlace
from toque.runs.run_record import RunRecord
from toque.serving.static_files import SITE
from toque.sources.records import Source

N_OF = {"Italian": 30, "Mexican": 12, "Thai": 1}
"""Recipes of each cuisine in the store; ten more name none, and one each all others."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuisines")
    tags = [name for name in CUISINES for _ in range(N_OF.get(name, 1))] + [
        "dinner"
    ] * 10
    lines = [
        {"title": f"Dish {n}", "tags": [tag],
         "ingredients": [f"{n} cups peas", "1 onion", "Garnish: mint", "Equipment: a sieve"],
         "directions": [f"Boil the peas with the onion for {n} minutes.", "Photograph by Ida Berg"]}
        for n, tag in enumerate(tags, start=1)
    ]  # fmt: skip
    source = folder / "dishes.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    settings = PrepareSettings(family_kind="decoder", tokenizer="trained:300")
    prepare(
        [Source(str(source), RecipeReader())],
        store=folder / "s",
        settings=settings,
        workers=1,
    )
    return folder / "s"


def report_of(store: Path) -> Report:
    found = Report.read_from(store)
    assert found is not None
    return found


def test_cuisines_are_told_by_name_the_commonest_first(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = build_store_page(store, report_of(store))
    sections = {one.name: one.parts for one in page.sections}
    *_, labels = sections["columns"]
    (told,) = (row[2] for row in labels.rows if row[0] == "Cuisine")
    n = sum(N_OF.values()) + len(CUISINES) - len(N_OF) + 10
    first, second, *_, others, unknown = told.split(", ")
    assert first == f"Italian {30 / n:.1%}"
    assert second == f"Mexican {12 / n:.1%}"
    assert others == f"{len(CUISINES) - 8} others {(len(CUISINES) - 8) / n:.1%}"
    assert unknown == f"unknown {10 / n:.1%}"
    assert "mean" not in told
    print_page(page, Console(width=300, highlight=False))
    assert told in capsys.readouterr().out
    assert all(name in page.html() for name in CUISINES)


def test_what_was_removed_is_counted_in_the_report(store: Path) -> None:
    notes, n = report_of(store).notes, report_of(store).read
    assert notes["credits among the steps removed"] == n
    assert notes["equipment among the ingredients removed"] == n
    assert notes["section names before an ingredient removed"] == n


# Confusion tables


def test_a_confusion_table_of_many_classes_fits() -> None:
    truths = [*CUISINES, "Thai", "Thai", "Thai", "Thai", "Thai"]
    answers = [*CUISINES, "Greek", "Greek", "Korean", "French", "Vietnamese"]
    table = class_scores(answers, truths, list(CUISINES)).lines()
    assert max(map(len, table)) <= 100
    assert len(table) == 1 + len(CUISINES)
    (thai,) = (line for line in table if line.startswith("Thai"))
    assert thai.split(maxsplit=4) == [
        "Thai", "6", "1", "0.286", "Greek 2, French 1, Korean 1, others 1",
    ]  # fmt: skip


def evaluation() -> dict[str, object]:
    """An evaluation.json with a task of many classes, one of few, and one without."""
    cuisine = class_scores(["Thai", "Greek"], ["Thai", "Thai"], list(CUISINES))
    return {
        "heldout": {"loss": 1.5},
        "generated": {"recipe_score": 0.31, "bleu": 4.0},
        "tasks": {
            "write": {"examples": 9, "loss": 1.25, "perplexity": 3.49},
            "cuisine": {
                "examples": 2, "loss": 2.0, "accuracy": cuisine.accuracy, "majority": 1.0,
                "macro_f1": 0.5, "ece": 0.25, "classes": list(CUISINES),
                "confusion": cuisine.confusion.tolist(),
            },
            "difficulty": {
                "examples": 3, "loss": 1.0, "accuracy": 2 / 3, "majority": 2 / 3,
                "macro_f1": 0.4, "ece": 0.1, "classes": ["easy", "hard"],
                "confusion": [[2, 0], [1, 0]],
            },
        },
    }  # fmt: skip


def test_task_accuracies_and_answers_are_tables_of_the_run_page() -> None:
    grids = {grid.title: grid for grid in make_score_grids(evaluation())}
    assert [row[:4] for row in grids["Tasks"].rows] == [
        ("write", "9", "1.2500", "-"),
        ("cuisine", "2", "2.0000", "0.5000"),
        ("difficulty", "3", "1.0000", "0.6667"),
    ]
    assert grids["Answers to difficulty"].rows == [
        ("easy", "2", "0"),
        ("hard", "1", "0"),
    ]
    assert [row for row in grids["Answers to cuisine"].rows if row[0] == "Thai"] == [
        ("Thai", "2", "1", "0.667", "Greek 1")
    ]
    assert "Answers to write" not in grids


@pytest.mark.parametrize(
    "harm",
    [
        {"classes": ["a", "b"], "confusion": [[1, 2], [3]]}, {"classes": 7, "confusion": 3},
        {"classes": ["a", "b"], "confusion": [[1, 2]]}, {"classes": [1], "confusion": [[1]]},
        {"classes": ["a"] * 8, "confusion": [[1]]}, {"classes": ["a"], "confusion": [["x"]]},
    ],
)  # fmt: skip
def test_answers_that_are_no_table_are_left_out_of_a_strangers_file(
    harm: dict[str, Any],
) -> None:
    given = evaluation() | {"tasks": {"x": {"examples": 2, "loss": None} | harm}}
    grids = {grid.title: grid for grid in make_score_grids(given)}
    assert grids["Tasks"].rows[0][:3] == ("x", "2", "-")
    assert "Answers to x" not in grids


def test_runs_shared_with_training_are_a_table_beside_those_of_people() -> None:
    runs = Memorisation([SharedRun(31, 62, 7)], [SharedRun(8, 80, 5)], 40, 80)
    (grid,) = (
        grid
        for grid in make_score_grids(evaluation() | {"memorisation": runs.record()})
        if grid.title == "Memorisation"
    )
    assert grid.rows[0] == ("texts", "1", "1")
    assert ("longest, tokens", "31", "8") in grid.rows
    assert ("largest share of a text", "0.5000", "0.1000") in grid.rows
    assert "40 of 80 training examples were read, for runs of 8 tokens" in grid.note
    assert "Memorisation" not in {grid.title for grid in make_score_grids(evaluation())}


# The page of a run


@pytest.fixture
def page(tmp_path: Path) -> str:
    counts = {"total": 15_200_000, "non_embedding": 1, "trainable": 304_000}
    start = {"event": "start", "step": 0, "stop_after": "2 steps", "parameters": counts}
    step = {
        "event": "step",
        "step": 1,
        "epoch": 0.5,
        "loss": 3.0,
        "tokens": 5,
        "seconds": 1.0,
    }
    scored = {"event": "evaluation", "step": 1, "epoch": 0.5, "metrics": {"loss": 2.0}}
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation()))
    sample = {"step": 1, "prompt": "toast", "text": "Toast the bread.", "metrics": {}}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample))
    (tmp_path / METRICS).write_text(
        "\n".join(map(json.dumps, [start, step, scored])) + "\n"
    )
    run = RunRecord(FolderPlace(tmp_path))
    run.read_whole()
    return build_run_page(run, "run").html()


def test_the_live_page_has_a_place_for_every_section(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text("")
    names = [
        one.name
        for one in build_run_page(RunRecord(FolderPlace(tmp_path)), "run").sections
    ]
    assert names == list(SECTIONS)
    live = (SITE / "runs.html").read_text()
    assert re.findall(r'<section id="([^"]+)"', live) == ["runs", *names]


def test_texts_and_a_hint_stand_before_tables_and_an_adapter_shows_what_it_trains(
    page,
) -> None:
    assert 0 < page.index("Generated texts") < page.index("<table>")
    assert "The texts are still poor: their recipe score is 0.31 of 1" in page
    assert "304,000 (2.00%)" in page


def test_a_wide_table_says_that_it_goes_on(page: str) -> None:
    """It can be scrolled with the keyboard, and a shadow stands at the side that is cut."""
    assert (
        page.count('<div class="table" role="region" tabindex="0"')
        == page.count("<table>")
        > 0
    )
    style = page[: page.index("</style>")]
    assert "no-repeat local" in style
    assert "no-repeat scroll" in style
