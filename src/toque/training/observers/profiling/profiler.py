"""Profiler: traces of some updates by torch.profiler, and the operations their time went into.

Into `trace/` of the run folder: a Chrome trace for each repetition of the schedule (open it at
ui.perfetto.dev or chrome://tracing), a memory timeline beside it, and the operations of all.
Updates that are profiled are marked as slowed, so rates leave them out; their numbers are the same
bits. On several ranks the first one is profiled.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from toque.storage.atomic import atomic_write
from toque.training.callbacks import Callback
from toque.training.events import RunEnd, RunStart, StepInfo
from toque.training.observers.profiling.memory_timeline import read_timeline
from toque.training.observers.profiling.operations import (
    PHASE,
    UPDATE,
    Profiled,
    in_a_line,
    profiled,
)
from toque.training.phases import UNWATCHED, Phase, Phases
from toque.training.signals import INTERRUPTED
from toque.units import Progress

FOLDER: Final = "trace"
"""Of the run folder."""
OPERATIONS: Final = "top_operations"
"""File in it, as .md for people and .json for programs."""
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

    >>> [ProfileSchedule(wait=1, warmup=1, active=2, repeat=1).spell(i) for i in range(5)]
    ['wait', 'warmup', 'active', 'active', 'over']
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

    def spell(self, update: int) -> Literal["wait", "warmup", "active", "over"]:
        """What happens to an update, counted from the begin of the session."""
        if update >= self.updates:
            return "over"
        place = update % self.cycle
        if place < self.wait:
            return "wait"
        return "warmup" if place < self.wait + self.warmup else "active"


@dataclass(eq=False)
class Profiler(Callback):
    """Profiles the updates of `schedule`. Whatever goes wrong with it, training goes on.

    Args:
        schedule: which updates.
        folder: of the run.
        phases: of the loop; they are marked in the trace.
        warn: takes what went wrong.
        say: takes a sentence about each trace.
        on_gpu: whether kernels of a GPU are traced as well.
        stacks: call stacks of operations, which makes traces larger and updates slower.
        memory: every allocation, for the memory timeline.
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
    _mark: Any = None
    _steps: list[int] = field(default_factory=list)
    _seconds: float = 0.0
    _all: Profiled = field(default_factory=Profiled)
    _traces: int = 0
    _told: bool = False

    def on_fit_start(self, start: RunStart) -> None:
        """Begin to count; say so where the run is shorter than the schedule."""
        self._updates, self._traces, self._all, self._told = 0, 0, Profiled(), False
        self.phases.watchers.append(self._watch)
        if start.stop_after.unit == "steps":
            self._tell_if_too_long(
                start.progress, int(start.stop_after.amount) - start.progress.step
            )

    def on_before_step(self, at: Progress) -> None:
        """Begin what the schedule has for this update."""
        spell = self.schedule.spell(self._updates)
        self.slows = spell in ("warmup", "active")
        try:
            if self.slows and self._profile is None:
                self._start()
            if spell == "active":
                self._mark = record_function(UPDATE)
                self._mark.__enter__()
        except Exception as error:  # noqa: BLE001 - whatever its library raises, the run goes on
            self._give_up(at, error)

    def on_step(self, info: StepInfo) -> None:
        """End it; after the last update of a repetition its files are written."""
        self._updates += 1
        if self._profile is None:
            return
        if self._mark is not None:
            self._unmark()
            self._steps.append(info.progress.step)
            self._seconds += info.seconds
        try:
            self._profile.step()
            if self._updates % self.schedule.cycle == 0:
                self._write()
        except Exception as error:  # noqa: BLE001 - whatever its library raises, the run goes on
            self._give_up(info.progress, error)

    def on_fit_end(self, end: RunEnd) -> None:
        """Write what was traced of a repetition that the end cut short."""
        self.slows = False
        self._unmark()
        try:
            if self._profile is not None:
                self._write()
        except Exception as error:  # noqa: BLE001 - whatever its library raises, the run goes on
            self._give_up(end.progress, error)
        _EXECUTED.clear()
        if self._watch in self.phases.watchers:
            self.phases.watchers.remove(self._watch)
        if end.error is None and end.reason != INTERRUPTED and not self._told:
            self._tell_if_too_long(end.progress, self._updates)

    def _watch(self, phase: Phase) -> AbstractContextManager[Any]:
        return UNWATCHED if self._mark is None else record_function(f"{PHASE}{phase}")

    def _start(self) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        plan = self.schedule
        self._steps, self._seconds = [], 0.0
        if self.stacks:
            _keep_executed()
            _EXECUTED.append(self)
        self._profile = profile(
            activities=kinds,
            schedule=schedule(wait=0, warmup=plan.warmup, active=plan.active, repeat=1),
            profile_memory=self.memory,
            with_stack=self.stacks,
        )
        self._profile.start()

    def _unmark(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def _write(self) -> None:
        ended, self._profile = self._profile, None
        assert ended is not None
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
            timeline = read_timeline(trace)  # which also shows that it can be read
        events = ended.events()  # type: ignore[no-untyped-call]
        found = profiled(events or (), loop_seconds=self._seconds)
        _EXECUTED.clear()
        self._all += found
        self._traces += 1
        if self.memory:
            atomic_write(folder / f"{name}-memory.csv", timeline.csv.encode())
        record = self._all.record() | {"peak_bytes_by_phase": timeline.peaks}
        atomic_write(folder / f"{OPERATIONS}.md", self._all.table().encode())
        atomic_write(folder / f"{OPERATIONS}.json", json.dumps(record, indent=1).encode())
        self.say(
            f"profiled updates {self._steps[0]:,} to {self._steps[-1]:,}: "
            f"{in_a_line(found.operations, found.traced_seconds)}; {folder / OPERATIONS}.md, and "
            f"{folder / name}.json.gz for ui.perfetto.dev"
        )

    def _give_up(self, at: Progress, error: Exception) -> None:
        self._unmark()
        with suppress(Exception):
            if self._profile is not None:
                self._profile.stop()
        self._profile, self._updates = None, self.schedule.updates
        self.slows, self._told = False, True
        why = str(error).partition("\n")[0]
        self.warn(
            at,
            f"profiling ended: {type(error).__name__}: {why:.200}. What was traced before is in "
            "trace/ of the run folder; training goes on",
        )

    def _tell_if_too_long(self, at: Progress, updates: int) -> None:
        plan = self.schedule
        if not 0 < updates < plan.updates:
            return
        self._told = True
        whole = updates // plan.cycle
        self.warn(
            at,
            f"observe.profile needs {plan.updates:,} updates (wait {plan.wait}, warmup "
            f"{plan.warmup}, active {plan.active}, repeated {plan.repeat} times) and this session "
            f"has {updates:,}: {whole} of {plan.repeat} traces are whole. Take smaller "
            "numbers, e.g. observe.profile={wait: 1, warmup: 1, active: 2, repeat: 1}; training is "
            "not touched by it",
        )
