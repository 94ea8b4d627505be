"""The crash test itself: it counts what it did, it sees what differs, and it leaves nothing."""

import json
from pathlib import Path

import pytest

from fixtures.kitchens import tiny_config
from fixtures.processes import python, toque
from toque.config import load_config, resolved_yaml
from toque.errors import ConfigError
from toque.workflows.configure import configure, with_origins
from toque.workflows.diagnosis.drill import QUIET, convert_times_to_steps, drill
from toque.workflows.diagnosis.run_facts import (
    events,
    facts_of,
    find_differences,
    newest_step,
    steps_done,
)

KILLS = """
import json, os, random, sys, time
from pathlib import Path
from toque.workflows.diagnosis.kills import kill_and_continue
from toque.workflows.diagnosis.training_session import Session

folder, lasting = Path(sys.argv[1]), sys.argv[2] == "exact"

def start(run):
    def count():
        # A "training" whose state is one number; the careless one adds another at each start.
        state = run / "state"
        done, total = json.loads(state.read_text()) if state.exists() else (0, 0)
        total += 0 if lasting else bool(done)
        for step in range(done, 20):
            total += step * step
            (run / "part").write_text(json.dumps([step + 1, total]))
            (run / "part").rename(state)
            time.sleep(0.01)
        return 0
    return Session(count, folder / "log.txt")

def fresh(n):
    (folder / f"run{n}").mkdir()
    return folder / f"run{n}"

def facts(run):
    return {"sum": json.loads((run / "state").read_text())[1]}

found = kill_and_continue(
    start, fresh, {"sum": sum(i * i for i in range(20))},
    kills=12, span=0.25, chance=random.Random(4), facts=facts,
)
print(json.dumps([len(found.moments), found.problems]))
"""


@pytest.mark.parametrize("how", ["exact", "careless"])
def test_a_run_that_is_not_exact_is_found_by_killing_it(
    tmp_path: Path, how: str
) -> None:
    # In a process of its own: one that has computed must not be forked.
    done = python("-c", KILLS, tmp_path, how)
    assert done.returncode == 0, done.stderr
    kills, wrong = json.loads(done.stdout)
    assert kills == 12
    assert set(wrong) == (set() if how == "exact" else {"other sum"})


def test_facts_are_of_the_last_step_and_the_last_report(tmp_path: Path) -> None:
    for step, content in ((3, b"old"), (12, b"new")):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (
            tmp_path / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
        ).write_bytes(content)
    lines = [
        {"event": "step", "step": s, "loss": x}
        for s, x in ((1, 3.0), (2, 2.5), (2, 2.25))
    ]
    text = "\n".join([json.dumps(line) for line in lines] + ['{"event": "st'])
    (tmp_path / "metrics.jsonl").write_text(text)
    found = facts_of(tmp_path)
    assert (newest_step(tmp_path), steps_done(tmp_path), len(events(tmp_path))) == (
        12,
        2,
        3,
    )
    assert found["losses"] == {1: 3.0, 2: 2.25}
    assert found["weights"][:8] == "11507a0e"  # SHA-256 of "new"
    assert find_differences(found, found) == []
    assert find_differences(found, {**found, "weights": "", "best": 1}) == [
        "weights",
        "best",
    ]


def test_what_is_no_run_and_numbers_that_make_no_drill_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        drill(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 1")
    with pytest.raises(
        ConfigError,
        match=r"steps must be at least 8 and kills at least 0, not 3 and 10",
    ):
        drill(tmp_path, steps=3)


@pytest.mark.parametrize(
    ("length", "optim", "by_steps"),
    [
        ("1 hour total", {}, ["train.stop_after=3600 steps"]),
        (
            "9 seconds",
            {"warmup": "8.9 seconds"},
            ["train.stop_after=24 steps", "optim.warmup=9 steps"],
        ),
        ("100 steps", {"warmup": "5 minutes"}, ["optim.warmup=99 steps"]),
        ("3 epochs", {"warmup": "5 %"}, []),
        (
            "2 minutes",
            {"schedule": "wsd", "cooldown": "20 seconds"},
            ["train.stop_after=120 steps", "optim.cooldown=20 steps"],
        ),
        (
            "2 minutes",
            {"schedule": "cosine_restarts", "cycles": {"first": "0.1 seconds"}},
            ["train.stop_after=120 steps", "optim.cycles.first=1 steps"],
        ),
    ],
)
def test_times_of_the_clock_are_steps_in_the_copies(
    tmp_path: Path, length, optim, by_steps
) -> None:
    config = configure(optim=optim, train={"stop_after": length})
    found = convert_times_to_steps(config, 24)
    assert found == by_steps
    (tmp_path / "my.yaml").write_text(resolved_yaml(with_origins(config)))
    copied = load_config(tmp_path / "my.yaml", [*QUIET, *found]).config
    assert convert_times_to_steps(copied, 24) == []


def test_code_that_a_run_names_is_refused_before_anything_is_copied(
    own_kitchen: Path,
) -> None:
    mine = tiny_config(optim={"name": "mine:Adam"})
    Path("run").mkdir()
    (Path("run") / "config.yaml").write_text(resolved_yaml(with_origins(mine)))
    with pytest.raises(ConfigError, match=r"mine:Adam .*add trust_code=True"):
        drill("run")
    assert [p.name for p in own_kitchen.glob("drill-*")] == []


CLOCKED = (
    "train.stop_after=2 seconds",
    "train.best_by=rougeL",
    "evaluation={generate: 2, texts: 2, max_examples: 4}",
    "optim.name=torch.optim:NAdam",
    "optim.schedule=linear",
    "optim.warmup=10 %",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("own_kitchen")
def test_a_run_by_the_clock_with_an_optimizer_of_its_own_is_drilled() -> None:
    assert toque("train", "my.yaml", *CLOCKED).returncode == 0
    words = ("drill", "run", "--kills", "1", "--steps", "8")
    refused = toque(*words)
    assert (refused.returncode, "add --trust-code" in refused.stderr) == (
        2,
        True,
    )
    done = toque(*words, "--trust-code")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the copies count one step per second: train.stop_after=" in done.stderr


WORDS = (
    "train.save_every=8 steps",
    "train.evaluate_every=8 steps",
    "train.stop_after=16 steps",
)
ADAPTED = (
    "run_dir=adapted",
    "model={family: gpt2, start_from: run/model, tokenizer: run/model}",
    "adapter={kind: lora, r: 4, dropout: 0.1}",
    "data.store=second",
    "train.stop_after=8 steps",
    "train.save_every=4 steps",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_drill_of_a_run_and_of_an_adapter_on_it(own_kitchen: Path) -> None:
    assert toque("train", "my.yaml", *WORDS).returncode == 0
    before = {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()}
    done = toque("drill", "run", "--kills", "2", "--steps", "16", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    verdicts = {o["fault"]: o["verdict"] for o in found["outcomes"]}
    assert set(verdicts.values()) == {"ok"}
    assert len(verdicts) == 5
    assert before == {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()}
    assert sorted(p.name for p in own_kitchen.iterdir()) == [
        "a.jsonl",
        "my.yaml",
        "run",
        "store",
    ]
    # An adapter's checkpoints are some kilobytes.
    assert toque("train", "my.yaml", *ADAPTED).returncode == 0
    done = toque("drill", "adapted", "--kills", "2", "--steps", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    # Drilled for longer than it lasts, it says so.
    done = toque("drill", "run", "--steps", "40")
    assert (done.returncode, "ends after 16 steps" in done.stderr) == (2, True)
