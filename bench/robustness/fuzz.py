"""Damaged and hostile files of every kind, given to the commands that read them.

    python bench/robustness/fuzz.py [--minutes 5] [--seed 1] [--area NAME ...] [--keep FOLDER]
    python bench/robustness/fuzz.py --seed 1 --case AREA:NUMBER [--in FOLDER]

Areas: configuration files; stores, checkpoints and run folders (with hashes that fit, as a forger
would write them); a run continued from a damaged checkpoint; model folders; and sources of every
format. Valid small files are made first, then damaged with their structure in mind: bits flipped,
types exchanged, numbers that are huge, nesting, names given twice, control characters, cuts, pieces
repeated to a fifth of a megabyte. A case must end well, or in one of Toque's errors: one paragraph
and its exit code. Another exception, a dead process, more than 10 s of processor time or 2 GiB of
memory is a finding. Areas take turns; the same seed and number repeat a case (`--case`), whatever
the machine. Quality fails when there is a finding. `--keep` keeps the input of each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import msgspec
from fuzzing import entrances, isolation, originals

SLICE_SECONDS = 6.0
"""An area's turn."""


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """Make the valid files; then let the areas take turns until the time is over."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_quick_folder()) as name:
        work = Path(name)
        os.environ["TOQUE_CACHE"] = str(work / "cache")
        originals.make(work)
        _import_all()
        areas = entrances.areas(work)
        if a.case:
            area, _, number = a.case.partition(":")
            folder = Path(a.inside or work / "case").resolve()
            met = isolation.one_case(
                areas[area].case, area=area, seed=a.seed, number=int(number), folder=folder
            )
            return {"records": met}
        names = a.area or list(areas)
        told = _turns({area: areas[area] for area in names}, a, work)
    findings = [f for one in told.values() for f in one.findings]
    distinct = Counter(_kind(f) for f in findings)
    shown = {_kind(f): f for f in reversed(findings)}
    return harness.Result(
        ours={area: {"cases": t.cases, "records": t.records, "findings": len(t.findings)}
              for area, t in told.items()},
        quality={
            "passes": not findings,
            "reason": f"{len(findings)} findings of {len(distinct)} kinds",
            "findings": [shown[kind] | {"times": n} for kind, n in distinct.most_common()],
        },
        details={"cases": sum(t.cases for t in told.values())},
    )  # fmt: skip


def _kind(finding: dict[str, Any]) -> tuple[str, str]:
    return finding["raised"].partition(":")[0], finding["at"]


def _turns(
    areas: dict[str, entrances.Area], a: argparse.Namespace, work: Path
) -> dict[str, isolation.Told]:
    """Slices of all areas in turn; of half of them each, where there are two processes."""
    until = time.monotonic() + 60 * a.minutes
    keep = a.keep.resolve() if a.keep else None
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
    names = list(areas)
    children = []
    for worker in range(a.processes):
        if child := os.fork():
            children.append(child)
            continue
        isolated = isolation.Isolation(a.seed, work / f"worker-{worker}", keep)
        told = {name: isolation.Told() for name in names[worker :: a.processes]}
        for name in itertools.cycle(told):
            left = min(SLICE_SECONDS, until - time.monotonic())
            if left <= 0:
                break
            isolated.run(areas[name].case, area=name, told=told[name], seconds=left)
            harness.note(f"{name}: {told[name].cases} cases, {len(told[name].findings)} findings")
        (work / f"told-{worker}.json").write_bytes(msgspec.json.encode(told))
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    found: dict[str, isolation.Told] = {}
    for file in sorted(work.glob("told-*.json")):
        found |= msgspec.json.decode(file.read_bytes(), type=dict[str, isolation.Told])
    if found.keys() != areas.keys():
        raise RuntimeError("a process of this script ended early; its last words are above")
    return found


def _quick_folder() -> str | None:
    """Where there is one, a disk in memory: every prepare and save waits for the disk."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of random name is made in it
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 1 << 30 else None


def _import_all() -> None:
    """What every forked process would otherwise import anew."""
    import importlib

    inference = ("inference.generate", "inference.open_model")
    for name in ("train", "prepare", "report", "results", "diagnosis.show_batch", *inference):
        importlib.import_module(f"toque.workflows.{name}")
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--minutes", type=float, default=5.0)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--area", nargs="*", metavar="NAME")
    p.add_argument(
        "--keep", type=Path, default=None, metavar="FOLDER", help="for inputs of findings"
    )
    p.add_argument("--processes", type=int, choices=(1, 2), default=1)
    p.add_argument(
        "--case", default=None, metavar="AREA:NUMBER", help="this one, with its traceback"
    )
    p.add_argument(
        "--in", dest="inside", default=None, metavar="FOLDER", help="where its files stay"
    )


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
