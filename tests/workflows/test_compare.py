"""Runs held against each other: what differs, what it is worth, and what cannot be said."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import toque
from toque.cli import main
from toque.errors import CheckpointError, ConfigError
from toque.evaluation.bootstrap import FILE, PerText, TextTable, losses_table, to_json
from toque.runs.history import METRICS
from watching.written_run import WrittenRun

DRAWN = np.random.default_rng(3)
NATS = DRAWN.normal(50.0, 10.0, 120)
SCORES = DRAWN.uniform(0.2, 0.9, 40)


def run_of(
    folder: Path,
    *,
    better_by: float = 0.0,
    score: float = 0.0,
    rate: str = "0.001",
    texts: str = "t",
    tokens: int = 20,
    scored: bool = True,
) -> Path:
    """A run whose held-out examples cost `better_by` nats less each, but for some noise."""
    run = WrittenRun(folder)
    for step in range(1, 11):
        run.step(step)
    run.evaluation(10, 2.0)
    run.system(10, gpus=[{"index": 0, "power_watts": 300.0}], seconds=12.0)
    run.end(10)
    (folder / "config.yaml").write_text(
        f"run_dir: {folder}\noptim: {{peak_lr: {rate}}}\nseed: 3\n"
    )
    if scored:
        noise = np.random.default_rng(len(folder.name)).normal(0.0, 1.0, len(NATS))
        losses = NATS - better_by + noise
        names, sizes = (
            [f"{texts}{i}" for i in range(len(losses))],
            np.full((2, len(losses)), 80.0),
        )
        sizes[0] = tokens
        examples = losses_table(names, losses, *sizes)
        keys = [f"{texts}{i}" for i in range(len(SCORES))]
        written = TextTable(keys, {"recipe_score": PerText.mean(SCORES + score)})
        (folder / FILE).write_text(to_json(examples=examples, texts=written, step=10))
        evaluation = {"step": 10, "heldout": {"loss": 2.5, "target_tokens": 2400},
                      "generated": {"recipe_score": 0.5, "texts": 40}}  # fmt: skip
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


def with_objective(run: Path, kind: str, **measured: float) -> Path:
    """Change a run to another objective, with its measurements of held-out pairs."""
    with (run / "config.yaml").open("a") as file:
        file.write(f"objective: {{kind: {kind}}}\n")
    record = json.loads((run / "evaluation.json").read_text())
    record["heldout"] |= measured
    (run / "evaluation.json").write_text(json.dumps(record))
    if measured:
        lines = (run / METRICS).read_text().splitlines()
        events = [json.loads(line) for line in lines]
        for event in events:
            if event["event"] == "step":
                event.update(measured)
            if event["event"] == "evaluation":
                event["metrics"].update(measured)
        (run / METRICS).write_text("".join(json.dumps(e) + "\n" for e in events))
    return run


def test_loss_of_pairs_is_not_held_against_a_loss_per_token(tmp_path):
    first = run_of(tmp_path / "a")
    other = run_of(tmp_path / "bb", better_by=3.0, score=-0.1)
    pairs = {"rewards/accuracies": 0.75, "rewards/margins": 0.5}
    with_objective(other, "dpo", **pairs)
    found = toque.compare(first, other)
    assert found.sentence.startswith("a is better than bb: recipe score 0.1000 higher")
    assert "held-out loss" not in found.sentence
    assert found.record["runs"]["a"]["scores"]["loss"] == 2.5
    assert found.record["runs"]["bb"]["scores"] == {
        "pair_loss": 2.5, "target_tokens": 2400, "recipe_score": 0.5, "texts": 40, **pairs,
    }  # fmt: skip
    text = str(found)
    for row in (
        r"held-out loss of pairs +- +2\.5000",
        r"accuracy of pairs +- +0\.7500",
        r"lowest held-out loss +2\.0000 at step 10 +-",
        r"lowest held-out loss of pairs +- +2\.0000 at step 10",
    ):
        assert re.search(f"^  {row}$", text, re.MULTILINE)
    (note,) = found.record["notes"]
    assert note.startswith("Objectives: sft (a), dpo (bb). The held-out loss")
    page = found.page.read_text()
    assert "Objectives: sft (a), dpo (bb)" in page
    assert "Training loss of pairs, smoothed" in page


def test_held_out_loss_does_not_rank_runs_that_learn_from_rewards(tmp_path):
    folders = [
        with_objective(run_of(tmp_path / name, better_by=3.0 * n), "grpo")
        for n, name in enumerate(("a", "bb"))
    ]
    found = toque.compare(*folders)
    assert found.record["differences"]["bb"]["loss"]["better"] == "other"  # a fact
    assert found.sentence.startswith("bb and a do not differ significantly: recipe")
    for folder in folders:
        table = json.loads((folder / FILE).read_text())
        table["texts"] = {"keys": [], "measures": {}}
        (folder / FILE).write_text(json.dumps(table))
    found = toque.compare(*folders)
    assert found.sentence.startswith("bb and a are not ranked, because")


def test_cookable_is_named_before_the_recipe_score(tmp_path):
    folders = [
        with_objective(run_of(tmp_path / name, score=score), "grpo")
        for name, score in (("a", 0.0), ("bb", 0.1))
    ]
    for folder in folders:
        table = json.loads((folder / FILE).read_text())
        measures = table["texts"]["measures"]
        measures["cookable"] = measures["recipe_score"]
        (folder / FILE).write_text(json.dumps(table))
    sentence = toque.compare(*folders).sentence
    assert sentence.startswith("bb is better than a: cookable 0.1000 higher (")
    assert "and recipe score 0.1000 higher (" in sentence


def test_the_better_run_is_named_with_its_interval_and_cost(tmp_path):
    first = run_of(tmp_path / "a")
    other = run_of(tmp_path / "bb", better_by=3.0, rate="0.003")
    found = toque.compare(first, other)
    loss = found.record["differences"]["bb"]["loss"]
    assert loss["low"] < -3.0 / 20 < loss["high"] < 0
    assert loss["better"] == "other"
    assert loss["pairs"] == 120
    assert found.record["settings"] == {"optim.peak_lr": {"a": "0.001", "bb": "0.003"}}
    assert found.record["runs"]["a"]["cost"] == {
        "steps": 10, "training_seconds": 20.0, "tokens": 1000, "gpu_watt_hours": 1.0,
    }  # fmt: skip
    assert found.sentence.startswith("bb is better than a: held-out loss 0.1")
    assert "Not significant: recipe score differs by +0.0000" in found.sentence
    assert found.sentence.endswith("bb took 1.00 times the training time of a.")
    text = str(found)
    for part in (
        "Settings that differ",
        "optim.peak_lr  0.001  0.003",
        "* better",
        "Cost",
    ):
        assert part in text
    page = found.page.read_text()
    assert found.page == tmp_path / "comparison.html"
    assert page.count("<svg") >= 5
    assert "<script" not in page


def test_what_noise_could_have_done_is_not_told_apart(tmp_path):
    found = toque.compare(run_of(tmp_path / "a"), run_of(tmp_path / "bb"))
    start = "bb and a do not differ significantly: held-out loss differs by"
    assert found.sentence.startswith(start)
    assert found.record["differences"]["bb"]["loss"]["better"] is None


def test_better_by_one_measure_and_worse_by_the_other(tmp_path):
    found = toque.compare(
        run_of(tmp_path / "a"), run_of(tmp_path / "bb", better_by=3.0, score=-0.1)
    )
    assert "is better than a by held-out loss" in found.sentence
    assert "and worse by recipe score 0.1000 lower" in found.sentence


def test_few_texts_get_no_interval_and_no_star(tmp_path):
    """Four texts whose BLEU was 0.06 and 0.00 were "* better"."""
    folders = [
        run_of(tmp_path / name, better_by=9.0 * n) for n, name in enumerate(("a", "bb"))
    ]
    for n, folder in enumerate(folders):
        names, numbers = [f"t{i}" for i in range(9)], (50.0 - 9.0 * n, 20.0, 80.0)
        examples = losses_table(names, *(np.full(9, number) for number in numbers))
        texts = TextTable(
            [f"t{i}" for i in range(10)], {"bleu": PerText.mean(SCORES[:10] + n)}
        )
        table = to_json(examples=examples, texts=texts, step=10)
        (folder / FILE).write_text(table)
    found = toque.compare(*folders)
    loss, bleu = (found.record["differences"]["bb"][name] for name in ("loss", "bleu"))
    assert (loss["mean"], loss["low"], loss["better"]) == (
        pytest.approx(-0.45),
        None,
        None,
    )
    assert bleu["better"] == "other"  # ten are enough
    row = next(line for line in str(found).splitlines() if "held-out loss  " in line)
    assert row.split() == ["held-out", "loss", "2.5000", "2.0500", "-0.4500", "-", "9"]
    assert (
        "held-out loss differs by -0.4500 (9 texts, too few for an interval)"
        in found.sentence
    )


def test_three_runs_are_held_against_the_first(tmp_path):
    runs = [
        run_of(tmp_path / name, better_by=n)
        for n, name in enumerate(("a", "bb", "ccc"))
    ]
    found = toque.compare(*runs, out=tmp_path / "page.html")
    assert list(found.record["differences"]) == ["bb", "ccc"]
    assert (tmp_path / "page.html").exists()


def test_other_held_out_texts_give_no_interval(tmp_path):
    found = toque.compare(
        run_of(tmp_path / "a"), run_of(tmp_path / "bb", texts="u", better_by=9.0)
    )
    assert found.record["differences"] == {"bb": {}}
    assert "cannot be compared, because they have no scores" in found.sentence
    assert any(
        "scored on different held-out examples" in note
        for note in found.record["notes"]
    )
    assert "different held-out examples" in found.page.read_text()
    assert (
        "The held-out loss of bb is 2.5000 and of a 2.5000 (+0.0000), each on its own texts and "
        "without an interval." in found.sentence
    )


def test_texts_are_paired_by_what_they_are_not_by_their_place(tmp_path):
    first, other = run_of(tmp_path / "a"), run_of(tmp_path / "bb", better_by=3.0)
    before = toque.compare(first, other).record["differences"]["bb"]["loss"]["mean"]
    record = json.loads((other / FILE).read_text())
    record["examples"]["keys"].reverse()
    for rows in record["examples"]["measures"].values():
        rows.reverse()
    (other / FILE).write_text(json.dumps(record))
    after = toque.compare(first, other).record["differences"]["bb"]["loss"]["mean"]
    assert after == pytest.approx(before)


def test_other_tokens_are_compared_by_bits_a_byte(tmp_path):
    found = toque.compare(
        run_of(tmp_path / "a"), run_of(tmp_path / "bb", tokens=25, better_by=3.0)
    )
    assert "loss" not in found.record["differences"]["bb"]
    assert found.sentence.startswith("bb is better than a: bits per byte")


def test_a_run_without_scores_has_its_curves_and_cost(tmp_path):
    first, killed = run_of(tmp_path / "a"), run_of(tmp_path / "bb", scored=False)
    found = toque.compare(first, killed)
    assert found.record["runs"]["bb"]["cost"]["tokens"] == 1000
    assert any("toque evaluate" in note for note in found.record["notes"])
    assert "cannot be compared" in found.sentence
    told = "The held-out loss of bb is 2.0000 and of a 2.5000 (-0.5000), each on its own texts"
    assert told in found.sentence  # bb was killed: by its evaluations while training
    (killed / FILE).write_text("{")
    (killed / "evaluation.json").write_text('{"step": 10}')
    assert any(
        "cannot be read" in note
        for note in toque.compare(first, killed).record["notes"]
    )
    (killed / FILE).write_text((first / FILE).read_text())
    (killed / "evaluation.json").write_text('{"step": 5}')
    assert any(
        "another step" in note for note in toque.compare(first, killed).record["notes"]
    )


def test_json_is_the_record(tmp_path, capsys):
    names = [str(run_of(tmp_path / name)) for name in ("a", "bb")]
    assert main(["compare", *names, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["differences"]["bb"]["recipe_score"]["mean"] == 0.0
    assert record["sentence"]


def test_what_cannot_be_compared_is_refused_in_words(tmp_path):
    run = run_of(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    model = tmp_path / "a" / "average"
    model.mkdir()
    (model / "config.json").write_text("{}")
    advice = f"is a model, .* `toque evaluate {model} {tmp_path}/a/config.yaml`"
    for runs, words in (
        ([run, model], advice),
        ([run], "at least two runs"),
        ([run, run], "named twice"),
        ([run, tmp_path / "empty"], "not a run that has begun"),
        ([run, tmp_path / "b"], "does not exist"),
    ):
        with pytest.raises(ConfigError, match=words):
            toque.compare(*runs)
    with pytest.raises(ConfigError, match="cannot be written"):
        toque.compare(run, run_of(tmp_path / "bb"), out="/proc/nowhere/page.html")
    linked = run_of(tmp_path / "linked")
    (linked / "metrics.jsonl").unlink()
    (linked / "metrics.jsonl").symlink_to(run / "metrics.jsonl")
    with pytest.raises(CheckpointError, match="symbolic link"):
        toque.compare(run, linked)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_in_a_bucket_is_compared_as_its_folder_is(
    s3_service, tmp_path, monkeypatch
):
    first = run_of(tmp_path / "a")
    other = run_of(tmp_path / "bb", better_by=3.0, rate="0.003")
    for file in other.iterdir():
        s3_service.put(f"runs/bb/{file.name}", file.read_bytes())
    monkeypatch.chdir(tmp_path)
    here, there = (
        toque.compare(first, other),
        toque.compare(first, "s3://pantry/runs/bb"),
    )
    records = [here.record, there.record]
    folders = [record["runs"]["bb"].pop("folder") for record in records]
    assert folders == [str(other), "s3://pantry/runs/bb"]
    assert records[0] == records[1]
    turned = toque.compare("s3://pantry/runs/bb/", first)
    assert turned.record["differences"]["a"]["loss"]["better"] == "first"
    assert turned.page == Path("comparison.html")
    assert turned.page.exists()
    with pytest.raises(
        ConfigError, match="s3://pantry/runs/none is not a run that has begun"
    ):
        toque.compare(first, "s3://pantry/runs/none")
    with pytest.raises(ConfigError, match=r"ftp:// addresses are not supported"):
        toque.compare(first, "ftp://pantry/runs/bb")
