import threading
from dataclasses import dataclass

import pytest
import torch

from fixtures.runs import RowStream
from toque.data.loader.batch_stream import Prefetch
from toque.errors import DataError
from toque.units import Cursor


def running():
    return [t for t in threading.enumerate() if t.name.startswith("toque-prefetch")]


@dataclass(frozen=True)
class Read(RowStream):
    """A stream whose reads wait for each other: none ends before `together` have begun."""

    together: threading.Barrier | None = None

    def collate(self, cursor, update):
        if self.together is not None:
            self.together.wait()
        return update


@pytest.mark.parametrize("readers", [1, 3])
def test_updates_come_in_order_with_their_own_cursors(row_stream, readers):
    together, cursor = threading.Barrier(readers, timeout=20), Cursor()
    stream = Read(readers=readers, together=together)
    with Prefetch(stream, cursor, depth=2) as ahead:
        for _ in range(18):
            expected = row_stream.at(cursor)
            planned, batch = ahead.next()
            assert planned.cursor == expected.cursor
            assert torch.equal(batch.tokens, expected.batch.tokens)
            cursor = expected.cursor
        assert len(running()) == 1 + readers
        together.abort()
    assert running() == []


def test_leaving_early_ends_the_threads(row_stream):
    with Prefetch(row_stream, Cursor(), depth=1):
        pass
    assert running() == []


class Damaged:
    def __init__(self, stream, good):
        self.stream, self.good, self.readers = stream, good, 1
        self.collate = stream.collate

    def plan_update(self, cursor):
        if self.good == 0:
            raise DataError("shard 3 is truncated")
        self.good -= 1
        return self.stream.plan_update(cursor)


def test_an_error_reaches_the_loop_in_its_turn(row_stream):
    with Prefetch(Damaged(row_stream, 3), Cursor(), depth=2) as ahead:
        for _ in range(3):
            ahead.next()
        with pytest.raises(DataError, match="shard 3 is truncated"):
            ahead.next()
    assert running() == []


def test_a_damaged_store_ends_the_run_with_its_own_error(make_run):
    run = make_run()
    run.trainer.batches = Damaged(run.trainer.batches, 4)
    with pytest.raises(DataError):
        run.trainer.fit()
    assert run.recorder.events[-2:] == ["save 4", "end DataError"]
    assert running() == []


def test_an_error_of_a_reader_reaches_the_loop():
    broken = Read(readers=2, together=threading.Barrier(2))
    broken.together.abort()
    with (
        Prefetch(broken, Cursor()) as ahead,
        pytest.raises(threading.BrokenBarrierError),
    ):
        ahead.next()
    assert running() == []
