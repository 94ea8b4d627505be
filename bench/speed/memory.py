"""Peak memory of training steps against transformers.Trainer, on the same examples.

    python bench/speed/memory.py [--pairs 3] [--rows 2] [--precision fp32]

Both sides train the t5_mini shape with the T5 vocabulary of 32,100 for three updates over the same
16 recipes. The other side is the shared peers/hf_train.py. Each measurement runs in its own
process, in turn. "peak" is the maximum resident size. "step" is "peak" minus the resident size
after the imports. The ratio is theirs / ours of "peak", so higher is better. `share_of_theirs` is
ours / theirs. Quality: the first losses must agree within 1e-2 nats in bf16 and 1e-4 in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers

BATCH, STEPS = 16, 3
LOSS_TOLERANCES = {"bf16": 1e-2, "fp32": 1e-4}


def resident_peak() -> int:
    """Return the maximum resident size of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def theirs(examples: Path, *, precision: str) -> dict[str, Any]:
    """Run hf_train.py in this process."""
    import transformers
    from transformers import (  # noqa: F401 - the imports of the script
        AutoModelForSeq2SeqLM,
        DataCollatorForSeq2Seq,
        T5Config,
        Trainer,
    )

    del transformers
    imported = resident_peak()
    script = peers.shared("peers/hf_train.py")
    words = peers.flags(
        {
            "family": "t5",
            "examples": examples,
            "tokenizer": peers.tokenizer_folder("t5"),
            "shape": peers.mini_shape("t5"),
            "batch_size": BATCH,
            "steps": STEPS,
            "warmup": 1,
            "precision": precision,
            "threads": os.environ.get("OMP_NUM_THREADS", "2"),
        }
    )
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")
    return {"imported": imported, "peak": resident_peak()}


def ours(examples: Path, *, rows: int, precision: str) -> dict[str, Any]:
    """Run the same updates by Toque in this process."""
    import numpy as np
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config
    from updates import update

    from toque.data.loader.collate import encoder_decoder_batch
    from toque.data.loader.packing import choose_shape, pack
    from toque.models.forward.cpu_layers import use_cpu_layers
    from toque.models.loading.from_scratch import fuse_activations
    from toque.training.optim.factory import build_optimizer
    from toque.training.runtime import Runtime

    imported = resident_peak()
    torch.manual_seed(0)  # the seed of hf_train.py, for the same initial weights
    tokenizer = AutoTokenizer.from_pretrained(peers.tokenizer_folder("t5"))
    shape = json.loads(peers.mini_shape("t5").read_text())
    config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **shape)
    model = AutoModelForSeq2SeqLM.from_config(config)
    fuse_activations(model)
    pairs = Pairs(examples, tokenizer)
    runtime = Runtime.detect(
        device="cpu", precision="bf16" if precision == "bf16" else "float32"
    )
    use_cpu_layers(model)
    optimizer = build_optimizer(model)
    lengths = np.array([[len(p), len(t)] for p, t in pairs.ids])
    row = choose_shape(lengths[:, 0], lengths[:, 1], encoder=True)
    placements = [tuple(line) for line in pack(lengths[:, 0], lengths[:, 1], row)]
    batch = encoder_decoder_batch(pairs, placements, shape=row, pad_id=0, start_id=0)
    losses = [
        update(model, batch, runtime, optimizer, lr=1e-4, rows=rows)
        for _ in range(STEPS)
    ]
    return {
        "imported": imported,
        "peak": resident_peak(),
        "losses": losses,
        "row": vars(row),
    }


class Pairs:
    """Examples, tokenised as in hf_train.py."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        import numpy as np

        self.ids = []
        for line in path.read_text(encoding="utf-8").splitlines():
            pair = json.loads(line)
            prompt = tokenizer(pair["prompt"], truncation=True, max_length=256)[
                "input_ids"
            ]
            target = tokenizer(
                pair["target"],
                truncation=True,
                max_length=511,
                add_special_tokens=False,
            )["input_ids"]
            target = [*target, tokenizer.eos_token_id]
            self.ids.append((np.array(prompt), np.array(target)))

    def prompt(self, row: int) -> Any:
        """Return the prompt ids of an example."""
        return self.ids[row][0]

    def target(self, row: int) -> Any:
        """Return the target ids of an example."""
        return self.ids[row][1]


def measured(a: argparse.Namespace, side: str, examples: Path) -> dict[str, Any]:
    """Run one side in a child process. Merge its JSON lines."""
    arguments = {"side": side, "examples": examples, "rows": a.rows}
    printed = peers.run(
        [__file__, *peers.flags(arguments | {"precision": a.precision})]
    ).stdout
    merged: dict[str, Any] = {}
    for line in printed.splitlines():
        try:
            merged |= json.loads(line)
        except ValueError:
            continue  # the Trainer prints its log in Python syntax
    return merged | {"step": merged.get("peak", 0) - merged.get("imported", 0)}


def compared(a: argparse.Namespace, folder: Path) -> harness.Result:
    """Run the pairs and compare the sizes."""
    examples = peers.write_pairs(folder / "pairs.jsonl", BATCH)

    def quality(ours: list[harness.Run], theirs: list[harness.Run]) -> dict[str, Any]:
        losses = [run.value["losses"][0] for run in (ours[0], theirs[0])]
        same = abs(losses[0] - losses[1]) <= LOSS_TOLERANCES[a.precision]
        return {"passes": same, "first_losses": losses}

    result = harness.paired(
        lambda _: measured(a, "ours", examples),
        lambda _: measured(a, "theirs", examples),
        pairs=a.pairs,
        score=lambda run: 1 / run.value["peak"],
        quality=quality,
    )
    sizes = {
        name: [
            statistics.median(run[name] for run in side)
            for side in (result.ours, result.theirs)
        ]
        for name in ("peak", "step")
    }
    result.details = {
        "ratio_of_step": result.ratio_by(lambda run: 1 / run.value["step"]),
        "mebibytes": {
            name: [round(size / 2**20) for size in two] for name, two in sizes.items()
        },
        "share_of_theirs": {
            name: round(ours / theirs, 3) for name, (ours, theirs) in sizes.items()
        },
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count(),
    }
    return result


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """Run the comparison. With --side, run one measured process."""
    if a.side == "ours":
        return ours(a.examples, rows=a.rows, precision=a.precision)
    if a.side == "theirs":
        return theirs(a.examples, precision=a.precision)
    with tempfile.TemporaryDirectory() as folder:
        return compared(a, Path(folder))


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--pairs", type=int, default=1, help="measurements per side")
    p.add_argument(
        "--rows", type=int, default=2, help="packed rows per micro-batch of Toque"
    )
    p.add_argument("--precision", choices=sorted(LOSS_TOLERANCES), default="bf16")
    p.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    p.add_argument("--examples", type=Path, help=argparse.SUPPRESS)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
