"""The harness of bench/: turns, void ratios, the record's form and its exit codes."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
KEYS = [
    "name", "command", "date", "machine", "versions", "ours", "theirs", "ratio", "quality",
    "details",
]  # fmt: skip


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import harness

    return harness


def record_of(harness, capsys, measure, *, words=(), options=None, monkeypatch):
    """The record that `measure` ends in, and the exit code."""
    monkeypatch.setattr(sys, "argv", ["bench/speed/trial.py", *words])
    with pytest.raises(SystemExit) as ended:
        harness.main(str(BENCH / "speed" / "trial.py"), "A trial.", options, measure)
    return json.loads(capsys.readouterr().out), int(ended.value.code)


def test_both_sides_run_in_turn(harness):
    called = []
    harness.paired(
        lambda n: called.append(("ours", n)),
        lambda n: called.append(("theirs", n)),
        pairs=3,
    )
    assert called == [(side, n) for n in range(3) for side in ("ours", "theirs")]


def test_the_ratio_is_ours_over_theirs_pair_by_pair(harness):
    speeds = {"ours": [10.0, 30.0, 80.0], "theirs": [10.0, 10.0, 10.0]}
    result = harness.paired(
        lambda n: {"speed": speeds["ours"][n]},
        lambda n: {"speed": speeds["theirs"][n]},
        pairs=3,
        score=harness.by("speed"),
    )
    assert result.ratio == {"median": 3.0, "worst": 1.0, "pairs": [1.0, 3.0, 8.0]}
    assert [run["speed"] for run in result.ours] == speeds["ours"]
    assert result.ratio_by(lambda run: 1 / run.value["speed"])["worst"] == 0.125


def test_both_clocks_are_read(harness):
    def work(_):
        return sum(range(300_000))

    result = harness.paired(work, work, pairs=1)
    assert result.ours[0]["wall"] > 0
    assert result.ours[0]["processor"] > 0
    assert result.ratio_by(harness.by_processor)["median"] > 0


def test_a_failed_quality_check_voids_every_ratio(harness):
    result = harness.paired(
        lambda _: {"tokens": 1},
        lambda _: {"tokens": 2},
        pairs=1,
        quality=lambda ours, theirs: {
            "passes": ours[0].value == theirs[0].value,
            "reason": "other tokens",
        },
    )
    assert result.ratio is None
    assert result.ratio_by(harness.by_wall) is None
    assert result.quality == {"passes": False, "reason": "other tokens"}
    assert result.ours[0]["tokens"] == 1  # the figures stay, to be looked at


def test_the_record(harness, capsys, monkeypatch):
    def options(parser):
        parser.add_argument("--pairs", type=int, default=1)

    def measure(a: Namespace):
        return harness.paired(lambda _: None, lambda _: None, pairs=a.pairs)

    record, code = record_of(
        harness,
        capsys,
        measure,
        words=["--pairs", "2"],
        options=options,
        monkeypatch=monkeypatch,
    )
    assert code == 0
    assert list(record) == KEYS
    assert record["name"] == "speed/trial"
    assert record["command"] == "python bench/speed/trial.py --pairs 2"
    assert set(record["machine"]) == {"cpu", "cores", "isa", "gpu", "load"}
    assert record["machine"]["cpu"]
    assert {"python", "torch", "numpy"} <= set(record["versions"])
    assert len(record["ratio"]["pairs"]) == 2
    assert record["quality"] == {"passes": True}
    assert record["details"]["arguments"] == {"pairs": 2}


def test_a_void_record_ends_with_code_1(harness, capsys, monkeypatch):
    def measure(_):
        result = harness.paired(lambda _: None, lambda _: None, pairs=1)
        result.void("two losses differ")
        return result

    record, code = record_of(harness, capsys, measure, monkeypatch=monkeypatch)
    assert code == 1
    assert record["ratio"] is None
    assert record["quality"] == {"passes": False, "reason": "two losses differ"}


def test_what_is_missing_is_skipped_with_its_reason(
    harness, capsys, monkeypatch, tmp_path
):
    import peers

    monkeypatch.setattr(peers, "SHARED", tmp_path)

    def measure(_):
        return harness.Result(ours=str(peers.shared(peers.RECIPES)))

    record, code = record_of(harness, capsys, measure, monkeypatch=monkeypatch)
    assert code == 0
    assert list(record) == [*KEYS, "skipped"]
    assert peers.RECIPES in record["skipped"]
    assert "TOQUE_SHARED" in record["skipped"]
    assert record["ratio"] is None
    assert record["quality"] == {"passes": None}


def test_a_side_in_a_process_of_its_own_prints_its_figures_alone(
    harness, capsys, monkeypatch
):
    record, code = record_of(
        harness, capsys, lambda _: {"peak": 3}, monkeypatch=monkeypatch
    )
    assert (record, code) == ({"peak": 3}, 0)


@pytest.mark.usefixtures("harness")
def test_a_utilisation_divides_by_the_rate_in_its_own_precision(monkeypatch):
    import torch
    import updates

    from toque.runs.peak import Peak

    # Threads are the process's: other tests of this worker compute on one.
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    asked = []

    def peak(_device, dtype, products, *, seconds):
        asked.append((products, seconds))
        return Peak({torch.float32: 350e9}.get(dtype, 2600e9), "made up")

    monkeypatch.setattr(updates, "measure_peak", peak)
    products = {(8, 16): 3.0, (8, 61): 1.0}
    rates = updates.Rates(products, threads=1)
    rates.sample()
    assert {"float32", "bf16"} <= rates.sampled.keys()
    assert asked == [(products, updates.SECONDS)] * len(rates.sampled)
    assert rates.utilisation(364e9, "bf16") == pytest.approx(0.14)
    assert rates.utilisation(297.5e9, "float32") == pytest.approx(0.85)
    assert rates.gflops()["bf16"] == {"median": 2600.0, "best": 2600.0}
