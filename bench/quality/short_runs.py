"""Many short runs from scratch: held-out bits a byte by size, text, optimizer, rate and batch.

    python bench/quality/short_runs.py --grid rates --out lab/tonight/runs.jsonl --work FOLDER

`init` chooses a model and its settings by what these runs showed (lab/tonight). Each line of the
result is one run: its settings, what it read, its held-out loss. Runs that the file already holds
are not made again, one that was stopped is continued, and stores are kept in the work folder. A
run that continues from SmolLM2-135M finds it in the folder $SMOLLM2. A run's length is a number of
tokens or epochs: its loss is the same on any machine but for the order of sums, so that other
programs may compute beside it, and its seconds are no figure of speed. Small models use one core
best: with OMP_NUM_THREADS=1, several of these scripts share a grid, each taking the next run that
nobody makes.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gzip
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers

from toque.runs.history import METRICS, read_metrics
from toque.workflows.first_config.dial import HEAD_WIDTH, Size

COLLECTIONS = {
    "two magazines and a site": (peers.RECIPES, None),
    "one magazine": ("data/recipes/epicurious_nutrition.jsonl.gz", 2400),
    "cuisines": ("data/recipes/grand_recipe_dataset_cuisine.jsonl", None),
    "public domain": ("data/recipes/public_domain_recipes.jsonl", None),
    "plays": ("data/text/tinyshakespeare.txt", None),
    "healthy": ("data/recipes/RecipeNLG_healthy50pct_no_link_source.csv", None),
    "foodista": ("data/recipes/foodista_cc_by_3_0.jsonl", None),
    "spoonacular": ("data/recipes/spoonacular.parquet", None),
    "500 of them": (peers.RECIPES, 500),
    "5000 of them": (peers.RECIPES, 5000),
    "50000 of them": (peers.RECIPES, 50_000),
    "cookbooks": ("data/text/[0-9]*.txt.gz", None),
}
"""File of the shared data, or a pattern of several, and how many of its records: of one magazine
the first, of all recipes evenly. "healthy" and "spoonacular" were kept away from every fit until
27 November 2026; "cookbooks", ten whole books as plain text, is since."""
BASES = ("stories15m", "smollm2")
USUAL: dict[str, Any] = {
    "data": "two magazines and a site", "family": "llama", "width": 128, "layers": 4,
    "vocabulary": 2048, "optimizer": "muon", "peak_lr": 1e-2, "schedule": "linear",
    "batch": 2048, "tokens": 1_000_000, "seed": 17,
}  # fmt: skip
BASE: dict[str, Any] = {
    "data": "500 of them", "start": "stories15m", "rank": 0, "optimizer": "adamw", "peak_lr": 3e-4,
    "schedule": "cosine", "batch": 1024, "epochs": 4, "seed": 17,
}  # fmt: skip
"""Of runs that continue from a model; of rank 0 all weights are trained, else an adapter."""
HOW_HARD = (
    "two magazines and a site", "one magazine", "cuisines", "public domain", "healthy", "foodista",
    "spoonacular", "plays",
)  # fmt: skip
"""Collections of which the first updates are to tell what many will reach."""
WORDS: dict[str, Any] = {"vocabulary": 8192}
"""The vocabulary of the dial since 27 November 2026, by the grid "small vocabularies"."""
HELD_OUT = 300  # recipes that none of these runs trains on, the same for all


CURRICULUM = [{"from": "0 %", "max_difficulty": "easy"}, {"from": "30 %"}]
"""Easy recipes first, for a third of the run."""


def grids() -> dict[str, Iterator[dict[str, Any]]]:
    """Settings to be varied, by the question that they answer."""
    small, tiny = {"width": 64, "layers": 3}, {"width": 128, "layers": 4}
    slower = tiny | {"peak_lr": 5e-3}
    middle, large = {"width": 192, "layers": 5}, {"width": 256, "layers": 6}
    slow = middle | {"peak_lr": 2.5e-3}
    magazine, spoonacular = {"data": "one magazine"}, {"data": "spoonacular"}
    rates = {"adamw": (1e-3, 3e-3, 1e-2), "muon": (5e-3, 1e-2, 2e-2, 4e-2)}
    named = [{"optimizer": name, "peak_lr": lr} for name, few in rates.items() for lr in few]
    batches = [{"batch": n} for n in (1024, 4096, 8192)]
    lengths = [{"tokens": n} for n in (500_000, 1_000_000, 2_000_000, 4_000_000)]
    return {
        "rates": _product([small, tiny], named, [{"tokens": 500_000}]),
        "batches": _product(
            [small | {"tokens": 500_000}], batches, [{"peak_lr": lr} for lr in (1e-2, 2e-2)]
        ),
        "wide batches": _product([tiny], batches, [{"peak_lr": lr} for lr in (1e-2, 2e-2)]),
        "sizes": _product([small, tiny], lengths),
        "long": _product([small, tiny], [{"tokens": n} for n in (8_000_000, 16_000_000)]),
        "long and wide": _product([middle, large], [{"tokens": 8_000_000}]),
        "middle sizes": _product([middle], lengths[:2]),
        "large sizes": itertools.chain(
            _product([middle], lengths[2:3]), _product([large], lengths[:2])
        ),
        "vocabularies": _product([tiny], [{"vocabulary": n} for n in (1024, 4096, 8192)]),
        "small vocabularies": _product(
            [small | {"vocabulary": n} for n in (2048, 4096, 8192, 16_384)],
            [
                {"tokens": 1_000_000},
                {"data": "spoonacular", "tokens": 1_000_000},
                {"data": "one magazine", "tokens": 2_000_000},
            ],
        ),
        "whole words": itertools.chain(
            _product([small | WORDS], [*lengths[:1], *lengths[2:], {"tokens": 8_000_000}]),
            _product([slower | WORDS], [*lengths, {"tokens": 8_000_000}]),
            _product([slow | WORDS], [*lengths[2:], {"tokens": 8_000_000}]),
            _product(
                [large | WORDS | {"peak_lr": 2e-3}],
                [{"batch": n, "tokens": 2_000_000} for n in (2048, 4096)],
            ),
            _product([small | WORDS | {"peak_lr": 2e-2}], lengths[1:2]),
            _product([small | WORDS], [{"tokens": 16_000_000}]),
        ),
        "whole words of few": itertools.chain(
            _product(
                [shape | {"tokens": n} for n in (2_000_000, 4_000_000) for shape in (slower, small)]
                + [small | {"tokens": 8_000_000}],
                [{"data": "one magazine"} | WORDS],
            ),
            _product(
                [slower | {"tokens": n} for n in (700_000, 1_000_000)]
                + [small | {"tokens": 1_400_000}],
                [{"data": "spoonacular"} | WORDS],
            ),
        ),
        "whole words of others": _product(
            [small | WORDS], [{"data": name, "tokens": 1_000_000} for name in HOW_HARD]
        ),
        "few": _product(
            [small | {"tokens": n} for n in (4_000_000, 8_000_000, 16_000_000)]
            + [tiny | {"tokens": n} for n in (2_000_000, 4_000_000, 8_000_000)],
            [{"data": "one magazine"}],
        ),
        "fewer": _product(
            [small | {"tokens": n} for n in (2_000_000, 4_000_000, 8_000_000)],
            [{"data": "500 of them"}],
        ),
        "small": _product(
            [small | {"data": "cuisines", "tokens": n} for n in (4_000_000, 8_000_000)]
            + [small | {"data": "5000 of them", "tokens": 8_000_000}]
            + [tiny | {"data": "cuisines", "tokens": 4_000_000}],
        ),
        "init's": _product(
            [tiny | {"tokens": 500_000}, large | {"vocabulary": 4096, "tokens": 300_000}],
            [
                {"optimizer": "adamw", "peak_lr": 1e-3, "schedule": "cosine"},
                {"optimizer": "adamw", "peak_lr": 3e-3, "schedule": "cosine"},
                {"peak_lr": 1e-2},
            ],
        ),
        "few rates": _product(
            [
                small | {"tokens": 8_000_000},
                tiny | {"tokens": 4_000_000},
                middle | {"tokens": 2_000_000},
            ],
            [{"data": "one magazine", "peak_lr": lr} for lr in (5e-3, 2.5e-3)],
        ),
        "fewer rates": _product(
            [small | {"tokens": 1_000_000}]
            + [tiny | {"tokens": n} for n in (500_000, 1_000_000)]
            + [middle | {"tokens": 500_000}],
            [{"data": "500 of them", "peak_lr": lr} for lr in (1e-2, 5e-3, 2.5e-3)],
        ),
        "fewer's decay": _product(
            [tiny | {"tokens": 1_000_000, "data": "500 of them", "peak_lr": 5e-3}],
            [{"weight_decay": decay} for decay in (0.1, 1.0)],
        ),
        "decay": itertools.chain(
            _varied(small | WORDS, (1.0, 0.3)),
            _varied(small | WORDS | {"tokens": 4_000_000}, (0.26,)),
            _varied(slower | WORDS | {"tokens": 2_000_000}, (1.0, 0.3)),
            _varied(slower | WORDS | {"tokens": 8_000_000}, (0.16,)),
            _varied(slow | WORDS | {"tokens": 4_000_000}, (0.25,)),
        ),
        "decay, of few": itertools.chain(
            _varied(slower | WORDS | magazine | {"tokens": 4_000_000}, (1.0, 0.3)),
            _varied(slower | WORDS | magazine | {"tokens": 8_000_000}, (0.91,)),
            _varied(slower | WORDS | spoonacular, (1.0, 3.0, 0.3)),
            _varied(slower | WORDS | spoonacular | {"tokens": 2_000_000}, (1.0, 0.5, 2.0)),
            _varied(slow | WORDS | spoonacular, (2.0,)),
            _varied(slow | WORDS | spoonacular | {"tokens": 2_000_000}, (2.0,)),
            _varied(small | WORDS | spoonacular | {"tokens": 2_000_000}, (0.5,)),
        ),
        "decayed": itertools.chain(
            _decayed(one | n for one in (slower, small) for n in lengths[:3]),
            _decayed(one | lengths[3] for one in (slower, small)),
            _decayed(slow | n for n in lengths[2:]),
            _decayed(one | {"tokens": 8_000_000} for one in (slower, small, slow)),
        ),
        "decayed, of few": itertools.chain(
            _decayed([slow | magazine | {"tokens": 4_000_000}], passes=6.1),
            _decayed(
                [one | spoonacular | {"tokens": 2_000_000} for one in (small, slow, slower)],
                passes=9.9,
            ),
            _decayed([small | spoonacular | {"tokens": 4_000_000}], passes=19.7),
            _decayed([small | magazine | {"tokens": 8_000_000}], passes=12.2),
        ),
        "other texts": _product(
            [small],
            [
                {"data": "foodista", "tokens": 1_000_000},
                {"data": "public domain", "tokens": 1_000_000},
                {"data": "cuisines", "tokens": 4_000_000, "peak_lr": 5e-3},
                {"data": "healthy", "tokens": 4_000_000, "peak_lr": 5e-3},
                {"data": "healthy", "tokens": 4_000_000},
            ],
        ),
        "other texts, wider": _product(
            [tiny | {"data": "healthy"}],
            [{"tokens": 2_000_000, "peak_lr": 5e-3}, {"tokens": 2_000_000}],
        ),
        "fewest": _product(
            [
                tiny | {"peak_lr": 5e-3, "tokens": n}
                for n in (430_000, 570_000, 720_000, 1_000_000, 1_200_000)
            ]
            + [middle | {"peak_lr": 5e-3, "tokens": 860_000}]
            + [tiny | {"tokens": 430_000}, middle | {"peak_lr": 5e-3, "tokens": 430_000}]
            + [tiny | {"peak_lr": 5e-3, "tokens": 500_000, "vocabulary": 4096}]
            + [tiny | {"peak_lr": 5e-3, "tokens": 900_000, "vocabulary": 4096}]
            + [small | {"tokens": 750_000, "vocabulary": 4096}],
            [{"data": "spoonacular"}],
        ),
        "plain text": itertools.chain(
            _product([small | WORDS | {"data": "cookbooks"}], lengths[:3]),
            _product([slower | WORDS | {"data": "cookbooks"}], lengths[1:]),
            _product(
                [small | WORDS | {"data": "plays"}], [{"tokens": n} for n in (250_000, 1_000_000)]
            ),
        ),
        "how hard": _product(
            [small | {"data": name} for name in HOW_HARD],
            [{"tokens": n} for n in (250_000, 500_000)],
        ),
        "another seed": _product(
            [tiny | {"seed": 18}], [{"tokens": 4_000_000}, {"tokens": 2_000_000}]
        ),
        "long at half": _product([small | {"tokens": 8_000_000, "peak_lr": 5e-3}]),
        "few and wide": _product(
            [middle | {"data": "one magazine", "peak_lr": 5e-3}],
            [{"tokens": n} for n in (3_000_000, 4_000_000)],
        ),
        "wide rates": _product(
            [middle | {"tokens": 4_000_000}, tiny | {"tokens": 8_000_000}],
            [{"peak_lr": lr} for lr in (5e-3, 2.5e-3)],
        ),
        "others": _product(
            [tiny], [{"data": name, "tokens": 500_000} for name in ("cuisines", "plays")]
        ),
        "bases": _product(
            [{"epochs": n} for n in (4, 2, 8)],
            [{"rank": 0, "peak_lr": lr} for lr in (1e-4, 3e-4, 1e-3)]
            + [{"rank": 16, "peak_lr": lr} for lr in (1e-3, 3e-3)],
            usual=BASE,
        ),
        "more for a base": _product(
            [{"rank": 0, "peak_lr": lr} for lr in (3e-4, 1e-3)] + [{"rank": 16, "peak_lr": 3e-3}],
            usual=BASE | {"data": "5000 of them", "batch": 4096, "epochs": 2},
        ),
        "larger base": _product(
            [{"rank": 0, "peak_lr": lr} for lr in (1e-4, 3e-4)]
            + [{"rank": 16, "peak_lr": lr} for lr in (1e-3, 3e-4, 3e-3)]
            + [{"rank": 0, "peak_lr": 3e-5}],
            usual=BASE | {"start": "smollm2", "epochs": 1},
        ),
        "rows for a base": _product(
            [{"batch": n, "peak_lr": 1e-4} for n in (2048, 4096)],
            usual=BASE | {"start": "smollm2", "epochs": 1},
        ),
        "muon for a base": _product(
            [{"optimizer": "muon", "peak_lr": lr} for lr in (1e-4, 3e-4, 1e-3)], usual=BASE
        ),
        "adapted layers": _product(
            [{"epochs": 4}, {"start": "smollm2", "epochs": 1}],
            [{"peak_lr": lr} for lr in (1e-3, 3e-3)],
            usual=BASE | {"rank": 16, "targets": "all"},
        ),
        "helps": _product(
            [slower | WORDS | magazine | {"tokens": 4_000_000, "weight_decay": 1.0}],
            [
                {"more": {"augmentation": {"substitute": 0.5, "paraphrase": 0.5}}},
                {"label_smoothing": 0.1},
                {"more": {"curriculum": {"stages": CURRICULUM}}},
            ],
        ),
        "families": _product(
            [tiny | WORDS | {"family": "t5", "tokens": 2_000_000}],
            [{"peak_lr": lr} for lr in (2.5e-3, 5e-3, 1e-2, 2e-2)],
        ),
    }


def _varied(run: dict[str, Any], decays: Iterable[float]) -> Iterator[dict[str, Any]]:
    return _product([run], [{"weight_decay": decay} for decay in decays])


def _decayed(varied: Iterable[dict[str, Any]], passes: float = 0.0) -> Iterator[dict[str, Any]]:
    """Runs with the dial's vocabulary and weight decay, over so many passes."""
    for run in _product([one | WORDS for one in varied]):
        size = Size(run["width"], run["layers"], run["batch"], run["peak_lr"])
        yield run | {"weight_decay": size.decay(run["tokens"], passes)}


def _product(
    *parts: list[dict[str, Any]], usual: Mapping[str, Any] = USUAL
) -> Iterator[dict[str, Any]]:
    for chosen in itertools.product(*parts):
        yield {**usual, **{name: value for part in chosen for name, value in part.items()}}


def source_of(data: str, work: Path) -> Path:
    """The file of a collection, or its pattern; one that is cut is written to `work`."""
    name, most = COLLECTIONS[data]
    if "*" in name:
        return peers.shared(str(Path(name).parent)) / Path(name).name
    return peers.shared(name) if most is None else _cut(data, name, most, work)


def _cut(data: str, name: str, most: int, work: Path) -> Path:
    cut, held_out = work / f"{data.replace(' ', '_')}.jsonl", held_out_of(data, work)
    if not held_out.exists():
        with gzip.open(peers.shared(name), "rt", encoding="utf-8") as lines:
            if name == peers.RECIPES:
                every = list(lines)
                held = range(0, len(every), len(every) // HELD_OUT)
                rest = [line for at, line in enumerate(every) if at not in held]
                chosen = [rest[at * len(rest) // most] for at in range(most)]
                kept = [every[at] for at in held]
            else:
                chosen = list(itertools.islice(lines, most))
                kept = list(itertools.islice(lines, HELD_OUT))
        cut.write_text("".join(chosen), encoding="utf-8")
        held_out.write_text("".join(kept), encoding="utf-8")
    return cut


def held_out_of(data: str, work: Path) -> Path:
    """Recipes held out from a cut collection: of one magazine the next, else the same for all."""
    return work / f"{data.replace(' ', '_')}_held_out.jsonl"


def config_of(run: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """The configuration of a run; `store` is shared by those with the same data and vocabulary."""
    source = str(source_of(run["data"], work))
    store, model = _base_of(run) if "start" in run else _model_of(run)
    data = {"sources": [{"path": source}], "store": str(work / store), "validation_fraction": 0.05}
    if "start" in run:
        data |= {"validation": [{"path": str(held_out_of(run["data"], work))}]}
    length = f"{run['tokens']} tokens" if "tokens" in run else f"{run['epochs']} epochs"
    return {
        "seed": run["seed"],
        **model,
        "data": data,
        "optim": {
            "name": run["optimizer"],
            "peak_lr": run["peak_lr"],
            "schedule": run["schedule"],
            **{name: run[name] for name in ("weight_decay", "label_smoothing") if name in run},
        },
        "train": {
            "stop_after": length,
            "batch": f"{run['batch']} tokens",
            "evaluate_every": "100 %",
            "save_every": "100 %",
        },
        "evaluation": {"generate": 0, "texts": 0, "max_examples": 1000},
        "observe": {"system": None, "gradients": None, "summary": None},
        **run.get("more", {}),
    }


def _model_of(run: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The store's name and the settings of a model from scratch."""
    size = Size(run["width"], run["layers"], run["batch"], run["peak_lr"])
    shape = size.shape
    if run["family"] == "t5":  # half the layers on each side, dropout as T5 has it
        shape = {
            "d_model": size.width,
            "d_kv": HEAD_WIDTH,
            "d_ff": size.inner,
            "num_layers": size.layers // 2,
            "num_decoder_layers": size.layers // 2,
            "num_heads": size.width // HEAD_WIDTH,
            "feed_forward_proj": "gated-gelu",
        }
    tokenizer = f"trained:{run['vocabulary']}"
    store = f"{run['data'].replace(' ', '_')}_{run['vocabulary']}"
    store += "" if run["family"] == "llama" else f"_{run['family']}"
    return store, {"model": {"family": run["family"], "shape": shape, "tokenizer": tokenizer}}


def _base_of(run: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The store's name and the settings of a model that a run continues from."""
    start = run["start"]
    folder = base_folder(start)
    lora = {"kind": "lora", "r": run["rank"], "target_modules": run.get("targets", "auto")}
    adapter = {"adapter": lora} if run["rank"] else {}
    store = f"{run['data'].replace(' ', '_')}_{start}"
    return store, {"model": {"family": "auto", "start_from": folder}, **adapter}


def base_folder(start: str) -> str:
    """The folder of a pretrained model."""
    return os.environ["SMOLLM2"] if start == "smollm2" else str(peers.shared(f"models/{start}"))


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
    made = 0
    for run in (run for name in a.grid for run in grids()[name]):
        key = _key(run)
        with _alone(a.work / f"{key}.lock") as mine:
            if not mine or key in _known(a.out):
                continue
            folder, file = a.work / key, a.work / f"{key}.yaml"
            config = config_of(run, a.work.resolve()) | {"run_dir": str(folder)}
            file.write_text(json.dumps(config))
            with _alone(Path(f"{config['data']['store']}.lock"), wait=True):
                peers.toque("prepare", file)
            peers.toque("train", file)
            with a.out.open("a") as out:
                out.write(json.dumps({"run": run, "found": of_run(folder)}) + "\n")
            shutil.rmtree(folder)
            made += 1
    return harness.Result(ours={"runs": made}, quality={"passes": True}, details={"of": a.grid})


@contextlib.contextmanager
def _alone(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold a lock while the block runs; without waiting, False where another process holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _known(out: Path) -> set[str]:
    """Keys of the runs that the file holds."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {_key(json.loads(line)["run"]) for line in lines}


def _key(run: Mapping[str, Any]) -> str:
    """Name of a run's files: the hash of its settings."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:12]


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--grid", nargs="+", choices=list(grids()), required=True)
    p.add_argument("--out", type=Path, default=Path("runs.jsonl"))
    p.add_argument("--work", type=Path, required=True, help="folder for stores and the run")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
