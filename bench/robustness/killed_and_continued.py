"""`toque train` killed by SIGKILL once and continued, compared with an undisturbed run.

    python bench/robustness/killed_and_continued.py [--family t5] [--device cuda]

Both runs train on the device of this machine in the default precision, with packed rows, dropout
and background saves, on recipes of the embedded cookbook. They run at the same time. The first run
is killed after its first save and at least one more update. The script compares SHA-256 hashes of
the last weights, the optimizer and the finished model, and the loss of every update. Quality fails
if they differ, or if no run was killed. `--device cpu` hides the GPUs.
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
    """Write the YAML file of both runs. Other settings keep their defaults."""
    model = {"family": a.family, "tokenizer": "trained:1000", "shape": SHAPES[a.family]}
    sources = [{"path": str(folder / "cookbook.jsonl")}]
    values = {
        "run_dir": str(folder / "run"),
        "seed": 5,
        "model": model,
        "data": {"sources": sources, "store": str(folder / "store")},
        "optim": {"peak_lr": 1e-3, "warmup": "5 steps", "label_smoothing": 0.1},
        "augmentation": {"prompt_formats": True, "instructions": 0.5},
        "train": {
            "stop_after": f"{a.steps} steps",
            "batch": "4096 tokens",
            "micro_batch_rows": 2,  # fixed, like the next two: a measured choice may differ
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


def start(config: Path, run: Path) -> subprocess.Popen[bytes]:
    """Start `toque train`. Its output goes to a file next to the run folder."""
    words = [sys.executable, "-m", "toque", "train", str(config), f"run_dir={run}"]
    with (run.parent / f"{run.name}.txt").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log)  # noqa: S603 - our own command


def wait_for(process: subprocess.Popen[bytes], run: Path) -> None:
    """Wait for a run. If it failed, end the benchmark."""
    if process.wait():
        log = (run.parent / f"{run.name}.txt").read_text(errors="replace")
        raise SystemExit(f"toque train ended with {process.returncode}:\n{log[-2500:]}")


def kill(process: subprocess.Popen[bytes], run: Path, *, after: int) -> tuple[int, int]:
    """Kill the run after a save and `after` updates. Return the last and the last saved step."""
    from toque.workflows.diagnosis.run_facts import newest_step, steps_done

    while process.poll() is None and not (steps_done(run) > after and newest_step(run)):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        wait_for(process, run)
        raise SystemExit(
            f"The run ended before it was killed. --steps must exceed {steps_done(run)}."
        )
    return steps_done(run), newest_step(run)


def measure(a: argparse.Namespace) -> harness.Result:
    """Run both and compare their facts."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if a.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from toque.runs.history import METRICS, read_metrics
    from toque.workflows.diagnosis.run_facts import facts_of, find_differences

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="killed-") as name:
        folder = Path(name)
        peers.toque("cookbook", folder / "cookbook.jsonl", "--n", RECIPES)
        config = configuration(a, folder)
        peers.toque("prepare", config)
        undisturbed, killed = folder / "undisturbed", folder / "killed"
        undisturbed_process = start(config, undisturbed)
        killed_process = start(config, killed)
        try:
            reached, saved = kill(killed_process, killed, after=a.save_every + 1)
            wait_for(start(config, killed), killed)
            wait_for(undisturbed_process, undisturbed)
        finally:
            for process in (undisturbed_process, killed_process):
                process.kill()
                process.wait()
        facts = facts_of(undisturbed)
        wrong = find_differences(facts, facts_of(killed))
        events = read_metrics(undisturbed / METRICS)
        started = next(event for event in events if event["event"] == "start")
    return harness.Result(
        ours={
            "killed_after_step": reached,
            "continued_from_step": saved,
            "updates": a.steps,
        },
        quality={"passes": not wrong and 0 < saved < a.steps, "other": wrong},
        details={
            "compared": sorted(facts),
            "device": started["hardware"]["device"],
            "precision": started["precision"],
            "attention": started.get("attention"),
            "seconds": round(time.perf_counter() - begun, 1),
        },
    )


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--family", choices=sorted(SHAPES), default="t5")
    p.add_argument("--steps", type=int, default=24, help="updates per run")
    p.add_argument("--save-every", type=int, default=4, help="updates between saves")
    p.add_argument("--device", choices=("auto", "cpu"), default="auto")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
