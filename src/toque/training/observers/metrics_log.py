"""Metrics log `metrics.jsonl`, with one JSON object per line. All other records are copies of it.

A step event has the loss, learning rate and gradient norm of its update, and the throughput and
sums since the previous step event. A step event is written before every save. A run that continues
from a checkpoint therefore counts every update once: `toque.runs.history` leaves out events that
an earlier session wrote after that checkpoint.
"""

from __future__ import annotations

import json
import math
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from toque.data.loader.batch_stream import BatchStream
from toque.errors import CheckpointError
from toque.hardware.onednn import has_fast_bf16
from toque.hardware.processor import usable_cores
from toque.hardware.thread_waits import waits_in
from toque.models.flops import parameter_counts
from toque.runs.history import METRICS
from toque.runs.metric_names import REWARD
from toque.runs.peak import Peak
from toque.storage.json_files import JsonLines, append_json_lines
from toque.training.arithmetic import Arithmetic, find_bf16_peak
from toque.training.callbacks import Callback, RunEnd, RunStart, Saved, StepInfo
from toque.training.distributed.data_parallel import DataParallel
from toque.training.distributed.process_group import versions
from toque.training.optimisations import choose_attention
from toque.training.resources import Resources
from toque.training.runtime import Runtime
from toque.units import Duration, Progress


class LossSum(NamedTuple):
    """Sums of the training loss and of its divisor, over updates with a finite loss.

    The sums are tensors on the device, so adding an update does not wait for CUDA.
    """

    loss: Tensor | float = 0.0
    divisor: Tensor | float = 0.0

    def plus(self, info: StepInfo) -> LossSum:
        """Return the sums after another update."""
        return self._plus(info.loss, info.loss_count)

    def plus_reward(self, info: StepInfo) -> LossSum:
        """Return the sums after another update, with its reward instead of its loss, if any."""
        reward = info.measured.get(REWARD)
        return (
            self.plus(info) if reward is None else self._plus(reward, info.n_examples)
        )

    def _plus(self, mean: Tensor, count: int) -> LossSum:
        mean = torch.as_tensor(mean).detach().double()
        is_finite = torch.isfinite(mean)
        total = torch.where(is_finite, mean, 0.0) * count
        return LossSum(self.loss + total, self.divisor + is_finite * count)

    def mean_since(self, before: LossSum) -> float:
        """Return the mean loss since earlier sums, or NaN without an update."""
        divisor = float(self.divisor - before.divisor)
        return float(self.loss - before.loss) / divisor if divisor else math.nan


@dataclass
class StepWindow:
    """Sums over consecutive updates. Rates leave out the updates that an observer slowed."""

    n_steps: int = 0
    n_examples: int = 0
    n_targets: int = 0
    n_tokens: int = 0
    n_computed: int = 0
    seconds: float = 0.0
    # Wall seconds of each `phases.Part`.
    parts: dict[str, float] = field(default_factory=dict)
    slowed_tokens: int = 0
    slowed_seconds: float = 0.0
    # Sums of the objective's measurements, by metric name. They stay on the device.
    measured: dict[str, Tensor] = field(default_factory=dict)
    first_lr: float = math.nan  # learning rate of the first update
    last: StepInfo | None = None

    def add(self, info: StepInfo) -> None:
        """Add one update."""
        if self.last is None:
            self.first_lr = info.lr
        self.last = info
        self.n_steps += 1
        self.n_examples += info.n_examples
        self.n_targets += info.n_targets
        self.n_tokens += info.n_tokens
        self.n_computed += info.n_computed
        self.seconds += info.seconds
        for part, seconds in info.parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds
        for name, value in info.measured.items():
            self.measured[name] = self.measured.get(name, 0.0) + value
        if info.slowed:
            self.slowed_tokens += info.n_tokens
            self.slowed_seconds += info.seconds

    @property
    def pad_fraction(self) -> float:
        """Fraction of the computed tokens that is padding."""
        return 1.0 - self.n_tokens / self.n_computed if self.n_computed else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Source and target tokens per second, without padding.

        Slowed updates count only if all updates are slowed.
        """
        tokens = self.n_tokens - self.slowed_tokens
        seconds = self.seconds - self.slowed_seconds
        if tokens == 0:
            tokens = self.n_tokens
            seconds = self.seconds
        return tokens / seconds if seconds > 0 else 0.0

    @property
    def data_wait_seconds(self) -> float:
        """Seconds spent waiting for batches."""
        return self.parts.get("data_wait", 0.0)

    @property
    def waiting_share(self) -> float:
        """Fraction of the time spent waiting for data."""
        return self.data_wait_seconds / self.seconds if self.seconds > 0 else 0.0

    def utilisation(
        self, flops_per_token: float | None, peak: Peak | None
    ) -> float | None:
        """Return the model FLOPs utilisation (MFU), or None if it is unknown.

        MFU is the FLOP/s that the tokens need, divided by the peak (Chowdhery et al. 2022,
        appendix B).
        """
        if flops_per_token is None or peak is None:
            return None
        return flops_per_token * self.tokens_per_second / peak.flops_per_second


def start_event(
    model: PreTrainedModel,
    stream: BatchStream,
    runtime: Runtime,
    sharing: DataParallel,
    resources: Resources,
    arithmetic: Arithmetic,
) -> dict[str, Any]:
    """Return the fields of the start event about the model, the data and the machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    counts = parameter_counts(model)
    attention = choose_attention(model, runtime)

    return {
        "versions": versions(),
        "hardware": {
            "device": gpu or platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "cores": len(usable_cores()),
            "waits": waits_in(),
            "fast_bf16": has_fast_bf16(runtime.device),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "parameters": asdict(counts)
        | {"trainable_share": counts.trainable / counts.total},
        "row": asdict(stream.layout.shape),
        "arithmetic": arithmetic.record(),
        "precision": runtime.precision,
        "deterministic": runtime.deterministic,
        "attention": attention.name,
        "attention_blocks": attention.blocks or None,
        "readers": stream.readers,
        "ranks": runtime.ranks.world_size,
        "strategy": sharing.strategy,
        **resources.record(),
        **find_bf16_peak(runtime, arithmetic),
    }


RecordSink = Callable[[Mapping[str, Any]], None]
"""Function that receives a copy of every record."""


@dataclass(eq=False)
class MetricsLog(Callback):
    """Callback that writes a run's events. A full disk loses records, but the run continues."""

    path: Path
    log_every: Duration  # time between step events; the first update always has one
    about: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the start event."""
    flops_per_token: float | None = None
    """FLOPs per token of the forward and backward passes, or None to record no utilisation."""
    peak: Peak | None = None
    evaluated: Callable[[], Mapping[str, Any]] = dict
    """Function that returns the fields `seconds` and `texts` of the newest evaluation."""
    copies: Sequence[RecordSink] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of the run. On a GPU, step events contain the session's peak of allocated bytes."""
    dropped_records: int = 0
    _window: StepWindow = field(default_factory=StepWindow)
    # Scalar loss of each update in the window.
    _losses: list[Tensor] = field(default_factory=list)
    _stop_after: Duration | None = None
    _file: JsonLines | None = None
    _warned_of_peak: bool = False
    _write_lock: threading.RLock = field(default_factory=threading.RLock)

    def on_fit_start(self, start: RunStart) -> None:
        """Open the file and write the start event.

        Raises:
            CheckpointError: The file cannot be opened.
        """
        try:
            self._file = JsonLines(self.path)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written: {error.strerror}. It stores the run's metrics. "
                "Choose another run_dir, or check that you may write to this one."
            ) from error

        self._stop_after = start.stop_after
        self._window = StepWindow()
        self._losses = []

        peak = self.peak
        self._write(
            "start",
            step=start.progress.step,
            epoch=start.progress.epoch,
            run_seconds=start.progress.seconds,
            stop_after=str(start.stop_after),
            flops_per_token=self.flops_per_token,
            peak_flops_per_second=peak.flops_per_second if peak else None,
            peak_origin=peak.origin if peak else None,
            **self.about,
        )
        for note in start.notes:
            self.on_warning(start.progress, note)

    def on_step(self, info: StepInfo) -> None:
        """Write a step event if it is due."""
        self._window.add(info)
        self._losses.append(info.loss)
        is_first = info.before.step == 0
        if is_first or self.log_every.crossed(
            info.before, info.progress, self._stop_after
        ):
            self._write_step()

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Write the held-out metrics to `metrics`, and the scores of generated texts to `texts`."""
        details = dict(self.evaluated())
        text_scores = details.get("texts", {})
        heldout = {
            name: value for name, value in metrics.items() if name not in text_scores
        }
        self._write(
            "evaluation", step=at.step, epoch=at.epoch, metrics=heldout, **details
        )

    def on_before_save(self, at: Progress) -> None:
        """Write a step event, so that its sums end at the checkpoint."""
        self._write_step()

    def on_save(self, at: Progress, saved: Saved) -> None:
        """Write a save event."""
        self._write(
            "save",
            step=saved.step,
            path=f"{saved.path.parent.name}/{saved.path.name}",
            bytes=saved.bytes,
            seconds=saved.seconds,
            blocked_seconds=saved.blocked_seconds or saved.seconds,
        )

    def on_warning(self, at: Progress, message: str) -> None:
        """Write a warning event."""
        self._write("warning", step=at.step, message=message)

    def on_fit_end(self, end: RunEnd) -> None:
        """Write the end event and close the file."""
        if end.error is None or end.reason == "non_finite":
            self._write_step()

        best: dict[str, Any] | None = None
        if end.best is not None:
            best = {
                "step": end.best.step,
                "loss": end.best.loss,
                end.best.metric: end.best.score,
            }
        optional = {"parts": dict(end.parts)} if end.parts else {}

        self._write(
            "end",
            step=end.progress.step,
            reason=end.reason,
            seconds=end.seconds,
            best=best,
            training_seconds=end.progress.seconds,
            error=end.error,
            dropped_records=self.dropped_records,
            saves=asdict(end.saves),
            skipped_updates=end.skipped_updates,
            **optional,
        )

        with self._write_lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def record(self, event: str, **fields: Any) -> None:
        """Write an event from another callback during a session. Any thread may call this."""
        with self._write_lock:
            if self._file is not None:
                self._write(event, **fields)

    def _write_step(self) -> None:
        """Write a step event about the updates since the previous one, if there are any."""
        window = self._window
        last = window.last
        if last is None:
            return
        losses = self._losses
        self._window = StepWindow()
        self._losses = []

        optional: dict[str, Any] = {}
        if last.stage is not None:
            optional["stage"] = last.stage
        if window.parts:
            optional["parts"] = window.parts
        for name, total in window.measured.items():
            optional[name] = float(total) / window.n_steps
        if len(losses) > 1:
            # Waits for the device once instead of once per loss.
            optional["losses"] = torch.stack(losses).tolist()
        if self.device.type == "cuda":
            optional["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)

        self._write(
            "step",
            step=last.progress.step,
            epoch=last.progress.epoch,
            loss=float(last.loss),
            lr=last.lr,
            grad_norm=float(last.grad_norm),
            target_tokens=window.n_targets,
            tokens=window.n_tokens,
            pad_fraction=window.pad_fraction,
            seconds=window.seconds,
            run_seconds=last.progress.seconds,
            tokens_per_second=window.tokens_per_second,
            data_wait_seconds=window.data_wait_seconds,
            mfu=self._plausible_utilisation(window, last.progress),
            **optional,
        )

    def _plausible_utilisation(self, window: StepWindow, at: Progress) -> float | None:
        """Return the utilisation of a window. If it is above 1, warn once and return None."""
        mfu = window.utilisation(self.flops_per_token, self.peak)
        if self.peak is None or mfu is None or mfu <= 1.0:
            return mfu
        if not self._warned_of_peak:
            self._warned_of_peak = True
            self.on_warning(
                at,
                f"model FLOPs utilisation (mfu) is not recorded: {self.peak.too_low_message}. "
                "Training itself is not affected",
            )
        return None

    def _write(self, event: str, **fields: Any) -> None:
        record = {"event": event, **fields}
        with self._write_lock:
            if self._file is not None:
                error = self._file.append([_encode(record)])
                if error is not None:
                    self.dropped_records += 1
            for copy in self.copies:
                copy(record)


def write_before_event(run: Path, source_losses: Mapping[str, float]) -> None:
    """Append a `before` event: the held-out loss of each source before the first update."""
    event = {"event": "before", "source_losses": dict(source_losses)}
    append_json_lines(run / METRICS, [_encode(event)])


def write_after_event(run: Path, parts: Mapping[str, float]) -> None:
    """Append an `after` event: the seconds of each activity after the run's last session."""
    append_json_lines(
        run / METRICS, [_encode({"event": "after", "parts": dict(parts)})]
    )


def _encode(record: Mapping[str, Any]) -> bytes:
    # JSON has no NaN and no infinity, so parsing replaces them by null.
    plain = json.loads(json.dumps(record), parse_constant=lambda _name: None)
    return json.dumps(plain).encode()
