"""Numbers of a run's events, of which anything may be missing or of another kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from toque.reports.growing_curve import GrowingCurve

SYSTEM: Final = "system "
"""What the names of curves over the machine's own time begin with."""
_AMOUNTS: Final = {
    "cpu_percent": 1.0,
    "process_cpu_percent": 1.0,
    "memory_used_bytes": 1e9,
    "process_resident_bytes": 1e9,
    "disk_read_bytes_per_second": 1e6,
    "disk_write_bytes_per_second": 1e6,
    "network_received_bytes_per_second": 1e6,
    "network_sent_bytes_per_second": 1e6,
}
"""Figures of a `system` event, and what one drawn unit of them is."""
_OF_GPUS: Final = {
    "utilisation_percent": 1.0,
    "memory_used_bytes": 1e9,
    "power_watts": 1.0,
    "temperature_celsius": 1.0,
}
_MOST_GPUS: Final = 16
_MOST_CURVES: Final = 400


class Curves(dict[str, GrowingCurve]):
    """Curves by name, made when they are first added to; not endlessly many."""

    def __missing__(self, name: str) -> GrowingCurve:
        made = GrowingCurve()
        if len(self) < _MOST_CURVES:
            self[name] = made
        return made


def number(value: object) -> float | None:
    """A finite number; None for anything else.

    >>> number(2), number(True), number(float("nan")), number("2")
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(values: object) -> dict[str, float]:
    """The numbers of a mapping by their names."""
    if not isinstance(values, Mapping):
        return {}
    return {str(k): n for k, v in values.items() if (n := number(v)) is not None}


def gpus_of(event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The GPUs of a `system` event."""
    found = event.get("gpus")
    return [g for g in found if isinstance(g, Mapping)] if isinstance(found, list) else []


def add_system(curves: Curves, event: Mapping[str, Any]) -> None:
    """Add a `system` event to the curves; x is minutes that were measured."""
    covered = (number(event.get("seconds")) or 0.0) / 60
    before = curves[f"{SYSTEM}cpu_percent"].last
    x = (before[0] if before else 0.0) + covered
    for name, unit in _AMOUNTS.items():
        value = number(event.get(name))
        curves[SYSTEM + name].add(x, None if value is None else value / unit)
    for gpu in gpus_of(event)[:_MOST_GPUS]:
        for name, unit in _OF_GPUS.items():
            if (value := number(gpu.get(name))) is not None:
                curves[f"{SYSTEM}gpu {gpu.get('index')} {name}"].add(x, value / unit)
