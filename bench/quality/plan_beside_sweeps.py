"""`toque plan`'s memory beside what a card held, for every sweep in the records of bench/gpu.sh.

    python bench/quality/plan_beside_sweeps.py results/gpu/results.jsonl

Needs no GPU: each sweep's shape, rows and precision are planned for the card that it ran on, as
`toque plan --hardware` would, without its levers. "held" are the most bytes that tensors took,
beside the plan without the allocator's share; "taken" those of the allocator, beside all of it.
Quality: the plan of what is held is within `--floor` for every sweep.
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

CHECKPOINTS = {"flan-t5-large": "google/flan-t5-large", "flan-t5-xxl": "google/flan-t5-xxl"}
"""Adapters are planned beside a checkpoint; its shape is known without a network."""


def sweeps(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of the part and its record, of sweeps that computed something on a card."""
    for line in path.read_text(encoding="utf-8").splitlines():
        part = json.loads(line)
        record = part.get("record") or {}
        if record.get("name") == "speed/sweep":
            yield part["part"], record


def configuration(arguments: dict[str, Any], shape: dict[str, Any], rows: int) -> dict[str, Any]:
    """Settings of a run that computes what the sweep computed."""
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


def planned(name: str, record: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """One micro-batch: bytes planned and measured, in GiB."""
    from toque.config.resolve import resolve_values
    from toque.hardware.cards import card_of_device
    from toque.runs.outlined_update import outlining
    from toque.workflows.plan.planned import ahead

    card = card_of_device(found["device"])
    if card is None:
        return {"part": name, "rows": found["rows"], "failed": f"{found['device']} is not known"}
    arguments, shape = record["details"]["arguments"], record["details"]["shape"]
    values = configuration(arguments, shape, found["rows"])
    values["train"]["precision"] = found["precision"]
    estimator, model_of, _ = ahead(resolve_values(values).config, card.name)
    with outlining():
        memory = estimator.memory(model_of(estimator.config))
    held = memory.tensors
    return {
        "part": name,
        "rows": found["rows"],
        "planned_held_gib": round(held / 2**30, 2),
        "held_gib": found["held_gib"],
        "held_error": round(held / 2**30 / found["held_gib"] - 1, 3),
        "planned_taken_gib": round(memory.total / 2**30, 2),
        "taken_gib": found["peak_gib"],
        "taken_error": round(memory.total / 2**30 / found["peak_gib"] - 1, 3),
    }


def measure(a: argparse.Namespace) -> harness.Result:
    """Every micro-batch of every sweep."""
    if not a.results.is_file():
        raise harness.Skipped(f"{a.results} is not there: bench/gpu.sh writes it")
    asked = [
        (name, record, found)
        for name, record in sweeps(a.results)
        for found in record["ours"] or []
        if "failed" not in found and found["held_gib"]
    ]
    if not asked:
        raise harness.Skipped(f"no sweep in {a.results} ran on a card")
    result = harness.Result(ours=[])
    with ProcessPoolExecutor(a.workers, mp_context=get_context("spawn")) as pool:
        for waited in [pool.submit(planned, *one) for one in asked]:
            result.ours.append(waited.result())
            harness.note(json.dumps(result.ours[-1]))
    failed = [found["part"] for found in result.ours if "failed" in found]
    far = [
        f"{found['part']} {found['held_error']:+.1%}"
        for found in result.ours
        if abs(found.get("held_error", 0.0)) > a.floor
    ]
    if failed or far:
        result.void(f"not planned: {failed}; further than {a.floor:.0%} from what was held: {far}")
    return result


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("results", type=Path, nargs="?", default=Path("results/gpu/results.jsonl"))
    p.add_argument("--floor", type=float, default=0.10, help="largest error, as a share")
    p.add_argument("--workers", type=int, default=2, help="sweeps planned at once")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
