"""Live progress of a run: a line that is renewed, and lines that stay.

Summary of a stretch of updates: speed, utilisation, memory, batch, scaling, convergence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import psutil
import torch
from torch import Tensor

from toque.reporter import Reporter, clock_text
from toque.runs.outlined_update import Peak
from toque.runs.time_left import TimeLeft
from toque.training.bottlenecks import GRAD_NORM
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


@dataclass(eq=False)
class Summary(Callback):
    """Prints at intervals what was measured since the last summary.

    It reads no number of an update before a summary is due, so on CUDA it waits for the device
    only then.

    Args:
        every: time between two summaries.
        reporter: prints them.
        device: of the run.
        compiled: True if the model is compiled.
        micro_batch_rows: rows computed at once.
        ranks: processes that share the run.
        alone_seconds: of one rank's part of an update, timed before the first; None: not timed.
        flops_per_token: forward and backward; None for no utilisation.
        peak: of the ranks together; None for no utilisation.
        uploads: outcome of the uploads so far, in words; None for none.
    """

    every: Duration
    reporter: Reporter
    device: torch.device
    compiled: bool
    micro_batch_rows: int
    ranks: int = 1
    alone_seconds: float | None = None
    flops_per_token: float | None = None
    peak: Peak | None = None
    uploads: Callable[[], str] | None = None
    _window: StepWindow = field(default_factory=StepWindow)
    _examples: int = 0
    _nats: Tensor | float = 0.0
    _norms: Tensor | float = 0.0
    _first_lr: float | None = None
    _loss_before: float | None = None
    _stop_after: Duration | None = None
    _gpu_percents: list[float] = field(default_factory=list)

    def take(self, record: Mapping[str, Any]) -> None:
        """Take the use of the GPUs from a record of metrics.jsonl, from any thread."""
        if record["event"] == "system":
            known = (gpu["utilisation_percent"] for gpu in record["gpus"])
            self._gpu_percents.extend(percent for percent in known if percent is not None)

    def on_fit_start(self, start: RunStart) -> None:
        """Begin a stretch."""
        self._stop_after, self._loss_before = start.stop_after, None
        self._clear()

    def on_step(self, info: StepInfo) -> None:
        """Add up, and print a summary when one is due."""
        self._window.add(info)
        self._examples += info.n_examples
        self._nats = self._nats + info.loss.detach().double() * info.n_targets
        self._norms = self._norms + info.grad_norm.detach().double()
        self._first_lr = info.lr if self._first_lr is None else self._first_lr
        if self.every.crossed(info.before, info.progress, self._stop_after):
            self.reporter.notice("\n".join(self._lines(info.progress, info.lr)))
            self._clear()

    def _clear(self) -> None:
        self._window, self._examples, self._first_lr = StepWindow(), 0, None
        self._nats = self._norms = 0.0

    def _lines(self, at: Progress, lr: float) -> list[str]:
        window, n = self._window, self._window.n_steps
        rows = {
            "speed": (
                f"{n / max(window.seconds, 1e-9):.2f} steps/s, "
                f"{window.tokens_per_second:,.0f} tokens/s"
            ),
            "utilisation": self._utilisation(),
            "memory": self._memory(),
            "batch": (
                f"{self._examples / n:,.1f} examples and {window.n_tokens / n:,.0f} tokens an "
                f"update (effective), {self.micro_batch_rows} rows at once, "
                f"{window.pad_fraction:.1%} padding"
            ),
            "compile": "compiled" if self.compiled else "not compiled",
            "scaling": self._scaling(),
            "signs": self._signs(lr),
        }
        first = f"summary at step {at.step:,}, over {n:,} update{'s' * (n > 1)}:"
        return [first, *(f"  {name:14}{text}" for name, text in rows.items() if text)]

    def _utilisation(self) -> str:
        seen, self._gpu_percents = self._gpu_percents, []
        busy = f"; GPU busy {sum(seen) / len(seen):.0f} % of the time" if seen else ""
        if self.flops_per_token is None or self.peak is None:
            return f"not measured{busy}"
        share = self._window.utilisation(self.flops_per_token, self.peak)
        if share > 1.0:
            return f"not known: the peak is too low{busy}"  # metrics_log warns once
        return (
            f"{share:.1%} of the peak, {self.peak.flops_per_second:.3g} FLOP/s "
            f"({self.peak.origin}); waiting for data {self._window.waiting_share:.1%}{busy}"
        )

    def _memory(self) -> str:
        resident, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
        words = f"{resident / 1e9:.2f} GB of {total / 1e9:.1f} GB resident"
        if self.device.type != "cuda":
            return words
        most = torch.cuda.max_memory_allocated(self.device)
        whole = torch.cuda.get_device_properties(self.device).total_memory
        return f"{most / 1e9:.2f} GB of the GPU's {whole / 1e9:.1f} GB at most; {words}"

    def _scaling(self) -> str:
        """Efficiency: the time of a rank's part of an update alone, over that of the update."""
        ranks, alone = self.ranks, self.alone_seconds
        if ranks < 2:
            return ""
        if alone is None:
            return f"{ranks} ranks; efficiency not measured"
        actual = max(self._window.seconds / self._window.n_steps, 1e-9)
        known = f"about {alone / actual:.0%}" if alone <= actual else "not known"
        return (
            f"{ranks} ranks, efficiency {known}: a rank's part of an update took {alone:.3g} s "
            f"before the run, an update {actual:.3g} s"
        )

    def _signs(self, lr: float) -> str:
        """Signs of convergence in the loss, the gradients, the learning rate and the uploads."""
        loss = float(torch.as_tensor(self._nats)) / max(1, self._window.n_targets)
        norm = float(torch.as_tensor(self._norms)) / self._window.n_steps
        before, self._loss_before = self._loss_before, loss
        words = f"loss {loss:.4f}"
        if before is not None:
            way = "falling" if loss < before else "NOT falling"
            words = f"loss {before:.4f} -> {loss:.4f}, {way}"
        calm = "" if norm < GRAD_NORM else f", above {GRAD_NORM:g}"
        first = lr if self._first_lr is None else self._first_lr
        moved = "constant" if first == lr else f"from {first:.2e}"
        words += f"; gradient norm {norm:.2f} on average{calm}; learning rate {lr:.2e}, {moved}"
        return words + (f"; uploads: {self.uploads()}" if self.uploads is not None else "")
