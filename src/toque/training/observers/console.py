"""Progress of a run for whoever watches: a line for now, and lines that stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from toque.reporter import Losing, Reporter
from toque.training.callbacks import Callback
from toque.training.events import RunEnd, RunStart, Saved, StepInfo
from toque.training.observers.step_window import Window
from toque.units import Duration, Progress


class ConsoleProgress(Callback):
    """Reports progress, evaluations, warnings and the end.

    Args:
        log_every: how often loss and speed are read; on CUDA reading waits for the device.
        reporter: who is told.
    """

    def __init__(self, *, log_every: Duration, reporter: Reporter) -> None:
        self.log_every = log_every
        self._reporter = reporter
        self._window = Window()
        self._stop_after: Duration | None = None
        self._began, self._fraction_at_start = 0.0, 0.0
        self._figures = ""
        self._newest_saved: int | None = None
        self._last_loss: float | None = None

    def on_fit_start(self, start: RunStart) -> None:
        """Say where the run begins."""
        self._window = Window()
        self._figures, self._last_loss = "", None
        self._stop_after = start.stop_after
        self._began = time.perf_counter()
        self._fraction_at_start = start.stop_after.fraction(start.progress)
        self._newest_saved = start.progress.step or None
        for note in start.notes:
            self._reporter.notice(f"note: {note}")
        if start.progress.step:
            self._reporter.notice(f"continuing from step {start.progress.step:,}")

    def on_step(self, info: StepInfo) -> None:
        """Renew the line."""
        self._window.add(info)
        first = info.before.step == 0
        logged = first or self.log_every.crossed(info.before, info.progress, self._stop_after)
        if logged:
            speed = f"{self._window.tokens_per_second:,.0f} tokens/s"
            self._figures = f"loss {float(info.loss):.4f}  lr {info.lr:.2e}  {speed}"
            self._window = Window()
        parts = (self._place(info.progress), self._figures, self._left(info))
        self._reporter.progress("  ".join(filter(None, parts)), keep=logged)

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """One line that stays, with the change since the evaluation before."""
        loss = metrics.get("loss")
        parts = [f"{self._place(at)}  evaluation"]
        parts += [f"{name} {metrics[name]:{form}}" for name, form in _SHOWN if name in metrics]
        if loss is not None and self._last_loss is not None:
            parts.append(f"({loss - self._last_loss:+.4f})")
        self._last_loss = loss
        self._reporter.notice("  ".join(parts))

    def on_save(self, at: Progress, saved: Saved) -> None:
        """Take note of the newest durable step."""
        self._newest_saved = saved.step

    def on_warning(self, at: Progress, message: str) -> None:
        """One line that stays."""
        self._reporter.notice(f"warning: {message}")

    def on_fit_end(self, end: RunEnd) -> None:
        """Say how it ended and what is safe."""
        self._reporter.progress("")
        saved = (
            f"saved up to step {self._newest_saved:,}" if self._newest_saved else "nothing saved"
        )
        best = f", best loss {end.best.loss:.4f} at step {end.best.step:,}" if end.best else ""
        self._reporter.notice(
            f"{end.reason.replace('_', ' ')} at step {end.progress.step:,} after "
            f"{_clock(end.seconds)}; {saved}{best}"
        )

    def _place(self, at: Progress) -> str:
        return f"step {at.step:,}  epoch {at.epoch:.2f}"

    def _left(self, info: StepInfo) -> str:
        assert self._stop_after is not None
        done = self._stop_after.fraction(info.progress)
        gained = done - self._fraction_at_start
        if gained <= 0:
            return ""
        left = (time.perf_counter() - self._began) * (1.0 - done) / gained
        saved = f"  saved {self._newest_saved:,}" if self._newest_saved else ""
        return f"{done:.0%}  {_clock(left)} left{saved}"


class ConsoleLoss(Callback):
    """Warns, once, that what was told could not be shown; the run goes on.

    Args:
        reporter: who is told.
        warn: takes the warning.
    """

    def __init__(self, reporter: Losing, *, warn: Callable[[Progress, str], None]) -> None:
        self._reporter, self._warn, self._warned = reporter, warn, False

    def on_step(self, info: StepInfo) -> None:
        """Look."""
        self._look(info.progress)

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Look."""
        self._look(at)

    def on_fit_end(self, end: RunEnd) -> None:
        """Look a last time."""
        self._look(end.progress)

    def _look(self, at: Progress) -> None:
        lost = self._reporter.lost
        if lost is None or self._warned:
            return
        self._warned = True
        self._warn(
            at,
            f"the console cannot be written ({lost}): what it would have shown is dropped where it "
            "fails. The run goes on; its figures are in this file",
        )


_SHOWN = (("loss", ".4f"), ("perplexity", ".2f"))


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds for people.

    >>> _clock(75), _clock(4000)
    ('1:15', '1:06:40')
    """
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"
