"""Runs slowed on purpose: whether `toque doctor` names the cause.

    python bench/robustness/slowed_runs.py [--only reader threads ...] [--steps 40]

Eleven small GPT-2 runs on cookbook recipes, each slowed in one way: a reader that sleeps, tiny
batches, rows of 512 tokens that hold one example each, an evaluation after every update, a save
after every update to a disk that is slow to make anything durable, a slow line to a bucket (an S3
emulator), busy programs beside, one thread, dense attention (a compiled model over long rows),
float32, and a micro-batch that is too large for memory (a machine without swap has none: pages of
a file that are dropped before they are read stand in for it). `doctor RUN --json` is asked about
each, as a user would. `named` counts the causes that came first. Quality: at least ten of eleven
named (all but one, when fewer are asked for).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
from s3_emulator import BUCKET, s3_emulator

from toque.hardware.processor import WORTH_WHILE, others_now

SLOWED = Path(__file__).resolve().parents[1] / "slowed"
"""Holds what Python imports when it starts, and what makes a run slow there."""
CONFIG = """
run_dir: run
model: {family: gpt2, tokenizer: "trained:2048",
  shape: {n_embd: 192, n_layer: 3, n_head: 4, n_positions: 2048}}
data: {sources: [{path: a.jsonl}], store: store, max_prompt_tokens: 64, max_target_tokens: 256}
train: {batch: "4096 tokens", compile: false}
evaluation: {max_examples: 16, generate: 0}
observe: {log_every: "2 steps"}
"""
BURN = "while True: pass"


@dataclass(frozen=True)
class Case:
    """A way to slow a run."""

    cause: tuple[str, ...]
    """What `doctor` may call it."""
    settings: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    busy: int = 0
    bucket: float | None = None
    """MB/s of the line to it."""
    faster: int = 1
    """Updates are short: so many times as many."""


CASES = {
    "reader": Case(("waiting for data",), environment={"SLOWED": "reader", "SLOWED_SECONDS": "3"}),
    "tiny-batches": Case(("tiny batches",), ("train.batch=1 examples",), faster=5),
    # An uncompiled model leaves padding out; what is compiled computes it.
    "padding": Case(
        ("padding",), ("train.pack=false", "train.row_tokens=512", "train.compile=true"), faster=1
    ),
    "evaluation": Case(
        ("evaluation",), ("train.evaluate_every=1 steps", "evaluation.max_examples=64")
    ),
    "saving": Case(("saving",), ("train.save_every=1 steps",), {"SLOWED": "disk"}),
    "bucket": Case(("uploads",), ("train.save_every=10 steps",), bucket=2.0),
    "busy": Case(("other programs",), busy=2),
    "one-thread": Case(("threads",), environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}),
    "dense-attention": Case(
        ("dense attention",), ("train.compile=true", "train.row_tokens=2048"), faster=1
    ),
    "float32": Case(("float32",), ("train.precision=float32",)),
    "swapping": Case(
        ("oversized micro-batch",),
        ("train.batch=32768 tokens", "train.micro_batch_rows=999"),
        {"SLOWED": "swap"},
    ),
}


def measure(a: argparse.Namespace) -> harness.Result:
    """Slow each, and ask."""
    others = others_now()
    if others > WORTH_WHILE:
        harness.note(f"other programs keep {others:.1f} cores busy: doctor will name them instead")
    with tempfile.TemporaryDirectory(prefix="slowed-") as name:
        work = Path(name)
        (work / "run.yaml").write_text(CONFIG)
        _toque(work, {}, "cookbook", "--n", "600", "--out", "a.jsonl")
        _toque(work, {}, "prepare", "run.yaml")
        found = {}
        for case in a.only:
            found[case] = _judged(work, case, CASES[case], a)
            harness.note(f"{case}: {json.dumps(found[case])}")
    named = [case for case, each in found.items() if each["named"]]
    enough = len(named) >= len(found) - 1
    quality: dict[str, Any] = {"passes": enough}
    if not enough:
        quality["reason"] = f"not named: {', '.join(sorted(found.keys() - set(named)))}"
    return harness.Result(
        ours={"named": len(named), "of": len(found)},
        quality=quality,
        details={"others_cores_before": round(others, 2), "runs": found},
    )


def _judged(work: Path, name: str, case: Case, a: argparse.Namespace) -> dict[str, Any]:
    steps = a.steps * case.faster
    settings = [*case.settings, f"train.stop_after={steps} steps", f"run_dir=runs/{name}"]
    with contextlib.ExitStack() as stack:
        if case.bucket is not None:
            stack.enter_context(s3_emulator(case.bucket))
            settings.append(f"checkpoint.upload={BUCKET}/runs/{name}")
        stack.enter_context(_busy(case.busy))
        began = time.perf_counter()
        _toque(work, case.environment, "train", "run.yaml", *settings)
        seconds = time.perf_counter() - began
        told = json.loads(_toque(work, {}, "doctor", f"runs/{name}", "--json"))
    gain = told["expected_gain"]
    return {
        "named": told["cause"] in case.cause,
        "cause": told["cause"],
        "besides": [found["cause"] for found in told["findings"][1:]],
        "sentence": told["sentence"],
        "shares": {s["name"]: round(s["share"], 3) for s in told["shares"][:4]},
        "lever": told["lever"],
        "expected_gain": None if gain is None else round(gain, 3),
        "command_seconds": round(seconds, 1),
    }


@contextlib.contextmanager
def _busy(programs: int) -> Iterator[None]:
    burn = [sys.executable, "-c", BURN]
    started = [subprocess.Popen(burn) for _ in range(programs)]  # noqa: S603 - our own program
    try:
        yield
    finally:
        for program in started:
            program.kill()
            program.wait()


def _toque(work: Path, environment: Mapping[str, str], *words: str) -> str:
    """Standard output of a command, slowed as `environment` says."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    inherited = {k: v for k, v in os.environ.items() if k not in threads}
    path = os.pathsep.join(filter(None, (str(SLOWED), inherited.get("PYTHONPATH"))))
    cache = {"TOQUE_CACHE": str(work / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}
    done = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "toque", *words],
        cwd=work,
        env={**inherited, "PYTHONPATH": path, **cache, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"toque {' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--only", nargs="+", choices=sorted(CASES), default=list(CASES))
    p.add_argument("--steps", type=int, default=40, help="updates of each run")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
