"""Peak memory of training steps against transformers.Trainer's, on the same examples; prints JSON.

    python bench/memory.py [--pairs 3] [--rows 2] [--precision fp32]

Model: the t5_mini shape at T5's vocabulary of 32,100; updates of 16 recipes, in bf16 or float32 on
both sides, as in `peers/hf_train.py`, whose step is the other side. Every measurement is a process
of its own, ours and theirs in turn. "peak" is the process' largest resident size, "step" the same
less what it was when the libraries had been imported. Quality: the loss of the first update over
the same 16 examples, from the same initial weights, must agree within 1e-2 nats in bf16 and 1e-4 in
float32, or the ratio is void.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHARED = Path(os.environ.get("TOQUE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
BATCH, STEPS = 16, 3
LOSS_TOLERANCES = {"bf16": 1e-2, "fp32": 1e-4}
RECIPES = "allrecipes_epicurious_as_is.jsonl.gz"


def resident_peak() -> int:
    """Largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def theirs(examples: Path, *, steps: int, precision: str) -> dict[str, Any]:
    """Run hf_train.py in this process."""
    import transformers
    from transformers import (  # noqa: F401  # loads what the script would load
        AutoModelForSeq2SeqLM,
        DataCollatorForSeq2Seq,
        T5Config,
        Trainer,
    )

    del transformers
    imported = resident_peak()
    script = SHARED / "peers" / "hf_train.py"
    flags = {
        "--family": "t5",
        "--examples": examples,
        "--tokenizer": SHARED / "tokenizers" / "t5",
        "--shape": SHARED / "peers" / "t5_mini.json",
        "--batch-size": BATCH,
        "--steps": steps,
        "--warmup": 1,
        "--precision": precision,
        "--threads": os.environ.get("OMP_NUM_THREADS", "2"),
    }
    sys.argv = [str(script), *(str(word) for flag in flags.items() for word in flag)]
    if steps == 1:  # the script's clock starts after the warmup
        sys.argv[sys.argv.index("--warmup") + 1] = "0"
        _losses_of_one_step()
    runpy.run_path(str(script), run_name="__main__")
    return {"imported": imported, "peak": resident_peak()}


def _losses_of_one_step() -> None:
    """One step has no timed part; the loss is read from the trainer's own log instead."""
    from transformers import TrainerCallback, trainer

    class Tell(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                print(json.dumps({"losses": [logs["loss"]]}), flush=True)
                os._exit(0)

    trainer.DEFAULT_CALLBACKS.append(Tell)


def ours(examples: Path, *, steps: int, rows: int, precision: str) -> dict[str, Any]:
    """The same updates through our loss, runtime and optimizer."""
    import numpy as np
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config

    from toque.data.loader.collate import encoder_decoder_batch
    from toque.data.loader.packing import choose_shape, pack
    from toque.models.forward.loss import loss_sum
    from toque.models.loading.fused_activations import fuse_activations
    from toque.training.optim.factory import build_optimizer
    from toque.training.runtime import Runtime

    imported = resident_peak()
    torch.manual_seed(0)  # as the script does, so that both begin with the same weights
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "t5")
    shape = json.loads((SHARED / "peers" / "t5_mini.json").read_text())
    config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **shape)
    model = AutoModelForSeq2SeqLM.from_config(config)
    fuse_activations(model)
    pairs = Pairs(examples, tokenizer)
    runtime = Runtime.detect(device="cpu", precision="bf16" if precision == "bf16" else "float32")
    optimizer = build_optimizer(model)
    lengths = np.array([[len(p), len(t)] for p, t in pairs.ids])
    row = choose_shape(lengths[:, 0], lengths[:, 1], encoder=True)
    losses = []
    for step in range(steps):
        chosen = np.arange(step * BATCH, (step + 1) * BATCH)
        packed = pack(lengths[chosen, 0], lengths[chosen, 1], row)
        where = [tuple(int(chosen[i]) for i in line) for line in packed]
        batch = encoder_decoder_batch(pairs, where, shape=row, pad_id=0, start_id=0)
        total = torch.zeros(())
        for micro in batch.split(rows):
            with runtime.autocast():
                loss = loss_sum(model, micro)
            runtime.backward(loss / batch.n_targets)
            total += loss.detach()
        losses.append(float(total) / batch.n_targets)
        runtime.update(optimizer, lr=1e-4, max_grad_norm=1.0, loss=total)
    return {"imported": imported, "peak": resident_peak(), "losses": losses, "row": vars(row)}


class Pairs:
    """Examples tokenised as hf_train.py does it."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        import numpy as np

        self.ids = []
        for line in path.read_text(encoding="utf-8").splitlines():
            pair = json.loads(line)
            prompt = tokenizer(pair["prompt"], truncation=True, max_length=256)["input_ids"]
            target = tokenizer(
                pair["target"], truncation=True, max_length=511, add_special_tokens=False
            )["input_ids"]
            target = [*target, tokenizer.eos_token_id]
            self.ids.append((np.array(prompt), np.array(target)))

    def prompt(self, row: int) -> Any:
        """Prompt ids of an example."""
        return self.ids[row][0]

    def target(self, row: int) -> Any:
        """Target ids of an example."""
        return self.ids[row][1]


def measured(side: str, examples: Path, *, steps: int, rows: int, precision: str) -> dict[str, Any]:
    """One process; its last JSON line, with the lines before it merged in."""
    # glibc gives each of a few large blocks its own mapping, so freed memory leaves the process.
    words = [sys.executable, __file__, "--side", side, "--examples", str(examples)]
    words += ["--steps", str(steps), "--rows", str(rows), "--precision", precision]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"{side} failed:\n{done.stderr[-2000:]}")
    merged: dict[str, Any] = {}
    for line in lines:
        try:
            merged |= json.loads(line)
        except ValueError:
            continue  # the trainer prints its log as Python, not JSON
    return merged


def compare(folder: Path, *, pairs: int, rows: int, precision: str) -> dict[str, Any]:
    """Quality once, then `pairs` of measurements in turn."""
    examples = folder / "pairs.jsonl"
    maker = [SHARED / "peers" / "make_pairs.py", SHARED / "data" / "recipes" / RECIPES]
    words = [sys.executable, *map(str, maker), str(BATCH * STEPS)]
    with examples.open("w", encoding="utf-8") as file:
        subprocess.run(words, stdout=file, check=True)  # noqa: S603
    how = {"rows": rows, "precision": precision}
    first = {side: measured(side, examples, steps=1, **how) for side in ("theirs", "ours")}
    losses = {side: float(result["losses"][0]) for side, result in first.items()}
    same = abs(losses["ours"] - losses["theirs"]) <= LOSS_TOLERANCES[precision]
    runs: list[dict[str, dict[str, Any]]] = [
        {s: measured(s, examples, steps=STEPS, **how) for s in ("ours", "theirs")}
        for _ in range(pairs)
    ]
    result: dict[str, Any] = {"first_loss": losses, "quality": "passed" if same else "failed"}
    for name, base in (("peak", 0), ("step", 1)):
        sizes = {
            side: [run[side]["peak"] - base * run[side]["imported"] for run in runs]
            for side in ("ours", "theirs")
        }
        ratios = [a / b for a, b in zip(sizes["ours"], sizes["theirs"], strict=True)]
        result[name] = {
            **{f"{side}_mib": round(statistics.median(v) / 2**20) for side, v in sizes.items()},
            "ratio": round(statistics.median(ratios), 3) if same else "void",
            "worst_ratio": round(max(ratios), 3) if same else "void",
        }
    result["row"] = runs[0]["ours"]["row"]
    return result


def main() -> None:
    """Measure; with --side, be one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3, help="measurements of each side")
    parser.add_argument("--rows", type=int, default=2, help="our packed rows at once")
    parser.add_argument("--precision", choices=sorted(LOSS_TOLERANCES), default="bf16")
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--examples", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side == "ours":
        how = {"rows": args.rows, "precision": args.precision}
        print(json.dumps(ours(args.examples, steps=args.steps, **how)))
        return
    if args.side == "theirs":
        print(json.dumps(theirs(args.examples, steps=args.steps, precision=args.precision)))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = compare(Path(folder), pairs=args.pairs, rows=args.rows, precision=args.precision)
    versions = {n: importlib.metadata.version(n) for n in ("toque", "torch", "transformers")}
    about = {
        "command": f"python bench/memory.py --pairs {args.pairs} --rows {args.rows} "
        f"--precision {args.precision}",
        "versions": versions | {"python": platform.python_version()},
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count()},
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count(),
    }
    json.dump(about | result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
