"""bench/gpu.sh: its commands, its table, and its rehearsal on a card that is not there."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = "tests/fake_cuda/run.py"
STUB = """#!/bin/sh
line=$(printf '%s\\037' "$@")
echo "$line" >>"$CALLS"
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """`commands(...)`: what gpu.sh calls Python with, when Python does nothing."""
    stub, calls = tmp_path / "python", tmp_path / "calls"
    stub.write_text(STUB)
    stub.chmod(0o755)
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("TOQUE_SHARED", str(tmp_path))
    (tmp_path / "peers").mkdir()

    def called(*words):
        calls.write_text("")
        done = subprocess.run(
            ["bench/gpu.sh", *words, str(stub)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return [line.split("\037")[:-1] for line in calls.read_text().splitlines()]

    return called


def parts_of(calls):
    """Names of parts in the order in which they ended."""
    return [call[3] for call in calls if call[0] == "bench/gpu_results.py"]


@pytest.mark.parametrize("mode", [(), ("--rehearse",)], ids=["card", "rehearsal"])
def test_every_command_can_be_read_by_its_script(commands, monkeypatch, mode):
    calls = commands(*mode)
    if mode:
        assert [FAKE in call[0] for call in calls].count(True) > 12
        calls = [call[1:] if FAKE in call[0] else call for call in calls]
    scripts = [
        call for call in calls if call[0].startswith(("bench/speed", "bench/quality"))
    ]
    scripts += [call for call in calls if call[0].startswith("bench/robustness")]
    assert len(scripts) >= 18
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    import harness

    options = {}
    monkeypatch.setattr(
        harness, "main", lambda file, _doc, its, _measure: options.update({file: its})
    )
    for script, *words in scripts:
        path = str(ROOT / script)
        if path not in options:
            monkeypatch.setattr(sys, "argv", [path])
            runpy.run_path(path, run_name="__main__")
        parser = argparse.ArgumentParser()
        options[path](parser)
        assert vars(parser.parse_args(words))


def test_what_a_cut_may_cost_comes_last(commands):
    order = parts_of(commands())
    assert order[:2] == ["machine", "doctor"]
    assert set(order[2:5]) == {"probe", "continued", "tests"}
    assert order[5:7] == ["neox", "t5-large"]
    assert (
        order.index("plan") > order.index("xxl-lora") > order.index("t5-packed-dense")
    )
    assert sorted(order) == sorted(parts_of(commands("--rehearse")))


def test_some_parts_alone(commands, monkeypatch):
    monkeypatch.setenv("PARTS", "neox xxl-lora")
    assert parts_of(commands()) == ["machine", "neox", "xxl-lora"]


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import gpu_results

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["gpu_results.py", *map(str, words)])
        gpu_results.main()

    return run


SWEEP = {
    "name": "speed/sweep",
    "ours": [
        {"rows": 8, "tokens_per_second": 50000.0, "mfu": 0.46, "peak_gib": 31.5,
         "attention": "flex"},
        {"rows": 16, "failed": "CUDA out of memory"},
    ],
    "theirs": [{"rows": 8, "tokens_per_second": 25000.0, "mfu": 0.23, "peak_gib": 60.0,
                "attention": "sdpa"}],
    "ratio": {"median": 2.0},
    "quality": {"passes": True},
    "details": {"arguments": {"beside": "trainer"}},
}  # fmt: skip
MACHINE = {"name": "machine", "device": "NVIDIA H100", "driver": "580.1", "begun": "20:00",
           "versions": {"python": "3.12.1", "torch": "2.11.0"}}  # fmt: skip
PROBE = {
    "name": "speed/attention_probe",
    "ours": [{"precision": "bf16", "head": 64, "bias": True, "seconds": 9.5,
              "options": {"BLOCK_M": 64}, "words": "blocks of 64 x 64, since a | b"}],
    "quality": {"passes": True},
}  # fmt: skip


def added(results, folder, name, record, *words):
    (folder / "out").write_text(
        record if isinstance(record, str) else json.dumps(record, indent=1)
    )
    (folder / "said").write_text("one\ntwo\n")
    results(folder / "results.jsonl", "--add", name, "--output", folder / "out", "--said",
            folder / "said", "--seconds", 41, *words)  # fmt: skip


def test_a_part_is_told_in_a_line(results, tmp_path, capsys):
    added(results, tmp_path, "neox", SWEEP)
    added(results, tmp_path, "probe", PROBE)
    added(results, tmp_path, "tests", "a\n30 passed\n", "--words", 1)
    added(results, tmp_path, "text", "half a rec", "--code", 124)
    added(
        results,
        tmp_path,
        "void",
        SWEEP | {"quality": {"passes": False, "reason": "apart"}},
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "neox, 41 s: 8 rows: 50,000 tokens/s, 46.0% MFU, 31.5 GiB, flex; 16 rows: CUDA out of "
        "memory; trainer: 8 rows: 25,000 tokens/s, 23.0% MFU, 60.0 GiB, sdpa; ratio 2.00"
    )
    assert lines[1].endswith(
        "1 of 1 have kernels: bf16 64 with bias: blocks of 64 x 64, since a | b"
    )
    assert lines[2:4] == [
        "tests, 41 s: 30 passed",
        "text, 41 s: FAILED (time limit): one / two / half a rec",
    ]
    assert lines[4].endswith("VOID: apart")


def test_the_table_is_put_in_place_of_the_cards_older_one(results, tmp_path, capsys):
    for name, record in (("machine", MACHINE), ("neox", SWEEP), ("probe", PROBE)):
        added(results, tmp_path, name, record)
    page = tmp_path / "page.md"
    page.write_text("# Performance\n\nText.\n\n## Older\n\nIts text.\n")
    results(tmp_path / "results.jsonl", "--page", page)
    once = page.read_text()
    assert "Results of bench/gpu.sh on NVIDIA H100\n" in once
    assert "| neox | 8 rows: 50,000 tokens/s, 46.0% MFU, 31.5 GiB, flex;" in once
    assert "| bf16 | 64 | yes | blocks of 64 x 64, since a / b | 9.5 |" in once
    assert once.endswith("\n\n## Older\n\nIts text.\n")
    results(tmp_path / "results.jsonl", "--page", page)
    assert page.read_text() == once
    assert "2 parts of NVIDIA H100" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["part", "record"])
def test_figures_of_a_rehearsal_make_no_table(results, tmp_path, where):
    added(results, tmp_path, "machine", MACHINE)
    added(
        results, tmp_path, "neox", SWEEP | {"rehearsal": where == "record"},
        *(["--rehearsal"] if where == "part" else []),
    )  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text("# Performance\n\n## Older\n")
    with pytest.raises(SystemExit, match="is from a rehearsal"):
        results(tmp_path / "results.jsonl", "--page", page)
    assert page.read_text() == "# Performance\n\n## Older\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="the hooks of a fake card need g++"
)
def test_a_rehearsal_comes_to_its_end(tmp_path):
    """Parts on a fake card, one on the CPU, and the plan beside the fake card's bytes."""
    asked = {"PARTS": "probe xxl-lora t5-packed plan", "OUT": str(tmp_path)}
    done = subprocess.run(
        ["bench/gpu.sh", "--rehearse", sys.executable],
        cwd=ROOT, env=os.environ | asked, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [
        json.loads(line)
        for line in (tmp_path / "results.jsonl").read_text().splitlines()
    ]
    assert [part["part"] for part in found] == [
        "machine",
        "probe",
        "t5-packed",
        "xxl-lora",
        "plan",
    ]
    assert all(part["rehearsal"] for part in found)
    assert found[3]["record"]["ours"][0]["peak_gib"] < 24
