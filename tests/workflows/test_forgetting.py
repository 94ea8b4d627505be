"""The held-out loss of each source, before and after training."""

import json
from pathlib import Path
from typing import Any

import pytest

import toque
from fixtures.kitchens import TINY, Notices, StopAt, start_model


@pytest.fixture(
    scope="module", params=["gpt2", pytest.param("t5", marks=pytest.mark.slow)]
)
def settings(request: pytest.FixtureRequest, tmp_path_factory: Any) -> toque.RunConfig:
    """Recipes, and half an epoch of general texts without prompts."""
    folder = tmp_path_factory.mktemp(request.param)
    model = start_model(folder, request.param)
    rows = [
        {"text": " ".join(f"The {n} travelled {n + i} miles." for i in range(20))}
        for n in range(40)
    ]
    general = folder / "general.jsonl"
    general.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"path": str(folder / "a.jsonl")}, {"path": str(general), "weight": 0.5}]
    config = toque.configure(
        TINY | {"model": {"family": "auto", "start_from": str(model)}},
        adapter={"r": 4},
        data={"sources": sources, "store": str(folder / "mixed")},
        optim={"peak_lr": 0.03, "warmup": "0 steps"},
        train={"stop_after": "4 steps", "keep_best": 0},
        evaluation={"max_examples": None, "generate": 0},
        run_dir=str(folder / "mixed-run"),
    )
    toque.prepare(config)
    return config


def sources_of(run: Path) -> dict[str, dict[str, float]]:
    return json.loads((run / "evaluation.json").read_text())["sources"]


def test_a_resumed_run_reports_the_losses_of_its_beginning(settings):
    toque.train(settings, callbacks=[StopAt(2)])
    heard = Notices()
    run = toque.train(settings, reporter=heard)
    scores = sources_of(run.folder)
    assert [*scores] == ["source 1 (a.jsonl)", "source 2 (general.jsonl)"]
    events = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    (before,) = [event for event in events if event["event"] == "before"]
    for source, losses in scores.items():
        assert losses["before"] == before["source_losses"][source]
        assert losses["change"] == losses["after"] - losses["before"] != 0
        assert losses["examples"] > 1
    general = "source 2 (general.jsonl)"
    change = scores[general]["change"]
    begin = f"{general}: loss {scores[general]['before']:.4f} before"
    assert any(begin in text for text in heard.notices)
    assert any(f"({change:+.4f}, " in text for text in heard.notices)

    toque.evaluate(run)
    for source, losses in sources_of(run.folder).items():
        assert losses == pytest.approx(scores[source], abs=1e-5)
    page = toque.report(run).file.read_text()
    assert page.index("How it ran") > page.index("What it forgot")
    assert general in page


@pytest.mark.slow
def test_without_a_change_of_the_weights_the_loss_is_the_same(settings):
    folder = str(Path(settings.run_dir).parent / "unchanged")
    config = toque.configure(
        settings,
        optim={"peak_lr": 1e-12},
        train={"stop_after": "1 steps"},
        run_dir=folder,
    )
    for losses in sources_of(toque.train(config).folder).values():
        assert losses["after"] == pytest.approx(losses["before"], abs=1e-5)


@pytest.mark.slow
def test_a_single_source_has_no_comparison(settings):
    folder = Path(settings.run_dir).parent
    alone = {
        "sources": [settings.data.sources[0].model_dump()],
        "store": str(folder / "alone"),
    }
    config = toque.configure(
        settings,
        data=alone,
        train={"stop_after": "1 steps"},
        run_dir=str(folder / "alone-run"),
    )
    run = toque.train(config)
    assert sources_of(run.folder) == {}
    assert '"before"' not in (run.folder / "metrics.jsonl").read_text()
