"""Operations of profiled updates: where their time went, adding up to the updates themselves.

An operation's own time is without the operations it calls, so own times add up. What is left of
the updates' time, Python and waiting for data or for the device, is told as the remainder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch does not say so

UPDATE: Final = "toque update"
"""Mark around an update in a trace; `PHASE` begins those of its phases."""
PHASE: Final = "toque: "
SHOWN: Final = 25
"""Operations in the table for people; the JSON file has all."""
_STEP: Final = "ProfilerStep"
_FRAMES: Final = 6
_MICROSECONDS: Final = 1e-6
_TIMES: Final = (
    "{:,.1f} ms an update by the trace, {:,.1f} ms by the loop's own clock. A profiled update is "
    "slower than another: read shares, not speeds."
)


@dataclass(frozen=True)
class Operation:
    """An operation over all profiled updates."""

    name: str
    calls: int
    cpu_seconds: float
    """Own time on the processor."""
    device_seconds: float
    """Of the kernels it started on a GPU."""
    stack: tuple[str, ...] = ()
    """Where it is called from most, innermost first; where call stacks were asked for."""


@dataclass(frozen=True)
class Profiled:
    """Figures of profiled updates, addable."""

    updates: int = 0
    loop_seconds: float = 0.0
    """Of these updates as the loop measured them."""
    traced_seconds: float = 0.0
    """Of the same updates by the marks in the trace."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of the processor in each phase."""
    operations: tuple[Operation, ...] = ()
    """Most own time first."""

    @property
    def remainder_seconds(self) -> float:
        """Time of the updates in no operation: Python, and waiting for data or the device.

        Zero where threads worked side by side for longer than the updates took.
        """
        return max(0.0, self.traced_seconds - sum(o.cpu_seconds for o in self.operations))

    def __add__(self, other: Profiled) -> Profiled:
        phases = Counter(self.phases) + Counter(other.phases)
        return Profiled(
            self.updates + other.updates,
            self.loop_seconds + other.loop_seconds,
            self.traced_seconds + other.traced_seconds,
            dict(phases),
            _joined([*self.operations, *other.operations]),
        )

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"remainder_seconds": self.remainder_seconds}

    def table(self) -> str:
        """As Markdown: phases, then operations with their shares of the time."""
        whole = self.traced_seconds or 1.0
        device = sum(o.device_seconds for o in self.operations)
        per = 1e3 / max(1, self.updates)
        lines = [
            f"# Where the time of {self.updates} profiled updates went",
            "",
            _TIMES.format(self.traced_seconds * per, self.loop_seconds * per),
            "",
            "| phase | ms an update | share |",
            "|---|---:|---:|",
        ]
        told = {**self.phases, "between them": max(0.0, whole - sum(self.phases.values()))}
        lines += [f"| {n} | {s * per:,.2f} | {s / whole:.1%} |" for n, s in told.items()]
        lines += ["", *self._operations(whole, device, per)]
        stacks = [o for o in self.operations[:SHOWN] if o.stack]
        lines += [f"\n## {o.name}\n\n" + "\n".join(f"    {f}" for f in o.stack) for o in stacks]
        return "\n".join(lines) + "\n"

    def _operations(self, whole: float, device: float, per: float) -> list[str]:
        shown, rest = self.operations[:SHOWN], self.operations[SHOWN:]
        rows = [*shown]
        if rest:
            rows.append(
                Operation(
                    f"{len(rest)} others",
                    sum(o.calls for o in rest),
                    sum(o.cpu_seconds for o in rest),
                    sum(o.device_seconds for o in rest),
                )
            )
        rows.append(Operation("remainder: Python, waiting", 0, self.remainder_seconds, 0.0))
        head = ["| operation | calls an update | CPU ms | share |", "|---|---:|---:|---:|"]
        if device:
            head = [head[0] + " GPU ms | share |", head[1] + "---:|---:|"]
        return head + [self._row(operation, whole, device, per) for operation in rows]

    def _row(self, one: Operation, whole: float, device: float, per: float) -> str:
        calls = one.calls / max(1, self.updates)
        cells = [one.name.replace("|", " "), f"{calls:,.0f}"]
        cells += [f"{one.cpu_seconds * per:,.2f}", f"{one.cpu_seconds / whole:.1%}"]
        if device:
            cells += [f"{one.device_seconds * per:,.2f}", f"{one.device_seconds / device:.1%}"]
        return f"| {' | '.join(cells)} |"


def profiled(events: Iterable[Any], *, loop_seconds: float) -> Profiled:
    """Figures from a profiler's events (`torch.profiler.profile.events()`).

    Only what lies within a mark of an update counts: an evaluation between two is none of theirs.

    Args:
        events: in any order.
        loop_seconds: of the marked updates, by the loop's clock.
    """
    host = [event for event in events if event.device_type == DeviceType.CPU]
    marks = sorted(
        ((e.time_range.start, e.time_range.end) for e in host if e.name == UPDATE),
    )
    starts = [start for start, _ in marks]
    phases: Counter[str] = Counter()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    stacks: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for event in host:
        place = bisect_right(starts, event.time_range.start) - 1
        if place < 0 or event.time_range.start >= marks[place][1] or event.name == UPDATE:
            continue
        if event.name.startswith(PHASE):
            phases[event.name.removeprefix(PHASE)] += event.cpu_time_total * _MICROSECONDS
        elif _is_operation(event):
            sums = found[event.name]
            sums[0] += 1
            sums[1] += max(0.0, event.self_cpu_time_total) * _MICROSECONDS
            sums[2] += max(0.0, event.self_device_time_total) * _MICROSECONDS
            if stack := _stack(event):
                stacks[event.name][stack] += 1
    return Profiled(
        updates=len(marks),
        loop_seconds=loop_seconds,
        traced_seconds=sum(end - start for start, end in marks) * _MICROSECONDS,
        phases=dict(phases),
        operations=_joined(
            Operation(name, int(n), cpu, device, _commonest(stacks[name]))
            for name, (n, cpu, device) in found.items()
        ),
    )


def _is_operation(event: Any) -> bool:
    """Whether its own time counts: not Python's, which is the remainder, nor other marks'."""
    return not (event.is_python_function or event.name.startswith(_STEP))


def _stack(event: Any) -> tuple[str, ...]:
    """Python functions around an event, innermost first."""
    frames: list[str] = []
    above = event.cpu_parent
    while above is not None and len(frames) < _FRAMES:
        if above.is_python_function and not above.name.startswith("<built-in"):
            frames.append(above.name)
        above = above.cpu_parent
    return tuple(frames)


def _commonest(stacks: Counter[tuple[str, ...]]) -> tuple[str, ...]:
    return stacks.most_common(1)[0][0] if stacks else ()


def _joined(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    by_name: dict[str, Operation] = {}
    for one in operations:
        known = by_name.get(one.name)
        by_name[one.name] = one if known is None else _sum(known, one)
    return tuple(sorted(by_name.values(), key=_own_time, reverse=True))


def _sum(a: Operation, b: Operation) -> Operation:
    return replace(
        a,
        calls=a.calls + b.calls,
        cpu_seconds=a.cpu_seconds + b.cpu_seconds,
        device_seconds=a.device_seconds + b.device_seconds,
        stack=a.stack or b.stack,
    )


def _own_time(operation: Operation) -> float:
    return operation.cpu_seconds + operation.device_seconds


def in_a_line(operations: Sequence[Operation], whole: float) -> str:
    """The first three with their shares of `whole` seconds of the processor.

    >>> in_a_line([Operation("aten::mm", 2, 0.75, 0.0)], 1.0)
    'aten::mm 75%'
    """
    shares = (f"{o.name} {o.cpu_seconds / whole:.0%}" for o in operations[:3])
    return ", ".join(shares) if whole > 0 else ""
