"""`toque train` killed with SIGKILL once and continued, beside a run left alone: the same bits?

    python bench/robustness/killed_and_continued.py [--family t5] [--device cuda]

The command as a user types it, on this machine's device, in the precision it chooses: rows packed
with dropout, recipes of the embedded cookbook, saves beside the training. The killed run and the
one left alone train at the same time; the killed one has saved and gone on for an update or more.
Compared bit for bit: SHA-256 of the last weights, of the optimizer and of the finished model, and
the loss of every update, those done twice by what was reported last. Quality fails where they
differ, or where nothing was killed. `--device cpu` hides the GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers

SHAPES: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 2, "num_heads": 4,
           "dropout_rate": 0.1},
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 512},
}  # fmt: skip
RECIPES = 300


def configuration(a: argparse.Namespace, folder: Path) -> Path:
    """The YAML file of both runs; what is not named keeps its default."""
    values = {
        "run_dir": str(folder / "run"),
        "seed": 5,
        "model": {"family": a.family, "tokenizer": "trained:1000", "shape": SHAPES[a.family]},
        "data": {
            "sources": [{"path": str(folder / "cookbook.jsonl")}],
            "store": str(folder / "store"),
        },
        "optim": {"peak_lr": 1e-3, "warmup": "5 steps", "label_smoothing": 0.1},
        "augmentation": {"prompt_formats": True, "instructions": 0.5},
        "train": {
            "stop_after": f"{a.steps} steps",
            "batch": "4096 tokens",
            "micro_batch_rows": 2,  # these three fixed: what is measured may differ from run to run
            "compile": False,
            "gradient_checkpointing": False,
            "save_every": f"{a.save_every} steps",
            "evaluate_every": "100 %",
        },
        "evaluation": {"max_examples": 8, "generate": 0},
        "observe": {"log_every": "1 step"},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def started(config: Path, run: Path) -> subprocess.Popen[bytes]:
    """`toque train` of that run folder, its words in a file beside it."""
    words = [sys.executable, "-m", "toque", "train", str(config), f"run_dir={run}"]
    with (run.parent / f"{run.name}.txt").open("ab") as said:
        return subprocess.Popen(words, stdout=said, stderr=said)  # noqa: S603 - our own command


def ended(process: subprocess.Popen[bytes], run: Path) -> None:
    """Wait for it; ends the benchmark where it failed."""
    if process.wait():
        said = (run.parent / f"{run.name}.txt").read_text(errors="replace")
        raise SystemExit(f"toque train ended with {process.returncode}:\n{said[-2500:]}")


def killed(process: subprocess.Popen[bytes], run: Path, *, after: int) -> tuple[int, int]:
    """SIGKILL it once it has saved and reported `after` updates; newest step done, and saved."""
    from toque.workflows.diagnosis.drill import newest_step, steps_done

    while process.poll() is None and not (steps_done(run) > after and newest_step(run)):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    ended_by = process.wait()
    if ended_by != -signal.SIGKILL:
        ended(process, run)
        raise SystemExit(f"the run came to its end before it was killed: give more than --steps "
                         f"{steps_done(run)}")  # fmt: skip
    return steps_done(run), newest_step(run)


def measure(a: argparse.Namespace) -> harness.Result:
    """Both runs, and their facts compared."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if a.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from toque.runs.history import METRICS, read_metrics
    from toque.workflows.diagnosis.drill import differing, facts_of

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="killed-") as name:
        folder = Path(name)
        peers.toque("cookbook", folder / "cookbook.jsonl", "--n", RECIPES)
        config = configuration(a, folder)
        peers.toque("prepare", config)
        whole, other = folder / "whole", folder / "killed"
        alone, first = started(config, whole), started(config, other)
        try:
            reached, saved = killed(first, other, after=a.save_every + 1)
            ended(started(config, other), other)
            ended(alone, whole)
        finally:
            for process in (alone, first):
                process.kill()
                process.wait()
        facts = facts_of(whole)
        wrong = differing(facts, facts_of(other))
        start = next(e for e in read_metrics(whole / METRICS) if e["event"] == "start")
    return harness.Result(
        ours={"killed_after_step": reached, "continued_from_step": saved, "updates": a.steps},
        quality={"passes": not wrong and 0 < saved < a.steps, "other": wrong},
        details={
            "compared": sorted(facts),
            "device": start["hardware"]["device"],
            "precision": start["precision"],
            "attention": start.get("attention"),
            "seconds": round(time.perf_counter() - begun, 1),
        },
    )


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--family", choices=sorted(SHAPES), default="t5")
    p.add_argument("--steps", type=int, default=24, help="of each run")
    p.add_argument("--save-every", type=int, default=4, help="in steps")
    p.add_argument("--device", choices=("auto", "cpu"), default="auto")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
