"""Profiler: traces of some updates and tables of their operations, both as torch.profiler has them.

Each repetition of the schedule writes a Chrome trace and a table into `trace/` of the run folder.
Profiled updates are marked as slowed, so rates leave them out; their numbers are the same bits. Of
several ranks the first one is profiled.
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
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from toque.config.schema_methods import ProfileConfig
from toque.storage.atomic import atomic_write
from toque.training.callbacks import Callback, RunEnd, RunStart, StepInfo
from toque.training.phases import UNWATCHED, Phase
from toque.training.runtime import Runtime
from toque.training.stopping import INTERRUPTED
from toque.units import Progress

FOLDER: Final = "trace"  # folder of the traces, in that of the run
_OPERATIONS: Final = 25  # rows of a table
_FRAMES: Final = 6  # python functions that an operation's call stack names
_EXECUTED: Final[list[object]] = []
"""Code that is executed while call stacks are traced, kept alive; empty while none are.

torch stores pointers into it and reads the names in the end. A module imported meanwhile, as
trackers do in a thread, drops its code when it is done, and the names are then other memory.
"""


@cache
def _keep_executed() -> None:
    """Hook into Python, once: a hook cannot be taken off again."""

    def keep(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec" and _EXECUTED:
            _EXECUTED.append(arguments[0])

    sys.addaudithook(keep)


@dataclass(eq=False)
class Profiler(Callback):
    """Profiles some updates of every session. Whatever goes wrong with it, training continues."""

    asked: ProfileConfig
    folder: Path  # folder of the run
    runtime: Runtime  # its phases are marked in the trace, and on a GPU kernels are traced as well
    warn: Callable[[Progress, str], None]
    say: Callable[[str], None]  # takes a sentence about each trace
    slows: bool = False
    _profile: profile | None = None
    _updates: int = 0
    _steps: list[int] = field(default_factory=list)  # steps of the trace that is being taken
    _warned: bool = False
    _error: Exception | None = None  # raised later: torch must not stop within its step

    def on_fit_start(self, start: RunStart) -> None:
        """Begin to count; say so where the run is shorter than the schedule."""
        asked = self.asked
        self._updates, self._steps, self._warned, self._error = 0, [], False, None
        self._action = schedule(
            wait=asked.wait, warmup=asked.warmup, active=asked.active, repeat=asked.repeat
        )
        self.runtime.phases.watchers.append(self._watch)
        if start.stop_after.unit == "steps":
            left = int(start.stop_after.amount) - start.progress.step
            self._warn_if_too_long(start.progress, left)
        self._or_give_up(start.progress, self._start)

    def on_before_step(self, at: Progress) -> None:
        """Say if the schedule has something for this update."""
        idle = self._profile is None or self._action(self._updates) is ProfilerAction.NONE
        self.slows = not idle

    def on_step(self, info: StepInfo) -> None:
        """End it; after the last update of a repetition its files are written."""
        if self.slows and self._action(self._updates) is not ProfilerAction.WARMUP:
            self._steps.append(info.progress.step)
        self._updates += 1
        if self._profile is not None:
            self._or_give_up(info.progress, self._profile.step)

    def on_fit_end(self, end: RunEnd) -> None:
        """Write what was traced of a repetition that the end cut short."""
        ended, self._profile, self.slows = self._profile, None, False
        if ended is not None:
            self._or_give_up(end.progress, ended.stop)
        _EXECUTED.clear()
        if self._watch in self.runtime.phases.watchers:
            self.runtime.phases.watchers.remove(self._watch)
        if end.error is None and end.reason != INTERRUPTED and not self._warned:
            self._warn_if_too_long(end.progress, self._updates)

    def _watch(self, phase: Phase) -> AbstractContextManager[Any]:
        return record_function(f"toque: {phase}") if self.slows else UNWATCHED

    def _start(self) -> None:
        # Its library writes lines of its own into the terminal, unless told before it starts.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        stacks, on_gpu = self.asked.stacks, self.runtime.device.type == "cuda"
        if stacks:
            _keep_executed()
            _EXECUTED.append(self)
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu],
            schedule=self._action,
            on_trace_ready=self._traced,
            profile_memory=self.asked.memory,
            with_stack=stacks,
            # Without it torch keeps the stacks out of its table; it has no public name.
            experimental_config=_ExperimentalConfig(verbose=True) if stacks else None,
        )
        self._profile.start()

    def _traced(self, ended: profile) -> None:
        try:
            if self._steps:
                self._write(ended, self._steps)
        except Exception as error:  # noqa: BLE001 - the kinds are its library's
            self._error = error
        self._steps = []
        ended.profiler = None  # torch would warn that the next trace begins without these events

    def _write(self, ended: profile, steps: Sequence[int]) -> None:
        folder = self.folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{steps[0]:08d}"
        with TemporaryDirectory(dir=folder, prefix="temp-") as aside:
            trace = Path(aside) / "trace.json.gz"
            ended.export_chrome_trace(str(trace))
            atomic_write(folder / f"{name}.json.gz", trace.read_bytes())
        averages = ended.key_averages(group_by_stack_n=_FRAMES if self.asked.stacks else 0)
        of = "device" if self.runtime.device.type == "cuda" else "cpu"
        table = averages.table(
            sort_by=f"self_{of}_time_total", row_limit=_OPERATIONS, max_name_column_width=60,
            max_src_column_width=120,
        )  # fmt: skip
        atomic_write(folder / f"{name}-operations.txt", table.encode())
        self.say(
            f"profiled updates {steps[0]:,} to {steps[-1]:,}: their operations are in "
            f"{folder / name}-operations.txt, and {folder / name}.json.gz is for ui.perfetto.dev"
        )

    def _or_give_up(self, at: Progress, act: Callable[[], None]) -> None:
        """Do it; whatever its library raises, the run continues without a profile."""
        try:
            act()
            if self._error is not None:
                raise self._error
        except Exception as error:  # noqa: BLE001 - the kinds are its library's
            ended, self._profile = self._profile, None
            with suppress(Exception):
                if ended is not None:
                    ended.stop()
            self.slows, self._warned = False, True
            why = str(error).partition("\n")[0]
            self.warn(
                at,
                f"profiling ended: {type(error).__name__}: {why:.200}. What was traced before is "
                "in trace/ of the run folder; training continues",
            )

    def _warn_if_too_long(self, at: Progress, updates: int) -> None:
        plan = self.asked
        cycle = plan.wait + plan.warmup + plan.active
        if not 0 < updates < cycle * plan.repeat:
            return
        self._warned = True
        self.warn(
            at,
            f"observe.profile needs {cycle * plan.repeat:,} updates, and this session has "
            f"{updates:,}: {updates // cycle} of {plan.repeat} traces are whole. Take smaller "
            "numbers, e.g. observe.profile={wait: 1, warmup: 1, active: 2, repeat: 1}",
        )
