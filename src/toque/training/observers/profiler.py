"""Profiler: traces of some updates and tables of their operations, both as torch.profiler has them.

Into `trace/` of the run folder, for each repetition of the schedule: a Chrome trace (open it at
ui.perfetto.dev or chrome://tracing) and the table of the operations that took most time. Updates
that are profiled are marked as slowed, so rates leave them out; their numbers are the same bits. On
several ranks the first one is profiled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from toque.storage.atomic import atomic_write
from toque.training.callbacks import Callback, RunEnd, RunStart, StepInfo
from toque.training.phases import UNWATCHED, Phase, Phases
from toque.training.stopping import INTERRUPTED
from toque.units import Progress

FOLDER: Final = "trace"
"""Folder of the traces, in that of the run."""
_OPERATIONS: Final = 25
"""Rows of a table."""
_FRAMES: Final = 6
"""Python functions that an operation's call stack names."""
_QUIET: Final = {"KINETO_LOG_LEVEL": "99"}
"""Its library writes lines of its own into the terminal, unless told before it starts."""
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


@dataclass(frozen=True)
class ProfileSchedule:
    """Updates of a session to profile, in repetitions of three spells.

    >>> plan = ProfileSchedule(wait=1, warmup=1, active=2, repeat=1)
    >>> [plan.action(i).name for i in range(5)]
    ['NONE', 'WARMUP', 'RECORD', 'RECORD_AND_SAVE', 'NONE']
    """

    wait: int
    """Updates that nothing is done to."""
    warmup: int
    """Updates with the profiler on and forgotten: its beginning is slow."""
    active: int
    """Updates that are traced."""
    repeat: int

    @property
    def cycle(self) -> int:
        """Updates of one repetition."""
        return self.wait + self.warmup + self.active

    @property
    def updates(self) -> int:
        """Updates of all repetitions."""
        return self.cycle * self.repeat

    def action(self, update: int) -> ProfilerAction:
        """Action of torch's profiler on an update, counted from the start of the session."""
        plan = schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat)
        action: ProfilerAction = plan(update)
        return action


@dataclass(eq=False)
class Profiler(Callback):
    """Profiles the updates of `schedule`. Whatever goes wrong with it, training continues.

    Args:
        schedule: which updates.
        folder: of the run.
        phases: of the loop; they are marked in the trace.
        warn: takes what went wrong.
        say: takes a sentence about each trace.
        on_gpu: whether kernels of a GPU are traced as well.
        stacks: call stacks of operations, which makes traces larger and updates slower.
        memory: record every allocation.
    """

    schedule: ProfileSchedule
    folder: Path
    phases: Phases
    warn: Callable[[Progress, str], None]
    say: Callable[[str], None]
    on_gpu: bool = False
    stacks: bool = False
    memory: bool = True
    slows: bool = False
    _updates: int = 0
    _profile: profile | None = None
    _steps: list[int] = field(default_factory=list)
    _warned: bool = False

    def on_fit_start(self, start: RunStart) -> None:
        """Begin to count; say so where the run is shorter than the schedule."""
        self._updates, self._warned = 0, False
        self.phases.watchers.append(self._watch)
        if start.stop_after.unit == "steps":
            self._warn_if_too_long(
                start.progress, int(start.stop_after.amount) - start.progress.step
            )

    def on_before_step(self, at: Progress) -> None:
        """Begin what the schedule has for this update."""
        self.slows = self.schedule.action(self._updates) is not ProfilerAction.NONE
        if self.slows and self._profile is None:
            self._or_give_up(at, self._start)

    def on_step(self, info: StepInfo) -> None:
        """End it; after the last update of a repetition its files are written."""
        action = self.schedule.action(self._updates)
        self._updates += 1
        if self._profile is None:
            return
        if action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
            self._steps.append(info.progress.step)
        self._or_give_up(info.progress, self._profile.step)
        if action is ProfilerAction.RECORD_AND_SAVE:
            self._or_give_up(info.progress, self._write)

    def on_fit_end(self, end: RunEnd) -> None:
        """Write what was traced of a repetition that the end cut short."""
        self.slows = False
        if self._profile is not None:
            self._or_give_up(end.progress, self._write)
        _EXECUTED.clear()
        if self._watch in self.phases.watchers:
            self.phases.watchers.remove(self._watch)
        if end.error is None and end.reason != INTERRUPTED and not self._warned:
            self._warn_if_too_long(end.progress, self._updates)

    def _watch(self, phase: Phase) -> AbstractContextManager[Any]:
        return UNWATCHED if self._profile is None else record_function(f"toque: {phase}")

    def _start(self) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        plan, self._steps = self.schedule, []
        if self.stacks:
            _keep_executed()
            _EXECUTED.append(self)
        self._profile = profile(
            activities=kinds,
            schedule=schedule(wait=0, warmup=plan.warmup, active=plan.active, repeat=1),
            profile_memory=self.memory,
            with_stack=self.stacks,
            # Without it torch keeps the stacks out of its table; it has no public name.
            experimental_config=_ExperimentalConfig(verbose=True) if self.stacks else None,
        )
        self._profile.start()

    def _write(self) -> None:
        ended, self._profile = self._profile, None
        if ended is None:
            return
        ended.stop()
        if not self._steps:
            return
        folder = self.folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{self._steps[0]:08d}"
        with TemporaryDirectory(dir=folder, prefix="temp-") as aside:
            trace = Path(aside) / "trace.json.gz"
            ended.export_chrome_trace(str(trace))
            atomic_write(folder / f"{name}.json.gz", trace.read_bytes())
        averages = ended.key_averages(group_by_stack_n=_FRAMES if self.stacks else 0)
        most = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
        table = averages.table(
            sort_by=most, row_limit=_OPERATIONS, max_name_column_width=60,
            max_src_column_width=120,
        )  # fmt: skip
        _EXECUTED.clear()
        atomic_write(folder / f"{name}-operations.txt", table.encode())
        self.say(
            f"profiled updates {self._steps[0]:,} to {self._steps[-1]:,}: their operations are in "
            f"{folder / name}-operations.txt, and {folder / name}.json.gz is for ui.perfetto.dev"
        )

    def _or_give_up(self, at: Progress, act: Callable[[], None]) -> None:
        """Do it; whatever its library raises, the run continues without a profile."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the kinds are its library's
            with suppress(Exception):
                if self._profile is not None:
                    self._profile.stop()
            self._profile, self._updates = None, self.schedule.updates
            self.slows, self._warned = False, True
            why = str(error).partition("\n")[0]
            self.warn(
                at,
                f"profiling ended: {type(error).__name__}: {why:.200}. What was traced before is "
                "in trace/ of the run folder; training continues",
            )

    def _warn_if_too_long(self, at: Progress, updates: int) -> None:
        plan = self.schedule
        if not 0 < updates < plan.updates:
            return
        self._warned = True
        whole = updates // plan.cycle
        self.warn(
            at,
            f"observe.profile needs {plan.updates:,} updates (wait {plan.wait}, warmup "
            f"{plan.warmup}, active {plan.active}, repeated {plan.repeat} times) and this session "
            f"has {updates:,}: {whole} of {plan.repeat} traces are whole. Take smaller "
            "numbers, e.g. observe.profile={wait: 1, warmup: 1, active: 2, repeat: 1}; training is "
            "not touched by it",
        )
