"""Live progress of a run: a line that is renewed, and lines that stay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Final

from toque.reporter import Reporter, clock_text
from toque.runs.time_left import TimeLeft
from toque.training.callbacks import Callback, RunEnd, RunStart, Saved, StepInfo
from toque.training.observers.metrics_log import StepWindow
from toque.units import Duration, Progress

_LOOK_SECONDS: Final = 0.25
"""Seconds between two looks at the newest update. On CUDA a look waits for the device."""


class ConsoleProgress(Callback):
    """Reports progress, evaluations, warnings and the end.

    Args:
        log_every: time between two lines that stay.
        reporter: shows them.
        warn: takes a warning, once, that something could not be shown.
        time_left: expected time of the run; None counts updates alone.
        clock: seconds that pass.
    """

    def __init__(
        self,
        *,
        log_every: Duration,
        reporter: Reporter,
        warn: Callable[[Progress, str], None] = lambda *_: None,
        time_left: TimeLeft | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.log_every = log_every
        self._reporter, self._warn = reporter, warn
        self._foreseen = time_left
        self._clock = clock
        self._window = StepWindow()
        self._newest_saved: int | None = None
        self._last_loss: float | None = None
        self._best: float | None = None
        self._line = ""
        self._looked = 0.0
        self._evaluation_began: float | None = None
        self._loss_told = False

    def on_fit_start(self, start: RunStart) -> None:
        """Show the step that the run begins at, and the time it will take."""
        self._window, self._line = StepWindow(), ""
        self._last_loss = self._evaluation_began = None
        self._stop_after = start.stop_after
        self._best = start.best.loss if start.best is not None else None
        self._time_left = self._foreseen or TimeLeft(start.stop_after)
        self._time_left.start(start.progress)
        self._newest_saved = start.progress.step or None
        self._looked = self._clock()
        for note in start.notes:
            self._reporter.notice(f"note: {note}")
        if start.progress.step:
            self._reporter.notice(f"continuing from step {start.progress.step:,}")
        if self._foreseen is not None and (words := self._time_left.in_words(start.progress)):
            self._reporter.notice(words)

    def on_before_step(self, at: Progress) -> None:
        """Take the time of an evaluation before it."""
        if self._evaluation_began is not None:
            self._time_left.evaluated(self._clock() - self._evaluation_began)
            self._evaluation_began = None

    def on_micro_batch(self, at: Progress, done: int, total: int) -> None:
        """Show that a long update continues."""
        if done == total or self._clock() - self._looked < _LOOK_SECONDS:
            return  # the line of the update follows
        under_way = f"step {at.step + 1:,}: {done} of {total} micro-batches"
        self._reporter.progress(f"{self._line}  ({under_way})" if self._line else under_way)

    def on_step(self, info: StepInfo) -> None:
        """Renew the line."""
        self._window.add(info)
        if words := self._time_left.updated(info.before, info.progress, slowed=info.slowed):
            self._reporter.notice(words)
        first = info.before.step == 0
        logged = first or self.log_every.crossed(info.before, info.progress, self._stop_after)
        now = self._clock()
        if not logged and now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        window = self._window
        best = "" if self._best is None else f"  best {self._best:.4f}"
        steps = window.n_steps / window.seconds if window.seconds > 0 else 0.0
        speed = f"{_rounded(steps)} steps/s  {window.tokens_per_second:,.0f} tokens/s"
        metrics = f"loss {float(info.loss):.4f}  lr {info.lr:.2e}{best}  {speed}"
        parts = (self._place(info.progress), metrics, self._left(info.progress))
        self._line = "  ".join(parts)
        self._reporter.progress(self._line, keep=logged)
        if logged:
            self._window = StepWindow()
        self._look_for_losses(info.progress)

    def on_before_evaluate(self, at: Progress) -> None:
        """Take the time."""
        self._evaluation_began = self._clock()

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """One line that stays, with the change since the evaluation before."""
        loss = metrics.get("loss")
        parts = [f"{self._place(at)}  evaluation"]
        parts += [f"{name} {metrics[name]:{form}}" for name, form in _SHOWN if name in metrics]
        if loss is not None and self._last_loss is not None:
            parts.append(f"({loss - self._last_loss:+.4f})")
        self._last_loss = loss
        if loss is not None and math.isfinite(loss):
            self._best = loss if self._best is None else min(loss, self._best)
        self._reporter.notice("  ".join(parts))

    def on_save(self, at: Progress, saved: Saved) -> None:
        """Take note of the newest durable step."""
        self._newest_saved = saved.step
        self._look_for_losses(at)

    def on_warning(self, at: Progress, message: str) -> None:
        """One line that stays."""
        self._reporter.notice(f"warning: {message}")

    def on_fit_end(self, end: RunEnd) -> None:
        """Show how it ended and the newest step that is saved."""
        self._reporter.progress("")
        saved = (
            f"saved up to step {self._newest_saved:,}" if self._newest_saved else "nothing saved"
        )
        best = f", best {end.best}" if end.best else ""
        self._reporter.notice(
            f"{end.reason.replace('_', ' ')} at step {end.progress.step:,} after "
            f"{clock_text(end.seconds)}; {saved}{best}"
        )

    def _place(self, at: Progress) -> str:
        return f"step {at.step:,}  epoch {at.epoch:.2f}"

    def _look_for_losses(self, at: Progress) -> None:
        lost = self._reporter.lost
        if lost is None or self._loss_told:
            return
        self._loss_told = True
        self._warn(
            at,
            f"the console cannot be written ({lost}): what it would have shown is dropped "
            "where it fails. The run continues; its metrics are in this file",
        )

    def _left(self, at: Progress) -> str:
        saved = f"  saved {self._newest_saved:,}" if self._newest_saved else ""
        left = clock_text(self._time_left.seconds(at))
        return f"{self._stop_after.fraction(at):.0%}  {left} left{saved}"


def _rounded(rate: float) -> str:
    """Three digits, or all of a larger number: 0.0123, 5.21, 1,234."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


_SHOWN = (("loss", ".4f"), ("perplexity", ".2f"), ("bits_per_byte", ".3f"))
