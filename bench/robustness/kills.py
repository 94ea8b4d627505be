"""Training runs killed by SIGKILL at random moments, compared with an undisturbed run.

    python bench/robustness/kills.py [--kills 200] [--seed 1] [--steps 80] [--upload]
                                     [--trainer toque|transformers] [--objective sft|dpo|grpo]

A tiny T5 with dropout, augmentation and background saves trains in a process forked from this one,
which has imported torch and transformers. A restart therefore costs tenths of a second. Each
session is killed at a random moment between the start and the end of an undisturbed run. A finished
run is compared, and the next run starts. The script compares SHA-256 hashes of the last weights,
the optimizer and the finished model, and every loss. With --upload the checkpoints go to an S3
emulator, and every tenth kill also deletes the run folder, so the run continues from the bucket.
With --trainer transformers the script kills transformers.Trainer. With another objective, the run
starts from a short run's model, without augmentation. Quality fails if Toque differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers
import yaml

from toque.storage.atomic import sha256_of
from toque.workflows.diagnosis.kills import Kills, kill_and_continue
from toque.workflows.diagnosis.run_facts import facts_of
from toque.workflows.diagnosis.training_session import Session

SAVE_EVERY = 3
OBJECTIVES = {
    "dpo": "{kind: dpo, sft_weight: 0.5}",
    "grpo": "{kind: grpo, rewards: {'kills:variety': 1.0}, samples: 2, kl: 0.1}",
}
SHAPE = (
    "{d_model: 48, d_kv: 12, d_ff: 96, num_layers: 2, num_heads: 4, dropout_rate: 0.1}"
)


def measure(a: argparse.Namespace) -> harness.Result:
    """Run the undisturbed and the killed runs and compare them."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        work = Path(name)
        os.environ["TOQUE_CACHE"] = str(work / "cache")
        _prepare(work, a)
        with peers.s3_emulator() if a.upload else contextlib.nullcontext():
            return _trial(work, a)


def _prepare(work: Path, a: argparse.Namespace) -> None:
    from toque.cooking.cookbook.recipes import write_cookbook

    write_cookbook(work / "a.jsonl", n=240, seed=3)
    (work / "run.yaml").write_text(
        f"""
run_dir: {work}/run
seed: 5
model: {{family: t5, tokenizer: "trained:600", shape: {SHAPE}}}
data: {{sources: [{{path: "{work}/a.jsonl"}}], store: "{work}/store", max_prompt_tokens: 64,
  max_target_tokens: 128}}
optim: {{peak_lr: 1e-3, warmup: "5 steps", label_smoothing: 0.1}}
augmentation: {{prompt_formats: true, instructions: 0.5, paraphrase: 0.5, substitute: 0.3,
  tips: 0.3}}
train: {{stop_after: "{a.steps} steps", batch: "512 tokens", micro_batch_rows: 2,
  precision: float32, compile: false, gradient_checkpointing: false,
  save_every: "{SAVE_EVERY} steps", evaluate_every: "20 steps", keep_last: 2}}
evaluation: {{max_examples: 4, generate: 0}}
observe: {{log_every: "1 step"}}
"""
    )
    peers.toque("prepare", work / "run.yaml")
    if a.objective != "sft":
        _prepare_objective(work, a.objective)


def _prepare_objective(work: Path, kind: str) -> None:
    """Train a start model, and change the configuration to one that learns from it."""
    base = (work / "run.yaml", "train.stop_after=20 steps", f"run_dir={work}/base")
    peers.toque("train", *base)
    config = yaml.safe_load((work / "run.yaml").read_text())
    config |= {
        "model": {"family": "auto", "start_from": f"{work}/base/model"},
        "objective": yaml.safe_load(OBJECTIVES[kind]),
        "augmentation": None,
    }
    del config["optim"]["label_smoothing"]
    if kind == "grpo":
        config["train"]["batch"] = "2 examples"
    else:
        _write_pairs(work)
        pairs = [{"path": f"{work}/pairs.jsonl"}]
        config["data"] |= {"sources": pairs, "store": f"{work}/pairs"}
    (work / "run.yaml").write_text(yaml.safe_dump(config))
    peers.toque("prepare", work / "run.yaml")


def _write_pairs(work: Path) -> None:
    """Write pairs of the directions of two recipes."""
    recipes = map(json.loads, (work / "a.jsonl").read_text().splitlines())
    rows = [(r["title"], " ".join(r["directions"])[:200]) for r in recipes]
    pairs = [
        json.dumps({"prompt": title, "chosen": chosen, "rejected": rejected})
        for (title, chosen), (_, rejected) in itertools.pairwise(rows)
    ]
    (work / "pairs.jsonl").write_text("\n".join(pairs))


def variety(_prompts: object, texts: list[str], _references: object) -> list[int]:
    """Compute the reward of grpo: the number of different characters of each text."""
    return [len(set(text)) for text in texts]


def _trial(work: Path, a: argparse.Namespace) -> harness.Result:
    importlib.import_module("toque.workflows.training_child")
    is_toque = a.trainer == "toque"
    session, facts = (
        (_toque, facts_of) if is_toque else (_transformers, _facts_of_transformers)
    )
    began = time.perf_counter()

    def wipe(run: Path, kills: int) -> None:
        print(f"{kills} kills", file=sys.stderr)
        if a.upload and kills % 10 == 0:
            shutil.rmtree(run, ignore_errors=True)

    undisturbed = work / "undisturbed"
    first = session(undisturbed, work, a, upload=False)
    if first.wait() != 0:
        raise SystemExit(first.read_log()[-3000:])
    undisturbed_seconds = time.perf_counter() - began
    outcome = kill_and_continue(
        lambda run: session(run, work, a, upload=a.upload),
        lambda n: work / f"killed-{n}",
        facts(undisturbed), kills=a.kills, span=undisturbed_seconds,
        chance=random.Random(a.seed), facts=facts, after_kill=wipe,
    )  # fmt: skip
    exact = not outcome.problems and len(outcome.moments) == a.kills
    return harness.Result(
        ours={
            "kills": len(outcome.moments),
            "folders_deleted": len(outcome.moments) // 10 if a.upload else 0,
            "finished_runs_compared": outcome.finished,
            **(_moments(outcome, a.steps) if is_toque else {}),
        },
        # The quality check does not apply to transformers.Trainer.
        quality={
            "passes": exact or not is_toque,
            "exact": exact,
            "wrong": dict(Counter(outcome.problems)),
        },
        details={
            "save_every_steps": SAVE_EVERY,
            "compared": sorted(facts(undisturbed)),
            "undisturbed_seconds": round(undisturbed_seconds, 1),
            "total_seconds": round(time.perf_counter() - began, 1),
        },
    )


def _moments(outcome: Kills, steps: int) -> dict[str, object]:
    """Count the kills per activity and per tenth of a run."""
    tenths = [min(9, 10 * step // steps) for _, step in outcome.moments]
    return {
        "killed_while": dict(Counter(doing for doing, _ in outcome.moments)),
        "kills_in_each_tenth_of_the_steps": [tenths.count(n) for n in range(10)],
    }


def _toque(run: Path, work: Path, _a: argparse.Namespace, *, upload: bool) -> Session:
    def body() -> int:
        from toque.cli import main as toque

        words = [f"run_dir={run}"]
        words += [f"checkpoint.upload={peers.BUCKET}/{run.name}"] if upload else []
        return toque(["train", str(work / "run.yaml"), *words])

    return Session(body, work / "log.txt")


def _transformers(
    run: Path, work: Path, a: argparse.Namespace, *, upload: bool
) -> Session:
    del upload  # the Trainer does not upload

    def body() -> int:
        import torch
        from transformers import (
            T5Config,
            T5ForConditionalGeneration,
            Trainer,
            TrainingArguments,
        )
        from transformers.trainer_utils import get_last_checkpoint

        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(3)
        rows = torch.randint(3, 600, (240, 48), generator=generator)
        data = [{"input_ids": row[:24], "labels": row[24:]} for row in rows]
        model = T5ForConditionalGeneration(
            T5Config(vocab_size=600, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4,
                     decoder_start_token_id=0)
        )  # fmt: skip
        arguments = TrainingArguments(
            output_dir=str(run), max_steps=a.steps, save_steps=SAVE_EVERY,
            save_total_limit=2, logging_steps=1, per_device_train_batch_size=2, seed=5,
            report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=1e-3,
        )  # fmt: skip
        last = get_last_checkpoint(str(run)) if run.exists() else None
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=last)
        trainer.save_model(str(run))
        return 0

    return Session(body, work / "log.txt")


def _facts_of_transformers(run: Path) -> dict[str, object]:
    """Return the facts of the newest checkpoint of transformers.Trainer."""
    checkpoints = run.glob("checkpoint-*")
    folders = sorted(checkpoints, key=lambda f: int(f.name.rpartition("-")[2]))
    if not folders:
        return {}
    places = {"weights": folders[-1], "model": run}
    files = {n: place / "model.safetensors" for n, place in places.items()}
    hashes = {n: sha256_of(path) for n, path in files.items() if path.exists()}
    state = json.loads((folders[-1] / "trainer_state.json").read_text())
    losses = {e["step"]: e["loss"] for e in state["log_history"] if "loss" in e}
    return {**hashes, "losses": losses}


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--kills", type=int, default=200)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--steps", type=int, default=80, help="updates per run")
    p.add_argument("--upload", action="store_true")
    p.add_argument("--objective", choices=("sft", *OBJECTIVES), default="sft")
    p.add_argument("--trainer", choices=("toque", "transformers"), default="toque")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
