"""Training speed against transformers.Trainer on the same examples and shape.

    python bench/speed/train.py --family t5 [--pairs 5] [--steps 8] [--precision float32]

Ours is `toque prepare` and `toque train` with default speed settings. The baseline is the shared
peers/hf_train.py. Both use 16 examples per update and run in turn, each in its own process. Every
pair samples new examples for both sides, because the padding of a batch depends on its examples.
`their_useful_share` compares the padding of these batches with the mean over random batches. The
speed counts useful tokens (prompt and target, no padding) of all steps after `--warmup`. Ours runs
in `--precision`, the baseline in `--baseline-precision`.

Quality: `toque check` must find that loss and gradient of the packed batch equal those of
transformers on each single example. `gemm_gflops` is the rate of the model's matrix products in
each precision, measured before, between and after the pairs. `mfu` divides the median speed by the
median rate in the precision of our runs. It counts useful tokens, attention, and the head for
labelled tokens, but not norms and activations.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers
from updates import Rates, products_of_run

EXAMPLES = 2000


def config_for(a: argparse.Namespace, folder: Path) -> Path:
    """Write the measured configuration. Other settings keep their defaults."""
    return peers.write_config(
        folder,
        a.family,
        folder / "pairs.jsonl",
        columns=True,
        model={"start_from": "scratch", "shape": json.loads(a.shape.read_text())},
        data={"validation_fraction": 0.02},
        optim={"peak_lr": 1e-4, "warmup": "0 steps"},
        train={
            "batch": f"{a.batch} examples",
            "stop_after": f"{a.steps} steps",
            "evaluate_every": "100 %",
            "save_every": "100 %",
            "precision": a.precision,
        },
        evaluation={"max_examples": 8, "generate": 0},
        observe={"log_every": "1 steps"},
    )


def ours(a: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """Run `toque train`. Read the steps after the warm-up from metrics.jsonl."""
    run = folder / f"run-{number}"
    words = [f"run_dir={run}", f"seed={number}"]
    peers.toque("train", folder / "config.yaml", *words, threads=a.threads)
    events = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    start = next(e for e in events if e["event"] == "start")
    steps = [e for e in events if e["event"] == "step" and e["step"] > a.warmup]
    seconds, tokens = sum(e["seconds"] for e in steps), sum(e["tokens"] for e in steps)
    recorded = ("precision", "compile", "micro_batch_rows", "flops_per_token")
    return {
        "seconds": round(seconds, 3),
        "useful_tokens_per_second": round(tokens / seconds, 1),
        "useful_share": round(
            1 - statistics.fmean(e["pad_fraction"] for e in steps), 4
        ),
        "data_wait_share": round(
            sum(e["data_wait_seconds"] for e in steps) / seconds, 5
        ),
        "losses": [round(e["loss"], 4) for e in steps[-2:]],
        **{name: start[name] for name in recorded},
    }


def theirs(a: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """Run hf_train.py."""
    # hf_train.py reads the first lines of its file in order.
    lines = (folder / "pairs.jsonl").read_text().splitlines(keepends=True)
    shuffled = folder / f"pairs-{number}.jsonl"
    shuffled.write_text("".join(random.Random(number).sample(lines, len(lines))))
    words = peers.flags(
        {
            "family": a.family,
            "examples": shuffled,
            "tokenizer": peers.tokenizer_folder(a.family),
            "shape": a.shape,
            "batch_size": a.batch,
            "steps": a.steps,
            "warmup": a.warmup,
            "precision": a.baseline_precision,
            "padding": a.padding,
            "threads": a.threads,
            "seed": number,
        }
    )
    return peers.last_json(peers.peer("hf_train.py", *words, threads=a.threads))


def mean_share(a: argparse.Namespace, folder: Path) -> float:
    """Return the share of useful tokens of the baseline over random batches."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(
        str(peers.tokenizer_folder(a.family) / "tokenizer.json")
    )
    pairs = [
        json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()
    ]
    prompts, targets = (
        np.array(
            [
                len(e.ids)
                for e in tokenizer.encode_batch([p[side] for p in pairs], **how)
            ]
        )
        for side, how in (("prompt", {}), ("target", {"add_special_tokens": False}))
    )
    # hf_train.py truncates to these lengths.
    prompts, targets = np.minimum(prompts, 256), np.minimum(targets, 511) + 1
    sides = (prompts, targets) if a.family == "t5" else (prompts + targets,)
    draws = np.random.default_rng(0).integers(0, len(pairs), (10_000, a.batch))
    computed = sum(side[draws].max(1) * a.batch for side in sides)
    return float(sum(side[draws].sum() for side in sides) / computed.sum())


def measure(a: argparse.Namespace) -> harness.Result:
    """Run all pairs and measure the rate of matrix products between them."""
    a.shape = a.shape or peers.mini_shape(a.family)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peers.write_pairs(folder / "pairs.jsonl", EXAMPLES)
        config = config_for(a, folder)
        peers.toque("prepare", config, threads=a.threads)
        rates = Rates(products_of_run(config), threads=a.threads)
        how_many = f"--examples={a.check_examples}"
        check = peers.toque("check", config, how_many, threads=a.threads, check=False)

        def our_turn(number: int) -> dict[str, Any]:
            rates.sample()
            return ours(a, folder, number)

        result = harness.paired(
            our_turn,
            lambda number: theirs(a, folder, number),
            pairs=a.pairs,
            score=harness.by("useful_tokens_per_second"),
        )
        rates.sample()
        share = mean_share(a, folder)
    result.quality["toque check"] = check.stdout.strip().splitlines()[-1:]
    if check.returncode:
        result.void("toque check: packed loss or gradient differs from transformers")
    speed = statistics.median(run["useful_tokens_per_second"] for run in result.ours)
    first = result.ours[0]
    result.details = {
        "useful_tokens_per_second": {
            "ours": speed,
            "theirs": statistics.median(
                run["useful_tokens_per_second"] for run in result.theirs
            ),
        },
        "their_useful_share": {
            "here": round(
                statistics.fmean(run["useful_share"] for run in result.theirs), 4
            ),
            "of_all_batches": round(share, 4),
        },
        "gemm_gflops": rates.gflops(),
        "mfu_precision": first["precision"],
        "mfu": rates.utilisation(speed * first["flops_per_token"], first["precision"])
        if first["flops_per_token"]
        else None,
    }
    return result


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--family", choices=sorted(peers.TOKENIZERS), default="t5")
    p.add_argument(
        "--shape", type=Path, help="JSON file instead of peers/FAMILY_mini.json"
    )
    p.add_argument(
        "--batch", type=int, default=16, help="examples per update on both sides"
    )
    p.add_argument("--pairs", type=int, default=2)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument(
        "--check-examples", type=int, default=4, help="examples of the quality check"
    )
    p.add_argument("--threads", type=int, default=2)
    p.add_argument(
        "--precision", default="auto", help="precision of Toque: auto, float32 or bf16"
    )
    p.add_argument("--baseline-precision", choices=("fp32", "bf16"), default="fp32")
    p.add_argument("--padding", choices=("dynamic", "max", "group"), default="dynamic")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
