"""Doctor: a real small run judged, its lever tried, the machine checked, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tiny import shape_yaml
from toque.cli import main
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import CheckFailed
from toque.reports.run_shares import facts_of
from toque.reports.verdict import verdict_of
from toque.runs.history import read_metrics
from toque.units import Duration
from toque.workflows.doctor import machine_checks
from toque.workflows.doctor.attempts import Attempt, disk
from toque.workflows.doctor.check_table import Check, Checkup
from toque.workflows.doctor.lever_trial import rate_of, updates_of

CONFIG = """
run_dir: {folder}/runs/a
model: {{family: gpt2, tokenizer: "trained:512", shape: {shape}}}
data: {{sources: [{{path: {folder}/a.jsonl}}], store: {folder}/store, max_prompt_tokens: 64,
  max_target_tokens: 256}}
optim: {{warmup: "1 steps"}}
train: {{stop_after: "6 steps", batch: "1024 tokens", precision: float32,
  evaluate_every: "1 steps"}}
evaluation: {{max_examples: 8, generate: 0}}
observe: {{log_every: "2 steps"}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    write_cookbook(folder / "a.jsonl", n=60, seed=3)
    shape = shape_yaml("gpt2", width=16, layers=1, heads=2, positions=512, dropout=0.0)
    (folder / "a.yaml").write_text(CONFIG.format(folder=folder, shape=shape))
    assert main(["train", str(folder / "a.yaml")]) == 0
    return folder / "runs" / "a"


def test_the_parts_of_a_run_add_up_to_its_wall_time(run: Path) -> None:
    events = read_metrics(run / "metrics.jsonl")
    (end,) = [e for e in events if e["event"] == "end"]
    told = [e["parts"] for e in events if e["event"] in ("step", "end")]
    assert sum(sum(parts.values()) for parts in told) == pytest.approx(end["seconds"], rel=0.02)
    inside = ("data_wait", "forward_backward", "ranks", "clip", "optimizer")
    for step in (e for e in events if e["event"] == "step"):
        # on_before_step is of the update's seconds, too
        assert sum(step["parts"][name] for name in inside) <= step["seconds"] * 1.001
    assert [list(e["parts"]) for e in events if e["event"] == "after"] == [["finishing"]]


def test_a_run_is_judged_as_a_table_and_as_json(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", str(run)]) == 0
    shown = capsys.readouterr().out
    verdict = verdict_of(run)
    assert verdict is not None
    assert verdict.sentence in shown
    assert "all of it" in shown
    assert main(["doctor", str(run), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["sentence"] == verdict.sentence
    assert sum(share["share"] for share in record["shares"]) == pytest.approx(1.0)


def test_time_that_a_profiler_took_is_a_share_of_its_own(run: Path, tmp_path: Path) -> None:
    """It was told as "tiny batches", with 150 % to gain from larger ones."""
    profile = "observe.profile={wait: 0, warmup: 1, active: 2, repeat: 1}"
    words = [str(run.parents[1] / "a.yaml"), f"run_dir={tmp_path / 'b'}", profile]
    words += ["train.evaluate_every=6 steps", "observe.log_every=1 steps"]
    assert main(["train", *words]) == 0
    told = read_metrics(tmp_path / "b" / "metrics.jsonl")
    update = {"forward_backward", "clip", "optimizer"}
    own = [update & set(e["parts"]) for e in told if e["event"] == "step"]
    assert own == [set(), set(), set(), *[update] * 3]
    slowed = [bool(e["parts"].get("profiling")) for e in told if e["event"] == "step"]
    assert slowed == [True] * 4 + [False] * 2  # what is written after the third is the fourth's
    verdict = verdict_of(tmp_path / "b")
    assert verdict is not None
    assert "profiling" in {share.name for share in verdict.shares}
    seconds = sum(sum(e["parts"].values()) for e in told if e.get("parts"))
    assert verdict.facts.wall == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--try"], "--try tries the lever of a run"),
        (["nowhere/at/all"], "nowhere"),
        (["EMPTY"], "holds no metrics.jsonl"),
        (["BEGUN"], "tells of no update yet"),
        (["RUN", "--try", "--steps", "1"], "--steps is 1"),
    ],
)
def test_what_cannot_be_judged_is_one_paragraph(
    words: list[str], said: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text('{"event": "start", "step": 0}\n')
    places = {"EMPTY": tmp_path, "BEGUN": tmp_path / "begun", "RUN": run}
    assert main(["doctor", *(str(places.get(word, word)) for word in words)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_lever_is_tried_and_the_run_is_left_alone(
    run: Path, capsys: pytest.CaptureFixture
) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    assert main(["doctor", str(run), "--try", "--steps", "3", "--pairs", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["trials"]
    measured = [t for t in record["trials"] if not t["not_tried"]]
    assert all(isinstance(trial["measured_gain"], float) for trial in measured)
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in run.parent.iterdir()) == ["a"]


def test_a_longer_interval_of_the_lever_is_tried_and_not_the_runs_own(run: Path) -> None:
    """An interval in per cent came as often with the lever as without it, so it gained nothing."""
    told = read_metrics(run / "metrics.jsonl")
    told[0]["train"]["evaluate_every"] = "10 %"
    facts = facts_of(told)
    assert facts is not None
    own, lever = (
        updates_of(Duration.parse(every), facts, "evaluate_every", 3) for every in ("10 %", "50 %")
    )
    assert (own, lever) == (2.0, 10.0)


def test_a_rate_counts_evaluations_as_often_as_the_run_has_them() -> None:
    step = {"event": "step", "tokens": 100, "parts": {"forward_backward": 0.5, "evaluation": 2.0}}
    events = [step, step, step, {"event": "evaluation"}, {"event": "evaluation"}]
    events.append({"event": "evaluation"})
    rate = rate_of(events, evaluate_every=1, save_every=9)
    assert (rate.update_seconds, rate.evaluation_seconds) == (0.5, 2.0)
    assert rate.tokens_per_second == pytest.approx(100 / 2.5)
    seldom = rate_of(events, evaluate_every=20, save_every=9)
    assert seldom.tokens_per_second == pytest.approx(100 / 0.6)


def test_what_failed_ends_with_exit_code_one() -> None:
    fine = Checkup([Check("a", "ok", "x"), Check("b", "warning", "y", "do")], 1.0)
    fine.raise_if_failed()
    with pytest.raises(CheckFailed, match="b failed") as raised:
        Checkup([Check("a", "ok", "x"), Check("b", "failed", "y", "do")], 1.0).raise_if_failed()
    assert raised.value.exit_code == 1


def test_versions_outside_their_range_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=99", "no-such-package>=1", "numpy>=1"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: wanted)
    (packages,) = [c for c in machine_checks.software() if c.name == "packages"]
    assert packages.state == "failed"
    assert "outside >=99" in packages.found
    assert "no-such-package is missing" in packages.found
    assert "numpy" not in packages.found


def test_credentials_are_found_and_never_shown(tmp_path: Path) -> None:
    secret = {"HF_TOKEN": "hf_secret", "AWS_ACCESS_KEY_ID": "secret", "AWS_SECRET_ACCESS_KEY": "se"}
    found = list(machine_checks.credentials(secret, tmp_path))
    assert [c.found.startswith("credentials found") for c in found] == [False, True, True]
    assert "secret" not in repr(found)
    half = list(machine_checks.credentials({"AWS_ACCESS_KEY_ID": "x"}, tmp_path))
    assert half[1].state == "failed"
    named = {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "none.json")}
    assert next(iter(machine_checks.credentials(named, tmp_path))).state == "failed"


def test_a_disk_that_cannot_be_written_fails(tmp_path: Path) -> None:
    assert disk(tmp_path / "absent").state == "failed"
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_says_what_went_wrong_and_ends_what_hangs() -> None:
    with Attempt([["-c", "raise SystemExit('no luck')"], ["-c", ""]], 60.0, {}) as attempt:
        assert attempt.failure()[1] == "no luck"
    with Attempt([["-c", "import time; time.sleep(600)"]], 0.2, {}) as attempt:
        assert attempt.failure() == (0.2, "timeout")
    (process,) = attempt.running
    assert process.returncode == -9


@pytest.mark.slow
def test_the_machine_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    looked = machine_checks.check_machine()
    names = [check.name for check in looked.checks]
    assert {"python", "packages", "processor", "memory", "all-reduce over gloo"} <= set(names)
    assert all(check.todo for check in looked.checks if check.state != "ok")
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - what was written to try the disk is gone
