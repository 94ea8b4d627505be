"""Cost of observing: system figures, gradients and a tracker on (ours) against off (theirs).

    python bench/robustness/observing_cost.py [--pairs 5] [--steps 120] [--profile]

A small GPT-2 trains on cookbook recipes, in turn with `observe.system` at 10 seconds,
`observe.gradients` at 100 steps and TensorBoard, and with none of the three; each run is a process
of its own. The ratio is of updates' seconds, without the first `SETTLING` updates: 0.995 is a cost
of 0.5 %, and that is the floor of its median. Two runs differ by more than that on a busy machine,
so the parts are also timed alone: milliseconds of processor time of one look at the machine and of
one measured update's extra work, as shares of the time between two of them.

Quality: the losses of all runs are the same, bit for bit. `--profile` adds a run with
`observe.profile`: its losses are the same bits, its trace is read back as Chrome trace JSON, and
the times in its table add up to the updates within 5 %.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

CONFIG = """
model: {family: gpt2, tokenizer: "trained:2048",
  shape: {n_embd: 256, n_layer: 4, n_head: 4, n_positions: 512}}
data: {sources: [{path: a.jsonl}], store: store}
train: {batch: "4096 tokens", compile: false, micro_batch_rows: 4, evaluate_every: "1000000 steps",
  save_every: "1000000 steps"}
evaluation: {max_examples: 4, generate: 0}
observe: {log_every: "10 steps"}
"""
OFF = ("observe.system=null", "observe.gradients=null")
ON = ("observe.system=10 seconds", "observe.gradients=100 steps", "observe.trackers=[tensorboard]")
PROFILE = ("observe.profile={wait: 2, warmup: 2, active: 5, repeat: 1}", "observe.log_every=1 step")
SETTLING = 10
"""Updates in which memory and caches find their places."""
FLOOR = 0.995
LOOKS = 200
SYSTEM_SECONDS, GRADIENT_STEPS = 10.0, 100


def measure(a: argparse.Namespace) -> harness.Result:
    """Both sides in turn, then the parts alone."""
    with tempfile.TemporaryDirectory(prefix="observing-") as name:
        work = Path(name)
        (work / "run.yaml").write_text(CONFIG)
        _toque(work, "cookbook", "--n", "600", "--out", "a.jsonl")
        _toque(work, "prepare", "run.yaml")
        result = harness.paired(
            lambda n: _train(work, f"on-{n}", a.steps, ON),
            lambda n: _train(work, f"off-{n}", a.steps, OFF),
            pairs=a.pairs,
            score=harness.by("updates_per_second"),
        )
        profile = _profiled(work, a.steps) if a.profile else None
    losses = [run.pop("losses") for run in [*result.ours, *result.theirs]]
    logged = losses[0]
    same = all(found == logged for found in losses)
    if profile is not None:
        every = profile.pop("losses")
        same = same and {step: every[step] for step in logged} == logged
    result.quality |= {"same_losses": same}
    if not same:
        result.void("observing changed a loss")
    seconds = statistics.median(1 / run["updates_per_second"] for run in result.theirs)
    result.details = {"parts": _parts(seconds), "floor": FLOOR, "profile": profile}
    if same and result.ratio is not None:
        result.quality |= {"median_above_floor": result.ratio["median"] >= FLOOR}
    if profile is not None and not profile["passes"]:
        result.void(f"the profile does not add up: {profile}")
    return result


def _train(work: Path, run: str, steps: int, observe: tuple[str, ...]) -> dict[str, Any]:
    words = ("train", "run.yaml", f"run_dir={run}", f"train.stop_after={steps} steps", *observe)
    _toque(work, *words)
    lines = (work / run / "metrics.jsonl").read_text().splitlines()
    found = [e for e in map(json.loads, lines) if e["event"] == "step"]
    counted = [(e, before) for before, e in pairwise(found) if before["step"] >= SETTLING]
    if not counted:
        raise SystemExit(f"{run} is over within {SETTLING} updates: give it more --steps")
    updates = sum(e["step"] - before["step"] for e, before in counted)
    return {
        "updates_per_second": round(updates / sum(e["seconds"] for e, _ in counted), 4),
        "losses": {e["step"]: e["loss"] for e in found},
    }


def _parts(update_seconds: float) -> dict[str, Any]:
    """Processor milliseconds of a look and of a measured update, and their shares of the time."""
    import torch

    from toque.models.loading.from_scratch import build_model
    from toque.training.events import RunStart, StepInfo
    from toque.training.observers.gradients import Gradients
    from toque.training.observers.system.host import Host
    from toque.training.optim.factory import build_optimizer
    from toque.training.phases import Phases
    from toque.units import Duration, Progress

    host = Host()
    look = _milliseconds(host.look, LOOKS)
    shape = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 512}
    model = build_model(
        family="gpt2", shape=shape, vocab_size=2048, pad_id=0, eos_id=1, bos_id=None, seed=0
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    phases, optimizer = Phases(), build_optimizer(model)
    observer = Gradients(lambda *_, **__: None, 1, model, lambda: optimizer, phases)
    observer.on_fit_start(RunStart(Progress(), Duration(1, "steps")))
    zero, at = torch.zeros(()), [Progress(step=0), Progress(step=1)]
    info = StepInfo(at[0], at[1], zero, zero, 0.0, 1, 1, 1, 1, 1.0, 0.0)

    def observed() -> None:
        observer.on_before_step(at[0])
        with phases("clip"):
            pass
        with phases("update"):
            pass
        observer.on_step(info)

    gradients = _milliseconds(observed, LOOKS)
    return {
        "look_ms": round(look, 3),
        "look_share": look / 1e3 / SYSTEM_SECONDS,
        "gradients_ms": round(gradients, 3),
        "gradients_share": gradients / 1e3 / (GRADIENT_STEPS * update_seconds),
    }


def _milliseconds(work: Any, times: int) -> float:
    work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times * 1e3


def _profiled(work: Path, steps: int) -> dict[str, Any]:
    run = _train(work, "profiled", steps, (*OFF, *PROFILE))
    trace = work / "profiled" / "trace"
    table = json.loads((trace / "top_operations.json").read_text())
    (file,) = trace.glob("step-*.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    marks = [e for e in events if e.get("name") == "toque update" and e["ph"] == "X"]
    own = sum(o["cpu_seconds"] for o in table["operations"]) + table["remainder_seconds"]
    off_by = own / table["loop_seconds"] - 1.0
    return {
        "updates": table["updates"],
        "events": len(events),
        "table_seconds": own,
        "loop_seconds": table["loop_seconds"],
        "remainder_share": table["remainder_seconds"] / table["traced_seconds"],
        "off_by": off_by,
        "passes": abs(off_by) < 0.05 and len(marks) == table["updates"],
        "losses": run["losses"],
    }


def _toque(work: Path, *words: str) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOQUE_CACHE": str(work / "cache")}
    command = [sys.executable, "-m", "toque", *words]
    done = subprocess.run(  # noqa: S603 - our own command
        command, cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"toque {' '.join(words)} ended with {done.returncode}\n{done.stderr}")


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--steps", type=int, default=120, help="updates of each run")
    p.add_argument("--profile", action="store_true", help="hold a profile against its run as well")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
