"""Held-out loss after the same minutes of training from scratch, against transformers.Trainer.

    python bench/quality/equal_time.py --shape t5 [--minutes 4] [--their-lrs 5e-4 1e-3]

Both sides train one shape (peers/t5_mini.json, peers/gpt2_mini.json, or the demo's) on the same
real recipes for the same minutes of updates; a model of theirs that is trained at several learning
rates counts by its best. Ours is `toque train` with the settings in `OURS`, and `--set` tries
others. Theirs is `bench/trainer_for_minutes.py`: 16 examples an update, padded to the longest of
them, bf16 where ours chose it. Both leave out what comes before the first update and evaluations.

Held-out loss is in nats per target token, over the same held-out examples, and by one evaluator:
stock transformers in float32, each example alone, on both finished models. `nats_ahead` is theirs
less ours. `minutes_to_theirs` is the training time of our first evaluation at or below their final
loss, not interpolated, by our own evaluations during the run; the ratio is the minutes over that.
Quality: our own last evaluation agrees with the stock one on the same model, `toque check` passes,
and both sides kept to the time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers
import torch

from toque.config import load_config
from toque.data.store.token_store import TokenStore
from toque.evaluation.heldout_loss import subset

BATCH = 16
AGREE = 0.02
"""Nats between our evaluation, in the run's precision, and the stock one in float32."""
LATE = 0.02
"""Share of the time that the last update may take beyond it, besides an update of theirs."""
LIMITS = {"max_prompt_tokens": 256, "max_target_tokens": 512}
OURS: dict[str, dict[str, Any]] = {
    "t5": {"peak_lr": 1e-3, "batch": "2048 tokens"},
    "gpt2": {"peak_lr": 1e-3, "batch": "2048 tokens"},
    "demo": {"peak_lr": 3e-3, "batch": "1024 tokens"},
}


def config_for(a: argparse.Namespace, folder: Path) -> Path:
    """The configuration of our side; whatever is not named keeps its default."""
    ours = OURS[a.shape]
    if a.shape == "demo":
        model = load_config("demo", []).config.model
        shape = model.shape | {"max_position_embeddings": sum(LIMITS.values())}
        section = {"family": model.family, "shape": shape, "tokenizer": model.tokenizer}
        family = "gpt2"  # its tokenizer is replaced by the demo's
    else:
        family, section = a.shape, {"shape": json.loads(peers.mini_shape(a.shape).read_text())}
    return peers.write_config(
        folder,
        family,
        folder / "pairs.jsonl",
        columns=True,
        model={"start_from": "scratch", **section},
        data=LIMITS | {"validation_fraction": 0.02},
        optim={"peak_lr": ours["peak_lr"], "warmup": "5 %"},
        train={
            "batch": ours["batch"],
            "stop_after": f"{a.minutes} minutes",
            "evaluate_every": "5 %",
            "save_every": "100 %",
        },
        evaluation={"max_examples": a.held_out, "generate": 0},
        observe={"log_every": "1 steps"},
    )


def ours(a: argparse.Namespace, folder: Path, config: Path) -> dict[str, Any]:
    """One `toque train`: losses over its training time, from metrics.jsonl."""
    begun = time.perf_counter()
    peers.toque("train", config, f"seed={a.seed}", *a.set, threads=a.threads)
    command = time.perf_counter() - begun
    events = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    start = next(e for e in events if e["event"] == "start")
    seconds, tokens, curve = 0.0, 0, []
    for event in events:
        if event["event"] == "step":
            seconds, tokens = seconds + event["seconds"], tokens + event["tokens"]
        elif event["event"] == "evaluation":
            curve.append((round(seconds, 2), round(event["metrics"]["loss"], 4)))
    steps = [e for e in events if e["event"] == "step"]
    named = ("precision", "compile", "micro_batch_rows")
    return {
        "updates": steps[-1]["step"],
        "seconds": round(seconds, 2),
        "command_seconds": round(command, 1),
        "tokens_per_second": round(tokens / seconds, 1),
        "last_update_seconds": round(steps[-1]["seconds"], 2),
        "evaluations": curve,
        **{name: start[name] for name in named},
    }


def theirs(a: argparse.Namespace, folder: Path, lr: float, *, bf16: bool) -> dict[str, Any]:
    """One Trainer in a process of its own; this script with hidden options."""
    words = ["--shape", a.shape, "--minutes", a.minutes, "--seed", a.seed, "--trainer", folder, lr]
    done = peers.run([__file__, *words, *["--bf16"] * bf16], threads=a.threads)
    return peers.last_json(done.stdout)


def their_turn(a: argparse.Namespace) -> dict[str, Any]:
    """What the hidden options ask for."""
    import trainer_for_minutes

    folder, lr = Path(a.trainer[0]), float(a.trainer[1])
    return trainer_for_minutes.train(
        folder / "run/model",
        TokenStore.open(folder / "store"),
        folder / f"theirs-{lr}",
        minutes=a.minutes,
        lr=lr,
        batch=BATCH,
        bf16=a.bf16,
        seed=a.seed,
    )


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """Ours, then theirs at every rate, then one evaluator over all of them."""
    if a.trainer is not None:
        return their_turn(a)
    import trainer_for_minutes

    torch.set_num_threads(a.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peers.write_pairs(folder / "pairs.jsonl", a.examples)
        config = config_for(a, folder)
        peers.toque("prepare", config, threads=a.threads)
        how_many = f"--examples={a.check_examples}"
        check = peers.toque("check", config, how_many, threads=a.threads, check=False)
        our_run = ours(a, folder, config)
        harness.note(f"ours: {our_run}")
        store = TokenStore.open(folder / "store")
        rows = subset(store.rows("validation"), a.held_out).tolist()
        our_run["loss"] = round(
            trainer_for_minutes.loss_alone(folder / "run/model", store, rows), 4
        )
        their_runs = []
        for lr in a.their_lrs:
            run = theirs(a, folder, lr, bf16=our_run["precision"] == "bf16")
            run["loss"] = round(
                trainer_for_minutes.loss_alone(folder / f"theirs-{lr}", store, rows), 4
            )
            their_runs.append(run)
            harness.note(f"theirs: {run}")
    best = min(their_runs, key=lambda run: float(run["loss"]))
    reached = next((s for s, loss in our_run["evaluations"] if loss <= best["loss"]), None)
    result = harness.Result(our_run, their_runs)
    result.details = {
        "nats_ahead": round(best["loss"] - our_run["loss"], 4),
        "minutes_to_theirs": None if reached is None else round(reached / 60, 3),
        "their_best_lr": best["lr"],
        "held_out": {"examples": len(rows), "target_tokens": int(store.target_lengths[rows].sum())},
        "settings": OURS[a.shape] | {"set": a.set},
    }
    if reached is not None:
        times = round(60 * a.minutes / reached, 4)
        result.ratio = {"median": times, "worst": times, "pairs": [times]}
    judge(a, result, check)
    return result


def judge(a: argparse.Namespace, result: harness.Result, check: Any) -> None:
    """Void the figures where the two sides were not given the same."""
    our_run, limit = result.ours, 60 * a.minutes
    lowest = min(loss for _, loss in our_run["evaluations"])
    result.quality["toque check"] = check.stdout.strip().splitlines()[-1:]
    result.quality["our_evaluation"] = lowest
    if check.returncode:
        result.void("toque check: packed and stock mathematics differ")
    if abs(lowest - our_run["loss"]) > AGREE:
        result.void("our evaluation and stock transformers' differ on the model that we trained")
    if our_run["seconds"] > limit * (1 + LATE) + our_run["last_update_seconds"]:
        result.void("our side trained longer than the time")
    if any(run["seconds"] < limit for run in result.theirs):
        result.void("their side trained less than the time")


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--shape", choices=sorted(OURS), default="t5")
    p.add_argument("--minutes", type=float, default=4.0, help="of updates, each side")
    p.add_argument("--their-lrs", type=float, nargs="+", default=[5e-4, 1e-3], metavar="LR")
    p.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of ours")
    p.add_argument("--examples", type=int, default=8000, help="recipes, held-out ones included")
    p.add_argument("--held-out", type=int, default=100, help="examples")
    p.add_argument("--check-examples", type=int, default=4, help="of `toque check`")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--trainer", nargs=2, metavar=("FOLDER", "LR"), help=argparse.SUPPRESS)
    p.add_argument("--bf16", action="store_true", help=argparse.SUPPRESS)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
