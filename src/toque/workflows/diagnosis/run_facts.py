"""Facts about a trained run, by which two runs are compared: hashes and losses."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from toque.runs.history import METRICS, read_metrics
from toque.storage.atomic import sha256_of

Facts = Mapping[str, Any]
"""Results of training by name: hashes, and the loss of every step."""


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint folder, which may be incomplete, or 0."""
    steps = [
        path.name.rpartition("-")[2] for path in (run / "checkpoints").glob("step-*")
    ]
    return max(map(int, steps), default=0)


def newest_checkpoint(run: Path) -> Path:
    """Return the folder of the newest checkpoint. It does not exist for step 0."""
    return run / "checkpoints" / f"step-{newest_step(run):08d}"


def events(run: Path) -> list[dict[str, Any]]:
    """Read the events of a run, or return [] without metrics.jsonl.

    If a restart repeated updates, only the events of the last repetition are included.
    """
    with suppress(OSError):
        return read_metrics(run / METRICS)
    return []


def steps_done(run: Path) -> int:
    """Return the newest step in metrics.jsonl, or 0."""
    steps = [event["step"] for event in events(run) if event["event"] == "step"]
    return max(steps, default=0)


def facts_of(run: Path) -> Facts:
    """Hash the last weights, optimizer and finished model, and read the loss of every step."""
    last = newest_checkpoint(run)
    files = {
        "weights": last / "model.safetensors",
        "optimizer": last / "optimizer.safetensors",
    }
    for path in (run / "model").glob("*.safetensors"):
        files[f"model/{path.name}"] = path
    hashes = {name: sha256_of(path) for name, path in files.items() if path.exists()}
    losses = {
        event["step"]: event["loss"]
        for event in events(run)
        if event["event"] == "step"
    }
    return {"last step": newest_step(run), **hashes, "losses": losses}


def find_differences(expected: Facts, actual: Facts) -> list[str]:
    """Return the names of facts that differ."""
    return [
        name
        for name in {**expected, **actual}
        if expected.get(name) != actual.get(name)
    ]
