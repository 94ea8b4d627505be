"""Training time lost to saving and uploading, against no saving at all.

    python bench/speed/save.py [--pairs 2] [--seconds 95] [--every 30] [--rate 5]

A T5 of 54 M parameters (the shared peers/t5_mini.json) trains on cookbook recipes, with a save
every 30 seconds that goes to an S3 emulator through a line throttled to 5 MB/s (ours), and without
saves or uploads (theirs), in turn, each in a process of its own that is ended after its time. The
ratio is of steps a second; `lost` is 1 minus it. Beside it, what training waited for by its own
account (`blocked_seconds` of the save events) and the processor time of a step, both of which a
busy machine disturbs less. `synchronous` is what waiting for the same save, and for its upload over
the same line, would take: measured apart, by writing and sending tensors of the same sizes.
Quality: both sides must report the same losses, step by step, and each session with saves must see
one become durable.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers
from s3_emulator import BUCKET, s3_emulator


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """One side, or the whole comparison."""
    if a.side == "synchronous":
        return _synchronous(a.work)
    if a.side is not None:
        _session(a)
    peers.mini_shape("t5")  # what is missing is found before anything is started
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with tempfile.TemporaryDirectory(prefix="save-") as name, s3_emulator(a.rate):
        a.work = Path(name)
        os.environ["TOQUE_CACHE"] = str(a.work / "cache")
        _prepare(a.work)
        # How to compute is found out once, before anything is timed.
        _run(a, "without", seconds=5.0)
        result = harness.paired(
            lambda _: _run(a, "with", seconds=a.seconds),
            lambda _: _run(a, "without", seconds=a.seconds),
            pairs=a.pairs,
            score=harness.by("steps_per_second"),
            quality=_quality,
        )
        synchronous = _run(a, "synchronous", seconds=0.0)
    save, sent = synchronous["save_seconds"], synchronous["upload_seconds"]
    waited = [run["blocked_seconds"] / run["seconds"] for run in result.ours]
    costs = [
        o["cpu_a_step"] / t["cpu_a_step"] for o, t in zip(result.ours, result.theirs, strict=True)
    ]
    for run in (*result.ours, *result.theirs):
        del run["losses"]
    result.details = {
        "threads": os.environ["OMP_NUM_THREADS"],
        "checkpoint_megabytes": round(synchronous["bytes"] / 1e6, 1),
        "lost": result.ratio and round(1 - result.ratio["median"], 4),
        "lost_by_blocked_seconds": round(statistics.median(waited), 4),
        "more_processor_time_a_step": [round(cost - 1, 4) for cost in costs],
        "synchronous": {
            "lost_to_the_save_alone": round(save / (a.every + save), 4),
            "lost_to_save_and_upload": round((save + sent) / (a.every + save + sent), 4),
            **synchronous,
        },
    }
    return result


def _quality(ours: list[harness.Run], theirs: list[harness.Run]) -> dict[str, Any]:
    """Equal losses, for as many steps as both have done, and a durable save in every session."""
    pairs = [(o.value["losses"], t.value["losses"]) for o, t in zip(ours, theirs, strict=True)]
    equal = all(x == y for pair in pairs for x, y in zip(*pair, strict=False))
    saved = all(run.value["saves"] for run in ours)
    return {"passes": equal and saved, "same_losses": equal, "a_save_in_every_session": saved}


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--pairs", type=int, default=1)
    p.add_argument("--seconds", type=float, default=95.0, help="of each session")
    p.add_argument("--every", type=float, default=30.0, help="seconds between saves")
    p.add_argument("--rate", type=float, default=5.0, help="MB/s of the line")
    sides = ("with", "without", "synchronous")
    p.add_argument("--side", choices=sides, help=argparse.SUPPRESS)
    p.add_argument("--work", type=Path, help=argparse.SUPPRESS)


def _prepare(work: Path) -> None:
    from toque.cooking.cookbook.recipes import write_cookbook

    write_cookbook(work / "a.jsonl", n=3000, seed=3)
    config = peers.write_config(
        work,
        "t5",
        work / "a.jsonl",
        model={"shape": json.loads(peers.mini_shape("t5").read_text())},
        train={
            "batch": "1024 tokens",
            "micro_batch_rows": 1,
            "compile": False,
            "precision": "float32",
            "stop_after": "100 epochs",
            "evaluate_every": "100 %",
            "save_every": "100 %",
        },
        evaluation={"max_examples": 8, "generate": 0},
        observe={"log_every": "1 step"},
    )
    peers.toque("prepare", config)


def _run(a: argparse.Namespace, side: str, *, seconds: float) -> dict[str, Any]:
    words = peers.flags({"side": side, "seconds": seconds, "every": a.every, "work": a.work})
    return peers.last_json(peers.run([__file__, *words]).stdout)


class Clock:
    """Times the updates of a session, and ends the process when it is enough."""

    def __init__(self, run: Path, seconds: float) -> None:
        self.run, self.seconds = run, seconds
        self.times: list[tuple[float, float]] = []

    def on_step_end(self, state: Any) -> None:
        """Note wall and processor time."""
        del state
        self.times.append((time.perf_counter(), time.process_time()))
        (first, cpu), (now, cpu_now) = self.times[0], self.times[-1]
        if now - first < self.seconds:
            return
        events = [json.loads(x) for x in (self.run / "metrics.jsonl").read_text().splitlines()]
        saves = [e for e in events if e["event"] == "save"]
        steps = len(self.times) - 1
        found = {
            "steps": steps,
            "seconds": round(now - first, 2),
            "steps_per_second": round(steps / (now - first), 5),
            "cpu_a_step": round((cpu_now - cpu) / steps, 5),
            "saves": len(saves),
            "blocked_seconds": round(sum(e["blocked_seconds"] for e in saves), 3),
            "seconds_until_durable": [round(e["seconds"], 2) for e in saves],
            "warnings": [e["message"] for e in events if e["event"] == "warning"],
            "losses": [e["loss"] for e in events if e["event"] == "step"],
        }
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        os._exit(0)  # what is left to upload is not our matter


def _session(options: argparse.Namespace) -> None:
    from toque.config import load_config
    from toque.workflows.train import train

    number = len(list(options.work.glob("run-*")))
    run = options.work / f"run-{number}"
    words = [f"run_dir={run}"]
    if options.side == "with":
        words += [f"train.save_every={options.every / 60} minutes"]
        words += [f"checkpoint.upload={BUCKET}/{run.name}"]
    train(
        load_config(str(options.work / "config.yaml"), words),
        callbacks=[Clock(run, options.seconds)],
    )


def _synchronous(work: Path) -> dict[str, float]:
    """Seconds that one save takes when it is waited for, and its upload."""
    import torch

    from toque.config import load_config
    from toque.data.store.token_store import TokenStore
    from toque.runs.outlined_update import outlining
    from toque.storage.bucket import RUNS, open_bucket
    from toque.training.checkpoint.resume import model_tensors
    from toque.training.checkpoint.store import CheckpointStore
    from toque.workflows.plan.outlined_model import outlined_model

    config = load_config(str(work / "config.yaml"), []).config
    with outlining():
        model = outlined_model(
            config, TokenStore.open(config.data.store).codec(), where="cuda", precision="float32"
        )
        shapes = {n: tuple(t.shape) for n, t in model_tensors(model).items()}
    made = {name: torch.randn(shape) for name, shape in shapes.items()}
    moments = {f"{n}/{m}": t.clone() for n, t in made.items() for m in ("exp_avg", "exp_avg_sq")}
    store, seconds, saved = CheckpointStore(work / "synchronous"), [], None
    for step in range(1, 4):
        began = time.perf_counter()
        saved = store.save(step, {"model": made, "optimizer": moments}, {})
        seconds.append(time.perf_counter() - began)
    # The weights alone are sent, a third of it; the line is the slow part and knows no sizes.
    weights = saved.path / "model.safetensors"
    began = time.perf_counter()
    open_bucket(f"{BUCKET}/synchronous", RUNS).put_file(weights, "model.safetensors")
    sent = time.perf_counter() - began
    return {
        "bytes": saved.bytes,
        "save_seconds": round(statistics.median(seconds), 2),
        "upload_seconds": round(sent * saved.bytes / weights.stat().st_size, 1),
    }


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
