"""Speed of training on a CPU by the way its threads wait, on a quiet machine and beside programs.

    python bench/robustness/busy_machine.py [--pairs 3] [--steps 12] [--busy 1]

A small GPT-2 trains on cookbook recipes, in turn with threads that sleep while they wait
(OMP_WAIT_POLICY=PASSIVE, ours) and with threads that spin as libgomp does by itself (theirs), each
run in a process of its own; `--busy N` starts N programs that keep a core each meanwhile, and
`--busy 0` is a quiet machine's. The ratio is of tokens a second, the first update left out.
`--spin COUNT` puts GOMP_SPINCOUNT=COUNT in place of PASSIVE: a short spin before sleeping. What
`toque train` does by itself follows from both: it takes PASSIVE where others are busy when it
begins, and leaves the waiting alone where they are not. Quality: the losses are the same, bit for
bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
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
BURN = "while True: pass"


def measure(a: argparse.Namespace) -> harness.Result:
    """Both ways in turn, beside as many busy programs as asked."""
    ours = {"GOMP_SPINCOUNT": str(a.spin)} if a.spin is not None else {"OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory(prefix="busy-") as name:
        work = Path(name)
        (work / "run.yaml").write_text(CONFIG)
        _toque(work, {}, "cookbook", "--n", "600", "--out", "a.jsonl")
        _toque(work, {}, "prepare", "run.yaml")
        burn = [sys.executable, "-c", BURN]
        busy = [subprocess.Popen(burn) for _ in range(a.busy)]  # noqa: S603 - our own program
        try:
            result = harness.paired(
                lambda n: _train(work, f"ours-{n}", ours, a.steps),
                lambda n: _train(work, f"theirs-{n}", SPINNING, a.steps),
                pairs=a.pairs,
                score=harness.by("tokens_per_second"),
                quality=_quality,
            )
        finally:
            for program in busy:
                program.kill()
                program.wait()
    for run in (*result.ours, *result.theirs):
        del run["losses"]
    result.details = {"busy": a.busy, "steps": a.steps, "waiting": [ours, SPINNING]}
    return result


def _train(work: Path, run: str, waiting: dict[str, str], steps: int) -> dict[str, Any]:
    _toque(work, waiting, "train", "run.yaml", f"run_dir={run}", f"train.stop_after={steps} steps")
    lines = (work / run / "metrics.jsonl").read_text().splitlines()
    found = [e for e in map(json.loads, lines) if e["event"] == "step"]
    seconds = sum(e["seconds"] for e in found[1:])
    return {
        "tokens_per_second": round(sum(e["tokens"] for e in found[1:]) / seconds, 1),
        "losses": [e["loss"] for e in found],
    }


def _toque(work: Path, waiting: dict[str, str], *words: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", *SPINNING)}
    environment |= {"HF_HUB_OFFLINE": "1", "TOQUE_CACHE": str(work / "cache"), **waiting}
    subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "toque", *words],
        cwd=work,
        env=environment,
        check=True,
        capture_output=True,
    )


def _quality(ours: list[harness.Run], theirs: list[harness.Run]) -> dict[str, Any]:
    """How threads wait changes no number."""
    same = all(o.value["losses"] == t.value["losses"] for o, t in zip(ours, theirs, strict=True))
    return {"passes": same, "same_losses": same}


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--pairs", type=int, default=3)
    p.add_argument("--steps", type=int, default=12, help="updates of each run")
    p.add_argument("--busy", type=int, default=1, help="programs that keep a core each; 0 for none")
    p.add_argument("--spin", type=int, help="GOMP_SPINCOUNT of ours, in place of PASSIVE")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
