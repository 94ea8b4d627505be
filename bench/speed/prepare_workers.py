"""Preparing with 1, 2 and 4 workers, on this machine and on Ray, and what 10^9 recipes would take.

    python bench/speed/prepare_workers.py [--records 20000] [--workers 1 2 4] [--engines local ray]

Generated recipes (the embedded cookbook's), a vocabulary like T5's learnt beforehand, a process for
each case. `rows_per_second` counts from the sources to the finished store, Ray's start left
out; `read` is the rate at which the one reading process can give blocks to any number of workers.
Quality: every case writes the same bytes. Workers beyond the cores share them.

`hours` extrapolates to 10^9 recipes on machines of 64 cores: the slower of the workers, at the rate
of one worker alone, and the reader; and the end (duplicates, split), at its seconds a row.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

RECIPES, CORES = 10**9, 64
MACHINES = (1, 4, 16)


def case(a: argparse.Namespace) -> dict[str, Any]:
    """One `prepare`: its seconds, those of its parts, and the hash of what it wrote."""
    from toque.cooking.schemas.reader import reader_for
    from toque.data.prepare.pipeline import prepare
    from toque.data.prepare.store_plan import PrepareSettings
    from toque.sources.records import Source

    folder = Path(a.case)
    engine, workers = a.engines[0], a.workers[0]
    if engine == "ray":
        import ray

        ray.init(num_cpus=workers, include_dashboard=False, logging_level="error")
    ends: list[float] = []

    def progress(_done: int, _total: int, message: str) -> None:
        if message.startswith("finding duplicates"):
            ends.append(time.perf_counter())

    settings = PrepareSettings(family_kind="encoder-decoder", tokenizer=str(folder / "tokenizer"))
    store = folder / f"{engine}-{workers}"
    began = time.perf_counter()
    result = prepare(
        [Source(str(folder / "recipes.jsonl"), reader_for({}))],
        store=store,
        settings=settings,
        workers=workers,
        engine=engine,
        progress=progress,
    )
    ended = time.perf_counter()
    found = hashlib.sha256()
    for file in sorted(store.rglob("*.npy")):
        found.update(file.read_bytes())
    return {
        "engine": engine,
        "workers": workers,
        "rows": result.store.n_rows,
        "seconds": ended - began,
        "ending_seconds": ended - ends[0],
        "rows_per_second": result.store.n_rows / (ended - began),
        "content": found.hexdigest(),
    }


def begin(folder: Path, records: int) -> dict[str, float]:
    """Write the recipes and the tokenizer; rate of the reader alone."""
    from toque.cooking.cookbook.recipes import write_cookbook
    from toque.cooking.schemas.reader import reader_for
    from toque.data.tokenizer.tokenizer_training import train_codec

    path = folder / "recipes.jsonl"
    write_cookbook(path, n=records, seed=3)
    lines = path.read_text().splitlines()[:2000]
    (folder / "tokenizer").mkdir()
    train_codec(lines, vocab_size=4096, kind="unigram").save(folder / "tokenizer")
    began = time.perf_counter()
    n_bytes = sum(len(block.payload) for block in reader_for({}).blocks(path))
    seconds = time.perf_counter() - began
    return {"bytes_per_second": n_bytes / seconds, "bytes_per_recipe": n_bytes / records}


def hours(read: dict[str, float], one: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Hours for 10^9 recipes on some machines, by parts."""
    a_row = (one["seconds"] - one["ending_seconds"]) / one["rows"]
    reading = RECIPES * read["bytes_per_recipe"] / read["bytes_per_second"] / 3600
    ending = RECIPES * one["ending_seconds"] / one["rows"] / 3600
    return {
        str(machines): {
            "workers": round(RECIPES * a_row / CORES / machines / 3600, 2),
            "reader": round(reading, 2),
            "ending": round(ending, 2),
            "together": round(max(RECIPES * a_row / CORES / machines / 3600, reading) + ending, 2),
        }
        for machines in MACHINES
    }


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """Every case in turn."""
    if a.case:
        return case(a)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        read = begin(Path(name), a.records)
        for engine in a.engines:
            for workers in a.workers:
                command = [sys.executable, __file__, "--case", name, "--engines", engine]
                command += ["--workers", str(workers)]
                done = subprocess.run(  # noqa: S603
                    command, capture_output=True, text=True, check=False, env=os.environ
                )
                if done.returncode:
                    raise harness.Skipped(f"{engine} with {workers}: {done.stderr[-300:]}")
                found.append(json.loads(done.stdout.splitlines()[-1]))
                harness.note(json.dumps(found[-1]))
    same = len({one["content"] for one in found}) == 1
    return harness.Result(
        ours=found,
        quality={"passes": same, "same_bytes": same},
        details={"read": read, "hours_for_10^9": hours(read, found[0])},
    )


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--records", type=int, default=20_000)
    p.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    p.add_argument("--engines", nargs="+", choices=("local", "ray"), default=["local", "ray"])
    p.add_argument("--case", help=argparse.SUPPRESS)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
