"""Training speed against transformers.Trainer on the same examples and shape; prints JSON.

    python bench/train.py --family t5 [--pairs 5] [--steps 8] [--precision float32]

Ours is `toque prepare` and `toque train` as a user runs them, with updates of 16 examples like the
baseline (the shared peers/hf_train.py) and every speed setting left at its default. Each side is a
process of its own, in turn. Every pair draws its examples anew on both sides: which ones meet in
a batch decides how much of a dynamically padded one is padding, and the mean over all possible
batches stands beside theirs. Counted are useful tokens: of prompts and targets, no padding, over
all steps but the first `--warmup`. Ours runs in the precision it chooses (float32 where bf16 has
no hardware), or the one given; the baseline in `--baseline-precision`.

Quality: `toque check` must find loss and gradient of the packed batch equal to stock transformers'
on each example alone, or the ratio is void. `gemm_gflops` is the rate of the model's own matrix
products, timed before, between and after the pairs: a shared machine's clock goes up and down, and
the best moment stands beside the median. `mfu` divides the median speed by the median rate,
counting useful tokens only, and the head only where a token has a label.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

SHARED = Path(os.environ.get("TOQUE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
PEERS = SHARED / "peers"
RECIPES = SHARED / "data" / "recipes" / "allrecipes_epicurious_as_is.jsonl.gz"
TOKENIZERS = {"t5": "t5", "gpt2": "gpt2", "neox": "gpt_neox"}
EXAMPLES = 2000


def run(command: list[str], threads: int) -> str:
    """Standard output of a process that must succeed."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(  # noqa: S603  # commands of this file
        command, capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return done.stdout


def shape_file(a: argparse.Namespace) -> Path:
    """Arguments of the family's Hugging Face config, the same for both sides."""
    return Path(a.shape) if a.shape else PEERS / f"{a.family}_mini.json"


def config_for(a: argparse.Namespace, folder: Path) -> list[str]:
    """The overrides of the run that is timed; whatever is not named keeps its default."""
    shape = json.loads(shape_file(a).read_text())
    config = {
        "run_dir": str(folder / "run"),
        "model": {
            "family": a.family,
            "start_from": "scratch",
            "shape": shape,
            "tokenizer": str(SHARED / "tokenizers" / TOKENIZERS[a.family]),
        },
        "data": {
            "sources": [
                {
                    "path": str(folder / "pairs.jsonl"),
                    "columns": {"prompt": "prompt", "target": "target"},
                }
            ],
            "store": str(folder / "store"),
            "validation_fraction": 0.02,
        },
        "optim": {"peak_lr": 1e-4, "warmup": "0 steps"},
        "train": {
            "batch": f"{a.batch} examples",
            "stop_after": f"{a.steps} steps",
            "evaluate_every": "100 %",
            "save_every": "100 %",
            "precision": a.precision,
        },
        "evaluation": {"max_examples": 8, "generate": 0},
        "observe": {"log_every": "1 steps"},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return [str(path)]


def ours(a: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """One `toque train`; steps after the warm-up, from metrics.jsonl."""
    begun = time.perf_counter()
    run_dir = folder / f"run-{number}"
    given = [*config_for(a, folder), f"run_dir={run_dir}", f"seed={number}"]
    run([sys.executable, "-m", "toque", "train", *given], a.threads)
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    start = next(e for e in events if e["event"] == "start")
    steps = [e for e in events if e["event"] == "step" and e["step"] > a.warmup]
    seconds, tokens = sum(e["seconds"] for e in steps), sum(e["tokens"] for e in steps)
    return {
        "seconds": round(seconds, 3),
        "useful_tokens_per_second": round(tokens / seconds, 1),
        "useful_share": round(1 - statistics.fmean(e["pad_fraction"] for e in steps), 4),
        "data_wait_share": round(sum(e["data_wait_seconds"] for e in steps) / seconds, 5),
        "losses": [round(e["loss"], 4) for e in steps[-2:]],
        "precision": start["precision"],
        "compile": start["compile"],
        "micro_batch_rows": start["micro_batch_rows"],
        "flops_per_token": start["flops_per_token"],
        "whole_seconds": round(time.perf_counter() - begun, 1),
    }


def theirs(a: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """One hf_train.py, every timed batch counted (exact_peer.py says why)."""
    begun = time.perf_counter()
    # It reads the first lines of its file, in the same order every time.
    lines = (folder / "pairs.jsonl").read_text().splitlines(keepends=True)
    drawn = folder / f"pairs-{number}.jsonl"
    drawn.write_text("".join(random.Random(number).sample(lines, len(lines))))
    flags = {
        "--family": a.family,
        "--examples": drawn,
        "--tokenizer": SHARED / "tokenizers" / TOKENIZERS[a.family],
        "--shape": shape_file(a),
        "--batch-size": a.batch,
        "--steps": a.steps,
        "--warmup": a.warmup,
        "--precision": a.baseline_precision,
        "--padding": a.padding,
        "--threads": a.threads,
        "--seed": number,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    peer = [sys.executable, str(Path(__file__).with_name("exact_peer.py")), str(PEERS), *words]
    out = run(peer, a.threads)
    printed: dict[str, Any] = json.loads(out.splitlines()[-1])
    return printed | {"whole_seconds": round(time.perf_counter() - begun, 1)}


def mean_share(a: argparse.Namespace, folder: Path) -> float:
    """Useful tokens of the baseline's among all, over random batches of all the examples."""
    import numpy as np
    from tokenizers import Tokenizer

    file = SHARED / "tokenizers" / TOKENIZERS[a.family] / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    prompts, targets = (
        np.array([len(e.ids) for e in tokenizer.encode_batch([p[side] for p in pairs], **how)])
        for side, how in (("prompt", {}), ("target", {"add_special_tokens": False}))
    )
    # Cut as hf_train.py cuts them.
    prompts, targets = np.minimum(prompts, 256), np.minimum(targets, 511) + 1
    sides = (prompts, targets) if a.family == "t5" else (prompts + targets,)
    draws = np.random.default_rng(0).integers(0, len(pairs), (10_000, a.batch))
    computed = sum(side[draws].max(1) * a.batch for side in sides)
    return float(sum(side[draws].sum() for side in sides) / computed.sum())


def gemm_gflops(a: argparse.Namespace) -> float:
    """Rate of the model's feed-forward product on 4,096 tokens, forward and both gradients."""
    import torch

    torch.set_num_threads(a.threads)
    shape = json.loads(shape_file(a).read_text())
    width = shape.get("d_model") or shape.get("n_embd") or shape["hidden_size"]
    inner = shape.get("d_ff") or shape.get("intermediate_size") or 4 * width
    x, w, dy = torch.randn(4096, width), torch.randn(inner, width), torch.randn(4096, inner)
    best = 0.0
    for _ in range(8):
        begun = time.perf_counter()
        for _ in range(3):
            _ = x @ w.t(), dy @ w, dy.t() @ x
        best = max(best, 3 * 3 * 2 * 4096 * width * inner / (time.perf_counter() - begun))
    return best / 1e9


def equal_mathematics(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What `toque check` says of this model and data."""
    command = [sys.executable, "-m", "toque", "check", *config_for(a, folder)]
    environment = os.environ | {"OMP_NUM_THREADS": str(a.threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(  # noqa: S603  # commands of this file
        command, capture_output=True, text=True, env=environment, check=False
    )
    return {"passes": done.returncode == 0, "said": done.stdout.strip().splitlines()[-1:]}


def measure(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All pairs, ours first, and what they come to."""
    make = [sys.executable, str(PEERS / "make_pairs.py"), str(RECIPES), str(EXAMPLES)]
    (folder / "pairs.jsonl").write_text(run(make, a.threads))
    run([sys.executable, "-m", "toque", "prepare", *config_for(a, folder)], a.threads)
    quality = equal_mathematics(a, folder)
    pairs, rates = [], [gemm_gflops(a)]
    for number in range(a.pairs):
        pairs.append((ours(a, folder, number), theirs(a, folder, number)))
        rates.append(gemm_gflops(a))
        print(f"pair {number + 1} of {a.pairs}: {pairs[-1]}", file=sys.stderr)
    ratios = [o["useful_tokens_per_second"] / t["useful_tokens_per_second"] for o, t in pairs]
    speed = statistics.median(o["useful_tokens_per_second"] for o, _ in pairs)
    gemm, flops = statistics.median(rates), pairs[0][0]["flops_per_token"]
    return {
        "ratio": round(statistics.median(ratios), 2) if quality["passes"] else "void",
        "worst_ratio": round(min(ratios), 2) if quality["passes"] else "void",
        "quality": quality,
        "ours_tokens_per_second": speed,
        "theirs_tokens_per_second": statistics.median(
            t["useful_tokens_per_second"] for _, t in pairs
        ),
        "gemm_gflops": {"median": round(gemm, 1), "best": round(max(rates), 1)},
        "their_useful_share": {
            "here": round(statistics.fmean(t["useful_share"] for _, t in pairs), 4),
            "of_all_batches": round(mean_share(a, folder), 4),
        },
        "mfu": round(speed * flops / gemm / 1e9, 3) if flops else None,
        "pairs": [{"ours": o, "theirs": t} for o, t in pairs],
    }


def main() -> None:
    """Measure and print."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--family", choices=sorted(TOKENIZERS), default="t5")
    p.add_argument("--shape", help="a JSON file in place of the shared peers/FAMILY_mini.json")
    p.add_argument("--batch", type=int, default=16, help="examples an update, on both sides")
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--precision", default="auto", help="ours: auto, float32 or bf16")
    p.add_argument("--baseline-precision", choices=("fp32", "bf16"), default="fp32")
    p.add_argument("--padding", choices=("dynamic", "max", "group"), default="dynamic")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = measure(a, Path(name))
    asked = {k: v for k, v in vars(a).items() if k != "pairs"}
    about = {
        "bench": "train",
        "asked": asked,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {n: version(n) for n in ("torch", "transformers", "toque")},
    }
    print(json.dumps(about | result, indent=1))


if __name__ == "__main__":
    main()
