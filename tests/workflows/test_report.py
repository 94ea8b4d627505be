"""The pages of stores and runs, and the tables of `toque prepare`."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

import toque
from fixtures.kitchens import tiny_config
from toque.cooking.schemas.reader import RecipeReader
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.store_plan import PrepareSettings
from toque.errors import CheckpointError, ConfigError, DataError
from toque.runs.history import METRICS
from toque.sources.records import Source
from toque.workflows.report import report, verify

SCRIPT = '<script>alert("1")</script>'
VOID = {
    "meta",
    "br",
    "img",
    "input",
    "link",
    "hr",
    "rect",
    "line",
    "circle",
    "polyline",
}


class Page(HTMLParser):
    """What a browser would make of a page: its elements, their attributes, the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data


def checked(path: Path) -> Page:
    """The page, after what must hold of every page: closed elements, nothing fetched or run."""
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {
        name for name in names if name in ("src", "href") or name.startswith("on")
    }
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    return page


def recipe(
    title: str, step: str = "Simmer everything gently for 20 minutes; serve."
) -> str:
    return json.dumps(
        {"title": title, "ingredients": ["1 cup lentils", "2 carrots"], "steps": [step]}
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of hostile recipes, its tokenizer learnt from them."""
    folder = tmp_path_factory.mktemp("report")
    lines = [
        recipe(f"Soup {i}", f"Simmer the {SCRIPT} soup {i} for 20 minutes.")
        for i in range(40)
    ]
    lines += [
        "{broken" + SCRIPT,
        '{"title": "\\ud800' + '</pre>"}',
        recipe("Soup [red]"),
    ]
    source = folder / "soups [bold]<b>.jsonl"
    source.write_text("\n".join(lines))
    settings = PrepareSettings(family_kind="decoder", tokenizer="trained:300")
    prepare(
        [Source(str(source), RecipeReader())], store=folder / "store", settings=settings
    )
    return folder / "store"


def test_a_store_becomes_a_page(store, tmp_path):
    out = tmp_path / "deep" / "page.html"
    written = report(store, out=out)
    assert (written.file, written.bytes) == (out, out.stat().st_size)
    assert str(out) in str(written)
    page = checked(out)
    assert "Read 43 records" in page.text
    assert "soups [bold]<b>.jsonl" in page.text
    assert "{broken" + SCRIPT in page.text
    assert page.tags.count("details") == 20 + 2 + 1
    labels = [value for name, value in page.attributes if name == "aria-label"]
    for plot in (
        "Prompt lengths",
        "Target lengths",
        "Quality",
        "Difficulty",
        "Nutrition",
    ):
        assert any(label.startswith(f"{plot}.") for label in labels), plot


def test_a_page_stands_beside_its_store_and_does_not_harm_it(store):
    report(store)
    checked(store / "report.html")
    assert "all hashes correct" in str(verify(store))


def test_all_that_is_damaged_of_a_run_is_named_and_an_absent_store_is_said(own_kitchen):
    run = toque.train(tiny_config()).folder
    shard = max(
        (own_kitchen / "store" / "shards").rglob("*.*"), key=lambda p: p.stat().st_size
    )
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match=rf"{shard.name}.* 2 other parts are correct\."):
        verify(run)
    weights = next(run.glob("checkpoints/*/model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as told:
        verify(run)
    assert re.search(
        rf"model.safetensors has .*{shard.name}.* 1 other parts", str(told.value)
    )
    shutil.move("store", "elsewhere")
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "best")
    assert verify(run).parts == (
        f"{run}: no checkpoint yet",
        "store: not verified: the store of the run does not exist",
    )


def test_a_store_without_its_report_says_how_to_get_it(store, tmp_path):
    (tmp_path / "manifest.json").write_bytes((store / "manifest.json").read_bytes())
    with pytest.raises(DataError, match="It keeps the store"):
        report(tmp_path)


def test_the_terminal_table_takes_names_as_they_are(store, capsys):
    from rich.console import Console

    from toque.cli.console import print_page
    from toque.data.prepare.data_report import Report
    from toque.reports.store_page import build_store_page

    found = Report.read_from(store)
    print_page(build_store_page(store, found), Console(width=200, highlight=False))
    shown = capsys.readouterr().out
    assert "soups [bold]<b>.jsonl" in shown
    assert "Read 43 records: kept 41, dropped 2." in shown
    assert re.search(r"not JSON\s+1\s+2\.33%\s+soups \[bold\]<b>\.jsonl:41", shown)


def run_folder(folder: Path, *, end: bool) -> Path:
    """Events of a run as a trainer writes them, with a torn last line."""
    start = {"event": "start", "step": 0, "epoch": 0.0, "stop_after": "40 steps"}
    events = [
        start | {"versions": {"toque": SCRIPT}, "parameters": {"total": 1_100_000}}
    ]
    for step in range(1, 31):
        loss = None if step == 7 else 4.0 / step
        events.append(
            {"event": "step", "step": step, "epoch": step / 10, "loss": loss, "lr": 1e-3,
             "grad_norm": 1.0, "target_tokens": 10, "tokens": 20, "pad_fraction": 0.1,
             "seconds": 0.5, "tokens_per_second": 40.0, "data_wait_seconds": 0.1, "mfu": None,
             "parts": {"data_wait": 0.1, "forward_backward": 0.4}}
        )  # fmt: skip
        if step % 10 == 0:
            metrics = {"loss": 1.0 + abs(step - 20) / 10, "perplexity": 3.0}
            events.append(
                {"event": "evaluation", "step": step, "epoch": 1, "metrics": metrics}
            )
    events.append({"event": "warning", "step": 30, "message": f"disk {SCRIPT}"})
    if end:
        last = {"event": "end", "step": 30, "reason": "early_stopping", "seconds": 15.0}
        events.append(last | {"best": {"step": 20, "loss": 1.0}, "error": None})
    torn = '{"event": "step", "st'
    folder.mkdir(exist_ok=True)
    (folder / METRICS).write_text("\n".join([*map(json.dumps, events), torn]))
    return folder


@pytest.mark.parametrize("end", [False, True])
def test_a_run_becomes_a_page_going_or_ended(tmp_path, *, end):
    folder = run_folder(tmp_path / "run", end=end)
    report(folder)
    page = checked(folder / "report.html")
    said = "Stopped early, as requested, at step 30." if end else "Running, at step 30."
    assert said in page.text
    assert (
        "Held-out loss was lowest at step 20 (1.0000). 1 later evaluation was higher."
        in page.text
    )
    assert f"disk {SCRIPT}" in page.text
    assert ("no end recorded" in page.text) is not end
    assert "Utilisation" not in page.text  # mfu was never known
    assert "What limits this run: waiting for data." in page.text
    assert re.search(r"waiting for data\s*0:03\s*20\.0%", page.text) is not None


def test_a_whole_run_shows_scores_samples_and_settings(tmp_path):
    folder = run_folder(tmp_path / "run", end=True)
    (folder / "config.yaml").write_text(f"seed: 17  # {SCRIPT}\n")
    scores = {"step": 30, "heldout": {"loss": 1.5}, "generated": {"bleu": 12.5}}
    more = {
        "intervals": {"bleu": [11.0, 14.0]},
        "slices": {"length": {"short": {"bleu": [9.5]}}},
    }
    (folder / "evaluation.json").write_text(json.dumps(scores | more))
    samples = [
        {"step": s, "prompt": "p", "text": f"{SCRIPT} {s}"} for s in range(10, 100, 10)
    ]
    (folder / "samples.jsonl").write_text(
        "\n".join(map(json.dumps, samples)) + '\n{"torn'
    )
    report(folder)
    text = checked(folder / "report.html").text
    for shown in (
        "11.0000 to 14.0000",
        "By length",
        "9.5000",
        "steps 10 to 90",
        f"{SCRIPT} 90",
        "seed: 17",
    ):
        assert shown in text, shown
    assert f"{SCRIPT} 80" not in text  # of nine texts of a prompt, three


def test_what_is_neither_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a run \(metrics.jsonl\) or a store"):
        report(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="Training writes this file"):
        report(tmp_path)
    folder = run_folder(tmp_path / "run", end=True)
    with pytest.raises(ConfigError, match="Name another file with out"):
        report(folder, out=folder)
