"""Whole runs on the fake card, and their parts: feed, saves, resume, evaluation, lack of memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fake_cuda.card import BLOCK, FakeCard, fake_card, some_number, to_card
from fake_cuda.cases import Setup, card_and_trainer, state_on
from gpu_run import Losses
from tiny import VOCAB
from toque.batch import Batch
from toque.data.loader.batch_stream import DeviceBatch, DeviceFeed, Prefetch
from toque.errors import NonFiniteError
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions
from toque.training.checkpoint.resume import load_tensors, trainer_tensors
from toque.training.checkpoint.saver import SnapshotBuffers
from toque.training.runtime import Runtime
from toque.training.trainer import Schedule, Trainer
from toque.training.update_guard import SkipStep
from toque.units import Cursor, Duration

SIX = Schedule(Duration(6, "steps"), Duration(3, "steps"), Duration(3, "steps"))
"""Six updates, of which the third and the last are evaluated and saved."""


def fed(**more: Any) -> dict[str, Any]:
    """Arguments of a trainer as `toque train` makes it on a card."""
    return {
        "schedule": SIX,
        "prefetch": lambda batches, cursor: Prefetch(
            batches, cursor, feed=DeviceFeed(torch.device("cuda"))
        ),
    } | more


def updates_must_not_wait(card: FakeCard, trainer: Trainer) -> None:
    """Make a wait within an update of this trainer an error."""
    step = trainer.step

    def guarded(*args: Any, **kwargs: Any) -> Any:
        with card.waiting_is_an_error():
            return step(*args, **kwargs)

    trainer.step = guarded  # type: ignore[method-assign]


@dataclass(frozen=True)
class Run:
    """Facts of a run of six updates."""

    steps: int
    reason: str
    saved: list[str]
    evaluated: bool
    state_on: dict[str, str]
    warnings: list[str]
    waits: dict[str, int]


def six_updates(kind: str, *, background: bool = False, **setup: Any) -> Run:
    """A run that stops after three updates, and one that continues it."""
    how = Setup(kind, **setup)
    models, stream = [how.model(), how.model()], how.stream()
    with tempfile.TemporaryDirectory() as name, fake_card(content=True) as card:
        folder = Path(name)
        first = how.trainer(
            models[0], stream, folder, **fed(background_saves=background)
        )
        first.schedule = Schedule(Duration(3, "steps"), None, Duration(1, "steps"))
        updates_must_not_wait(card, first)
        assert first.fit().reason == "finished"
        seen = Losses()
        again = how.trainer(models[1], stream, folder, **fed(callbacks=(seen,)))
        assert again.progress.step == 3
        updates_must_not_wait(card, again)
        card.waits.clear()
        end = again.fit()
        card.settle()
        assert set(card.pageable) <= {
            card.order.default.number
        }  # evaluation's, not the feed's
        saved = sorted(
            p.name for p in again.checkpoints.current_folder.iterdir() if p.is_dir()
        )
        return Run(
            end.progress.step, end.reason, saved, end.best is not None, state_on(again),
            seen.warnings, dict(card.waits),
        )  # fmt: skip


def rolled_back() -> tuple[list[str], dict[str, str]]:
    """A run whose updates are judged as outliers for a while; its warnings, and where state is."""
    how, seen = Setup(), Losses()
    with card_and_trainer(how, **fed(callbacks=(seen,))) as (card, trainer):
        updates_must_not_wait(card, trainer)
        trainer.guard.skip_step = SkipStep(roll_back_after=2)
        trainer.schedule = Schedule(
            Duration(6, "steps"),
            None,
            Duration(2, "steps"),
            check_every=Duration(1, "steps"),
        )

        def read(tensor: Tensor) -> bool | float | int:
            is_outlier = tensor.dtype == torch.bool and trainer.progress.step in (3, 4)
            return False if is_outlier else some_number(tensor)

        card.read = read
        assert trainer.fit().progress.step == 6
        return seen.warnings, state_on(trainer)


def not_finite() -> str:
    """The error of a run whose updates are not finite, which is traced on the card."""
    with card_and_trainer(Setup(), **fed()) as (card, trainer):
        # "Is it finite", then "is there a NaN": no and no, so that all is looked at.
        card.read = lambda t: False if t.dtype == torch.bool else some_number(t)
        try:
            trainer.fit()
        except NonFiniteError as error:
            return str(error)
    raise AssertionError("the run went on")


@dataclass(frozen=True)
class Short:
    """Facts of an update for which the card's memory was too small at first."""

    smaller_from: dict[int, int]
    warnings: list[str]
    left: int  # bytes held after it and not before it
    peak: int
    limit: int


def short_of_memory(kind: str) -> Short:
    """An update of five rows at once on a card that holds two."""
    how, seen = Setup(kind), Losses()
    with card_and_trainer(how, callbacks=(seen,)) as (card, trainer):
        step = trainer.batches.at(Cursor())
        batch = step.batch.to("cuda")
        trainer.oom_fallback.rows = 2
        trainer.step(step, batch)  # the optimizer's state is there from the first on
        torch.cuda.reset_peak_memory_stats()
        trainer.step(step, batch)
        fits = card.peak
        trainer.oom_fallback.rows = 5
        torch.cuda.reset_peak_memory_stats()
        # A little more: the guard keeps what it has still to judge.
        before, card.limit = card.now, fits + 8 * BLOCK
        trainer.step(step, batch)
        smaller = trainer.oom_fallback.smaller_from
        return Short(smaller, seen.warnings, card.now - before, card.peak, card.limit)


def held_out(
    kind: str, precision: Any = "bf16"
) -> tuple[dict[str, float], dict[str, int]]:
    """A held-out loss of seven examples in batches of two rows, and the waits for it."""
    with card_and_trainer(Setup(kind, precision=precision)) as (card, trainer):
        card.waits.clear()
        return trainer.evaluator(), dict(card.waits)


def texts(kind: str, n_tokens: int, **options: Any) -> tuple[list[int], dict[str, int]]:
    """Lengths of three texts, and the waits while they were written."""
    model = Setup(kind).model()
    asked = GenerationOptions(max_new_tokens=n_tokens, **options)
    with fake_card(content=True) as card:
        to_card(model)
        # No token of the vocabulary ends a text.
        found = generate(model, [[5, 6, 7], [8, 9], [4]], asked, eos_id=VOCAB, pad_id=0)
        return [len(text) for text in found], dict(card.waits)


def fed_batch(feed_of: Callable[[torch.device], DeviceFeed] = DeviceFeed) -> list[str]:
    """What the card is asked for when one batch is sent, received and used; how often in a row."""
    batch = Setup().stream().at(Cursor()).batch
    with fake_card(on_wait="raise", content=True) as card:
        feed = feed_of(torch.device("cuda"))
        received = feed.receive(feed.send(batch))
        for tensor in received.tensors().values():
            tensor + tensor
        assert not card.pageable, dict(card.pageable)
        card.settle()
        return _told(card.order.log)


def _told(log: list[str]) -> list[str]:
    """A log with what stands there several times in a row said once."""
    return [
        line for line, before in zip(log, ["", *log], strict=False) if line != before
    ]


class UnrecordedFeed(DeviceFeed):
    """A control: what it gives may be overwritten while it is read."""

    def receive(self, sent: DeviceBatch) -> Batch:
        batch, whole = sent
        torch.cuda.current_stream(self._device).wait_event(whole)
        return batch


class HastyFeed(DeviceFeed):
    """A control: what it gives may not have arrived."""

    def receive(self, sent: DeviceBatch) -> Batch:
        return sent[0]


class PageableFeed(DeviceFeed):
    """A control: it copies from memory that is not page-locked."""

    def send(self, batch: Batch) -> DeviceBatch:
        with torch.cuda.stream(self._stream):
            return batch.to(self._device), self._stream.record_event()


@dataclass(frozen=True)
class Snapshot:
    """Facts of the copies of a trainer's tensors."""

    waits: dict[str, int]
    log: list[str]
    on: set[str]
    pinned: bool
    second_is_the_first: bool
    is_whole: bool


def snapshot() -> Snapshot:
    """The copies that a save in the background makes, twice."""
    with card_and_trainer(Setup("t5")) as (card, trainer):
        step = trainer.batches.at(Cursor())
        trainer.step(step, step.batch.to("cuda"))
        tensors = trainer_tensors(trainer.model, trainer.optimizer)
        slot = SnapshotBuffers()
        card.waits.clear()
        card.order.log.clear()
        copies = _flat(slot.copy(tensors))
        waits, log = dict(card.waits), _told(card.order.log)
        card.refuse_in_flight(*copies)
        places = [copy.data_ptr() for copy in copies]
        again = [copy.data_ptr() for copy in _flat(slot.copy(tensors))]
        kinds = {copy.device.type for copy in copies}
        whole = [(t.shape, t.dtype) for t in _flat(tensors)] == [
            (c.shape, c.dtype) for c in copies
        ]
        pinned = all(copy.is_pinned() for copy in copies)
        return Snapshot(waits, log, kinds, pinned, places == again, whole)


def _flat(tensors: dict[str, dict[str, Tensor]]) -> list[Tensor]:
    return [tensor for named in tensors.values() for tensor in named.values()]


def reads_a_copy_too_soon() -> None:
    """A control: a copy from the card that is read before anything waited for it."""
    with fake_card(content=True):
        copy = torch.empty(3, pin_memory=True)
        copy.copy_(torch.empty(3, device="cuda"), non_blocking=True)
        copy.sum()


def loaded(optimizer: str, **setup: Any) -> dict[str, str]:
    """The devices of weights and of optimizer state once they were loaded; an update goes on."""
    how = Setup("gpt2", optimizer=optimizer, **setup)
    once = Schedule(Duration(1, "steps"))
    with card_and_trainer(how, schedule=once) as (_, trainer):
        trainer.fit()
        found = trainer.checkpoints.newest_valid()
        assert found is not None
        before = state_on(trainer)
        load_tensors(found, trainer.model, trainer.optimizer)
        assert state_on(trainer) == before
        step = trainer.batches.at(Cursor())
        trainer.step(step, step.batch.to("cuda"))
        weights = {p.device.type for p in trainer.model.parameters()}
        return before | {"weights": ", ".join(sorted(weights))}


def leaves_state_in_memory() -> None:
    """A control: an update whose optimizer holds a tensor in the machine's memory."""
    with card_and_trainer(Setup()) as (_, trainer):
        step = trainer.batches.at(Cursor())
        trainer.step(step, step.batch.to("cuda"))
        first = next(iter(trainer.optimizer.state.values()))
        first["exp_avg"] = first["exp_avg"].cpu()
        trainer.step(step, step.batch.to("cuda"))


def hidden(environment: str) -> str:
    """The device that is chosen where the environment hides the card."""
    with (
        fake_card(content=True),
        patch.dict(os.environ, CUDA_VISIBLE_DEVICES=environment),
    ):
        return Runtime.detect().device.type
