"""Files beside a run that the disk does not take: the run goes on and says so."""

import json
import os

import pytest

from fixtures.damage import no_file_above
from toque import evaluate
from toque.cli import main
from toque.errors import CheckpointError
from toque.storage.json_files import JsonLines

SPARSE = 1 << 30


def test_fault_65_a_disk_that_does_not_take_samples_ends_no_run(
    kitchen, tmp_path, capfd
):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (
        run / "checkpoints" / ".lock"
    ).touch()  # the folder of a run, whose samples are full
    samples = run / "samples.jsonl"
    samples.touch()
    os.truncate(samples, SPARSE)
    words = [f"run_dir={run}", "train.stop_after=6 steps", "evaluation.generate=2"]
    config = str(kitchen / "run.yaml")
    with no_file_above(SPARSE + 20):  # half a line fits
        assert main(["train", config, *words]) == 0
    events = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    warned = [e["message"] for e in events if e["event"] == "warning"]
    lost = [
        w
        for w in warned
        if w.startswith("the 2 texts of step") and "samples.jsonl" in w
    ]
    assert [e["step"] for e in events if e["event"] == "evaluation"] == [5, 6]
    assert len(lost) == 2
    assert "File too large" in lost[0]
    # And so are those of the finished model, which ends with all that it should have.
    assert capfd.readouterr().err.count("could not be written to") == 3
    assert (run / "model" / "config.json").is_file()
    assert (run / "evaluation.json").is_file()
    assert samples.stat().st_size == SPARSE  # no half line
    with no_file_above(10), pytest.raises(CheckpointError, match="is full"):
        evaluate(run)


def test_fault_65_lines_are_appended_all_or_none(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"torn": ')
    file = JsonLines(path)
    with no_file_above(20):
        assert file.append([b'{"a": 1}', b'{"b": 2}']) is not None
        assert file.append([b'{"c": 3}']) is None
    assert file.append([b"{}"]) is None
    file.close()
    assert path.read_bytes() == b'{"torn": \n{"c": 3}\n{}\n'
