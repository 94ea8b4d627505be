"""Cost of observing: system figures, gradients and a tracker on (ours) against off (theirs).

    python bench/robustness/observing_cost.py [--pairs 5] [--blocks 24] [--often 10] [--profile]

A small GPT-2 trains on cookbook recipes in one process, in blocks of ten updates with
`observe.system`, `observe.gradients` and TensorBoard on and off in turn (on, off, off, on): the
sampler's thread is stopped and started, the others are taken out and put back, and what that takes
counts as theirs.

The cost is far below what a machine's speed moves by within a second, so everything is done
`--often` times as often as by default: a look at the machine every second instead of ten, gradients
measured every 10 updates instead of 100, a record for the tracker after each update instead of
every tenth. What is found is divided by that: 0.97 is a cost of 3 % as often, of 0.3 % as usual.
So every block holds some of everything, and the ratio of a pair is the median over its fours of
blocks; what other programs do to one four does not count. `overall` is over all fours, with a 95 %
bootstrap interval; `processor` the same by processor time of all threads. The floor is 0.995.

The parts are also timed alone: milliseconds of processor time of one look at the machine, of one
measured update's extra work, and of one record on its way into TensorBoard, as shares of the time
between two of them by default.

Quality: the losses are those of a training with none of it, bit for bit; the tracker got the
records of blocks that were on and no other. `--profile` adds a run with `observe.profile` and one
without: their losses are the same bits, and its trace is read back as Chrome trace JSON with the
updates that were asked for.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

if TYPE_CHECKING:
    from observed_blocks import Block

CONFIG = """
model: {family: gpt2, tokenizer: "trained:2048",
  shape: {n_embd: 256, n_layer: 4, n_head: 4, n_positions: 512}}
data: {sources: [{path: a.jsonl}], store: store}
train: {batch: "2048 tokens", compile: false, micro_batch_rows: 4, evaluate_every: "1000000 steps",
  save_every: "1000000 steps"}
evaluation: {max_examples: 4, generate: 0}
"""
OFF = ("observe.system=null", "observe.gradients=null")
PROFILE = ("observe.profile={wait: 2, warmup: 2, active: 5, repeat: 1}", "observe.log_every=1 step")
PROFILED_UPDATES, TRACED_UPDATES = 40, 5
SETTLING, SIZE = 25, 10
"""Updates before the first block, which load the tracker, and of each block."""
ALONE = 60
"""Updates of the training with nothing on."""
FLOOR = 0.995
LOOKS = 200
SYSTEM_SECONDS, GRADIENT_STEPS, LOG_STEPS = 10.0, 100, 10


def measure(a: argparse.Namespace) -> harness.Result:
    """Blocks in turn, then the parts alone."""
    with tempfile.TemporaryDirectory(prefix="observing-") as name:
        work = Path(name)
        (work / "run.yaml").write_text(CONFIG)
        _toque(work, "cookbook", "--n", "600", "--out", "a.jsonl")
        _toque(work, "prepare", "run.yaml")
        result = _in_turn(work, a)
        if a.profile:
            profile = _profiled(work)
            result.details["profile"] = profile
            if not profile["passes"]:
                result.void(f"the profile is not right: {profile}")
    return result


def _in_turn(work: Path, a: argparse.Namespace) -> harness.Result:
    from observed_blocks import Blocks, StopAt, as_rows, losses_of, pairs_of, tracked_steps, trained

    from toque.runs.history import METRICS, read_metrics

    blocks = Blocks(SETTLING, SIZE, a.pairs * a.blocks)
    every = LOG_STEPS // a.often
    both = (f"train.stop_after={blocks.steps} steps", f"observe.log_every={every} steps")
    on = (
        f"observe.system={SYSTEM_SECONDS / a.often} seconds",
        f"observe.gradients={GRADIENT_STEPS // a.often} steps",
        "observe.trackers=[tensorboard]",
    )
    run = trained(work, "in-turn", blocks, (*on, *both))
    alone = losses_of(trained(work, "alone", StopAt(ALONE), (*OFF, *both)))
    # The end of a training may have a record of its own, when all is off.
    of_the_end = {blocks.steps} if blocks.steps % every else set()
    events = [e for e in read_metrics(run / METRICS) if e["step"] not in of_the_end]
    sides = pairs_of(blocks.found, events, a.pairs)
    for number, (ours, theirs) in enumerate(sides, start=1):
        harness.note(f"pair {number}: on {ours}, off {theirs}")
    ours, theirs = [list(side) for side in zip(*sides, strict=True)]
    ratio = _ratios(blocks.found, a.pairs, a.often)
    result = harness.Result(ours, theirs, ratio)
    losses = losses_of(run)
    same = len(alone) >= ALONE // every and alone.items() <= losses.items()
    meant = [
        step
        for step in losses
        if step not in of_the_end
        and (step <= SETTLING or any(b.on and b.first <= step <= b.last for b in blocks.found))
    ]
    told = tracked_steps(run) == meant
    result.quality |= {"same_losses": same, "tracked": told}
    result.quality["above_floor"] = ratio["overall"] >= FLOOR
    if not same:
        result.void("observing changed a loss")
    if not told:
        result.void("the tracker did not get the records of the blocks that were on, and no other")
    update = sum(side["seconds"] for side in theirs) / sum(side["updates"] for side in theirs)
    result.details = {
        "floor": FLOOR,
        "update_seconds": update,
        "parts": _parts(run, update),
        "blocks": as_rows(blocks.found),
    }
    return result


def _ratios(blocks: list[Block], pairs: int, often: int) -> dict[str, Any]:
    import numpy as np
    from observed_blocks import ORDER

    from toque.evaluation.bootstrap import RESAMPLES, draws

    def of_fours(seconds: Callable[[Block], float]) -> Any:
        fours = [blocks[i : i + len(ORDER)] for i in range(0, len(blocks), len(ORDER))]
        on, off = (
            np.array([sum(seconds(b) for b in four if b.on is on) for four in fours])
            for on in (True, False)
        )
        return 1.0 - (on / off - 1.0) / often  # as often as by default

    def over_all(ratios: Any) -> dict[str, Any]:
        drawn = [np.median(ratios[draws(len(ratios), b)]) for b in range(RESAMPLES)]
        low, high = np.percentile(drawn, [2.5, 97.5])
        return {"overall": float(np.median(ratios)), "interval": [float(low), float(high)]}

    wall, processor = of_fours(lambda b: b.wall), of_fours(lambda b: b.processor)
    each = [round(float(np.median(part)), 5) for part in np.array_split(wall, pairs)]
    return {
        **over_all(wall),
        "median": round(float(np.median(each)), 5),
        "worst": min(each),
        "pairs": each,
        "processor": over_all(processor),
    }


def _train(work: Path, run: str, steps: int, observe: tuple[str, ...]) -> dict[int, float]:
    words = ("train", "run.yaml", f"run_dir={run}", f"train.stop_after={steps} steps", *observe)
    _toque(work, *words)
    lines = (work / run / "metrics.jsonl").read_text().splitlines()
    return {e["step"]: e["loss"] for e in map(json.loads, lines) if e["event"] == "step"}


def _parts(run: Path, update_seconds: float) -> dict[str, Any]:
    """Processor milliseconds of a look and of a measured update, and their shares of the time."""
    import torch

    from toque.models.loading.from_scratch import build_model
    from toque.training.callbacks import RunStart, StepInfo
    from toque.training.observers.gradients import Gradients
    from toque.training.observers.system_sampler import Host
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
    phases = Phases()
    observer = Gradients(lambda *_, **__: None, 1, model, phases)
    observer.on_fit_start(RunStart(Progress(), Duration(1, "steps")))
    zero, at = torch.zeros(()), [Progress(step=0), Progress(step=1)]
    info = StepInfo(at[0], at[1], zero, zero, 0.0, 1, 1, 1, 1, 1.0, 0.0)

    def observed() -> None:
        observer.on_before_step(at[0])
        with phases("clip"):
            pass
        observer.on_step(info)

    gradients = _milliseconds(observed, LOOKS)
    return {
        "look_ms": round(look, 3),
        "look_share": look / 1e3 / SYSTEM_SECONDS,
        "gradients_ms": round(gradients, 3),
        "gradients_share": gradients / 1e3 / (GRADIENT_STEPS * update_seconds),
        "record_ms": round(record := _record_milliseconds(run), 3),
        "record_share": record / 1e3 / (LOG_STEPS * update_seconds),
    }


def _record_milliseconds(run: Path) -> float:
    """Of all threads, from a step event of the run to TensorBoard's file."""
    from toque.runs.history import METRICS, read_metrics
    from toque.training.observers.tracker_services import opener
    from toque.training.observers.trackers import TrackerFeed

    event = [e for e in read_metrics(run / METRICS) if e["event"] == "step"][-1]
    tracker = opener("tensorboard", folder=run / "alone", settings={})()
    feed = TrackerFeed("tensorboard", lambda: tracker, warn=lambda _at, said: harness.note(said))
    began = time.process_time()
    for _ in range(LOOKS):
        feed.take(event)
    feed.finish(failed=False)
    return (time.process_time() - began) / LOOKS * 1e3


def _milliseconds(work: Any, times: int) -> float:
    work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times * 1e3


def _profiled(work: Path) -> dict[str, Any]:
    losses = _train(work, "profiled", PROFILED_UPDATES, (*OFF, *PROFILE))
    plain = _train(work, "plain", PROFILED_UPDATES, (*OFF, PROFILE[1]))
    trace = work / "profiled" / "trace"
    (file,) = trace.glob("step-*.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    n_updates = sum(e.get("name") == "toque: clip" and e["ph"] == "X" for e in events)
    return {
        "updates": n_updates,
        "events": len(events),
        "same_losses": losses == plain,
        "passes": n_updates == TRACED_UPDATES and losses == plain,
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
    p.add_argument("--blocks", type=int, default=24, help="of a pair, in fours, half of them on")
    p.add_argument(
        "--often", type=int, choices=(1, 2, 5, 10), default=10, help="times as often as by default"
    )
    p.add_argument("--profile", action="store_true", help="hold a profile against its run as well")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
