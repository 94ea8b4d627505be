"""Metrics log `metrics.jsonl`: one JSON object per line; every other record is a copy of it.

A step event holds loss, learning rate and gradient norm of that update, and throughput and sums
since the last one. One is written before every save, so a run continued from a checkpoint neither
loses nor doubles anything: `toque.runs.history` leaves out what came after the step it starts from.
"""

from __future__ import annotations

import json
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from toque.data.loader.batch_stream import BatchStream
from toque.errors import CheckpointError
from toque.hardware.processor import usable_cores
from toque.hardware.thread_waits import waits_in
from toque.models.flops import parameter_counts
from toque.models.onednn import has_fast_bf16
from toque.runs.history import METRICS
from toque.runs.peak import Peak
from toque.storage.json_files import JsonLines, append_json_lines
from toque.training.callbacks import Callback, RunEnd, RunStart, Saved, StepInfo
from toque.training.distributed.data_parallel import DataParallel
from toque.training.distributed.process_group import versions
from toque.training.placement import Arithmetic, attention_in, rate_of_bf16
from toque.training.resources import Resources
from toque.training.runtime import Runtime
from toque.units import Duration, Progress


@dataclass
class StepWindow:
    """Sums over consecutive updates; rates are of those that no observer slowed."""

    n_steps: int = 0
    n_examples: int = 0
    n_targets: int = 0
    n_tokens: int = 0
    n_computed: int = 0
    seconds: float = 0.0
    data_wait_seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)  # wall seconds by `phases.Part`
    slowed_tokens: int = 0
    slowed_seconds: float = 0.0
    last: StepInfo | None = None

    def add(self, info: StepInfo) -> None:
        """Add one update."""
        self.last = info
        self.n_steps += 1
        self.n_examples += info.n_examples
        self.n_targets += info.n_targets
        self.n_tokens += info.n_tokens
        self.n_computed += info.n_computed
        self.seconds += info.seconds
        self.data_wait_seconds += info.data_wait_seconds
        for part, seconds in info.parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds
        if info.slowed:
            self.slowed_tokens += info.n_tokens
            self.slowed_seconds += info.seconds

    @property
    def pad_fraction(self) -> float:
        """Share of the computed tokens that were padding."""
        return 1.0 - self.n_tokens / self.n_computed if self.n_computed else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of both sides without padding, per second; slowed updates count if all are."""
        tokens, seconds = self.n_tokens - self.slowed_tokens, self.seconds - self.slowed_seconds
        if tokens == 0:
            tokens, seconds = self.n_tokens, self.seconds
        return tokens / seconds if seconds > 0 else 0.0

    @property
    def waiting_share(self) -> float:
        """Share of the time that the updates waited for data."""
        return self.data_wait_seconds / self.seconds if self.seconds > 0 else 0.0

    def utilisation(self, flops_per_token: float | None, peak: Peak | None) -> float | None:
        """FLOP/s needed over the peak (MFU; Chowdhery et al. 2022, appendix B); None if unknown."""
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
    """Fields of the start event that describe what is computed, and where."""
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    counts, chosen = parameter_counts(model), attention_in(model, runtime)
    return {
        "versions": versions(),
        "hardware": {
            "device": cuda or platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "cores": len(usable_cores()),
            "waits": waits_in(),
            "fast_bf16": has_fast_bf16(runtime.device),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "parameters": asdict(counts) | {"trainable_share": counts.trainable / counts.total},
        "row": asdict(stream.layout.shape),
        "arithmetic": arithmetic.record(),
        "precision": runtime.precision,
        "deterministic": runtime.deterministic,
        "attention": chosen.name,
        "attention_blocks": chosen.blocks or None,
        "readers": stream.readers,
        "ranks": runtime.ranks.world_size,
        "strategy": sharing.strategy,
        **resources.record(),
        **rate_of_bf16(runtime, arithmetic),
    }


@dataclass(eq=False)
class MetricsLog(Callback):
    """Appends events to a file, or raises CheckpointError; a full disk costs records alone."""

    path: Path
    log_every: Duration  # time between step events; the first update always has one
    about: Mapping[str, Any] = field(default_factory=dict)  # further fields of the start event
    flops_per_token: float | None = None  # FLOPs of forward and backward; None for no utilisation
    peak: Peak | None = None
    evaluated: Callable[[], Mapping[str, Any]] = dict  # `seconds`, and `texts`, scores of texts
    copies: Sequence[Callable[[Mapping[str, Any]], None]] = ()  # called with every record
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of the run; for a GPU, step events hold the most bytes the session has allocated."""
    dropped_records: int = 0
    _window: StepWindow = field(default_factory=StepWindow)
    _losses: list[torch.Tensor] = field(default_factory=list)  # [] each, of the window's updates
    _stop_after: Duration | None = None
    _file: JsonLines | None = None
    _peak_doubted: bool = False
    _one_writer: threading.RLock = field(default_factory=threading.RLock)

    def on_fit_start(self, start: RunStart) -> None:
        """Open the file and write the start event."""
        try:
            self._file = JsonLines(self.path)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written: {error.strerror}. The run's metrics are kept "
                "there; choose another run_dir, or give yourself the right to write."
            ) from error
        self._stop_after, self._window, peak = start.stop_after, StepWindow(), self.peak
        self._losses = []
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
        """Write a step event when one is due."""
        self._window.add(info)
        self._losses.append(info.loss)
        first = info.before.step == 0
        if first or self.log_every.crossed(info.before, info.progress, self._stop_after):
            self._write_step()

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Write the metrics; scores of texts stand apart from what is computed on held-out data."""
        details = dict(self.evaluated())
        texts = details.get("texts", {})
        own = {name: value for name, value in metrics.items() if name not in texts}
        self._write("evaluation", step=at.step, epoch=at.epoch, metrics=own, **details)

    def on_before_save(self, at: Progress) -> None:
        """Write the pending step event, so that a checkpoint stands on whole sums."""
        self._write_step()

    def on_save(self, at: Progress, saved: Saved) -> None:
        """Write the save."""
        self._write(
            "save",
            step=saved.step,
            path=f"{saved.path.parent.name}/{saved.path.name}",
            bytes=saved.bytes,
            seconds=saved.seconds,
            blocked_seconds=saved.blocked_seconds or saved.seconds,
        )

    def on_warning(self, at: Progress, message: str) -> None:
        """Write the message."""
        self._write("warning", step=at.step, message=message)

    def on_fit_end(self, end: RunEnd) -> None:
        """Write how the session ended and close the file."""
        if end.error is None or end.reason == "non_finite":
            self._write_step()
        best: dict[str, Any] | None = None
        if end.best is not None:
            best = {"step": end.best.step, "loss": end.best.loss, end.best.metric: end.best.score}
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
            **({} if not end.parts else {"parts": dict(end.parts)}),
        )
        if self._file is not None:
            with self._one_writer:
                self._file.close()
                self._file = None

    def record(self, event: str, **fields: Any) -> None:
        """Write an event of another observer, from any thread; outside a session nothing."""
        with self._one_writer:
            if self._file is not None:
                self._write(event, **fields)

    def _write_step(self) -> None:
        window, last = self._window, self._window.last
        if last is None:
            return
        self._window = StepWindow()
        mfu = window.utilisation(self.flops_per_token, self.peak)
        if self.peak is not None and mfu is not None and mfu > 1.0:
            if not self._peak_doubted:
                why = f"the share of the peak (mfu) is not recorded: {self.peak.too_low}"
                self.on_warning(last.progress, f"{why}. Training itself is not affected")
            mfu, self._peak_doubted = None, True
        also: dict[str, Any] = {} if last.stage is None else {"stage": last.stage}
        also |= {"parts": window.parts} if window.parts else {}
        losses, self._losses = self._losses, []
        if len(losses) > 1:  # read together: the device is waited for once
            also["losses"] = torch.stack(losses).tolist()
        if self.device.type == "cuda":
            also["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
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
            mfu=mfu,
            **also,
        )

    def _write(self, event: str, **fields: Any) -> None:
        record = {"event": event, **fields}
        with self._one_writer:
            if self._file is not None and self._file.append([_line(record)]) is not None:
                self.dropped_records += 1
            for copy in self.copies:
                copy(record)


def write_after(run: Path, parts: Mapping[str, float]) -> None:
    """Add seconds after a run's last session, by their work: the finished model, uploads."""
    append_json_lines(run / METRICS, [_line({"event": "after", "parts": dict(parts)})])


def _line(record: Mapping[str, Any]) -> bytes:
    # Parsed once to put null for NaN and infinities, which JSON does not have.
    return json.dumps(json.loads(json.dumps(record), parse_constant=lambda _name: None)).encode()
