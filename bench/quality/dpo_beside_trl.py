"""Twenty updates of dpo against TRL's DPOTrainer, or against plain transformers for a T5.

    python bench/quality/dpo_beside_trl.py --model FOLDER --trl PYTHON
    python bench/quality/dpo_beside_trl.py --family llama --trl PYTHON

Both sides start from the same folder and see the same pairs in the same order, in float32 and
without dropout: AdamW with a constant learning rate, no weight decay and no clipping. PYTHON is an
interpreter with TRL, which may also be the one of a T5. Without --model, the model has random
weights and the shared tokenizer of its family. Quality: the losses and margins of all updates
differ by at most `--floor`. The ratio compares seconds per update, without the first two.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
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

PAIRS_PER_UPDATE = 4
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "max_position_embeddings": 512},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
           "dropout_rate": 0.0},
}  # fmt: skip
WORDS = [
    "salt",
    "pepper",
    "onion",
    "garlic",
    "butter",
    "flour",
    "sugar",
    "egg",
    "milk",
    "stir",
    "bake",
]

TRL_SIDE = '''
import json, sys, time
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

torch.set_num_threads(2)
folder, pairs, out, lr, beta, batch = sys.argv[1:]
rows = json.load(open(pairs))


class Ordered(DPOTrainer):
    """Keeps the given ids and their order."""

    def _prepare_dataset(self, dataset, *_, **__):
        return dataset

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *a, **k):
        started = time.perf_counter()
        loss = super().training_step(*a, **k)
        seconds.append(started)
        return loss


seconds = []
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
trainer = Ordered(
    model=model,
    args=DPOConfig(
        output_dir=out, beta=float(beta), learning_rate=float(lr), lr_scheduler_type="constant",
        per_device_train_batch_size=int(batch), max_steps=len(rows) // int(batch), logging_steps=1,
        max_grad_norm=1e9, weight_decay=0.0, report_to=[], save_strategy="no", bf16=False,
        use_cpu=True, gradient_checkpointing=False, max_length=None, disable_dropout=True,
        remove_unused_columns=False, disable_tqdm=True, precompute_ref_log_probs=True,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
)
trainer.train()
steps = [l for l in trainer.state.log_history if "loss" in l]
taken = [b - a for a, b in zip(seconds, seconds[1:])]
print(json.dumps({
    "losses": [s["loss"] for s in steps],
    "margins": [s["rewards/margins"] for s in steps],
    "seconds": taken,
}))
'''

T5_SIDE = """
import copy, json, sys, time
import torch
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM

torch.set_num_threads(2)
folder, pairs, out, lr, beta, batch = sys.argv[1:]
rows, beta, batch = json.load(open(pairs)), float(beta), int(batch)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
reference = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=float(lr), weight_decay=0.0)


def logp(model, prompt, answer):
    labels = torch.tensor([answer])
    logits = model(input_ids=torch.tensor([prompt]), labels=labels).logits
    return -F.cross_entropy(logits[0], labels[0], reduction="sum")


found = {"losses": [], "margins": [], "seconds": []}
for at in range(0, len(rows), batch):
    started = time.perf_counter()
    margins = []
    for row in rows[at : at + batch]:
        ratios = {
            side: logp(model, row["prompt_ids"], row[side])
            - logp(reference, row["prompt_ids"], row[side])
            for side in ("chosen_ids", "rejected_ids")
        }
        margins.append(beta * (ratios["chosen_ids"] - ratios["rejected_ids"]))
    margin = torch.stack(margins)
    loss = -F.logsigmoid(margin).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    found["losses"].append(loss.item())
    found["margins"].append(margin.mean().item())
    found["seconds"].append(time.perf_counter() - started)
print(json.dumps(found))
"""


def write_pairs(path: Path, n: int) -> None:
    """Write random pairs of different lengths."""
    rng = random.Random(5)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))

    with path.open("w") as file:
        for i in range(n):
            row = {
                "prompt": f"{text(3, 9)} {i}",
                "chosen": text(5, 40),
                "rejected": text(5, 40),
            }
            file.write(json.dumps(row) + "\n")


def start_model(a: argparse.Namespace, folder: Path) -> Path:
    """Return the folder of the start model, made with random weights if there is none."""
    if a.model is not None:
        return Path(a.model).resolve()
    path = folder / "start"
    tokenizer = AutoTokenizer.from_pretrained(
        peers.tokenizer_folder("gpt2" if a.family == "llama" else a.family)
    )
    end = tokenizer.eos_token_id
    model = build_model(
        family=a.family, shape=SHAPES[a.family], vocab_size=len(tokenizer), pad_id=0, eos_id=end,
        bos_id=None, seed=1,
    )  # fmt: skip
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def measure(a: argparse.Namespace) -> harness.Result:
    """Train on both sides, and compare the updates."""
    folder = Path(tempfile.mkdtemp())
    start = start_model(a, folder)
    write_pairs(folder / "pairs.jsonl", 2 * a.updates * PAIRS_PER_UPDATE)
    config = {
        "run_dir": str(folder / "run"),
        "model": {"family": "auto", "start_from": str(start)},
        "objective": {"kind": "dpo", "beta": a.beta},
        "data": {
            "sources": [{"path": str(folder / "pairs.jsonl")}],
            "store": str(folder / "store"),
        },
        "optim": {
            "peak_lr": a.lr, "schedule": "constant", "warmup": "0 steps", "weight_decay": 0.0,
            "max_grad_norm": 1e9,
        },
        "train": {
            "stop_after": f"{a.updates} steps", "batch": f"{PAIRS_PER_UPDATE} examples",
            "precision": "float32", "evaluate_every": None, "save_every": None,
        },
        "evaluation": {"generate": 0},
        "observe": {"log_every": "1 steps"},
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    peers.toque("prepare", path, threads=2)
    pairs = _pairs_in_order(path, a.updates)
    (folder / "pairs.json").write_text(json.dumps(pairs))

    peers.toque("train", path, threads=2)
    events = [
        json.loads(line)
        for line in (folder / "run/metrics.jsonl").read_text().splitlines()
    ]
    steps = [event for event in events if event["event"] == "step"]
    ours = {
        "losses": [step["loss"] for step in steps],
        "margins": [step["rewards/margins"] for step in steps],
        "seconds": [step["seconds"] for step in steps],
    }
    side = T5_SIDE if a.family == "t5" else TRL_SIDE
    words = [
        a.trl, "-c", side, start, folder / "pairs.json", folder / "out", a.lr, a.beta,
        PAIRS_PER_UPDATE,
    ]  # fmt: skip
    done = subprocess.run(  # noqa: S603 - the script above
        list(map(str, words)), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise harness.Skipped(f"the other side failed: {done.stderr[-2000:]}")
    theirs = peers.last_json(done.stdout)

    gaps = {
        name: max(abs(x - y) for x, y in zip(ours[name], theirs[name], strict=True))
        for name in ("losses", "margins")
    }
    speeds = [statistics.median(s["seconds"][2:]) for s in (theirs, ours)]
    return harness.Result(
        ours=ours,
        theirs=theirs,
        ratio={"median": round(speeds[0] / speeds[1], 3)},
        quality={"passes": max(gaps.values()) <= a.floor, "largest gaps": gaps},
        details={"arguments": {name: str(value) for name, value in vars(a).items()}},
    )


def _pairs_in_order(path: Path, updates: int) -> list[dict[str, list[int]]]:
    """List the token ids of the pairs of all updates, in the order of training."""
    config = load_config(path).config
    store = TokenStore.open(config.data.store)
    stream = build_stream(config, store, build_language_model(config, store))
    pairs = []
    cursor = Cursor()
    for _ in range(updates):
        update = stream.plan_update(cursor)
        cursor = update.cursor
        for row in update.rows:
            pairs += [
                {
                    "prompt_ids": store.prompt(chosen).tolist(),
                    "chosen_ids": store.target(chosen).tolist(),
                    "rejected_ids": store.target(chosen + 1).tolist(),
                }
                for chosen in row
            ]
    return pairs


def options(p: argparse.ArgumentParser) -> None:
    """Add the flags."""
    p.add_argument("--family", choices=list(SHAPES), default="llama")
    p.add_argument("--model", help="folder of a start model, instead of random weights")
    p.add_argument("--trl", default=sys.executable, help="interpreter with TRL")
    p.add_argument("--updates", type=int, default=20)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--beta", type=float, default=0.1)
    p.add_argument("--floor", type=float, default=1e-4)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
