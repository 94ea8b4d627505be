"""Evaluations while training: texts, scores, what a run may go by, and what stays the same."""

import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

import toque
from fixtures.kitchens import TINY
from fixtures.processes import python
from fixtures.ranks import TORCHRUN
from toque.config.dump import to_yaml
from toque.errors import ConfigError

STEPS = 6
MINE = (
    "def score(predictions, references):\n    return {'letters': [len(p) for p "
    "in predictions]}\n"
)
OWN = {
    "model": {},
    "optim": {"warmup": "2 steps"},
    "train": {"stop_after": f"{STEPS} steps", "batch": "2048 tokens", "evaluate_every": "2 steps",
              "save_every": "1 steps", "micro_batch_rows": "auto", "best_by": "distinct_1",
              "early_stopping": {"patience": 9, "metric": "rougeL"}},
    "evaluation": {"generate": 3, "prompts": ["Make a healthy breakfast"]},
    "observe": {"summary": "4 steps"},
}  # fmt: skip
COMBINATIONS = {
    "adapted": {
        "model": {"family": "auto", "start_from": "plain/model", "shape": {}},
        "adapter": {"r": 2},
    },
}


@pytest.fixture(scope="module")
def screen() -> io.StringIO:
    """What a command would show of the run `plain` in a pipe."""
    return io.StringIO()


@pytest.fixture(scope="module")
def kitchen(shared_kitchen, screen):
    (shared_kitchen / "counted.py").write_text(MINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(shared_kitchen))
        reporter = toque.ConsoleReporter(Console(file=screen))
        toque.train(configuration(run_dir="plain"), reporter=reporter)
        yield shared_kitchen


def configuration(**sections):
    base = {name: {**TINY.get(name, {}), **more} for name, more in OWN.items()}
    for name, more in sections.items():  # not merged: an adapter's model has no shape
        both = isinstance(more, dict) and isinstance(base.get(name), dict)
        base[name] = base[name] | more if both else more
    return toque.configure(TINY | base)


def events(run: str | Path, kind: str) -> list[dict]:
    lines = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def losses(run: str | Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "step")}


def found(run: str | Path) -> dict[int, tuple]:
    """Loss and scores of each evaluation."""
    return {
        e["step"]: (e["metrics"]["loss"], e["texts"]) for e in events(run, "evaluation")
    }


def test_scores_stand_in_the_event_and_texts_in_the_samples(kitchen) -> None:
    (first, *_) = events("plain", "evaluation")
    assert set(first["metrics"]) == {
        "loss",
        "perplexity",
        "bits_per_byte",
        "target_tokens",
    }
    assert {"bleu", "rougeL", "recipe_score", "completeness"} <= set(first["texts"])
    assert 0 < first["texts_seconds"] < first["seconds"]
    lines = map(
        json.loads, (kitchen / "plain" / "samples.jsonl").read_text().splitlines()
    )
    at_two = [line for line in lines if line["step"] == 2][
        :4
    ]  # the final ones may follow
    assert at_two[-1]["prompt"] == "Make a healthy breakfast"
    assert at_two[-1]["asked"] == "Generate recipe for: healthy breakfast"
    assert "recipe_score" in at_two[-1]["metrics"]


@pytest.mark.usefixtures("kitchen")
def test_a_run_is_shown_in_one_screen_with_a_row_per_evaluation(screen) -> None:
    # A busy machine is warned of, and its slow work named.
    named = (
        "warning: ",
        "note: ",
        "measuring",
        "finding out",
        "evaluating ",
        "writing ",
        "step ",
    )
    lines = [
        line for line in screen.getvalue().splitlines() if not line.startswith(named)
    ]
    assert len(lines) <= 20  # five evaluations would have 22
    banner = [line.split()[0] for line in lines[1:5]]
    assert lines[0].startswith(
        f"toque {toque.__version__}: gpt2 from scratch, 0.0 M parameters"
    )
    assert banner == ["data", "length", "batch", "run"]
    assert re.search(
        r"data  .*: \d+ examples to train on, .*; no record dropped", lines[1]
    )
    assert re.search(r"run folder +plain, on \w+ \(.+\); uploads: none", lines[4])
    (head,) = (n for n, line in enumerate(lines) if line.startswith("   step "))
    assert lines[head].split()[:6] == [
        "step",
        "epoch",
        "loss",
        "held-out",
        "distinct",
        "1",
    ]
    rows = {
        int(line.split()[0]): line.split()[3:5] for line in lines[head + 1 : head + 4]
    }
    assert rows == {
        step: [f"{loss:.4f}", f"{texts['distinct_1']:.4f}"]
        for step, (loss, texts) in found("plain").items()
    }
    ended = lines[head + 4 :]
    assert ended[0].startswith("finished at step 6 after ")
    assert ended[1].startswith("held-out loss ")
    assert re.search(
        r"\. The model is in plain/model \(step \d, highest distinct 1\)\.", ended[1]
    )
    assert ended[2].startswith('For "')
    assert ended[-1].startswith(
        ("The texts are still poor", "What limits", "Nothing slows")
    )


def test_every_line_of_the_log_has_its_time_and_the_log_has_the_rest(kitchen) -> None:
    log = (kitchen / "plain" / "training.log").read_text()
    assert all(
        re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}  ", s) for s in log.splitlines()
    )
    for text in (
        "uploads       none", "3 texts for held-out prompts:", "evaluated in", "accumulation  ",
        "3 generated texts, with 95 % intervals:",
        "summary at step 4, over 4 updates:", "asked as: Generate recipe for: healthy breakfast",
        "The model is in plain/model", "highest distinct 1",
    ):  # fmt: skip
        assert text in log, text


def test_a_batch_in_tokens_is_told_in_rows(kitchen) -> None:
    log = (kitchen / "plain" / "training.log").read_text()
    (told,) = re.findall(
        r"batch +2048 tokens per update: (\d+) rows? of (?:\d+ \+ )?\d+, over", log
    )
    (start,), step = events("plain", "start"), events("plain", "step")[0]
    row = sum(start["row"].values())
    assert int(told) == 2048 // row
    assert step["tokens"] <= int(told) * row <= 2048


def test_the_best_by_a_score_of_texts_is_kept_and_finished(kitchen) -> None:
    by_step = {
        e["step"]: e["texts"]["distinct_1"] for e in events("plain", "evaluation")
    }
    best = max(by_step, key=lambda step: (by_step[step], -step))
    (kept,) = (kitchen / "plain" / "best").glob("step-*")
    assert kept.name == f"step-{best:08d}"
    (end,) = events("plain", "end")
    assert end["best"]["step"] == best
    assert end["best"]["distinct_1"] == by_step[best]
    assert (
        json.loads((kitchen / "plain" / "end.json").read_text())["model_step"] == best
    )


@pytest.mark.usefixtures("kitchen")
def test_texts_change_no_number_of_training() -> None:
    toque.train(
        configuration(
            run_dir="silent", train={"best_by": "loss", "early_stopping": None},
            evaluation={"texts": 0, "prompts": []},
        )
    )  # fmt: skip
    assert losses("silent") == losses("plain")
    assert "texts" not in events("silent", "evaluation")[0]


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_run_interrupted_between_evaluations_goes_on_to_the_same(name: str) -> None:
    sections = COMBINATIONS[name]
    whole, halved = f"{name}-whole", f"{name}-halved"
    toque.train(configuration(run_dir=whole, **sections))
    assert len(found(whole)) == 3

    class Stop:
        def on_step_end(self, state):
            return ["save", "stop"] if state.step == 3 else None

    toque.train(configuration(run_dir=halved, **sections), callbacks=[Stop()])
    toque.train(configuration(run_dir=halved, **sections))
    same = found(halved)
    assert {step: same[step] for step in (2, 4, 6)} == found(whole)
    assert losses(halved) == losses(whole)
    ends = [events(run, "end")[-1]["best"] for run in (whole, halved)]
    scored = {s: t["distinct_1"] for s, (_, t) in same.items() if s in (2, 3, 4, 6)}
    assert ends[1]["distinct_1"] == max(scored.values())
    assert ends[0]["distinct_1"] == max(scored[step] for step in (2, 4, 6))


@pytest.mark.usefixtures("kitchen")
def test_early_stopping_goes_by_the_metric_it_names() -> None:
    stopping = {
        "patience": 1,
        "metric": "title_kept",
    }  # which stays 0 or is not measured
    run = toque.train(
        configuration(run_dir="stopped", train={"early_stopping": stopping})
    )
    assert run.reason == "early_stopping"
    assert run.step < STEPS


@pytest.mark.usefixtures("kitchen")
def test_a_metric_of_ones_own_can_be_what_a_run_goes_by() -> None:
    own = {"metrics": ["bleu", "counted:score"]}
    train = {"best_by": "letters", "early_stopping": None}
    toque.train(configuration(run_dir="own", evaluation=own, train=train))
    lengths = {e["step"]: e["texts"]["letters"] for e in events("own", "evaluation")}
    (end,) = events("own", "end")
    assert end["best"]["letters"] == max(lengths.values())
    with pytest.raises(ConfigError, match="Neither Toque nor a function"):
        toque.train(
            configuration(
                run_dir="no", evaluation=own, train={**train, "best_by": "lettr"}
            )
        )


@pytest.mark.usefixtures("kitchen")
def test_what_is_not_measured_is_refused_before_training() -> None:
    with pytest.raises(ConfigError) as refused:
        toque.train(configuration(run_dir="typo", train={"best_by": "rouge_L"}))
    said = str(refused.value)
    assert "train.best_by is rouge_L" in said
    assert "Nearest: rougeL" in said
    assert "loss, perplexity, bleu" in said
    assert not Path("typo").exists()
    with pytest.raises(
        ConfigError, match=r"evaluation\.texts and evaluation\.generate above 0"
    ):
        toque.train(configuration(run_dir="typo", evaluation={"texts": 0}))


def on_two_ranks(kitchen: Path, run: str, **sections) -> dict[int, tuple]:
    """What a run of that name found, trained by two processes."""
    (kitchen / f"{run}.yaml").write_text(
        to_yaml(configuration(run_dir=run, **sections))
    )
    done = python(*TORCHRUN[1:], "-m", "toque", "train", f"{run}.yaml", cwd=kitchen)
    assert done.returncode == 0, done.stderr[-3000:]
    return found(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_share_the_texts_and_find_the_scores_of_one(kitchen) -> None:
    one, two = found("plain"), on_two_ranks(kitchen, "two")
    assert one.keys() == two.keys()
    for step, (
        loss,
        _,
    ) in one.items():  # rounding can change a word of such a model's texts
        assert math.isclose(two[step][0], loss, rel_tol=1e-3)
    samples = (kitchen / "two" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in samples[:8]] == [2] * 4 + [4] * 4
    assert "efficiency" in (kitchen / "two" / "training.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_find_every_score_of_the_same_weights(kitchen) -> None:
    still = {
        "optim": {"peak_lr": 1e-12},
        "model": {"start_from": "plain/model", "shape": {}},
    }
    toque.train(configuration(run_dir="one_still", **still))
    one, two = found("one_still"), on_two_ranks(kitchen, "two_still", **still)
    assert one.keys() == two.keys()
    for step, (loss, texts) in one.items():
        assert two[step][0] == pytest.approx(loss, rel=1e-6)
        assert two[step][1] == pytest.approx(texts, rel=1e-6, nan_ok=True)
