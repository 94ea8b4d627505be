"""Metrics reader: reads `metrics.jsonl` back without loading torch, for reports and users."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

METRICS: Final = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events of a run, without those that a continued session undid.

    Lines torn by a kill are left out.
    """
    events: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or "event" not in event:
            continue
        if event["event"] == "start":
            events = [e for e in events if _stands(e, event["step"])]
        events.append(event)
    return events


def _stands(event: Mapping[str, Any], continued_from: int) -> bool:
    counted = event["event"] in {"step", "evaluation", "save"}
    return not counted or event["step"] <= continued_from
