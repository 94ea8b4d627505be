"""Twenty updates of dpo against TRL's DPOTrainer: the same model, pairs, order and float32.

    python bench/quality/dpo_beside_trl.py --trl PYTHON [--family llama|gpt2] [--model FOLDER]

PYTHON is an interpreter with TRL. Without --model, the model has random weights. Quality: losses
and margins differ by at most 1e-4. The ratio compares the medians of seconds per update.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers
from transformers import AutoTokenizer

from toque.config import load_config
from toque.data.store.token_store import TokenStore
from toque.models.loading.from_scratch import build_model
from toque.units import Cursor
from toque.workflows.build import build_language_model, build_stream

PAIRS, UPDATES = 4, 20  # pairs per update
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "max_position_embeddings": 512},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
}  # fmt: skip
THEIRS = """
import json, sys, time, torch, datasets
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
folder, pairs, out, lr, batch = sys.argv[1:]
rows, starts = json.load(open(pairs)), []
class Ordered(DPOTrainer):
    def _prepare_dataset(self, dataset, *_, **__): return dataset
    def _get_train_sampler(self, *_): return torch.utils.data.SequentialSampler(self.train_dataset)
    def training_step(self, *a, **k):
        starts.append(time.perf_counter())
        return super().training_step(*a, **k)
torch.set_num_threads(2); tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
trainer = Ordered(
    model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    args=DPOConfig(output_dir=out, learning_rate=float(lr), lr_scheduler_type="constant",
        per_device_train_batch_size=int(batch), max_steps=len(rows) // int(batch), logging_steps=1,
        max_grad_norm=1e9, weight_decay=0.0, report_to=[], save_strategy="no", bf16=False,
        use_cpu=True, gradient_checkpointing=False, max_length=None, disable_dropout=True,
        remove_unused_columns=False, disable_tqdm=True, precompute_ref_log_probs=True),
    train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer)
trainer.train(); log = [l for l in trainer.state.log_history if "loss" in l]
print(json.dumps({n: [l[n] for l in log] for n in ("loss", "rewards/margins")}
    | {"seconds": [b - a for a, b in zip(starts, starts[1:])]}))
"""


def measure(a: argparse.Namespace) -> harness.Result:
    """Train on both sides and compare the updates."""
    folder = Path(tempfile.mkdtemp())
    start = Path(a.model).resolve() if a.model else folder / "start"
    if not a.model:
        tokenizer = AutoTokenizer.from_pretrained(peers.tokenizer_folder("gpt2"))
        build_model(
            family=a.family, shape=SHAPES[a.family], vocab_size=len(tokenizer), pad_id=0,
            eos_id=tokenizer.eos_token_id, bos_id=None, seed=1,
        ).save_pretrained(start)  # fmt: skip
        tokenizer.save_pretrained(start)
    rng = random.Random(5)
    words = [f"word{n}" for n in range(20)]
    lengths = {"prompt": (3, 9), "chosen": (5, 40), "rejected": (5, 40)}
    rows = [
        {side: " ".join(rng.choices(words, k=rng.randint(*n))) for side, n in lengths.items()}
        for _ in range(2 * UPDATES * PAIRS)
    ]  # fmt: skip
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sections: dict[str, Any] = {
        "model": {"family": "auto", "start_from": str(start), "tokenizer": "auto"},
        "objective": {"kind": "dpo"},
        "optim": {"peak_lr": a.lr, "schedule": "constant", "warmup": "0 steps",
                  "weight_decay": 0.0, "max_grad_norm": 1e9},
        "train": {"stop_after": f"{UPDATES} steps", "batch": f"{PAIRS} examples",
                  "precision": "float32"},
        "evaluation": {"generate": 0}, "observe": {"log_every": "1 steps"},
    }  # fmt: skip
    path = peers.write_config(folder, "gpt2", folder / "pairs.jsonl", **sections)
    peers.toque("prepare", path, threads=2)
    (folder / "pairs.json").write_text(json.dumps(_pairs_in_order(path, UPDATES)))
    peers.toque("train", path, threads=2)
    events = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    steps = [event for event in events if event["event"] == "step"]
    names = ("loss", "rewards/margins", "seconds")
    ours = {name: [step[name] for step in steps] for name in names}
    arguments = [start, folder / "pairs.json", folder / "out", a.lr, PAIRS]
    done = subprocess.run(  # noqa: S603 - the script above
        [a.trl, "-c", THEIRS, *map(str, arguments)], capture_output=True, text=True, check=True
    )  # fmt: skip
    theirs = peers.last_json(done.stdout)
    gaps = [
        abs(x - y) for n in names[:2] for x, y in zip(ours[n], theirs[n], strict=True)
    ]
    speeds = [statistics.median(side["seconds"][2:]) for side in (theirs, ours)]
    return harness.Result(
        ours=ours, theirs=theirs, ratio={"median": round(speeds[0] / speeds[1], 3)},
        quality={"passes": max(gaps) <= 1e-4, "largest gap": max(gaps)},
    )  # fmt: skip


def _pairs_in_order(path: Path, updates: int) -> list[dict[str, list[int]]]:
    """List the token ids of the pairs of all updates in training order."""
    config = load_config(path).config
    store = TokenStore.open(config.data.store)
    stream = build_stream(config, store, build_language_model(config, store))
    update = stream.plan_update(Cursor())
    rows = [*update.rows]
    for _ in range(updates - 1):
        update = stream.plan_update(update.cursor)
        rows += update.rows
    return [
        {"prompt_ids": store.prompt(row).tolist(), "chosen_ids": store.target(row).tolist(),
         "rejected_ids": store.target(row + 1).tolist()} for row in chain.from_iterable(rows)
    ]  # fmt: skip


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--family", choices=list(SHAPES), default="llama")
    p.add_argument("--model", help="folder of a start model, instead of random weights")
    p.add_argument("--trl", default=sys.executable, help="interpreter with TRL")
    p.add_argument("--lr", type=float, default=1e-3)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
