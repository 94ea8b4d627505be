"""Summary of a stretch of updates: speed, utilisation, memory, batch, scaling, convergence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor

from toque.reporter import Reporter
from toque.runs.peak_flops import Peak
from toque.training.bottlenecks import GRAD_NORM
from toque.training.callbacks import Callback, RunStart, StepInfo
from toque.training.observers.metrics_log import StepWindow
from toque.units import Duration, Progress


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
