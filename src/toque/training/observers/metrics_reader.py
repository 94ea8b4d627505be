"""Metrics reader: reads `metrics.jsonl` back without loading torch, for reports and users."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

METRICS: Final = "metrics.jsonl"

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)] | None
"""None where it was not finite, which JSON has no word for."""


class _Placed(msgspec.Struct):
    step: _Count


class _Start(_Placed):
    parameters: dict[str, _Number] | None = None


class _Step(_Placed):
    epoch: Annotated[float, msgspec.Meta(ge=0, le=1e300)] = 0.0
    loss: _Number = None
    tokens: _Count | None = None
    seconds: _Number = None


class _Evaluation(_Placed):
    metrics: dict[str, _Number] = {}


class _Gpu(msgspec.Struct):
    index: _Count
    name: str | None = None
    utilisation_percent: _Number = None
    memory_used_bytes: _Number = None
    memory_total_bytes: _Number = None
    power_watts: _Number = None
    temperature_celsius: _Number = None
    throttled: list[str] = []


class _System(_Placed):
    seconds: _Number = None
    cpu_percent: _Number = None
    cpu_percent_by_core: list[_Number] = []
    process_cpu_percent: _Number = None
    memory_used_bytes: _Number = None
    memory_total_bytes: _Number = None
    process_resident_bytes: _Number = None
    disk_read_bytes_per_second: _Number = None
    disk_write_bytes_per_second: _Number = None
    network_received_bytes_per_second: _Number = None
    network_sent_bytes_per_second: _Number = None
    gpus: list[_Gpu] = []


class _Gradients(_Placed):
    groups: dict[str, dict[str, _Number]] = {}
    optimizer_groups: list[dict[str, _Number]] = []


class _End(_Placed):
    seconds: _Number = None


_FORMS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "start": _Start,
    "step": _Step,
    "evaluation": _Evaluation,
    "save": _Placed,
    "system": _System,
    "gradients": _Gradients,
    "end": _End,
}
"""What every reader of an event may rely on, where it is there."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events of a run, without those that a continued session undid.

    Lines torn by a kill are left out, and events of another form: the file may come from anyone.
    """
    events: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        event = event_in(line)
        if event is None:
            continue
        if event["event"] == "start":
            events = [e for e in events if stands(e, event["step"])]
        events.append(event)
    return events


def event_in(line: str) -> dict[str, Any] | None:
    """The event of one line; None for a torn line or an event of another form."""
    try:
        event = json.loads(line, parse_constant=lambda _: None)
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            return None
        msgspec.convert(event, _FORMS.get(event["event"], msgspec.Struct))
    except (ValueError, RecursionError):  # msgspec's is a ValueError
        return None
    return event


def stands(event: Mapping[str, Any], continued_from: int) -> bool:
    """Whether an event counts after a session began at the step `continued_from`."""
    counted = event["event"] in {"step", "evaluation", "save", "system", "gradients"}
    return not counted or event["step"] <= continued_from
