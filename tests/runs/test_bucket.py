"""A run in a bucket, of a real service on this machine."""

import pytest

from toque.errors import CheckpointError
from toque.runs.places import RunFinder
from toque.runs.run_record import RunRecord
from toque.runs.run_state import state_of
from toque.storage.bucket import open_bucket
from toque.storage.bucket_lock import Owner
from toque.workflows.inference.serve import _WATCHED, watch
from watching.written_run import WrittenRun

pytestmark = pytest.mark.slow


def test_a_run_in_a_bucket_is_followed_and_its_end_seen(s3_service, tmp_path):
    run, now = WrittenRun(tmp_path / "first"), [0.0]

    def upload(name: str = "runs/first") -> None:
        s3_service.put(f"{name}/metrics.jsonl", run.metrics.read_bytes())

    run.step(1)
    upload()
    owner = Owner()
    s3_service.put("runs/first/lock.json", owner.record())
    finder = RunFinder(open_bucket("s3://pantry/runs", _WATCHED))
    ((name, place),) = finder.places().items()
    assert name == "first"
    assert place.address == "s3://pantry/runs/first"
    watched = RunRecord(place, clock=lambda: now[0])
    watched.refresh()
    assert watched.trouble == ""
    assert state_of(watched).sentence == "Running, at step 1."
    run.step(2, loss=0.5)
    upload()
    s3_service.put("runs/first/lock.json", owner.record())
    now[0] = 40.0
    watched.refresh()
    assert watched.history.step.loss == 0.5
    assert watched.history.curves["loss"].points()[0] == [1.0, 2.0]
    now[0] = 90.0  # its lock was not renewed for longer than any that lives
    watched.refresh()
    assert state_of(watched).kind == "killed"
    run.end(2)
    upload()
    watched.refresh()
    assert state_of(watched).sentence == "Finished, at step 2."
    alone = RunFinder(open_bucket("s3://pantry/runs/first", _WATCHED)).places()
    assert [one.address for one in alone.values()] == ["s3://pantry/runs/first"]


@pytest.mark.usefixtures("s3_service")
def test_a_bucket_that_is_not_there_is_said_in_a_paragraph():
    with pytest.raises(CheckpointError, match="nobody"):
        watch("s3://nobody/runs", port=0)
