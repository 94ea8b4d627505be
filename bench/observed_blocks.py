"""Blocks of one training with observing on and off in turn (on, off, off, on), in one process.

Two processes of the same training differ by several per cent on most machines: where their memory
lies, what else runs, how warm the processor is. Neighbouring blocks of one process share all that,
and on-off-off-on takes a steady drift out of their sums.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toque.config import load_config
from toque.cooking.recipe_scores import RECIPE_SCORES
from toque.reporter import SILENT
from toque.runs.history import METRICS, read_metrics
from toque.training.callbacks import Callback, RunEnd, RunStart
from toque.training.distributed.process_group import joined
from toque.training.observers.gradients import Gradients
from toque.training.observers.metrics_log import MetricsLog
from toque.training.observers.system_sampler import SystemSampler
from toque.training.observers.watchers import RunState, Watchers
from toque.training.stopping import CommandClock
from toque.units import Duration, Progress
from toque.workflows.build import build_run
from toque.workflows.prepared_store import open_store

ORDER = (True, False, False, True)


@dataclass(frozen=True)
class Block:
    """Some updates: whether they were observed, and what they took."""

    on: bool
    first: int
    """The step its first update ends at; the last one's is `last`."""
    last: int
    wall: float
    """Seconds by the clock, with starting and stopping what observes."""
    processor: float
    """Seconds of all threads."""


@dataclass(eq=False)
class Blocks:
    """A user's callback that turns observing on and off, and times what is between.

    Args:
        settling: updates before the first block, observed: memory and caches find their places,
            and the tracker is loaded.
        size: updates of a block.
        n: blocks, a multiple of `ORDER`'s length.
    """

    settling: int
    size: int
    n: int
    found: list[Block] = field(default_factory=list)
    _on: bool = True
    _stamp: tuple[float, float] = (0.0, 0.0)

    @property
    def steps(self) -> int:
        """Of the whole training."""
        return self.settling + self.n * self.size

    def watch(self, observers: Sequence[Callback]) -> None:
        """Take what is turned on and off from the training's own observers."""
        self._threads = [c for c in observers if isinstance(c, SystemSampler | Gradients)]
        (self._log,) = (c for c in observers if isinstance(c, MetricsLog))
        self._copies = self._log.copies

    def on_step_end(self, state: RunState) -> None:
        """End a block and begin the next."""
        into = state.step - self.settling
        if into < 0 or into % self.size:
            return
        done, before = into // self.size, self._stamp
        # What observing takes to begin and to end is its own: it counts in the block that is on.
        if self._on and (done == self.n or not self._wanted(done)):
            self._turn(on=False)
        self._stamp = time.perf_counter(), time.process_time()
        if done:
            wall, processor = (now - then for now, then in zip(self._stamp, before, strict=True))
            was_on = self._wanted(done - 1)
            self.found.append(
                Block(was_on, state.step - self.size + 1, state.step, wall, processor)
            )
        if done < self.n and self._wanted(done) and not self._on:
            self._turn(on=True)

    def _wanted(self, block: int) -> bool:
        return ORDER[block % len(ORDER)]

    def _turn(self, *, on: bool) -> None:
        for observer in self._threads:
            if on:
                observer.on_fit_start(RunStart(Progress(), Duration(1, "steps")))
            else:
                observer.on_fit_end(RunEnd("finished", Progress(), 0.0))
        self._log.copies = self._copies if on else ()
        self._on = on


@dataclass(frozen=True)
class StopAt:
    """A user's callback that ends a training after so many updates."""

    step: int

    def on_step_end(self, state: RunState) -> str | None:
        """Ask for it."""
        return "stop" if state.step >= self.step else None


def trained(work: Path, run: str, callback: Blocks | StopAt, settings: Sequence[str]) -> Path:
    """Train `work`/run.yaml with these settings and the callback, here; the run's folder."""
    os.environ["TOQUE_CACHE"] = str(work / "cache")
    with chdir(work), joined(strategy="single") as ranks:
        config = load_config("run.yaml", [f"run_dir={run}", *settings]).config
        watchers = Watchers.from_settings(
            config.observe,
            config.foreign_code,
            [callback],
            run=Path(config.run_dir),
            settings=config.model_dump(mode="json"),
            scores=RECIPE_SCORES,
        )
        made = build_run(
            config,
            open_store(config),
            ranks,
            watchers=watchers,
            uploads=None,
            clock=CommandClock(),
            reporter=SILENT,
        )
        if isinstance(callback, Blocks):
            callback.watch(list(made.trainer.callbacks))
        made.trainer.fit()
        for feed in watchers.opened:
            feed.finish(failed=False)
    return work / run


def losses_of(run: Path) -> dict[int, float]:
    """Logged losses by step."""
    return {e["step"]: e["loss"] for e in read_metrics(run / METRICS) if e["event"] == "step"}


def pairs_of(blocks: Sequence[Block], events: Sequence[dict[str, Any]], pairs: int) -> list[Any]:
    """On and off of each pair: seconds, updates, and what was observed meanwhile."""
    each = len(blocks) // pairs
    found = []
    for begin in range(0, each * pairs, each):
        part = blocks[begin : begin + each]
        found.append(tuple(_side([b for b in part if b.on is on], events) for on in (True, False)))
    return found


def _side(blocks: Sequence[Block], events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    steps = {step for b in blocks for step in range(b.first, b.last + 1)}
    counts = {
        name: sum(e["event"] == name and e["step"] in steps for e in events)
        for name in ("gradients", "system", "step")
    }
    return {
        "seconds": round(sum(b.wall for b in blocks), 3),
        "processor_seconds": round(sum(b.processor for b in blocks), 3),
        "updates": len(steps),
        **counts,
    }


def tracked_steps(run: Path) -> list[int]:
    """The steps whose loss TensorBoard was told."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = EventAccumulator(str(run / "tensorboard"))
    told.Reload()
    return [scalar.step for scalar in told.Scalars("train/loss")]


def as_rows(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """For the record."""
    return [
        {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(b).items()}
        for b in blocks
    ]
