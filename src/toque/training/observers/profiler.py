"""Profiler of selected updates: torch.profiler's traces and tables of operations.

Each repetition of the schedule writes a Chrome trace and a table into `trace/` of the run folder.
Profiled updates are marked as slowed, so rates leave them out. Their results are bitwise identical
with and without the profiler. With several ranks, only rank 0 is profiled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import (
    ProfilerAction,
    ProfilerActivity,
    profile,
    record_function,
    schedule,
)

from toque.config.schema_methods import ProfileConfig
from toque.storage.atomic import atomic_write
from toque.training.callbacks import Callback, RunEnd, RunStart, StepInfo
from toque.training.phases import UNWATCHED, Phase
from toque.training.runtime import Runtime
from toque.training.stopping import INTERRUPTED
from toque.units import Progress

FOLDER: Final = "trace"  # folder of the traces in the run folder
_TABLE_ROWS: Final = 25
_STACK_DEPTH: Final = 6  # maximum number of Python frames per call stack in the table
_EXECUTED: Final[list[object]] = []
"""Code objects that Python executed while call stacks were traced. It is empty at other times.

torch stores pointers into code objects and reads their names at the end. Python deletes a module's
code after the import, e.g. when a thread imports a tracker's package, and reuses its memory.
"""


@cache
def _keep_executed_code() -> None:
    """Add a hook that keeps code objects alive. Python cannot remove a hook, so add it once."""

    def keep(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec" and _EXECUTED:
            _EXECUTED.append(arguments[0])

    sys.addaudithook(keep)


@dataclass(eq=False)
class Profiler(Callback):
    """Callback that profiles selected updates of every session. If it fails, training continues."""

    settings: ProfileConfig
    folder: Path  # run folder
    runtime: Runtime
    warn: Callable[[Progress, str], None]
    notice: Callable[[str], None]  # reports the files of each trace
    slows: bool = False
    _profile: profile | None = None
    _updates: int = 0
    _steps: list[int] = field(default_factory=list)  # steps of the current trace
    _warned: bool = False
    # Raised later, because torch must finish its own step.
    _error: Exception | None = None

    def on_fit_start(self, start: RunStart) -> None:
        """Start the profiler, and warn if the run is shorter than the schedule."""
        settings = self.settings
        self._updates = 0
        self._steps = []
        self._warned = False
        self._error = None
        self._action_at = schedule(
            wait=settings.wait,
            warmup=settings.warmup,
            active=settings.active,
            repeat=settings.repeat,
        )
        self.runtime.phases.watchers.append(self._annotate)
        if start.stop_after.unit == "steps":
            n_updates = int(start.stop_after.amount) - start.progress.step
            self._warn_if_too_short(start.progress, n_updates)
        self._stop_on_error(start.progress, self._start)

    def on_before_step(self, at: Progress) -> None:
        """Set `slows`, i.e. whether the schedule records or warms up at this update."""
        is_on = self._profile is not None
        self.slows = is_on and self._action_at(self._updates) is not ProfilerAction.NONE

    def on_step(self, info: StepInfo) -> None:
        """Count the update. The last update of a repetition writes the files."""
        if self.slows and self._action_at(self._updates) is not ProfilerAction.WARMUP:
            self._steps.append(info.progress.step)
        self._updates += 1
        if self._profile is not None:
            self._stop_on_error(info.progress, self._profile.step)

    def on_fit_end(self, end: RunEnd) -> None:
        """Stop the profiler, which writes the files of an unfinished repetition."""
        stopped = self._profile
        self._profile = None
        self.slows = False
        if stopped is not None:
            self._stop_on_error(end.progress, stopped.stop)
        _EXECUTED.clear()
        if self._annotate in self.runtime.phases.watchers:
            self.runtime.phases.watchers.remove(self._annotate)
        if end.error is None and end.reason != INTERRUPTED and not self._warned:
            self._warn_if_too_short(end.progress, self._updates)

    def _annotate(self, phase: Phase) -> AbstractContextManager[Any]:
        """Return a context that marks a phase in the trace."""
        return record_function(f"toque: {phase}") if self.slows else UNWATCHED

    def _start(self) -> None:
        # Kineto writes lines to the terminal unless this is set before it starts.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if self.runtime.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with_stacks = self.settings.stacks
        experimental_config = None
        if with_stacks:
            # Only this setting, which has no public name, adds the stacks to torch's table.
            experimental_config = _ExperimentalConfig(verbose=True)
            _keep_executed_code()
            _EXECUTED.append(self)  # any first entry switches the hook on
        self._profile = profile(
            activities=activities,
            schedule=self._action_at,
            on_trace_ready=self._on_trace,
            profile_memory=self.settings.memory,
            with_stack=with_stacks,
            experimental_config=experimental_config,
        )
        self._profile.start()

    def _on_trace(self, trace: profile) -> None:
        """Write the files of a repetition. Store an error for `_stop_on_error`."""
        try:
            if self._steps:
                self._write_files(trace, self._steps)
        except Exception as error:  # noqa: BLE001 - torch and the disk may raise anything
            self._error = error
        self._steps = []
        # Otherwise torch warns that these events are missing from the next trace.
        trace.profiler = None

    def _write_files(self, trace: profile, steps: Sequence[int]) -> None:
        folder = self.folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{steps[0]:08d}"

        # torch can only write to a path, so the complete file is copied into place.
        with TemporaryDirectory(dir=folder, prefix="temp-") as temp:
            chrome_trace = Path(temp) / "trace.json.gz"
            trace.export_chrome_trace(str(chrome_trace))
            atomic_write(folder / f"{name}.json.gz", chrome_trace.read_bytes())

        stack_depth = _STACK_DEPTH if self.settings.stacks else 0
        averages = trace.key_averages(group_by_stack_n=stack_depth)
        processor = "device" if self.runtime.device.type == "cuda" else "cpu"
        table = averages.table(
            sort_by=f"self_{processor}_time_total",
            row_limit=_TABLE_ROWS,
            max_name_column_width=60,
            max_src_column_width=120,
        )
        atomic_write(folder / f"{name}-operations.txt", table.encode())
        self.notice(
            f"profiled updates {steps[0]:,} to {steps[-1]:,}. Table of operations: "
            f"{folder / name}-operations.txt. Trace for ui.perfetto.dev: {folder / name}.json.gz"
        )

    def _stop_on_error(self, at: Progress, action: Callable[[], None]) -> None:
        """Call `action`. If it raises, stop profiling and warn."""
        try:
            action()
            if self._error is not None:
                raise self._error
        except Exception as error:  # noqa: BLE001 - torch and the disk may raise anything
            with suppress(Exception):
                if self._profile is not None:
                    self._profile.stop()
            self._profile = None
            self.slows = False
            self._warned = True
            reason = str(error).partition("\n")[0]
            self.warn(
                at,
                f"profiling failed: {type(error).__name__}: {reason:.200}. Earlier traces are in "
                "trace/ of the run folder. Training continues",
            )

    def _warn_if_too_short(self, at: Progress, n_updates: int) -> None:
        settings = self.settings
        cycle = settings.wait + settings.warmup + settings.active
        needed = cycle * settings.repeat
        if not 0 < n_updates < needed:
            return
        self._warned = True
        self.warn(
            at,
            f"observe.profile needs {needed:,} updates, but this session has {n_updates:,}, so "
            f"{n_updates // cycle} of {settings.repeat} traces are complete. Use smaller numbers, "
            "e.g. observe.profile={wait: 1, warmup: 1, active: 2, repeat: 1}",
        )
