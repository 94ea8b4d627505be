"""Tasks of one's own: templates, classes and metrics in the configuration, from rows to scores."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import toque
from fixtures.asked import texts_asked
from fixtures.kitchens import kitchen_in, tiny_config
from toque.cli import main
from toque.config.dump import differences, to_yaml
from toque.errors import ConfigError, DataError
from toque.evaluation.bootstrap import FILE, from_json
from toque.models.loading.provenance import OwnTask
from toque.sources.documents import template_parts
from toque.workflows.prepared_store import open_store

ADJECTIVES = {"good": ("warm", "fresh", "crisp"), "bad": ("cold", "stale", "burnt")}
ROWS = [
    {"text": f"The {dish} was {word} on day {n}.", "label": label, "dish": dish}
    for n in range(20)
    for dish in ("soup", "bread")
    for label, words in ADJECTIVES.items()
    for word in words
]
SENTIMENT = {
    "prompt": "Review: {text}\nSentiment:",
    "target": "{label}",
    "classes": ["good", "bad"],
}
DISH = {
    "prompt": "Name the dish: {text}",
    "target": "{dish}",
    "metrics": ["exact_match", "token_f1"],
}


def settings(
    folder: Path, rows: list[dict[str, Any]] = ROWS, **sections: Any
) -> toque.RunConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "sources": [{"path": str(folder / "rows.jsonl")}],
        "store": str(folder / "store"),
        "validation_fraction": 0.2,
        "tasks": {"sentiment": SENTIMENT, "dish": DISH},
    } | sections.pop("data", {})
    evaluation = {"generate": 24, "texts": 12} | sections.pop("evaluation", {})
    return tiny_config(
        run_dir=str(folder / "run"), data=data, evaluation=evaluation, **sections
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> toque.RunConfig:
    """A run that learns two tasks of the same rows, and goes by one of them."""
    folder = tmp_path_factory.mktemp("own")
    train = {
        "stop_after": "9 steps", "batch": "16 examples", "evaluate_every": "3 steps",
        "best_by": "sentiment_accuracy",
        "early_stopping": {"metric": "sentiment_macro_f1", "patience": 1, "min_delta": 1.0},
    }  # fmt: skip
    config = settings(folder, train=train)
    toque.train(config)
    return config


def test_metrics_of_tasks_are_those_of_every_evaluation(
    trained: toque.RunConfig,
) -> None:
    run = Path(trained.run_dir)
    events = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    found = [event["texts"] for event in events if event["event"] == "evaluation"]
    names = {f"sentiment_{name}" for name in ("accuracy", "macro_f1", "no_class")}
    assert found[0].keys() == names | {"dish_exact_match", "dish_token_f1"}
    # No macro-F1 rises by 1: the second evaluation without improvement is the last.
    assert [e["step"] for e in events if e["event"] == "evaluation"] == [3, 6]
    assert next(e for e in events if e["event"] == "end")["reason"] == "early_stopping"
    log = (run / "training.log").read_text()
    assert "sentiment no class" in log
    assert "best sentiment accuracy" in log


def test_final_scores_have_intervals_and_are_of_each_text(
    trained: toque.RunConfig,
) -> None:
    run = Path(trained.run_dir)
    scores = json.loads((run / "evaluation.json").read_bytes())
    assert scores["generated"]["texts"] == 48
    assert (
        scores["applies_to"]["sentiment_accuracy"]
        == scores["applies_to"]["dish_token_f1"]
        == 24
    )
    answers = [
        json.loads(line)
        for line in (run / "samples.jsonl").read_text().splitlines()[-48:]
    ]
    mine = [a for a in answers if a.get("task") == "sentiment"]
    right = sum(a["text"].strip() == a["reference"] for a in mine) / len(mine)
    assert scores["generated"]["sentiment_accuracy"] == pytest.approx(right, abs=1e-6)
    none = sum(a["text"].strip() not in ("good", "bad") for a in mine) / len(mine)
    assert scores["generated"]["sentiment_no_class"] == pytest.approx(none, abs=1e-6)
    low, high = scores["intervals"]["sentiment_accuracy"]
    assert low <= right <= high
    assert scores["tasks"]["sentiment"]["classes"] == ["good", "bad"]
    # What is read back gives the same scores.
    texts = from_json((run / FILE).read_bytes()).texts
    for name, value in scores["generated"].items():
        if name != "texts":
            m = texts.measures[name]
            assert float(m.score(m.values.sum(axis=0))) == pytest.approx(
                value, abs=1e-6
            ), name


def test_evaluate_compare_the_report_and_the_card_show_them(
    trained: toque.RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trained.run_dir
    metrics = toque.TrainedRun(Path(run), 0, "finished").metrics
    assert {"sentiment_choice_accuracy", "sentiment_ece", "dish_loss"} < metrics.keys()
    del metrics["texts"]  # their number, which is no score
    assert metrics == pytest.approx(toque.evaluate(run).metrics, abs=1e-5)
    assert main(["evaluate", run]) == 0
    assert re.search(
        r"sentiment macro f1 +0\.\d+ +0\.\d+ to 0\.\d+   \(24 texts\)",
        capfd.readouterr().out,
    )
    shutil.copytree(run, f"{run}-2")
    assert main(["compare", run, f"{run}-2"]) == 0
    assert re.search(
        r"sentiment macro f1 .*\+0\.0000 to \+0\.0000 +24", capfd.readouterr().out
    )
    assert main(["report", run]) == 0
    for page in (Path(run) / "report.html", Path(run) / "model" / "README.md"):
        text = page.read_text().replace("_", " ")
        assert "sentiment accuracy" in text, page
        assert "dish token f1" in text, page


def test_classes_of_a_task_of_ones_own_are_chosen_among_as_evaluation_does(
    tmp_path: Path, trained: toque.RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    run, store = trained.run_dir, open_store(trained)
    decode, code = store.codec().decode, trained.data.task_names.index("sentiment")
    rows = store.rows("validation")
    rows = rows[store.column("task")[rows] == code].tolist()
    whole = {f"Review: {row['text']}\nSentiment:": row for row in ROWS}
    records = [whole[decode(store.prompt(row)).strip()] for row in rows]
    found = toque.classify(run, records, task="sentiment")
    scores = json.loads((Path(run) / "evaluation.json").read_bytes())["tasks"][
        "sentiment"
    ]
    right = [
        one.answer == row["label"] for one, row in zip(found, records, strict=True)
    ]
    assert sum(right) / len(right) == pytest.approx(scores["accuracy"], abs=1e-6)
    asked = [one.prompt for one in found]
    assert set(asked) < whole.keys()
    file = tmp_path / "asked.jsonl"
    lines = [
        records[0]["text"],
        json.dumps(records[0]),
        json.dumps({"prompt": asked[0]}),
    ]
    file.write_text("\n".join(lines))
    assert {one.prompt for one in toque.classify(run, file=file, task="sentiment")} == {
        asked[0]
    }
    raw = toque.classify(run, asked[0], task="sentiment", raw=True)
    assert raw == toque.classify(run, records[0]["text"], task="sentiment")
    assert (
        main(["generate", run, "--task", "sentiment", "--prompt", records[0]["text"]])
        == 0
    )
    assert re.search(r"good 0\.\d+", capfd.readouterr().out)
    for task, record, message in (
        (
            "sentiment",
            {"txt": "Warm."},
            r"no text in text, but .*sentiment needs it.*are txt",
        ),
        ("dish", {"text": "Warm."}, r"task=dish has no classes\. Use toque\.generate"),
        (
            "difficulty",
            "Soup",
            r"was not trained for task=difficulty: its data.tasks is sentiment, dish",
        ),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            toque.classify(run, [record], task=task)


def test_a_task_with_texts_is_asked_by_name_of_a_run_and_of_its_exported_model(
    tmp_path: Path, trained: toque.RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    run, text, whole = (
        trained.run_dir,
        "The soup was cold.",
        "Name the dish: The soup was cold.",
    )
    (by_prompt,) = toque.generate(run, whole, temperature=0)
    exported = toque.export(run, tmp_path / "exported").folder
    for model in (run, exported):
        asked = toque.generate(
            model, [text, {"text": text}], task="dish", temperature=0
        )
        assert [(one.prompt, one.text) for one in asked] == [
            (whole, by_prompt.text)
        ] * 2
        assert (
            toque.generate(model, whole, task="dish", raw=True, temperature=0)[0]
            == asked[0]
        )
        (chosen,) = toque.classify(model, text, task="sentiment")
        assert chosen.prompt == f"Review: {text}\nSentiment:"
        assert chosen.probabilities.keys() == {"good", "bad"}
        with pytest.raises(
            ConfigError, match=r"has the classes good, bad\. Use toque\.classi"
        ):
            toque.generate(model, text, task="sentiment")
        with pytest.raises(
            ConfigError,
            match=r"was not trained for task=title: its .* is sentiment, di",
        ):
            toque.generate(model, text, task="title")
        capfd.readouterr()
        asks = ["generate", str(model), "--task"]
        assert main([*asks, "dish", "--prompt", text, "--best-of", "2"]) == 0
        assert capfd.readouterr().out.startswith(whole)
        assert main([*asks, "sentiment", "--prompt", text]) == 0
        assert re.search(
            r"\((good|bad) 0\.\d+, (good|bad) 0\.\d+\)", capfd.readouterr().out
        )
    card = (exported / "README.md").read_text()
    assert (
        "sentiment: `Review: {text}\\nSentiment:`, dish: `Name the dish: {text}`."
        in card
    )
    assert "prompt = 'Review: Your text\\nSentiment:'" in card
    # A damaged or crafted record is refused before the model is used.
    record = Path(run) / "model" / "toque" / "model.json"
    damaged = record.read_text().replace("dish: {text}", "dish: {text")
    (exported / "toque" / "model.json").write_text(damaged)
    for command in (
        ["generate", str(exported), "--prompt", "x"],
        ["serve", str(exported)],
    ):
        assert main(command) == 4
        assert (
            "the prompt 'Name the dish: {text' is not a template"
            in capfd.readouterr().err
        )


def test_a_record_takes_the_templates_that_a_configuration_does() -> None:
    def is_taken(read: Callable[[str], object], prompt: str) -> bool:
        with suppress(ConfigError, ValueError):
            read(prompt)
            return True
        return False

    found = {True: 0, False: 0}
    for length in range(1, 6):
        for prompt in map("".join, itertools.product("{}a:!", repeat=length)):
            taken = is_taken(template_parts, prompt)
            assert is_taken(partial(OwnTask, "task"), prompt) is taken, prompt
            found[taken] += 1
    assert min(found.values()) > 100


def test_a_text_does_not_stand_for_several_fields() -> None:
    task = OwnTask("oven", "{context}: {question}")
    with pytest.raises(
        ConfigError, match=r"has 2 fields, context, question\. Give records"
    ):
        texts_asked("How hot?", None, task=task, raw=False)
    record = {"context": "Ovens", "question": "How hot?", "answer": "Hot."}
    assert texts_asked([record], None, task=task, raw=False) == ["Ovens: How hot?"]


def test_a_function_of_ones_own_scores_a_task(
    tmp_path: Path, trained: toque.RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owntaskmetric.py").write_text(
        "def length(texts, references):\n    return [float(len(text)) for text in texts]\n"
        "def both(texts, references):\n    return {'n': len(texts)}\n"
    )
    monkeypatch.chdir(tmp_path)
    tasks = {"dish": {"metrics": ["owntaskmetric:length", "owntaskmetric:both"]}}
    config = toque.configure(trained, data={"tasks": tasks})
    assert [change.is_safe for change in differences(trained, config)] == [True]
    found = toque.evaluate(trained.run_dir, config).texts
    assert found.overall["dish_n"].value == 24
    assert found.overall["dish_length"].low is not None
    assert found.overall["sentiment_accuracy"].n == 24
    # A run folder runs no code of its own accord: its file names what somebody else chose.
    (Path(trained.run_dir) / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(
        ConfigError, match=r"owntaskmetric:length \(data\.tasks\.dish\.metrics"
    ):
        toque.evaluate(trained.run_dir)
    assert "dish_length" in toque.evaluate(trained.run_dir, trust_code=True).metrics


def prepared(folder: Path, rows: list[dict[str, Any]] = ROWS, **tasks: Any) -> Any:
    return toque.prepare(settings(folder, rows, data={"tasks": tasks}), replace=True)


def test_rows_of_no_class_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [*ROWS, {"text": "It was soup.", "label": "neutral"}, {"text": "So so."}]
    report = prepared(tmp_path, rows, sentiment=SENTIMENT).report
    assert report.dropped == {
        "an answer that is not a class of sentiment": 1,
        "no target": 1,
    }
    assert report.notes["examples of the task sentiment, answer good"] == 120
    # Of a record that has another example it is counted beside it.
    both = prepared(
        tmp_path, rows, sentiment=SENTIMENT, name={**DISH, "target": "{text}"}
    )
    assert both.report.dropped == {}
    assert (
        both.report.notes["records without an example of the task sentiment: no target"]
        == 1
    )


def test_tasks_and_classes_are_counted_in_the_rows_in_use(tmp_path: Path) -> None:
    config = settings(
        tmp_path, [*ROWS, *ROWS[:30]], data={"tasks": {"sentiment": SENTIMENT}}
    )
    notes = toque.prepare(config).report.notes
    assert notes["examples of the task sentiment"] == 240
    notes = toque.prepare(
        toque.configure(config, data={"max_examples": 100}), replace=True
    ).report.notes
    counts = [
        notes[f"examples of the task sentiment, answer {name}"]
        for name in ("good", "bad")
    ]
    assert notes["examples of the task sentiment"] == sum(counts) == 100


def test_a_class_that_is_only_held_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text(
        json.dumps({"text": "It was soup.", "label": "neutral"})
    )
    task = SENTIMENT | {"classes": ["good", "bad", "neutral"]}
    data = {
        "tasks": {"sentiment": task},
        "validation": [{"path": str(tmp_path / "held.jsonl")}],
    }
    with pytest.raises(
        DataError,
        match=r"'neutral', but none of the 1 records in .* is a training example",
    ):
        toque.prepare(settings(tmp_path, data=data))


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_a_column_of_true_and_false_has_two_classes(tmp_path: Path, form: str) -> None:
    rows = [{"text": row["text"], "good": row["label"] == "good"} for row in ROWS]
    task = {"prompt": "{text}", "target": "{good}", "classes": ["true", "false"]}
    data: dict[str, Any] = {"tasks": {"good": task}}
    if form == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
        parquet.write_table(table, tmp_path / "rows.parquet")
        data["sources"] = [{"path": str(tmp_path / "rows.parquet")}]
    report = toque.prepare(settings(tmp_path, rows, data=data)).report
    assert report.dropped == {}
    for answer in ("true", "false"):
        assert report.notes[f"examples of the task good, answer {answer}"] == 120


def test_examples_of_a_record_share_a_side_and_files_have_tasks_of_their_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "more.csv").write_text(
        "question,context,label\n"
        + "".join(f"How hot is {n}?,Ovens,{n}\n" for n in range(30))
    )
    config = settings(tmp_path)
    asked = {"prompt": "{context}: {question}", "target": "{label}"}
    data = {
        "sources": [{"path": str(tmp_path / name)} for name in ("rows.jsonl", "more.csv")],
        "tasks": {"oven": asked}, "task_weights": {"oven": 2.0},
    }  # fmt: skip
    store = toque.prepare(toque.configure(config, data=data)).store
    names = toque.configure(config, data=data).data.task_names
    codes, starts = (
        store.column("task").tolist(),
        store.column("starts_record").astype(bool),
    )
    assert {names[code] for code in codes} == {"sentiment", "dish", "oven"}
    assert codes.count(names.index("oven")) == 30
    record = starts.cumsum()
    assert all(
        len(set(store.split[record == n].tolist())) == 1
        for n in range(1, record[-1] + 1)
    )
    oven = codes.index(names.index("oven"))
    assert store.codec().decode(store.prompt(oven)).startswith("Ovens: How hot is")


@pytest.mark.parametrize("alone", [True, False])
def test_a_task_whose_column_the_first_rows_lack_is_learnt(
    tmp_path: Path, alone: bool
) -> None:
    late = [{"text": row["text"] + " Late.", "dish": row["dish"]} for row in ROWS]
    late = [
        row | ({"short": f"It is {n}."} if n >= 60 else {})
        for n, row in enumerate(late)
    ]
    path = tmp_path / "late.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in late))
    tasks = {"dish": DISH, "short": {"prompt": "Sum up: {text}", "target": "{short}"}}
    sources = [{"path": str(path)}] if alone else [{"path": str(tmp_path / "*.jsonl")}]
    data = {"sources": sources, "tasks": tasks}
    notes = toque.prepare(settings(tmp_path, data=data)).report.notes
    assert notes["examples of the task short"] == 180
    # Of the other file, none of whose rows has the column, the task is not asked.
    assert notes["records without an example of the task short: no target"] == 60


def test_neighbours_with_one_text_each_are_two_records(tmp_path: Path) -> None:
    rows = [{"q": f"same {n}", name: "yes"} for n in range(20) for name in ("x", "y")]
    path = tmp_path / "neighbours.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows[:4]]))
    tasks = {
        name: {"prompt": f"{name}: {{q}}", "target": f"{{{name}}}"} for name in "xy"
    }
    tasks["y"]["prompt"] = tasks["x"]["prompt"]
    data = {"sources": [{"path": str(path)}], "tasks": tasks}
    result = toque.prepare(settings(tmp_path, data=data))
    assert (result.store.split < 255).sum() == 40
    assert result.report.dropped == {"duplicate": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "{txt}"}, r"no column for prompt of sentiment: txt.*'label'"),
        ({"prompt": "{text:>9}"}, "has a field without a name or with a format"),
        ({"classes": ["good", "bad", "Bad"]}, r"classes has 'Bad', but no record in rows\.jsonl"),
        ({"classes": ["Good", "Bad"]}, r"240 an answer that is not a class of sentiment"),
        ({"target": "{dish}", "classes": ["soup", "Brot"]}, r"classes has 'Brot', but no record"),
        ({"target": "{label}, and it was served in the large room", "classes":
          [f"{label}, and it was served in the large room" for label in ADJECTIVES]},
         r"which takes \d+ tokens including the end token, but data\.max_target_tokens is 8"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_task_is_said(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    data = {"tasks": {"sentiment": SENTIMENT | change}, "max_target_tokens": 8}
    with pytest.raises((ConfigError, DataError), match=message):
        toque.prepare(settings(tmp_path, data=data))
    assert not (tmp_path / "store" / "manifest.json").exists()


def test_a_task_that_no_file_has_the_columns_of_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data\.tasks\.dish needs the columns plate, text"
    ):
        prepared(tmp_path, sentiment=SENTIMENT, dish=DISH | {"target": "{plate}"})


def test_tasks_of_ones_own_and_of_recipes_are_scored_alike(tmp_path: Path) -> None:
    recipes = kitchen_in(
        tmp_path,
        data={"tasks": ["write", "difficulty"], "validation_fraction": 0.4},
        evaluation={"generate": 6, "metrics": ["exact_match"]},
        train={"best_by": "difficulty_macro_f1"},
    )
    toque.train(str(recipes))
    scores = json.loads((tmp_path / "run" / "evaluation.json").read_bytes())
    names = {f"difficulty_{name}" for name in ("accuracy", "macro_f1", "no_class")}
    assert scores["generated"].keys() == {"texts", "exact_match", *names}
    assert scores["applies_to"]["exact_match"] == 6
