"""Memory timeline of a trace: bytes allocated after every allocation, and the phase it was in."""

from __future__ import annotations

import gzip
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from toque.training.observers.profiling.operations import PHASE

_HEADER: Final = "milliseconds,device,allocated_bytes,phase\n"
_CPU: Final = 0
"""Device types are torch's: 0 the processor, 1 CUDA."""


class _Arguments(msgspec.Struct):
    allocated: int | None = msgspec.field(name="Total Allocated", default=None)
    device: int = msgspec.field(name="Device Id", default=-1)
    kind: int = msgspec.field(name="Device Type", default=_CPU)


class _Event(msgspec.Struct):
    name: str = ""
    ph: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


@dataclass(frozen=True)
class Timeline:
    """Allocations in order, as CSV, and the most that was held in each phase."""

    csv: str
    peaks: dict[str, int]
    """Phase -> bytes above those held when tracing began; of the GPU where there is one."""


def read_timeline(trace: Path) -> Timeline:
    """The timeline of a gzipped Chrome trace.

    Raises:
        OSError, msgspec.DecodeError: it cannot be read, or is no Chrome trace.
    """
    events = msgspec.json.decode(gzip.decompress(trace.read_bytes()), type=_Trace).events
    phases = sorted(
        (e.ts, e.ts + e.dur, e.name.removeprefix(PHASE))
        for e in events
        if e.name.startswith(PHASE) and e.ph == "X"
    )
    starts = [start for start, _, _ in phases]
    found = sorted(
        ((e.ts, msgspec.json.decode(e.args, type=_Arguments)) for e in events if _is_memory(e)),
        key=lambda pair: pair[0],
    )
    lines, peaks = [_HEADER], dict[tuple[bool, str], int]()
    for ts, args in found:
        if args.allocated is None:
            continue
        place = bisect_right(starts, ts) - 1
        phase = phases[place][2] if place >= 0 and ts < phases[place][1] else "between"
        on_gpu = args.kind != _CPU
        device = f"cuda:{args.device}" if on_gpu else "cpu"
        lines.append(f"{(ts - found[0][0]) / 1e3:.3f},{device},{args.allocated},{phase}\n")
        peaks[on_gpu, phase] = max(peaks.get((on_gpu, phase), 0), args.allocated)
    gpu = any(on_gpu for on_gpu, _ in peaks)
    told = {phase: n for (on_gpu, phase), n in peaks.items() if on_gpu == gpu}
    return Timeline("".join(lines), told)


def _is_memory(event: _Event) -> bool:
    return event.name == "[memory]" and event.ph == "i"
