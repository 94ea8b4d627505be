"""Benchmark harness: pairs in turn, a quality check that voids, one JSON record for every script.

A script defines `measure(arguments) -> Result` and ends with `main(__file__, __doc__, options,
measure)`, which prints one JSON object; what does not apply is null:

    name, command, date   "speed/train"; what was typed; UTC
    machine       CPU model, cores, instruction sets that decide the rate of products, GPU, load
    versions      of Python, Toque and every library that a benchmark compares with
    ours, theirs  figures of each side, one object per pair where pairs were run
    ratio         how many times better ours is: median, worst, pairs; null when void
    quality       passes, what was compared, and a reason when it does not pass
    details       everything else, the arguments among it

The exit code is 0 when the quality check passes, 1 when it does not. What a machine lacks (shared
data, a peer's library) makes a record with "skipped" and its reason, and exit code 0.
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
    "ctranslate2", "rouge-score", "sacrebleu", "moto", "ingredient-parser-nlp",
)  # fmt: skip


class Skipped(Exception):  # noqa: N818 - no error: this machine cannot run the benchmark
    """The benchmark cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Run:
    """One timed call: seconds of either clock, and what it returned.

    The processor clock counts this process and the children it waited for; on a machine that other
    programs use it is the steadier of the two.
    """

    wall: float
    processor: float
    value: Any = None

    @property
    def figures(self) -> dict[str, Any]:
        """For the record: the seconds, and the value where it is a mapping."""
        seconds = {"wall": round(self.wall, 4), "processor": round(self.processor, 4)}
        return seconds | (dict(self.value) if isinstance(self.value, Mapping) else {})


@dataclass
class Result:
    """What a benchmark found; `harness.main` completes it into the record."""

    ours: Any = None
    theirs: Any = None
    ratio: dict[str, Any] | None = None
    quality: dict[str, Any] = field(default_factory=lambda: {"passes": True})
    details: dict[str, Any] = field(default_factory=dict)
    runs: tuple[list[Run], list[Run]] = field(default=([], []), repr=False)
    """Ours and theirs, as `paired` timed them."""

    def void(self, reason: str) -> None:
        """Withdraw the ratio, because the two sides did not do the same work equally well."""
        self.ratio = None
        self.quality |= {"passes": False, "reason": reason}

    def ratio_by(self, score: Callable[[Run], float]) -> dict[str, Any] | None:
        """The ratio of another score of the same runs: median, worst, pairs; None when void."""
        return ratio_of(*self.runs, score) if self.quality["passes"] else None

    def as_part(self) -> dict[str, Any]:
        """For `details` of a benchmark that compares several things."""
        return {"ratio": self.ratio, "quality": self.quality, **self.details}


def free_port() -> int:
    """A port of this machine that nothing listens on."""
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
    # The children's part of os.times() has ticks of 10 ms; this process' own clock is finer.
    return time.process_time() + now.children_user + now.children_system


def by_wall(run: Run) -> float:
    """The default score: calls a second."""
    return 1.0 / run.wall


def by_processor(run: Run) -> float:
    """Calls per second of processor time."""
    return 1.0 / run.processor


def by(key: str) -> Callable[[Run], float]:
    """A score that is a figure of the returned mapping."""
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
        ours: Called with the pair's number. A mapping that it returns joins the record.
        theirs: The same for the other side.
        pairs: How many.
        score: What is compared; more is better. A pair's ratio is ours / theirs.
        quality: Compares what the runs returned; its "passes" decides whether the ratio stands.
    """
    sides: tuple[list[Run], list[Run]] = ([], [])
    for number in range(pairs):
        for side, work in zip(sides, (ours, theirs), strict=True):
            side.append(timed(lambda work=work: work(number)))  # type: ignore[misc]  # noqa: B023
        note(f"pair {number + 1} of {pairs}: {sides[0][-1].figures} {sides[1][-1].figures}")
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
    """Median, worst and each pair's ratio of a score."""
    ratios = [score(a) / score(b) for a, b in zip(ours, theirs, strict=True)]
    return {
        "median": round(statistics.median(ratios), 4),
        "worst": round(min(ratios), 4),
        "pairs": [round(ratio, 4) for ratio in ratios],
    }


def note(text: str) -> None:
    """Progress, on stderr: stdout is the record's."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """CPU model, cores, instruction sets, GPU and load."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.partition(":")[::2] for line in cpu.splitlines()[::-1] if ":" in line)
    found = {name.strip(): value.strip() for name, value in lines.items()}
    flags = set(found.get("flags", found.get("Features", "")).split())
    gpus = [p.read_text() for p in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    return {
        "cpu": found.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": [name for name in ISA if name in flags],
        "gpu": gpus[0].splitlines()[0].partition(":")[2].strip() if gpus else None,
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Python's version and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(
    script: str,
    doc: str | None,
    options: Callable[[argparse.ArgumentParser], object] | None,
    measure: Callable[[argparse.Namespace], Result | Mapping[str, Any]],
) -> None:
    """Parse the command line, measure, print the record, and exit.

    A mapping instead of a `Result` is printed as it is: a script that starts itself again for one
    side (hidden options) hands its figures to its parent that way.
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
    asked = {name: value for name, value in vars(arguments).items() if value is not None}
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
        "details": {"arguments": asked, **result.details},
    }
    if skipped is not None:
        record["skipped"] = skipped
    if os.environ.get("TOQUE_REHEARSAL"):  # bench/gpu.sh --rehearse: seconds of no machine
        record["rehearsal"] = True
    print(json.dumps(record, indent=1, default=str))
    sys.exit(result.quality["passes"] is False)
