"""Sample texts of every evaluation: kept in samples.jsonl, their scores and cost shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from toque.evaluation.text_samples import append_samples
from toque.models.lora.layers import is_adapted
from toque.reporter import SILENT, Reporter
from toque.storage.held_folder import place_of
from toque.training.callbacks import Callback
from toque.training.events import RunStart
from toque.training.runtime import Runtime
from toque.units import Progress
from toque.workflows.assembly.while_training.evaluator import Evaluated
from toque.workflows.assembly.while_training.shown import block, cost, shown

WritingContext = Callable[[], AbstractContextManager[Any]]


def writing_in(model: nn.Module, runtime: Runtime) -> WritingContext:
    """The context in which a model in training can write texts.

    Whole models are float32 and need none; frozen weights beside an adapter may be held in the
    format autocast computes in, and then only work with it.
    """
    return runtime.autocast if is_adapted(model) else nullcontext


class Newest(Protocol):
    """Knows what the newest evaluation found."""

    last: Evaluated


@dataclass
class SampleWriter(Callback):
    """Keeps and shows what an evaluation has written.

    Args:
        evaluator: knows what the newest evaluation found.
        path: samples.jsonl.
        watched: metrics that the run goes by.
        reporter: who is shown it.
        warn: called when a text could not be kept or scored; the run goes on.
        clock: seconds that pass.
    """

    evaluator: Newest
    path: Path
    watched: Sequence[str] = ()
    reporter: Reporter = SILENT
    warn: Callable[[Progress, str], None] = lambda _at, _message: None
    clock: Callable[[], float] = time.perf_counter
    _before: Mapping[str, float] = field(default_factory=dict)
    _began: float = 0.0
    _spent: float = 0.0
    _failed: set[str] = field(default_factory=set)

    def on_fit_start(self, start: RunStart) -> None:
        """Begin to count the time."""
        self._began, self._spent = self.clock(), 0.0

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Keep the texts; show the scores, the cost, and the texts for the user's own prompts."""
        found = self.evaluator.last
        self._spent += found.seconds
        samples = [*found.held_out, *found.own]
        path = (
            place_of(self.path.parent) / self.path.name
        )  # of a run that is moved while it goes on
        refused = append_samples(path, samples, step=at.step) if samples else None
        if refused is not None:
            self.warn(at, refused)
        for name in [name for name in found.failed if name not in self._failed]:
            self._failed.add(name)
            self.warn(at, f"scores of texts: {name} {found.failed[name]}")
        lines = block(found, self._before, self.watched)
        share = self._spent / max(self.clock() - self._began, self._spent, 1e-9)
        self.reporter.notice("\n".join([*lines, cost(found, share)]))
        for sample in found.own:
            self.reporter.notice(shown(sample, step=at.step))
        self._before = found.texts
