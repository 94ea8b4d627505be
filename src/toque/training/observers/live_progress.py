"""Live progress of a run: a line that is renewed, a row per evaluation, summaries for the log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import psutil
import torch
from torch import Tensor

from toque.reporter import Reporter, clock_text, one_line
from toque.runs.peak import Peak
from toque.runs.time_left import TimeLeft
from toque.training.bottlenecks import GRAD_NORM
from toque.training.callbacks import LOSS, Callback, RunEnd, RunStart, Saved, State, StepInfo
from toque.training.observers.metrics_log import StepWindow
from toque.training.state_values import number_in
from toque.units import Duration, Progress

_LOOK_SECONDS: Final = 0.25  # between two looks, each of which waits for the device on CUDA
_SHOWN: Final = (("loss", ".4f"), ("perplexity", ".2f"), ("bits_per_byte", ".3f"))


_EPOCH_ROWS: Final = 4  # most rows of epochs that end without an evaluation
_LEAST_TEXT: Final = 24  # letters of a written text in a row, however narrow the terminal
_EPOCH: Final = Duration(1, "epochs")


class Highlight(NamedTuple):
    """The main score of an evaluation, and one of its texts."""

    name: str = ""  # name of the score, with its spaces; "" without a score
    value: float = math.nan
    text: str = ""


class LossSum(NamedTuple):
    """Training loss and target tokens since the session began, of updates with a finite loss."""

    nats: Tensor | float = 0.0
    targets: Tensor | float = 0.0

    def plus(self, info: StepInfo) -> LossSum:
        """The sums with an update more; on CUDA without waiting for the device."""
        loss = torch.as_tensor(info.loss).detach().double()
        counts = torch.isfinite(loss)
        nats = torch.where(counts, loss, 0.0) * info.n_targets
        return LossSum(self.nats + nats, self.targets + counts * info.n_targets)

    def mean_since(self, before: LossSum) -> float:
        """Mean loss per target token since other sums, in nats; NaN without an update between."""
        targets = float(self.targets - before.targets)
        return float(self.nats - before.nats) / targets if targets else math.nan


class _Epoch(NamedTuple):
    """An epoch that has just ended."""

    number: int
    at: Progress
    loss: float  # mean training loss of its updates


class ConsoleProgress(Callback):
    """Reports progress, and a row per evaluation and epoch; `log_every` a line is logged.

    `warn` is called once if the console fails. Without `time_left` the forecast is of updates
    alone. `highlight` returns the main score of the newest evaluation, and a text.
    """

    def __init__(
        self,
        *,
        log_every: Duration,
        reporter: Reporter,
        warn: Callable[[Progress, str], None] = lambda *_: None,
        time_left: TimeLeft | None = None,
        highlight: Callable[[], Highlight] = Highlight,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._log_every, self._reporter, self._warn = log_every, reporter, warn
        self._foreseen, self._clock = time_left, clock
        self._highlight = highlight
        self._dropping_told = False
        self._best: float | None = None  # the lowest held-out loss so far

    def state_dict(self) -> State:
        """The lowest held-out loss, which a run that goes by another metric keeps nowhere else."""
        return {"best": self._best}

    def load_state_dict(self, state: State) -> None:
        """Restore it."""
        self._best = None if state["best"] is None else number_in(state, "best")

    def on_fit_start(self, start: RunStart) -> None:
        """Show the step that the run begins at, and the time it will take."""
        self._window, self._line, self._looked = StepWindow(), "", self._clock()
        self._last_loss: float | None = None
        self._evaluation_began: float | None = None
        self._stop_after = start.stop_after
        self._losses = self._at_row = self._at_epoch = LossSum()
        self._heading = ""
        self._ended: _Epoch | None = None
        self._newest_scores = ""
        if start.best is None or start.best.metric == LOSS.metric:
            self._best = start.best.loss if start.best is not None else None
        self._time_left = self._foreseen or TimeLeft(start.stop_after)
        self._time_left.start(start.progress)
        self._newest_saved = start.progress.step
        for note in start.notes:
            self._reporter.notice(f"note: {note}")
        if start.progress.step:
            self._reporter.notice(f"continuing from step {start.progress.step:,}")
        self._forecasts = self._foreseen is not None

    def on_before_step(self, at: Progress) -> None:
        """Report the forecast before the first update, and an epoch without an evaluation."""
        if self._forecasts and (words := self._time_left.in_words(at)):
            self._reporter.notice(words)
        self._forecasts = False
        if self._evaluation_began is not None:
            self._time_left.evaluated(self._clock() - self._evaluation_began)
            self._evaluation_began = None
        self._show_epoch()

    def on_micro_batch(self, at: Progress, done: int, total: int) -> None:
        """Show that a long update continues."""
        if done == total or self._clock() - self._looked < _LOOK_SECONDS:
            return  # the line of the update follows
        under_way = f"step {at.step + 1:,}: {done} of {total} micro-batches"
        self._reporter.progress(f"{self._line}  ({under_way})" if self._line else under_way)

    def on_step(self, info: StepInfo) -> None:
        """Renew the line."""
        self._window.add(info)
        self._losses = self._losses.plus(info)
        if _EPOCH.crossed(info.before, info.progress):
            loss, self._at_epoch = self._losses.mean_since(self._at_epoch), self._losses
            self._ended = _Epoch(math.floor(info.progress.epoch), info.progress, loss)
        if words := self._time_left.updated(info.before, info.progress, slowed=info.slowed):
            self._reporter.notice(words)
        first = info.before.step == 0
        logged = first or self._log_every.crossed(info.before, info.progress, self._stop_after)
        now = self._clock()
        if not logged and now - self._looked < _LOOK_SECONDS:
            return
        self._looked, window, at = now, self._window, info.progress
        best = "" if self._best is None else f"  best {self._best:.4f}"
        steps = window.n_steps / window.seconds if window.seconds > 0 else 0.0
        rate = f"{steps:,.0f}" if steps >= 100 else f"{steps:.3g}"
        saved = f"  saved {self._newest_saved:,}" if self._newest_saved else ""
        self._line = (
            f"{_place(at)}  loss {float(info.loss):.4f}  lr {info.lr:.2e}{best}  {rate} steps/s  "
            f"{window.tokens_per_second:,.0f} tokens/s  {self._stop_after.fraction(at):.0%}  "
            f"{clock_text(self._time_left.seconds(at))} left{saved}"
        )
        self._reporter.progress(self._line)
        if logged:
            self._reporter.detail(self._line)
            self._window = StepWindow()
        self._warn_of_dropping(at)

    def on_before_evaluate(self, at: Progress) -> None:
        """Take the time."""
        self._evaluation_began = self._clock()

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """One row; the log has the change since the evaluation before."""
        loss = metrics.get("loss")
        parts = [f"{_place(at)}  evaluation"]
        parts += [f"{name} {metrics[name]:{form}}" for name, form in _SHOWN if name in metrics]
        if loss is not None and self._last_loss is not None:
            parts.append(f"({loss - self._last_loss:+.4f})")
        self._last_loss = loss
        if loss is not None and math.isfinite(loss):
            self._best = loss if self._best is None else min(loss, self._best)
        self._reporter.detail("  ".join(parts))

        newest = self._highlight()
        held_out = math.nan if loss is None else loss
        self._show_row(at, held_out, newest)
        score = f", {newest.name} {_number(newest.value)}" if newest.name else ""
        self._newest_scores = f"held-out loss {_number(held_out)}{score} (step {at.step:,})"
        if self._ended is not None and self._ended.at.step == at.step:
            self._log_epoch(self._ended)
            self._ended = None

    def on_save(self, at: Progress, saved: Saved) -> None:
        """Take note of the newest durable step."""
        self._newest_saved = saved.step
        self._warn_of_dropping(at)

    def on_warning(self, at: Progress, message: str) -> None:
        """One line that stays."""
        self._reporter.notice(f"warning: {message}")

    def on_fit_end(self, end: RunEnd) -> None:
        """Show how it ended and the newest step that is saved."""
        self._reporter.progress("")
        self._show_epoch()
        newest, best = self._newest_saved, f", best {end.best}" if end.best else ""
        saved = f"saved up to step {newest:,}" if newest else "nothing saved"
        self._reporter.notice(
            f"{end.reason.replace('_', ' ')} at step {end.progress.step:,} after "
            f"{clock_text(end.seconds)}; {saved}{best}"
        )

    def _show_epoch(self) -> None:
        """Log an epoch that ended without an evaluation, and show it if there are few of them."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        self._log_epoch(ended)
        done = self._stop_after.fraction(ended.at)
        n_epochs = ended.at.epoch / done if done > 0 else math.inf
        if n_epochs < math.inf and ended.number % max(1, math.ceil(n_epochs / _EPOCH_ROWS)) == 0:
            self._show_row(ended.at, math.nan, Highlight(text=f"(end of epoch {ended.number})"))

    def _log_epoch(self, ended: _Epoch) -> None:
        scores = f"; newest evaluation: {self._newest_scores}" if self._newest_scores else ""
        self._reporter.detail(
            f"epoch {ended.number} ended at step {ended.at.step:,}: loss {_number(ended.loss)}, "
            f"the mean of its updates{scores}"
        )

    def _show_row(self, at: Progress, held_out: float, shown: Highlight) -> None:
        name = shown.name or self._heading or "score"
        width = max(8, len(name))
        if not self._heading or name != self._heading:
            self._heading = name
            names = f"{'step':>7}  {'epoch':>6}  {'loss':>8}  {'held-out':>8}  {name:>{width}}"
            self._reporter.notice(f"{names}  written text")
        loss, self._at_row = self._losses.mean_since(self._at_row), self._losses
        row = (
            f"{at.step:>7,}  {at.epoch:>6.2f}  {_number(loss):>8}  {_number(held_out):>8}  "
            f"{_number(shown.value):>{width}}  "
        )
        text = one_line(shown.text, max(_LEAST_TEXT, self._reporter.columns - len(row)))
        self._reporter.notice(f"{row}{text}".rstrip())

    def _warn_of_dropping(self, at: Progress) -> None:
        lost = self._reporter.lost
        if lost is None or self._dropping_told:
            return
        self._dropping_told = True
        self._warn(
            at,
            f"the console cannot be written ({lost}): what it would have shown is dropped "
            "where it fails. The run continues; its metrics are in this file",
        )


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _place(at: Progress) -> str:
    return f"step {at.step:,}  epoch {at.epoch:.2f}"


@dataclass(eq=False)
class Summary(Callback):
    """Logs at intervals what was measured; on CUDA it waits for the device only then."""

    every: Duration
    reporter: Reporter
    device: torch.device
    compiled: bool
    micro_batch_rows: int
    ranks: int = 1
    alone_seconds: float | None = None  # of one rank's part of an update, timed before the first
    flops_per_token: float | None = None  # FLOPs of forward and backward; None for no utilisation
    peak: Peak | None = None  # peak of the ranks together; None for no utilisation
    uploads: Callable[[], str] | None = None  # their outcome so far, in words
    _gpu_percents: list[float] = field(default_factory=list)
    _first_lr: float | None = None
    _nats: Tensor | float = 0.0
    _norms: Tensor | float = 0.0

    def take(self, record: Mapping[str, Any]) -> None:
        """Take the use of the GPUs from a record of metrics.jsonl, from any thread."""
        if record["event"] == "system":
            known = (gpu["utilisation_percent"] for gpu in record["gpus"])
            self._gpu_percents.extend(percent for percent in known if percent is not None)

    def on_fit_start(self, start: RunStart) -> None:
        """Begin a stretch."""
        self._stop_after = start.stop_after
        self._loss_before: float | None = None
        self._clear()

    def on_step(self, info: StepInfo) -> None:
        """Add up, and log a summary when one is due."""
        self._window.add(info)
        self._nats = self._nats + info.loss.detach().double() * info.n_targets
        self._norms = self._norms + info.grad_norm.detach().double()
        self._first_lr = info.lr if self._first_lr is None else self._first_lr
        if self.every.crossed(info.before, info.progress, self._stop_after):
            self.reporter.detail("\n".join(self._lines(info.progress, info.lr)))
            self._clear()

    def _clear(self) -> None:
        self._window, self._first_lr, self._nats, self._norms = StepWindow(), None, 0.0, 0.0

    def _lines(self, at: Progress, lr: float) -> list[str]:
        window, n = self._window, self._window.n_steps
        resident, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
        memory = f"{resident / 1e9:.2f} GB of {total / 1e9:.1f} GB resident"
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self.device)
            whole = torch.cuda.get_device_properties(self.device).total_memory
            memory = f"{most / 1e9:.2f} GB of the GPU's {whole / 1e9:.1f} GB at most; {memory}"
        rows = {
            "speed": (
                f"{n / max(window.seconds, 1e-9):.2f} steps/s, "
                f"{window.tokens_per_second:,.0f} tokens/s"
            ),
            "utilisation": self._utilisation(),
            "memory": memory,
            "batch": (
                f"{window.n_examples / n:,.1f} examples and {window.n_tokens / n:,.0f} tokens an "
                f"update (effective), {self.micro_batch_rows} rows at once, "
                f"{window.pad_fraction:.1%} padding"
            ),
            "compile": "compiled" if self.compiled else "not compiled",
            "scaling": self._scaling(window.seconds / n) if self.ranks > 1 else "",
            "signs": self._signs(lr),
        }
        first = f"summary at step {at.step:,}, over {n:,} update{'s' * (n > 1)}:"
        return [first, *(f"  {name:14}{text}" for name, text in rows.items() if text)]

    def _utilisation(self) -> str:
        seen, self._gpu_percents = self._gpu_percents, []
        busy = f"; GPU busy {sum(seen) / len(seen):.0f} % of the time" if seen else ""
        share = self._window.utilisation(self.flops_per_token, self.peak)
        if self.peak is None or share is None:
            return f"not measured{busy}"
        if share > 1.0:
            return f"not known, as updates are faster than the peak{busy}"  # metrics_log says why
        return (
            f"{share:.1%} of the peak, {self.peak.flops_per_second:.3g} FLOP/s "
            f"({self.peak.origin}); waiting for data {self._window.waiting_share:.1%}{busy}"
        )

    def _scaling(self, actual: float) -> str:
        """Efficiency: the time of a rank's part of an update alone, over that of the update."""
        ranks, alone = self.ranks, self.alone_seconds
        if alone is None:
            return f"{ranks} ranks; efficiency not measured"
        known = f"about {alone / actual:.0%}" if 0 < alone <= actual else "not known"
        return (
            f"{ranks} ranks, efficiency {known}: a rank's part of an update took {alone:.3g} s "
            f"before the run, an update {actual:.3g} s"
        )

    def _signs(self, lr: float) -> str:
        loss = float(self._nats) / max(1, self._window.n_targets)
        norm = float(self._norms) / self._window.n_steps
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
