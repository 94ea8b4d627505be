from __future__ import annotations

import threading

import pytest
import torch

from toque.data.loader.epoch_plan import Update
from toque.data.loader.prefetch import Prefetch
from toque.errors import DataError
from toque.units import Cursor


def running():
    return [t for t in threading.enumerate() if t.name.startswith("toque-prefetch")]


def test_updates_come_in_order_with_their_own_cursors(row_stream):
    cursor = Cursor()
    with Prefetch(row_stream, cursor, depth=3) as ahead:
        for _ in range(20):
            expected = row_stream.at(cursor)
            planned, batch, waited = ahead.next()
            assert planned.cursor == expected.cursor
            assert torch.equal(batch.tokens, expected.batch.tokens)
            assert waited >= 0.0
            cursor = expected.cursor
        assert len(running()) == 1
    assert running() == []


def test_leaving_early_ends_the_thread(row_stream):
    with Prefetch(row_stream, Cursor(), depth=1):
        pass
    assert running() == []


class Damaged:
    def __init__(self, stream, good):
        self.stream, self.good = stream, good

    def at(self, cursor):
        if self.good == 0:
            raise DataError("shard 3 is truncated")
        self.good -= 1
        return self.stream.at(cursor)


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


class Read:
    """A stream whose reads wait for each other: none ends before `together` have begun."""

    def __init__(self, stream, *, readers, together):
        self.stream, self.readers = stream, readers
        self.barrier = threading.Barrier(together, timeout=20)

    def at(self, cursor):
        return self.stream.at(cursor)

    def planned(self, cursor):
        step = self.stream.at(cursor)
        return Update(((step.n_tokens,),), step.cursor, step.epoch)

    def collated(self, cursor, update):
        self.barrier.wait()
        return self.stream.at(cursor)


def test_several_readers_read_at_once_and_the_order_stays(row_stream):
    slow = Read(row_stream, readers=3, together=3)
    cursor = Cursor()
    with Prefetch(slow, cursor, depth=2) as ahead:
        for _ in range(9):
            planned, batch, _ = ahead.next()
            expected = row_stream.at(cursor)
            assert planned.cursor == expected.cursor
            assert torch.equal(batch.tokens, expected.batch.tokens)
            cursor = expected.cursor
        slow.barrier.abort()
    assert running() == []


def test_an_error_of_a_reader_reaches_the_loop(row_stream):
    broken = Read(row_stream, readers=2, together=2)
    broken.barrier.abort()
    with Prefetch(broken, Cursor()) as ahead, pytest.raises(threading.BrokenBarrierError):
        ahead.next()
    assert running() == []
