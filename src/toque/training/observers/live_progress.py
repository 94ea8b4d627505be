"""Live progress of a run: a status line, a row per evaluation, and summaries for the log."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import psutil
import torch
from torch import Tensor

from toque.reporter import Reporter, clock_text, one_line
from toque.runs.metric_names import ACCURACY, MARGIN, REWARD
from toque.runs.peak import Peak
from toque.runs.time_left import TimeLeft
from toque.training.bottlenecks import GRAD_NORM
from toque.training.callbacks import (
    LOSS,
    Callback,
    RunEnd,
    RunStart,
    Saved,
    State,
    StepInfo,
)
from toque.training.observers.metrics_log import LossSum, StepWindow
from toque.training.state_values import optional_number_in
from toque.units import Duration, Progress

# Minimum seconds between status lines, because each line waits for CUDA.
_REFRESH_SECONDS: Final = 0.25
_METRIC_FORMATS: Final = {
    "loss": ".4f",
    "perplexity": ".2f",
    ACCURACY: ".3f",
    MARGIN: ".4f",
    "bits_per_byte": ".3f",
}
_MAX_EPOCH_ROWS: Final = 4  # maximum rows per run for epochs without an evaluation
_MIN_TEXT_WIDTH: Final = 24  # minimum characters of a generated text in a row
_EPOCH: Final = Duration(1, "epochs")


class Highlight(NamedTuple):
    """Main score of an evaluation and one of its generated texts."""

    name: str = ""  # name of the score with spaces, or "" without a score
    value: float = math.nan
    text: str = ""


class _Epoch(NamedTuple):
    """Epoch that has just ended."""

    number: int
    at: Progress
    mean: float  # mean training loss, or reward, of its updates


@dataclass(eq=False, kw_only=True)
class ConsoleProgress(Callback):
    """Callback that shows a status line, and a row per evaluation and per epoch."""

    log_every: Duration  # duration between status lines in the log
    reporter: Reporter
    # Called once if the console fails.
    warn: Callable[[Progress, str], None] = lambda *_: None
    time_left: TimeLeft | None = None
    """Forecast for the entire command. By default the forecast covers only the updates."""
    highlight: Callable[[], Highlight] = Highlight
    """Function that returns the main score and a generated text of the newest evaluation."""
    clock: Callable[[], float] = time.perf_counter
    _warned_of_losses: bool = False
    _best: float | None = None  # lowest held-out loss so far

    def state_dict(self) -> State:
        """Return the lowest held-out loss. `RunStart.best` may use another metric."""
        return {"best": self._best}

    def load_state_dict(self, state: State) -> None:
        """Restore the lowest held-out loss."""
        self._best = optional_number_in(state, "best")

    def on_fit_start(self, start: RunStart) -> None:
        """Reset the state of the session. Show its notes and the step that it continues from."""
        self._stop_after = start.stop_after
        self._window = StepWindow()
        self._line = ""
        self._refreshed_at = self.clock()
        self._last_loss: float | None = None
        self._evaluation_began: float | None = None
        self._learns_from_rewards = False  # until the first update
        self._losses = self._losses_at_row = self._losses_at_epoch = LossSum()
        self._columns = ("", "")
        self._ended_epoch: _Epoch | None = None
        self._newest_scores = ""
        self._newest_save = start.progress.step
        if start.best is None:
            self._best = None
        elif start.best.metric == LOSS.metric:
            self._best = start.best.loss
        self._time_left = self.time_left or TimeLeft(start.stop_after)
        self._time_left.start(start.progress)
        self._forecast_is_due = self.time_left is not None

        for note in start.notes:
            self.reporter.notice(f"note: {note}")
        if start.progress.step:
            self.reporter.notice(f"continuing from step {start.progress.step:,}")

    def on_before_step(self, at: Progress) -> None:
        """Show the forecast before the first update, and an epoch that had no evaluation."""
        if self._forecast_is_due:
            self._forecast_is_due = False
            if forecast := self._time_left.describe(at):
                self.reporter.notice(forecast)
        if self._evaluation_began is not None:
            self._time_left.record_evaluation(self.clock() - self._evaluation_began)
            self._evaluation_began = None
        self._show_epoch()

    def on_micro_batch(self, at: Progress, done: int, total: int) -> None:
        """Show the progress of a long update."""
        if done == total or self.clock() - self._refreshed_at < _REFRESH_SECONDS:
            return  # after the last micro-batch, `on_step` shows the update
        current = f"step {at.step + 1:,}: {done} of {total} micro-batches"
        self.reporter.progress(f"{self._line}  ({current})" if self._line else current)

    def on_step(self, info: StepInfo) -> None:
        """Refresh the status line."""
        at = info.progress
        self._window.add(info)
        self._learns_from_rewards = REWARD in info.measured
        self._losses = self._losses.plus_reward(info)
        if _EPOCH.crossed(info.before, at):
            mean = self._losses.mean_since(self._losses_at_epoch)
            self._losses_at_epoch = self._losses
            self._ended_epoch = _Epoch(math.floor(at.epoch), at, mean)
        correction = self._time_left.record_update(info.before, at, slowed=info.slowed)
        if correction:
            self.reporter.notice(correction)

        is_first = info.before.step == 0
        is_due = self.log_every.crossed(info.before, at, self._stop_after)
        is_logged = is_first or is_due
        now = self.clock()
        if not is_logged and now - self._refreshed_at < _REFRESH_SECONDS:
            return
        self._refreshed_at = now
        self._line = self._render_line(info)
        self.reporter.progress(self._line)
        if is_logged:
            self.reporter.detail(self._line)
            self._window = StepWindow()
        self._warn_of_lost_lines(at)

    def _render_line(self, info: StepInfo) -> str:
        at = info.progress
        window = self._window
        rate = window.n_steps / window.seconds if window.seconds > 0 else 0.0
        rate_text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        best = ""
        if self._best is not None and not self._learns_from_rewards:
            best = f"  best {self._best:.4f}"
        save = f"  saved {self._newest_save:,}" if self._newest_save else ""
        return (
            f"{_render_progress(at)}  {_render_learning(info)}  lr {info.lr:.2e}{best}  "
            f"{rate_text} steps/s  {window.tokens_per_second:,.0f} tokens/s  "
            f"{self._stop_after.fraction(at):.0%}  "
            f"{clock_text(self._time_left.seconds(at))} left{save}"
        )

    def on_before_evaluate(self, at: Progress) -> None:
        """Note the start time of the evaluation."""
        self._evaluation_began = self.clock()

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Show a row, and log the metrics with the change since the previous evaluation."""
        loss = metrics.get("loss")
        self._log_evaluation(at, metrics)
        self._last_loss = loss
        if loss is not None and math.isfinite(loss):
            self._best = loss if self._best is None else min(loss, self._best)

        highlight = self.highlight()
        held_out_loss = math.nan if loss is None else loss
        self._show_row(at, held_out_loss, highlight)
        self._newest_scores = _render_scores(at, held_out_loss, highlight)
        if self._ended_epoch is not None and self._ended_epoch.at.step == at.step:
            # The row of the evaluation is also the row of this epoch.
            self._log_epoch(self._ended_epoch)
            self._ended_epoch = None

    def _log_evaluation(self, at: Progress, metrics: Mapping[str, float]) -> None:
        parts = [f"{_render_progress(at)}  evaluation"]
        parts += [
            f"{name} {metrics[name]:{form}}"
            for name, form in _METRIC_FORMATS.items()
            if name in metrics
        ]
        loss = metrics.get("loss")
        if loss is not None and self._last_loss is not None:
            parts.append(f"({loss - self._last_loss:+.4f})")
        self.reporter.detail("  ".join(parts))

    def on_save(self, at: Progress, saved: Saved) -> None:
        """Note the step of the newest save."""
        self._newest_save = saved.step
        self._warn_of_lost_lines(at)

    def on_warning(self, at: Progress, message: str) -> None:
        """Show the warning."""
        self.reporter.notice(f"warning: {message}")

    def on_fit_end(self, end: RunEnd) -> None:
        """Show the reason for the end, the newest save and the best evaluation."""
        self.reporter.progress("")
        self._show_epoch()
        save = "nothing saved"
        if self._newest_save:
            save = f"saved up to step {self._newest_save:,}"
        best = f", best {end.best}" if end.best else ""
        if self._learns_from_rewards and end.best and end.best.metric == LOSS.metric:
            best = ""  # the run moves away from the held-out texts
        self.reporter.notice(
            f"{end.reason.replace('_', ' ')} at step {end.progress.step:,} after "
            f"{clock_text(end.seconds)}; {save}{best}"
        )

    def _show_epoch(self) -> None:
        """Log an epoch that ended without an evaluation. Show it if the run has few epochs."""
        epoch = self._ended_epoch
        self._ended_epoch = None
        if epoch is None:
            return
        self._log_epoch(epoch)
        share = self._stop_after.fraction(epoch.at)
        if share <= 0:
            return  # the number of epochs cannot be estimated yet
        total_epochs = epoch.at.epoch / share
        interval = max(1, math.ceil(total_epochs / _MAX_EPOCH_ROWS))
        if epoch.number % interval == 0:
            label = Highlight(text=f"(end of epoch {epoch.number})")
            self._show_row(epoch.at, math.nan, label)

    def _log_epoch(self, epoch: _Epoch) -> None:
        scores = ""
        if self._newest_scores:
            scores = f"; newest evaluation: {self._newest_scores}"
        name = REWARD if self._learns_from_rewards else "training loss"
        self.reporter.detail(
            f"epoch {epoch.number} ended at step {epoch.at.step:,}: mean {name} "
            f"{_render_number(epoch.mean)}{scores}"
        )

    def _show_row(
        self, at: Progress, held_out_loss: float, highlight: Highlight
    ) -> None:
        """Show a row of the table, below a heading if a column has another name than before."""
        learning = REWARD if self._learns_from_rewards else "loss"
        name = highlight.name or self._columns[1] or "score"
        width = max(8, len(name))
        if (learning, name) != self._columns:
            self._columns = (learning, name)
            heading = f"{'step':>7}  {'epoch':>6}  {learning:>8}  {'held-out':>8}  {name:>{width}}"
            self.reporter.notice(f"{heading}  generated text")

        mean = self._losses.mean_since(self._losses_at_row)
        self._losses_at_row = self._losses
        numbers = (
            f"{at.step:>7,}  {at.epoch:>6.2f}  {_render_number(mean):>8}  "
            f"{_render_number(held_out_loss):>8}  {_render_number(highlight.value):>{width}}  "
        )
        text_width = max(_MIN_TEXT_WIDTH, self.reporter.columns - len(numbers))
        row = numbers + one_line(highlight.text, text_width)
        self.reporter.notice(row.rstrip())

    def _warn_of_lost_lines(self, at: Progress) -> None:
        problem = self.reporter.lost
        if problem is None or self._warned_of_losses:
            return
        self._warned_of_losses = True
        self.warn(
            at,
            f"cannot write to the console ({problem}), so some lines are lost. The run continues, "
            "and metrics.jsonl has its metrics",
        )


def _render_number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _render_learning(info: StepInfo) -> str:
    """Describe the reward of an update, or its loss and the accuracy of its pairs."""
    reward = info.measured.get(REWARD)
    if reward is not None:
        return f"reward {float(reward):.4f}"
    text = f"loss {float(info.loss):.4f}"
    accuracy = info.measured.get(ACCURACY)
    return text if accuracy is None else f"{text}  accuracy {float(accuracy):.0%}"


def _render_progress(at: Progress) -> str:
    return f"step {at.step:,}  epoch {at.epoch:.2f}"


def _render_scores(at: Progress, held_out_loss: float, highlight: Highlight) -> str:
    scores = f"held-out loss {_render_number(held_out_loss)}"
    if highlight.name:
        scores += f", {highlight.name} {_render_number(highlight.value)}"
    return f"{scores} (step {at.step:,})"


@dataclass(eq=False)
class Summary(Callback):
    """Callback that logs a summary at intervals. On CUDA only the logging synchronises."""

    every: Duration
    reporter: Reporter
    device: torch.device
    compiled: bool
    micro_batch_rows: int
    ranks: int = 1
    alone_seconds: float | None = None
    """Seconds for one rank's part of an update, measured before the first update."""
    flops_per_token: float | None = None
    """FLOPs per token of the forward and backward passes, or None if they are unknown."""
    peak: Peak | None = None
    """Peak FLOP/s of all ranks together, or None if it is unknown."""
    uploads: Callable[[], str] | None = None
    """Function that describes the uploads so far."""
    _gpu_percents: list[float] = field(default_factory=list)
    _window: StepWindow = field(default_factory=StepWindow)
    _losses: LossSum = field(default_factory=LossSum)
    _norms: Tensor | float = 0.0
    _previous_mean: float | None = None  # loss, or reward, of the previous interval

    def take(self, record: Mapping[str, Any]) -> None:
        """Add the GPU utilisation in a record of metrics.jsonl. Any thread may call this."""
        if record["event"] == "system":
            percents = (gpu["utilisation_percent"] for gpu in record["gpus"])
            self._gpu_percents.extend(
                percent for percent in percents if percent is not None
            )

    def on_fit_start(self, start: RunStart) -> None:
        """Start the first interval."""
        self._stop_after = start.stop_after
        self._previous_mean = None
        self._clear()

    def on_step(self, info: StepInfo) -> None:
        """Add the update, and log a summary if it is due."""
        self._window.add(info)
        self._losses = self._losses.plus_reward(info)
        self._norms = self._norms + info.grad_norm.detach().double()
        if self.every.crossed(info.before, info.progress, self._stop_after):
            mean = self._losses.mean_since(LossSum())
            self.reporter.detail("\n".join(self._render(info, mean)))
            self._previous_mean = mean
            self._clear()

    def _clear(self) -> None:
        self._gpu_percents = []
        self._window = StepWindow()
        self._losses = LossSum()
        self._norms = 0.0

    def _render(self, info: StepInfo, mean: float) -> list[str]:
        window = self._window
        n_steps = window.n_steps
        rows = {
            "speed": (
                f"{n_steps / max(window.seconds, 1e-9):.2f} steps/s, "
                f"{window.tokens_per_second:,.0f} tokens/s"
            ),
            "utilisation": self._render_utilisation(),
            "memory": self._render_memory(),
            "batch": (
                f"{window.n_examples / n_steps:,.1f} examples and "
                f"{window.n_tokens / n_steps:,.0f} tokens per update (effective), "
                f"{self.micro_batch_rows} rows per micro-batch, {window.pad_fraction:.1%} padding"
            ),
            "compile": "compiled" if self.compiled else "not compiled",
        }
        if self.ranks > 1:
            rows["scaling"] = self._render_scaling(window.seconds / n_steps)
        rows["signs"] = self._render_signs(info, mean)

        updates = "updates" if n_steps > 1 else "update"
        heading = f"summary at step {info.progress.step:,}, over {n_steps:,} {updates}:"
        return [heading, *(f"  {name:14}{text}" for name, text in rows.items())]

    def _render_memory(self) -> str:
        resident = psutil.Process().memory_info().rss
        total = psutil.virtual_memory().total
        memory = f"{resident / 1e9:.2f} GB of {total / 1e9:.1f} GB resident"
        if self.device.type != "cuda":
            return memory
        gpu_peak = torch.cuda.max_memory_allocated(self.device)
        gpu_total = torch.cuda.get_device_properties(self.device).total_memory
        return f"{gpu_peak / 1e9:.2f} GB of the GPU's {gpu_total / 1e9:.1f} GB at most; {memory}"

    def _render_utilisation(self) -> str:
        percents = self._gpu_percents
        gpu = ""
        if percents:
            gpu = f"; GPU busy {sum(percents) / len(percents):.0f} % of the time"
        share = self._window.utilisation(self.flops_per_token, self.peak)
        if self.peak is None or share is None:
            return f"not measured{gpu}"
        if share > 1.0:  # `MetricsLog` warns of this
            return f"unknown, because updates are faster than the peak{gpu}"
        return (
            f"{share:.1%} of the peak, {self.peak.flops_per_second:.3g} FLOP/s "
            f"({self.peak.origin}); waiting for data {self._window.waiting_share:.1%}{gpu}"
        )

    def _render_scaling(self, seconds: float) -> str:
        """Describe the efficiency: the time of one rank's part alone over the time of an update."""
        alone = self.alone_seconds
        if alone is None:
            return f"{self.ranks} ranks; efficiency not measured"
        # An efficiency above 1 means that the measurement before the run was disturbed.
        efficiency = "unknown"
        if 0 < alone <= seconds:
            efficiency = f"about {alone / seconds:.0%}"
        return (
            f"{self.ranks} ranks, efficiency {efficiency}: a rank's part of an update took "
            f"{alone:.3g} s before the run, an update takes {seconds:.3g} s"
        )

    def _render_signs(self, info: StepInfo, mean: float) -> str:
        """Describe the signs of learning: loss or reward, gradient norm and learning rate."""
        name, change, is_good = "loss", "falling", operator.lt
        if REWARD in info.measured:
            name, change, is_good = REWARD, "rising", operator.gt
        previous = self._previous_mean
        signs = f"{name} {mean:.4f}"
        if previous is not None:
            direction = change if is_good(mean, previous) else f"NOT {change}"
            signs = f"{name} {previous:.4f} -> {mean:.4f}, {direction}"

        norm = float(self._norms) / self._window.n_steps
        signs += f"; gradient norm {norm:.2f} on average"
        if norm >= GRAD_NORM:
            signs += f", above {GRAD_NORM:g}"

        lr = info.lr
        first_lr = self._window.first_lr
        change = "constant" if first_lr == lr else f"from {first_lr:.2e}"
        signs += f"; learning rate {lr:.2e}, {change}"
        if self.uploads is not None:
            signs += f"; uploads: {self.uploads()}"
        return signs
