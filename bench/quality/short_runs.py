"""Many short runs from scratch: held-out bits a byte by size, text, optimizer, rate and batch.

    python bench/quality/short_runs.py --grid rates --out lab/tonight/runs.jsonl --work FOLDER
        [--part 1 2]

`init` chooses a model and its settings by what these runs showed (lab/tonight). Each line of the
result is one run: its settings, what it read, its held-out loss. Runs that the file already holds
are not made again, so that a stopped script continues; stores are kept in the work folder. A run's
length is a number of tokens: its loss is the same on any machine but for the order of sums, so that
other programs may compute beside it, and its seconds are no figure of speed. Small models use one
core best: with OMP_NUM_THREADS=1, `--part 1 2` and `--part 2 2` beside it share a grid.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers

from toque.runs.history import METRICS, read_metrics

COLLECTIONS = {
    "two magazines and a site": (peers.RECIPES, None),
    "one magazine": ("data/recipes/epicurious_nutrition.jsonl.gz", 2400),
    "healthy": ("data/recipes/RecipeNLG_healthy50pct_no_link_source.csv", None),
}
"""File of the shared data and how many of its records. The last is kept away from every fit."""
USUAL: dict[str, Any] = {
    "data": "two magazines and a site", "family": "llama", "width": 128, "layers": 4,
    "vocabulary": 2048, "optimizer": "muon", "peak_lr": 1e-2, "schedule": "linear",
    "batch": 2048, "tokens": 1_000_000, "seed": 17,
}  # fmt: skip
HEAD = 32
"""Width of an attention head, as the presets from scratch have it."""


def grids() -> dict[str, Iterator[dict[str, Any]]]:
    """Settings to be varied, by the question that they answer."""
    small, tiny = {"width": 64, "layers": 3}, {"width": 128, "layers": 4}
    middle, large = {"width": 192, "layers": 5}, {"width": 256, "layers": 6}
    rates = {"adamw": (1e-3, 3e-3, 1e-2), "muon": (5e-3, 1e-2, 2e-2, 4e-2)}
    named = [{"optimizer": name, "peak_lr": lr} for name, few in rates.items() for lr in few]
    batches = [{"batch": n} for n in (1024, 4096, 8192)]
    lengths = [{"tokens": n} for n in (500_000, 1_000_000, 2_000_000, 4_000_000)]
    return {
        "rates": _product([small, tiny], named, [{"tokens": 500_000}]),
        "batches": _product([tiny], batches, [{"peak_lr": lr} for lr in (1e-2, 2e-2)]),
        "sizes": _product([small, tiny, middle, large], lengths),
        "vocabularies": _product([tiny], [{"vocabulary": n} for n in (1024, 4096, 8192)]),
        "few": _product(
            [small, tiny, middle],
            [{"data": "one magazine", "tokens": n} for n in (1_000_000, 2_000_000, 4_000_000)],
        ),
        "init's": _product(
            [tiny | {"tokens": 500_000}, large | {"vocabulary": 4096, "tokens": 300_000}],
            [
                {"optimizer": "adamw", "peak_lr": 1e-3, "schedule": "cosine"},
                {"optimizer": "adamw", "peak_lr": 3e-3, "schedule": "cosine"},
                {"peak_lr": 1e-2},
            ],
        ),
        "wide rates": _product([middle, large], [{"peak_lr": lr} for lr in (5e-3, 1e-2, 2e-2)]),
    }


def _product(*parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for chosen in itertools.product(*parts):
        yield {**USUAL, **{name: value for part in chosen for name, value in part.items()}}


def source_of(data: str, work: Path) -> Path:
    """The file of a collection; one that is cut is written to `work`."""
    name, most = COLLECTIONS[data]
    path = peers.shared(name)
    if most is None:
        return path
    cut = work / f"{data.replace(' ', '_')}.jsonl"
    if not cut.exists():
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            cut.write_text("".join(itertools.islice(lines, most)), encoding="utf-8")
    return cut


def config_of(run: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """The configuration of a run; `store` is shared by those with the same data and vocabulary."""
    width, heads = run["width"], max(1, run["width"] // HEAD)
    shape = {
        "hidden_size": width,
        "num_hidden_layers": run["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": -(-width * 11 // 4 // HEAD) * HEAD,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    store = f"{run['data'].replace(' ', '_')}_{run['vocabulary']}"
    return {
        "seed": run["seed"],
        "model": {
            "family": run["family"],
            "shape": shape,
            "tokenizer": f"trained:{run['vocabulary']}",
        },
        "data": {
            "sources": [{"path": str(source_of(run["data"], work))}],
            "store": str(work / store),
            "validation_fraction": 0.05,
        },
        "optim": {
            "name": run["optimizer"],
            "peak_lr": run["peak_lr"],
            "schedule": run["schedule"],
        },
        "train": {
            "stop_after": f"{run['tokens']} tokens",
            "batch": f"{run['batch']} tokens",
            "evaluate_every": "100 %",
            "save_every": "100 %",
        },
        "evaluation": {"generate": 0, "texts": 0, "max_examples": 1000},
        "observe": {"system": None, "gradients": None, "summary": None},
    }


def of_run(folder: Path) -> dict[str, Any]:
    """What a finished run measured."""
    records = read_metrics(folder / METRICS)
    steps = [record for record in records if record["event"] == "step"]
    start = next(record for record in records if record["event"] == "start")
    held = [record["metrics"] for record in records if record["event"] == "evaluation"][-1]
    return {
        "parameters": start["parameters"],
        "epochs": steps[-1]["epoch"],
        "updates": steps[-1]["step"],
        "seconds": round(sum(record["seconds"] for record in steps), 1),
        "precision": start.get("precision"),
        "loss": held["loss"],
        "bits_per_byte": held["bits_per_byte"],
    }


def measure(a: argparse.Namespace) -> harness.Result:
    """Make the runs of a grid that the file does not hold yet."""
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.work.mkdir(parents=True, exist_ok=True)
    lines = a.out.read_text().splitlines() if a.out.exists() else []
    known = {json.dumps(json.loads(line)["run"], sort_keys=True) for line in lines}
    wanted = [run for name in a.grid for run in grids()[name]]
    part, parts = a.part
    new = [run for run in wanted if json.dumps(run, sort_keys=True) not in known]
    new, folder = new[part - 1 :: parts], a.work / f"run{part}"
    for run in new:
        shutil.rmtree(folder, ignore_errors=True)
        file = a.work / f"config{part}.yaml"
        file.write_text(json.dumps(config_of(run, a.work.resolve()) | {"run_dir": str(folder)}))
        peers.toque("train", file)
        with a.out.open("a") as out:
            out.write(json.dumps({"run": run, "found": of_run(folder)}) + "\n")
    return harness.Result(ours={"runs": len(new)}, quality={"passes": True}, details={"of": a.grid})


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--grid", nargs="+", choices=list(grids()), required=True)
    p.add_argument("--out", type=Path, default=Path("runs.jsonl"))
    p.add_argument("--part", type=int, nargs=2, default=(1, 1), help="this part of so many")
    p.add_argument("--work", type=Path, required=True, help="folder for stores and the run")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
