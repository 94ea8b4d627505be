"""Doctor: a real small run judged, its lever tried, the machine checked, what is refused."""

import json
import os
from pathlib import Path

import pytest

from fixtures.kitchens import kitchen_in
from toque.cli import main
from toque.errors import CheckFailed
from toque.reports.verdict import judge_run
from toque.runs.history import read_metrics
from toque.workflows.diagnosis import machine_checks
from toque.workflows.diagnosis.machine_checks import (
    Checkup,
    MachineCheck,
    check_disk,
    run_programs,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    train = {
        "stop_after": "6 steps",
        "evaluate_every": "1 steps",
        "micro_batch_rows": "auto",
    }
    config = kitchen_in(folder, n=60, train=train, observe={"log_every": "2 steps"})
    assert main(["train", str(config)]) == 0
    return folder / "run"


def test_the_parts_of_a_run_add_up_to_its_wall_time(run: Path) -> None:
    events = read_metrics(run / "metrics.jsonl")
    (end,) = [e for e in events if e["event"] == "end"]
    told = [e["parts"] for e in events if e["event"] in ("step", "end")]
    assert sum(sum(parts.values()) for parts in told) == pytest.approx(
        end["seconds"], rel=0.02
    )
    inside = ("data_wait", "forward_backward", "ranks", "clip", "optimizer")
    for step in (e for e in events if e["event"] == "step"):
        # on_before_step is of the update's seconds, too
        assert sum(step["parts"][name] for name in inside) <= step["seconds"] * 1.001
    assert [list(e["parts"]) for e in events if e["event"] == "after"] == [
        ["finishing"]
    ]


def test_a_run_is_judged_as_a_table_and_as_json(
    run: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["doctor", str(run)]) == 0
    shown = capsys.readouterr().out
    verdict = judge_run(run)
    assert verdict is not None
    assert verdict.sentence in shown
    assert "total" in shown
    assert main(["doctor", str(run), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["sentence"] == verdict.sentence
    assert sum(share["share"] for share in record["shares"]) == pytest.approx(1.0)


def test_time_that_a_profiler_took_is_a_share_of_its_own(
    run: Path, tmp_path: Path
) -> None:
    """It was told as "tiny batches", with 150 % to gain from larger ones."""
    profile = "observe.profile={wait: 0, warmup: 1, active: 2, repeat: 1}"
    words = [str(run.parent / "run.yaml"), f"run_dir={tmp_path / 'b'}", profile]
    words += ["train.evaluate_every=6 steps", "observe.log_every=1 steps"]
    assert main(["train", *words]) == 0
    told = read_metrics(tmp_path / "b" / "metrics.jsonl")
    update = {"forward_backward", "clip", "optimizer"}
    own = [update & set(e["parts"]) for e in told if e["event"] == "step"]
    assert own == [set(), set(), set(), *[update] * 3]
    slowed = [bool(e["parts"].get("profiling")) for e in told if e["event"] == "step"]
    assert (
        slowed == [True] * 4 + [False] * 2
    )  # what is written after the third is the fourth's
    verdict = judge_run(tmp_path / "b")
    assert verdict is not None
    assert "profiling" in {share.name for share in verdict.shares}
    seconds = sum(sum(e["parts"].values()) for e in told if e.get("parts"))
    assert verdict.facts.wall == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere/at/all"], "nowhere"),
        (["EMPTY"], "has no metrics.jsonl"),
        (["BEGUN"], "has no update yet"),
    ],
)
def test_what_cannot_be_judged_is_one_paragraph(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text('{"event": "start", "step": 0}\n')
    places = {"EMPTY": tmp_path, "BEGUN": tmp_path / "begun"}
    assert main(["doctor", *(str(places.get(word, word)) for word in words)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_what_failed_ends_with_exit_code_one() -> None:
    fine = Checkup(
        [MachineCheck("a", "ok", "x"), MachineCheck("b", "warning", "y", "do")], 1.0
    )
    fine.raise_if_failed()
    with pytest.raises(CheckFailed, match="b failed") as raised:
        Checkup(
            [MachineCheck("a", "ok", "x"), MachineCheck("b", "failed", "y", "do")], 1.0
        ).raise_if_failed()
    assert raised.value.exit_code == 1


def test_versions_outside_their_range_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=99", "no-such-package>=1", "numpy>=1"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: wanted)
    (packages,) = [c for c in machine_checks.check_software() if c.name == "packages"]
    assert packages.state == "failed"
    assert "outside >=99" in packages.found
    assert "no-such-package is missing" in packages.found
    assert "numpy" not in packages.found


def test_credentials_are_found_and_never_shown(tmp_path: Path) -> None:
    secret = {
        "HF_TOKEN": "hf_secret",
        "AWS_ACCESS_KEY_ID": "secret",
        "AWS_SECRET_ACCESS_KEY": "se",
    }
    found = list(machine_checks.check_credentials(secret, tmp_path))
    assert [c.found.startswith("credentials found") for c in found] == [
        False,
        True,
        True,
    ]
    assert "secret" not in repr(found)
    half = list(machine_checks.check_credentials({"AWS_ACCESS_KEY_ID": "x"}, tmp_path))
    assert half[1].state == "failed"
    named = {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "none.json")}
    assert (
        next(iter(machine_checks.check_credentials(named, tmp_path))).state == "failed"
    )


def test_a_disk_that_cannot_be_written_fails(tmp_path: Path) -> None:
    assert check_disk(tmp_path / "absent").state == "failed"
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_says_what_went_wrong_and_ends_what_hangs() -> None:
    assert (
        run_programs([["-c", "raise SystemExit('no luck')"], ["-c", ""]], {})[1]
        == "no luck"
    )
    hangs = "import subprocess, sys, time; subprocess.run([sys.executable, '-c', '%s'])"
    seconds, failure = run_programs(
        [["-c", hangs % "import time; time.sleep(600)"]], {}, limit_seconds=1
    )
    assert failure == "not done within 1 s"
    assert seconds < 60.0


@pytest.mark.slow
def test_the_machine_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    looked = machine_checks.check_machine()
    names = [check.name for check in looked.checks]
    assert {"python", "packages", "processor", "memory", "all-reduce over gloo"} <= set(
        names
    )
    assert all(check.todo for check in looked.checks if check.state != "ok")
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - what was written to try the disk is gone
