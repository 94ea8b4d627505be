"""Memory estimated by `toque plan` against memory measured on a GPU by bench/gpu.sh.

    python bench/quality/plan_beside_sweeps.py results/gpu/results.jsonl

This script needs no GPU. It plans the shape, rows and precision of each sweep for the GPU of that
sweep, as `toque plan --hardware` does. "held" is the peak of the tensors, compared with the plan
without the share of the allocator. "taken" is the peak of the allocator, compared with the entire
plan. Quality: the error of "held" is within `--floor` for every sweep.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "speed"))
import harness
from sweep import VOCABULARY, dropouts

CHECKPOINTS = {
    "flan-t5-large": "google/flan-t5-large",
    "flan-t5-xxl": "google/flan-t5-xxl",
}
"""Checkpoints for plans with an adapter. Their shapes need no network."""


def sweeps(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the part name and the record of each sweep."""
    for line in path.read_text(encoding="utf-8").splitlines():
        part = json.loads(line)
        record = part.get("record") or {}
        if record.get("name") == "speed/sweep":
            yield part["part"], record


def configuration(
    arguments: dict[str, Any], shape: dict[str, Any], rows: int
) -> dict[str, Any]:
    """Return the settings of a run that computes the updates of the sweep."""
    a = argparse.Namespace(**{"dropout": None, **arguments})
    model: dict[str, Any] = {
        "family": a.family,
        "shape": shape | dropouts(a),
        "tokenizer": f"trained:{a.vocabulary or VOCABULARY[a.family]}",
    }
    if a.lora:
        model = {"family": "auto", "start_from": CHECKPOINTS[a.shape]}
    lengths = {"max_prompt_tokens": a.source, "max_target_tokens": a.target}
    if a.family != "t5":
        lengths = dict.fromkeys(lengths, a.target // 2)
    return {
        "run_dir": "planned/run",
        "model": model,
        **({"adapter": {"kind": "lora", "r": a.lora}} if a.lora else {}),
        "data": {"sources": [{"path": "none"}], "store": "planned/store", **lengths},
        "optim": {"name": "adamw", "label_smoothing": 0.0},
        "train": {
            "batch": f"{rows} examples",
            "micro_batch_rows": rows,
            "gradient_checkpointing": a.recompute,
            "row_tokens": "auto" if a.family == "t5" else a.target,
            "optimisations": {"attention": a.attention},
        },
    }


def compare(name: str, record: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Plan one micro-batch size. Return planned and measured memory in GiB."""
    from toque.config.resolve import resolve_values
    from toque.hardware.cards import card_of_device
    from toque.runs.outlined_update import outlining
    from toque.workflows.plan.run_estimate import build_estimator

    card = card_of_device(run["device"])
    if card is None:
        return {
            "part": name,
            "rows": run["rows"],
            "failed": f"{run['device']} is unknown",
        }
    arguments, shape = record["details"]["arguments"], record["details"]["shape"]
    values = configuration(arguments, shape, run["rows"])
    values["train"]["precision"] = run["precision"]
    estimator, model_of, _ = build_estimator(resolve_values(values).config, card.name)
    with outlining():
        memory = estimator.memory(model_of(estimator.config))
    return {
        "part": name,
        "rows": run["rows"],
        "planned_held_gib": round(memory.tensors / 2**30, 2),
        "held_gib": run["held_gib"],
        "held_error": round(memory.tensors / 2**30 / run["held_gib"] - 1, 3),
        "planned_taken_gib": round(memory.total / 2**30, 2),
        "taken_gib": run["peak_gib"],
        "taken_error": round(memory.total / 2**30 / run["peak_gib"] - 1, 3),
    }


def measure(a: argparse.Namespace) -> harness.Result:
    """Compare every micro-batch size of every sweep."""
    if not a.results.is_file():
        raise harness.Skipped(f"{a.results} does not exist. bench/gpu.sh writes it")
    cases = [
        (name, record, run)
        for name, record in sweeps(a.results)
        for run in record["ours"] or []
        if "failed" not in run and run["held_gib"]
    ]
    if not cases:
        raise harness.Skipped(f"no sweep in {a.results} ran on a GPU")
    result = harness.Result(ours=[])
    with ProcessPoolExecutor(a.workers, mp_context=get_context("spawn")) as pool:
        for waited in [pool.submit(compare, *case) for case in cases]:
            result.ours.append(waited.result())
            harness.note(json.dumps(result.ours[-1]))
    failed = [row["part"] for row in result.ours if "failed" in row]
    far = [
        f"{row['part']} {row['held_error']:+.1%}"
        for row in result.ours
        if abs(row.get("held_error", 0.0)) > a.floor
    ]
    if failed or far:
        result.void(f"not planned: {failed}; error above {a.floor:.0%}: {far}")
    return result


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument(
        "results", type=Path, nargs="?", default=Path("results/gpu/results.jsonl")
    )
    p.add_argument(
        "--floor", type=float, default=0.10, help="largest allowed error, as a share"
    )
    p.add_argument("--workers", type=int, default=2, help="parallel processes")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
