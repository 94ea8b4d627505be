"""A small model's training speed against the plain torch loop that people write for one.

    python bench/speed/small_model.py [--pairs 5] [--steps 60] [--compiled]

Ours is `toque train` on cookbook recipes in the demo's shape (1.1 M parameters, Llama), AdamW,
every speed setting at its default. Theirs is the shared peers/plain_loop.py: the same shape,
precision and tokens an update, one stream of tokens cut into rows, no padding and no masks,
`--compiled` with torch.compile. Each side is a process of its own, in turn; both count useful
tokens a second over all steps but the first `--warmup`, a multiple of 10 (`observe.log_every`).

Quality: `toque check` must find loss and gradient of the packed batch equal to stock transformers'
on each example alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers

from toque.cooking.cookbook.recipes import write_cookbook

RECIPES, ROW = 4000, 512
SHAPE = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 352, "max_position_embeddings": 448,
    "tie_word_embeddings": True,
}  # fmt: skip
VOCABULARY = 2048


def config_for(a: argparse.Namespace, folder: Path) -> Path:
    """The configuration that is timed."""
    config = {
        "run_dir": str(folder / "run"),
        "model": {"family": "llama", "shape": SHAPE, "tokenizer": f"trained:{VOCABULARY}"},
        "data": {
            "sources": [{"path": str(folder / "cookbook.jsonl")}],
            "store": str(folder / "store"),
        },
        "optim": {"peak_lr": 3e-3, "warmup": "0 steps"},
        "train": {
            "batch": f"{a.rows * ROW} tokens",
            "stop_after": f"{a.steps} steps",
            "evaluate_every": "100 %",
            "save_every": "100 %",
            "precision": a.precision,
        },
        "evaluation": {"max_examples": 8, "generate": 0},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def ours(a: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """One `toque train`; steps after the warm-up, from metrics.jsonl."""
    run = folder / f"run-{number}"
    peers.toque(
        "train", folder / "config.yaml", f"run_dir={run}", f"seed={number}", threads=a.threads
    )
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    start = next(e for e in events if e["event"] == "start")
    steps = [e for e in events if e["event"] == "step" and e["step"] > a.warmup]
    seconds, tokens = sum(e["seconds"] for e in steps), sum(e["tokens"] for e in steps)
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "losses": [round(e["loss"], 3) for e in (steps[0], steps[-1])],
        "precision": start["precision"],
        "compile": start["compile"],
    }


def theirs(a: argparse.Namespace, precision: str, number: int) -> dict[str, Any]:
    """One plain_loop.py."""
    words = {
        "vocab": VOCABULARY, "width": SHAPE["hidden_size"], "layers": SHAPE["num_hidden_layers"],
        "heads": SHAPE["num_attention_heads"], "inner": SHAPE["intermediate_size"],
        "rows": a.rows, "row": ROW, "steps": a.steps, "warmup": a.warmup, "threads": a.threads,
        "seed": number, "precision": "bf16" if precision == "bf16" else "fp32",
    }  # fmt: skip
    compiled = ["--compile"] if a.compiled else []
    return peers.last_json(
        peers.peer("plain_loop.py", *peers.flags(words), *compiled, threads=a.threads)
    )


def measure(a: argparse.Namespace) -> harness.Result:
    """All pairs, ours first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_cookbook(folder / "cookbook.jsonl", RECIPES, seed=1)
        config = config_for(a, folder)
        peers.toque("prepare", config, threads=a.threads)
        check = peers.toque("check", config, "--examples=4", threads=a.threads, check=False)
        precision = a.precision

        def our_turn(number: int) -> dict[str, Any]:
            nonlocal precision
            found = ours(a, folder, number)
            precision = found["precision"]
            return found

        result = harness.paired(
            our_turn,
            lambda number: theirs(a, precision, number),
            pairs=a.pairs,
            score=harness.by("tokens_per_second"),
        )
    result.quality["toque check"] = check.stdout.strip().splitlines()[-1:]
    if check.returncode:
        result.void("toque check: packed and stock mathematics differ")
    result.details = {
        f"{side}_tokens_per_second": statistics.median(run["tokens_per_second"] for run in runs)
        for side, runs in (("our", result.ours), ("their", result.theirs))
    }
    return result


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--warmup", type=int, default=10)
    p.add_argument("--rows", type=int, default=2, help=f"of {ROW} tokens an update")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--precision", default="auto", help="of both sides: auto, float32 or bf16")
    p.add_argument("--compiled", action="store_true", help="the plain loop by torch.compile")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
