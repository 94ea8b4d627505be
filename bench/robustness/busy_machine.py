"""Speed of training on a CPU beside busy programs: as `toque train` waits, and spinning.

    python bench/robustness/busy_machine.py [--pairs 3] [--steps 40] [--busy 1]

A small GPT-2 trains on cookbook recipes, in turn as `toque train` chooses by itself (ours) and with
threads that spin as libgomp's do by themselves (theirs), each run in a process of its own, beside
`--busy N` programs that keep a core each. They begin once the run has logged an update, so that it
has to notice; the ratio is of tokens a second from `SETTLING` seconds after that. `share_of_quiet`
is ours over a run of ours without those programs, in the same turn. `--passive` tries
OMP_WAIT_POLICY=PASSIVE in place of ours. Quality: the losses of all runs are the same, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

CONFIG = """
model: {family: gpt2, tokenizer: "trained:2048",
  shape: {n_embd: 256, n_layer: 4, n_head: 4, n_positions: 512}}
data: {sources: [{path: a.jsonl}], store: store}
train: {batch: "4096 tokens", compile: false, micro_batch_rows: 4}
evaluation: {max_examples: 4, generate: 0}
observe: {log_every: "1 step"}
"""
SPINNING = {"GOMP_SPINCOUNT": "300000"}
"""What libgomp takes where nothing is set; said, so that `toque train` leaves it so."""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
BURN = "while True: pass"
SETTLING = 4.0
"""Seconds in which a run may notice."""


def measure(a: argparse.Namespace) -> harness.Result:
    """Quiet, ours and theirs in turn."""
    ours, quiet = PASSIVE if a.passive else {}, []
    with tempfile.TemporaryDirectory(prefix="busy-") as name:
        work = Path(name)
        (work / "run.yaml").write_text(CONFIG)
        _toque(work, {}, "cookbook", "--n", "600", "--out", "a.jsonl")
        _toque(work, {}, "prepare", "run.yaml")

        def our_turn(n: int) -> dict[str, Any]:
            quiet.append(_train(work, f"quiet-{n}", ours, a.steps, busy=0))
            return _train(work, f"ours-{n}", ours, a.steps, busy=a.busy)

        result = harness.paired(
            our_turn,
            lambda n: _train(work, f"theirs-{n}", SPINNING, a.steps, busy=a.busy),
            pairs=a.pairs,
            score=harness.by("tokens_per_second"),
        )
    runs = [*result.ours, *result.theirs, *quiet]
    losses = [run.pop("losses") for run in runs]
    same = all(found == losses[0] for found in losses)
    result.quality |= {"same_losses": same}
    if not same:
        result.void("the way of waiting changed a loss")
    speeds = [run["tokens_per_second"] for run in result.ours]
    shares = [s / q["tokens_per_second"] for s, q in zip(speeds, quiet, strict=True)]
    result.details = {
        "busy": a.busy,
        "steps": a.steps,
        "waiting": [ours, SPINNING],
        "quiet": [run["tokens_per_second"] for run in quiet],
        "share_of_quiet": {
            "median": round(statistics.median(shares), 3),
            "worst": round(min(shares), 3),
        },
    }
    return result


def _train(
    work: Path, run: str, waiting: dict[str, str], steps: int, *, busy: int
) -> dict[str, Any]:
    words = ("train", "run.yaml", f"run_dir={run}", f"train.stop_after={steps} steps")
    metrics = work / run / "metrics.jsonl"
    with _started(work, waiting, *words) as process:
        while process.poll() is None and not _steps(metrics):
            time.sleep(0.05)
        burn = [sys.executable, "-c", BURN]
        programs = [subprocess.Popen(burn) for _ in range(busy)]  # noqa: S603 - our own program
        before = len(_steps(metrics))
        try:
            process.wait()
        finally:
            for program in programs:
                program.kill()
                program.wait()
    if process.returncode:
        raise SystemExit(f"{run} ended with {process.returncode}")
    found = _steps(metrics)
    seconds, tokens, settling = 0.0, 0, SETTLING
    for event in found[before:]:
        if settling > 0:
            settling -= event["seconds"]
        else:
            seconds, tokens = seconds + event["seconds"], tokens + event["tokens"]
    if not tokens:
        raise SystemExit(f"{run} was over within {SETTLING} s: give it more --steps")
    return {
        "tokens_per_second": round(tokens / seconds, 1),
        "losses": [event["loss"] for event in found],
    }


def _steps(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == "step"]


def _toque(work: Path, waiting: dict[str, str], *words: str) -> None:
    with _started(work, waiting, *words) as process:
        if process.wait():
            raise SystemExit(f"toque {' '.join(words)} ended with {process.returncode}")


@contextmanager
def _started(work: Path, waiting: dict[str, str], *words: str) -> Iterator[subprocess.Popen[bytes]]:
    chosen = ("OMP_WAIT_POLICY", *SPINNING)
    environment = {k: v for k, v in os.environ.items() if k not in chosen}
    environment |= {"HF_HUB_OFFLINE": "1", "TOQUE_CACHE": str(work / "cache"), **waiting}
    command = [sys.executable, "-m", "toque", *words]
    with subprocess.Popen(  # noqa: S603 - our own command
        command, cwd=work, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        yield process


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--pairs", type=int, default=3)
    p.add_argument("--steps", type=int, default=40, help="updates of each run")
    p.add_argument("--busy", type=int, default=1, help="programs that keep a core each; 0 for none")
    p.add_argument("--passive", action="store_true", help="ours with OMP_WAIT_POLICY=PASSIVE")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
