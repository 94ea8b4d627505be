"""Benchmark harness: paired runs in turn, a quality check, and one JSON record per script.

A script defines `measure(arguments) -> Result` and ends with `main(__file__, __doc__, options,
measure)`, which prints one JSON object. A field that does not apply is null:

    name, command, date   "speed/train", the command line, UTC
    machine       CPU model, cores, relevant instruction sets, GPU, load
    versions      versions of Python, Toque and the compared libraries
    ours, theirs  results of each side, one object per pair
    ratio         ours / theirs: median, worst, pairs; null if void
    quality       "passes", the compared values, and a reason if the check fails
    details       everything else, including the arguments

The exit code is 0 if the quality check passes and 1 if it fails. If shared data or a library is
missing, the record has "skipped" with the reason, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "sve", "bf16")
PACKAGES = (
    "toque", "torch", "numpy", "transformers", "tokenizers", "datasets", "accelerate", "pyarrow",
    "ctranslate2", "rouge-score", "sacrebleu", "moto",
)  # fmt: skip


class Skipped(Exception):  # noqa: N818 - not an error
    """The benchmark cannot run on this machine. The message names the missing part."""


@dataclass(frozen=True)
class Run:
    """One timed call: wall seconds, processor seconds, and the returned value.

    Processor seconds count this process and its finished children. They vary less than wall seconds
    on a shared machine.
    """

    wall: float
    processor: float
    value: Any = None

    @property
    def figures(self) -> dict[str, Any]:
        """The seconds, and the returned value if it is a mapping."""
        seconds = {"wall": round(self.wall, 4), "processor": round(self.processor, 4)}
        return seconds | (dict(self.value) if isinstance(self.value, Mapping) else {})


@dataclass
class Result:
    """Result of a benchmark. `harness.main` completes the record."""

    ours: Any = None
    theirs: Any = None
    ratio: dict[str, Any] | None = None
    quality: dict[str, Any] = field(default_factory=lambda: {"passes": True})
    details: dict[str, Any] = field(default_factory=dict)
    runs: tuple[list[Run], list[Run]] = field(default=([], []), repr=False)
    """Timed runs of both sides, set by `paired`."""

    def void(self, reason: str) -> None:
        """Remove the ratio, because both sides did not do the same work."""
        self.ratio = None
        self.quality |= {"passes": False, "reason": reason}

    def ratio_by(self, score: Callable[[Run], float]) -> dict[str, Any] | None:
        """Return the ratio of another score of the same runs, or None if the result is void."""
        return ratio_of(*self.runs, score) if self.quality["passes"] else None

    def as_part(self) -> dict[str, Any]:
        """Return ratio, quality and details for a benchmark with several comparisons."""
        return {"ratio": self.ratio, "quality": self.quality, **self.details}


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def timed(work: Callable[[], Any]) -> Run:
    """Call `work` and time it."""
    gc.collect()
    wall, processor = time.perf_counter(), _processor_seconds()
    value = work()
    return Run(time.perf_counter() - wall, _processor_seconds() - processor, value)


def _processor_seconds() -> float:
    now = os.times()
    # os.times() counts children in ticks of 10 ms. The clock of this process is finer.
    return time.process_time() + now.children_user + now.children_system


def by_wall(run: Run) -> float:
    """Score a run by calls per second. This is the default."""
    return 1.0 / run.wall


def by_processor(run: Run) -> float:
    """Score a run by calls per second of processor time."""
    return 1.0 / run.processor


def by(key: str) -> Callable[[Run], float]:
    """Return a score that reads `key` from the returned mapping."""
    return lambda run: float(run.value[key])


def paired(
    ours: Callable[[int], Any],
    theirs: Callable[[int], Any],
    *,
    pairs: int,
    score: Callable[[Run], float] = by_wall,
    quality: Callable[[list[Run], list[Run]], Mapping[str, Any]] | None = None,
) -> Result:
    """Run both sides in turn (A B A B ...) and compare them pair by pair.

    Args:
        ours: Called with the number of the pair. A returned mapping is added to the record.
        theirs: The same for the other side.
        pairs: Number of pairs.
        score: Compared value, higher is better. The ratio of a pair is ours / theirs.
        quality: Compares the returned values. If its "passes" is false, the ratio is void.
    """
    sides: tuple[list[Run], list[Run]] = ([], [])
    for number in range(pairs):
        for side, work in zip(sides, (ours, theirs), strict=True):
            side.append(timed(lambda work=work: work(number)))  # type: ignore[misc]  # noqa: B023
        note(
            f"pair {number + 1} of {pairs}: {sides[0][-1].figures} {sides[1][-1].figures}"
        )
    ours_shown, theirs_shown = ([run.figures for run in side] for side in sides)
    result = Result(ours_shown, theirs_shown, ratio_of(*sides, score), runs=sides)
    if quality is not None:
        result.quality = dict(quality(*sides))
        if not result.quality["passes"]:
            result.void(result.quality.get("reason", "the quality check failed"))
    return result


def ratio_of(
    ours: Sequence[Run], theirs: Sequence[Run], score: Callable[[Run], float]
) -> dict[str, Any]:
    """Return the median, the worst and every ratio of a score."""
    ratios = [score(a) / score(b) for a, b in zip(ours, theirs, strict=True)]
    return {
        "median": round(statistics.median(ratios), 4),
        "worst": round(min(ratios), 4),
        "pairs": [round(ratio, 4) for ratio in ratios],
    }


def note(text: str) -> None:
    """Print progress to stderr, because stdout contains the record."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Describe the machine: CPU model, cores, instruction sets, GPU and load."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = dict(
        line.partition(":")[::2] for line in cpu.splitlines()[::-1] if ":" in line
    )
    facts = {name.strip(): value.strip() for name, value in lines.items()}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    gpus = [
        p.read_text() for p in Path("/proc/driver/nvidia/gpus").glob("*/information")
    ]
    return {
        "cpu": facts.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": [name for name in ISA if name in flags],
        "gpu": gpus[0].splitlines()[0].partition(":")[2].strip() if gpus else None,
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def main(
    script: str,
    doc: str | None,
    options: Callable[[argparse.ArgumentParser], object] | None,
    measure: Callable[[argparse.Namespace], Result | Mapping[str, Any]],
) -> None:
    """Parse the command line, measure, print the record, and exit.

    If `measure` returns a mapping, print only that mapping. A script that runs one side in a child
    process (hidden options) returns its results to the parent that way.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if options is not None:
        options(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    file, skipped = Path(script).resolve(), None
    try:
        result = measure(arguments)
    except Skipped as missing:
        result, skipped = Result(quality={"passes": None}), str(missing)
    if not isinstance(result, Result):
        print(json.dumps(result), flush=True)
        sys.exit(0)
    given_arguments = {
        name: value for name, value in vars(arguments).items() if value is not None
    }
    record = {
        "name": f"{file.parent.name}/{file.stem}",
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "ours": result.ours,
        "theirs": result.theirs,
        "ratio": result.ratio,
        "quality": result.quality,
        "details": {"arguments": given_arguments, **result.details},
    }
    if skipped is not None:
        record["skipped"] = skipped
    if os.environ.get("TOQUE_REHEARSAL"):  # bench/gpu.sh --rehearse: not measurements
        record["rehearsal"] = True
    print(json.dumps(record, indent=1, default=str))
    sys.exit(result.quality["passes"] is False)
