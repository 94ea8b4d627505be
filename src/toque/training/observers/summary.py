"""Summary of a stretch of updates: speed, utilisation, memory, batch, scaling, convergence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import psutil
import torch
from torch import Tensor

from toque.reporter import Reporter
from toque.runs.peak_flops import Peak
from toque.training.autotune.fitting import Fitted
from toque.training.callbacks import Callback, RunStart, StepInfo
from toque.training.observers.step_window import Window
from toque.training.placement import Arithmetic
from toque.training.runtime import Runtime
from toque.units import Duration, Progress

CALM_NORM: Final = 5.0
"""Gradient norms below it are taken as a sign that training goes well; a rule of thumb."""


@dataclass(frozen=True)
class Computing:
    """Facts of a run's computing that are known before it begins."""

    device: torch.device
    compiled: bool
    micro_batch_rows: int
    ranks: int = 1
    alone_seconds: float | None = None
    """Seconds of one rank's part of an update, timed before the first update; None: not timed."""
    flops_per_token: float | None = None
    peak: Peak | None = None

    @classmethod
    def of_run(cls, runtime: Runtime, fitted: Fitted, arithmetic: Arithmetic, peak: Peak) -> Self:
        """The computing of a run, fitted to its machine."""
        return cls(
            runtime.device,
            fitted.resources.compile,
            fitted.resources.micro_batch_rows,
            runtime.ranks.world_size,
            fitted.update_seconds,
            arithmetic.flops_per_token,
            peak,
        )


@dataclass
class GpuUse:
    """Use of the GPUs since the last summary, from `system` events."""

    _seen: list[float] = field(default_factory=list)

    def take(self, record: Mapping[str, Any]) -> None:
        """Take a record of metrics.jsonl, from any thread."""
        if record["event"] == "system":
            known = (gpu["utilisation_percent"] for gpu in record["gpus"])
            self._seen.extend(percent for percent in known if percent is not None)

    def in_words(self) -> str:
        """The use since the last call, in words; "" where nothing was measured."""
        seen, self._seen = self._seen, []
        return f"; GPU busy {sum(seen) / len(seen):.0f} % of the time" if seen else ""


@dataclass(eq=False)
class Summary(Callback):
    """Prints at intervals what was measured since the last summary.

    It reads no number of an update before a summary is due, so on CUDA it waits for the device
    only then.

    Args:
        every: time between two summaries.
        reporter: prints them.
        computing: facts of the run's computing.
        uploads: outcome of the uploads so far, in words; None for none.
        gpu_use: use of the machine's GPUs.
    """

    every: Duration
    reporter: Reporter
    computing: Computing
    uploads: Callable[[], str] | None = None
    gpu_use: GpuUse = field(default_factory=GpuUse)
    _window: Window = field(default_factory=Window)
    _examples: int = 0
    _nats: Tensor | float = 0.0
    _norms: Tensor | float = 0.0
    _first_lr: float | None = None
    _loss_before: float | None = None
    _stop_after: Duration | None = None

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
            self.reporter.notice("\n".join(self._lines(info.progress)))
            self._clear()

    def _clear(self) -> None:
        self._window, self._examples, self._first_lr = Window(), 0, None
        self._nats = self._norms = 0.0

    def _lines(self, at: Progress) -> list[str]:
        window, n = self._window, self._window.n_steps
        rows = {
            "speed": (
                f"{n / max(window.seconds, 1e-9):.2f} steps/s, "
                f"{window.tokens_per_second:,.0f} tokens/s"
            ),
            "utilisation": self._utilisation() + self.gpu_use.in_words(),
            "memory": self._memory(),
            "batch": (
                f"{self._examples / n:,.1f} examples and {window.n_tokens / n:,.0f} tokens an "
                f"update (effective), {self.computing.micro_batch_rows} rows at once, "
                f"{window.pad_fraction:.1%} padding"
            ),
            "compile": "compiled" if self.computing.compiled else "not compiled",
            "scaling": self._scaling(),
            "signs": self._signs(),
        }
        first = f"summary at step {at.step:,}, over {n:,} update{'s' * (n > 1)}:"
        return [first, *(f"  {name:14}{text}" for name, text in rows.items() if text)]

    def _utilisation(self) -> str:
        flops, peak = self.computing.flops_per_token, self.computing.peak
        share = None if flops is None or peak is None else self._window.utilisation(flops, peak)
        if share is None or peak is None:
            return "not measured"
        if share > 1.0:
            return "not known: the peak is too low"  # metrics_log warns once
        return (
            f"{share:.1%} of the peak, {peak.flops_per_second:.3g} FLOP/s ({peak.origin}); waiting "
            f"for data {self._window.data_wait_seconds / max(self._window.seconds, 1e-9):.1%}"
        )

    def _memory(self) -> str:
        resident, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
        words = f"{resident / 1e9:.2f} GB of {total / 1e9:.1f} GB resident"
        device = self.computing.device
        if device.type != "cuda":
            return words
        most = torch.cuda.max_memory_allocated(device)
        whole = torch.cuda.get_device_properties(device).total_memory
        return f"{most / 1e9:.2f} GB of the GPU's {whole / 1e9:.1f} GB at most; {words}"

    def _scaling(self) -> str:
        """Efficiency: the time of a rank's part of an update alone, over that of the update."""
        ranks, alone = self.computing.ranks, self.computing.alone_seconds
        if ranks < 2:
            return ""
        if alone is None:
            return f"{ranks} ranks; efficiency not measured"
        actual = self._window.seconds / self._window.n_steps
        share = alone / max(actual, 1e-9)
        times = (
            f"a rank's part of an update took {alone:.3g} s before the run, an update "
            f"{actual:.3g} s"
        )
        if share > 1.0:
            return f"{ranks} ranks; efficiency not known: {times}"
        return f"{ranks} ranks, efficiency about {share:.0%} ({times})"

    def _signs(self) -> str:
        """Signs of convergence in the loss, the gradients, the learning rate and the uploads."""
        window, last = self._window, self._window.last
        assert last is not None
        loss = float(torch.as_tensor(self._nats)) / max(1, window.n_targets)
        norm = float(torch.as_tensor(self._norms)) / window.n_steps
        before, self._loss_before = self._loss_before, loss
        words = f"loss {loss:.4f}"
        if before is not None:
            way = "falling" if loss < before else "NOT falling"
            words = f"loss {before:.4f} -> {loss:.4f}, {way}"
        calm = "" if norm < CALM_NORM else f", above {CALM_NORM:g}"
        words += f"; gradient norm {norm:.2f} on average{calm}"
        first = last.lr if self._first_lr is None else self._first_lr
        moved = "constant" if first == last.lr else f"from {first:.2e}"
        words += f"; learning rate {last.lr:.2e}, {moved}"
        return words + (f"; uploads: {self.uploads()}" if self.uploads is not None else "")
