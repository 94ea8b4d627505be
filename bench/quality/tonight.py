"""Tonight: what `toque init --for TIME` chooses, beside other choices at equal minutes of training.

    python bench/quality/tonight.py --data "two magazines and a site" --minutes 15 \
        --sides dial before --work FOLDER --out lab/tonight/long.jsonl

Sides: `dial` is the configuration that init writes; `before` the one that it wrote until November
2026 (6 M parameters, or 1 M for a small collection, AdamW at 1e-3 or 3e-3 with a cosine); `hand`
are hand-made variations of size, rate and optimizer. With a base, all sides continue from it (the
folder $SMOLLM2, or one of the shared models), and the variations are of adapter, rate and batch.
`trainer` is transformers.Trainer with the dial's shape, tokens and minutes, its usual settings and
three rates; the dial's own run is made before.
Every side trains on a store that is prepared beforehand, for so many minutes of the clock,
evaluations not counted, or for as many passes as the dial allows where texts are few; its model is
then scored over so many held-out prompts, a part of a collection by recipes beside it. A line
of the result is one run. Runs that the file holds are not made again, and one that was killed
continues. Nothing may compute beside it, but with --tokens, which is for nights that no session
lasts: a run then ends after the tokens that init foresees for those minutes, for the loss goes by
tokens, and the hours that it took beside other work say nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import peers
import torch
import trainer_for_minutes
from short_runs import BASES, COLLECTIONS, base_folder, held_out_of, of_run, source_of

import toque
from toque.config import load_config
from toque.data.store.token_store import TokenStore
from toque.models.loading.provenance import RECIPE_RUN_TOKENS
from toque.models.onednn import has_fast_bf16
from toque.workflows.first_config.dial import SIZES, VOCABULARY

ADAMW = {"name": "adamw", "schedule": "cosine"}
MUON = {"name": "muon", "schedule": "linear"}
BEFORE = {
    True: ("1m", ADAMW | {"peak_lr": 3e-3}, 2048, 2048),
    False: ("6m", ADAMW | {"peak_lr": 1e-3}, 4096, 4096),
}
"""Size, optimizer, batch and vocabulary of init before, by whether the collection is small."""
HAND = {
    "300k muon 2e-2": ("300k", MUON | {"peak_lr": 2e-2}, 2048),
    "300k muon 5e-3": ("300k", MUON | {"peak_lr": 5e-3}, 2048),
    "1m muon 1e-2": ("1m", MUON | {"peak_lr": 1e-2}, 2048),
    "1m muon 2e-2, batch 4096": ("1m", MUON | {"peak_lr": 2e-2}, 4096),
    "1m adamw 3e-3": ("1m", ADAMW | {"peak_lr": 3e-3}, 2048),
    "3m muon 5e-3": ("3m", MUON | {"peak_lr": 5e-3}, 2048),
    "1m muon 5e-3": ("1m", MUON | {"peak_lr": 5e-3}, 2048),
    "6m muon 4e-3": ("6m", MUON | {"peak_lr": 4e-3}, 4096),
}
TRAINER = {f"trainer {lr:g}": lr for lr in (5e-4, 1e-3, 3e-3)}
TRAINER_BATCH = 16  # examples of an update, padded to the longest
SCRATCH = "scratch"
SCORED = ("heldout", "generated", "intervals", "memorisation")  # texts without prompts: the first
ALL_WEIGHTS = 0  # the rank where no adapter is trained
BASE_BEFORE = (ALL_WEIGHTS, 1e-4, 16_384)
BASE_HAND = {
    "all weights 1e-4": (ALL_WEIGHTS, 1e-4, 2048),
    "all weights 3e-4": (ALL_WEIGHTS, 3e-4, 2048),
    "lora 16 1e-3": (16, 1e-3, 2048),
    "lora 16 3e-3": (16, 3e-3, 2048),
    "lora 64 1e-3": (64, 1e-3, 2048),
    "lora 16 1e-3, batch 1024": (16, 1e-3, 1024),
}
"""Rank, rate and tokens of an update of runs that continue from a base."""


def configured(side: str, a: argparse.Namespace) -> dict[str, Any]:
    """The settings of a side, and what is expected of it where it is the dial's."""
    source, small = source_of(a.data, a.work), COLLECTIONS[a.data][1] is not None
    made = toque.init(
        source,
        to=a.work / "dial.yaml",
        for_=f"{a.minutes} minutes",
        start_from=SCRATCH if a.base == SCRATCH else base_folder(a.base),
        replace=True,
    )
    settings: dict[str, Any] = made.config.model_dump(mode="json", exclude_unset=True)
    if small:  # a twentieth of it would be too few prompts
        settings["data"]["validation"] = [{"path": str(held_out_of(a.data, a.work))}]
    if side == "dial":
        return settings | {"expected": made.forecast}
    if a.base != SCRATCH:
        rank, peak_lr, batch = BASE_BEFORE if side == "before" else BASE_HAND[side]
        settings["optim"] = ADAMW | {"peak_lr": peak_lr}
        settings["adapter"] = {"kind": "lora", "r": rank} if rank else None
    else:
        name, settings["optim"], batch, entries = (
            BEFORE[small] if side == "before" else (*HAND[side], VOCABULARY)
        )
        settings["model"] |= {"shape": SIZES[name].shape, "tokenizer": f"trained:{entries}"}
    settings["train"]["batch"] = f"{batch} tokens"
    return settings


def _named(side: str, a: argparse.Namespace) -> Path:
    """The run folder of a side; its configuration is beside it."""
    base = "" if a.base == SCRATCH else f" {a.base}"
    name = f"{side}{base} {a.data} {a.minutes:g}".replace(" ", "_").replace(",", "")
    return Path(a.work / name)


def by_trainer(side: str, a: argparse.Namespace) -> dict[str, Any]:
    """Train with transformers.Trainer on the store of the dial's run, and score as the others."""
    dial, folder = _named("dial", a), _named(side, a)
    config = load_config(f"{dial}.yaml").config
    run = trainer_for_minutes.train(
        dial / "model",
        TokenStore.open(Path(config.data.store)),
        folder,
        minutes=a.minutes,
        lr=TRAINER[side],
        batch=TRAINER_BATCH,
        bf16=has_fast_bf16(torch.device("cpu")),
        seed=config.seed,
    )
    for file in (dial / "model").iterdir():
        if file.is_file() and not (folder / file.name).exists():
            shutil.copy(file, folder)  # its tokenizer
    found = toque.evaluate(folder, config)
    return _line(side, a, run, json.loads(found.to_json()), [run["lr"], TRAINER_BATCH])


def run_of(side: str, a: argparse.Namespace) -> dict[str, Any]:
    """Train and score one side."""
    if side in TRAINER:
        return by_trainer(side, a)
    folder = _named(side, a)
    file = Path(f"{folder}.yaml")
    if not file.exists():
        settings = configured(side, a)
        tokenizer = settings["model"].get("tokenizer", f":{a.base}").partition(":")[2]
        settings["run_dir"] = str(folder)
        held = "_held_out" if "validation" in settings["data"] else ""
        settings["data"]["store"] = str(a.work / f"{a.data.replace(' ', '_')}_{tokenizer}{held}")
        if side != "dial" or "epochs" not in str(settings["train"]["stop_after"]):
            settings["train"]["stop_after"] = f"{a.minutes:g} minutes"
            if a.tokens:
                foreseen = re.search(r"It reads ([\d,]+) tokens", settings["expected"])
                settings["train"]["stop_after"] = f"{foreseen[1].replace(',', '')} tokens"
        settings["evaluation"] = {
            "generate": a.prompts,
            "texts": 0,
            "max_examples": a.held_out,
        }
        Path(f"{folder}.expected").write_text(settings.pop("expected", ""))
        file.write_text(json.dumps(settings))
    config = load_config(file).config
    peers.toque("prepare", file)
    peers.toque("train", file)  # which scores the finished model as `evaluate` does
    found = json.loads((folder / "evaluation.json").read_text())
    optim = [config.optim.name, config.optim.peak_lr]
    expected = Path(f"{folder}.expected").read_text()
    return _line(side, a, of_run(folder), found, optim) | {"expected": expected}


def _line(
    side: str, a: argparse.Namespace, run: dict[str, Any], found: dict[str, Any], optim: list[Any]
) -> dict[str, Any]:
    return {
        "side": side,
        "data": a.data,
        "base": a.base,
        "minutes": a.minutes,
        "optim": optim,
        "no_repeat_ngram_size": RECIPE_RUN_TOKENS,  # lines before the rule of November 2026 lack it
        "run": run,
        **{name: found[name] for name in SCORED if name in found},
        "machine": harness.machine(),
    }


def measure(a: argparse.Namespace) -> harness.Result:
    """Every side that the file does not hold, one after the other."""
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.work = a.work.resolve()
    a.work.mkdir(parents=True, exist_ok=True)
    lines = a.out.read_text().splitlines() if a.out.exists() else []
    held = [json.loads(line) for line in lines]
    if a.base != SCRATCH and "trainer" in a.sides:
        raise harness.Skipped("the Trainer's side begins from random weights: leave the base out")
    if a.tokens and a.sides != ["dial"]:
        raise harness.Skipped("--tokens are those that init foresees of the dial's side alone")
    hand = HAND if a.base == SCRATCH else BASE_HAND
    several = {"hand": hand, "trainer": TRAINER}
    sides = [one for side in a.sides for one in several.get(side, [side])]
    known = {(one["side"], _of(one)) for one in held}
    for side in sides:
        if (side, (a.data, a.base, a.minutes)) in known:
            continue
        harness.note(f"{side}, {a.minutes:g} minutes")
        held.append(run_of(side, a))
        with a.out.open("a") as out:
            out.write(json.dumps(held[-1]) + "\n")
    rows = [
        {
            "side": one["side"],
            "bits_per_byte": round(one["heldout"]["bits_per_byte"], 4),
            **{k: round(v, 4) for k, v in one.get("generated", {}).items() if isinstance(v, float)},
        }
        for one in held
        if _of(one) == (a.data, a.base, a.minutes)
    ]
    return harness.Result(ours={"runs": rows}, quality={"passes": None})


def _of(run: dict[str, Any]) -> tuple[str, str, float]:
    return run["data"], run["base"], run["minutes"]


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--data", choices=list(COLLECTIONS), default="two magazines and a site")
    p.add_argument("--base", choices=[SCRATCH, *BASES], default=SCRATCH)
    p.add_argument("--minutes", type=float, default=15)
    p.add_argument("--sides", nargs="+", default=["dial", "before"])
    p.add_argument("--tokens", action="store_true", help="of the dial: end by tokens, not minutes")
    p.add_argument("--prompts", type=int, default=200)
    p.add_argument("--held-out", type=int, default=512, help="examples that give the loss")
    p.add_argument("--out", type=Path, default=Path("long.jsonl"))
    p.add_argument("--work", type=Path, required=True, help="folder for stores and runs")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
