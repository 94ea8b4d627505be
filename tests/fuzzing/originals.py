"""Valid files to damage: sources of every format, a store, a run, and models.

The commands of Toque and common libraries write them. They are small, so a case takes milliseconds.
"""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

STEPS = [
    "Rinse the lentils in cold water.",
    "Simmer them until soft, then serve with rice.",
]
N_RECORDS = 24
RUN = """
run_dir: {folder}/run
seed: 5
model: {{family: gpt2, tokenizer: "trained:512",
  shape: {{n_embd: 16, n_layer: 1, n_head: 2, n_positions: 512}}}}
data: {{sources: [{{path: "{folder}/cookbook.jsonl"}}], store: "{folder}/store",
  max_prompt_tokens: 64, max_target_tokens: 256}}
optim: {{warmup: "2 steps", peak_lr: 1e-2}}
train: {{stop_after: "6 steps", batch: "512 tokens", evaluate_every: "3 steps", keep_last: 1,
  precision: float32, micro_batch_rows: 2, compile: false, save_every: "2 steps"}}
evaluation: {{max_examples: 2, generate: 2}}
observe: {{log_every: "1 step"}}
"""


def record(n: int) -> dict[str, Any]:
    """Return an invented recipe."""
    return {
        "title": f"Pot {n}",
        "ingredients": [
            f"{n} cups lentils",
            "½ lemon",
            "2 (14 oz.) cans tomatoes, drained",
        ],
        "directions": STEPS,
        "servings": "4",
    }


def sources() -> dict[str, bytes]:
    """Return a valid file of every format that `prepare` reads, by format."""
    records = [record(n) for n in range(N_RECORDS)]
    lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()
    pairs = [
        {"question": f"How many is {n}?", "answer": f"It is {n}."}
        for n in range(N_RECORDS)
    ]
    return {
        "json": json.dumps(records).encode(),
        "json-nested": json.dumps(
            {"recipes": {str(n): r for n, r in enumerate(records)}}
        ).encode(),
        "json-ld": json.dumps([_marked_up(r) for r in records]).encode(),
        "jsonl": lines,
        "pairs": "".join(json.dumps(p) + "\n" for p in pairs).encode(),
        "documents": "".join(
            json.dumps({"text": " ".join(STEPS) * 3}) + "\n" for _ in records
        ).encode(),
        "csv": _table(records, ","),
        "tsv": _table(records, "\t"),
        "foodcom": _r_table(records),
        "html": _page(records),
        "text": ("\n\n".join(["Of lentils", *STEPS * 3]) + "\n").encode() * 5,
        **_arrays(),
        **_columnar(records),
        "xlsx": _workbook(records),
    }


def _marked_up(r: dict[str, Any]) -> dict[str, Any]:
    steps = [{"@type": "HowToStep", "text": step} for step in r["directions"]]
    return {
        "@context": "https://schema.org", "@type": "Recipe", "name": r["title"],
        "totalTime": "PT1H30M", "recipeYield": ["4", "4 servings"],
        "recipeIngredient": r["ingredients"],
        "recipeInstructions": [{"@type": "HowToSection", "name": "Soup", "itemListElement": steps}],
        "nutrition": {"@type": "NutritionInformation", "calories": "120 kcal", "fatContent": "3 g"},
    }  # fmt: skip


def _table(records: list[dict[str, Any]], delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(("title", "ingredients", "directions", "NER"))
    for r in records:
        writer.writerow(
            (
                r["title"] + ', "the" one',
                json.dumps(r["ingredients"]),
                json.dumps(r["directions"]),
                "[]",
            )
        )
    return text.getvalue().encode()


def _r_table(records: list[dict[str, Any]]) -> bytes:
    def vector(items: list[str]) -> str:
        return "c(" + ", ".join(map(json.dumps, items)) + ")"

    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("Name", "TotalTime", "RecipeIngredientQuantities", "RecipeIngredientParts",
                     "RecipeInstructions", "Calories"))  # fmt: skip
    for r in records:
        quantities = vector(["1", "1/2", "2"])
        writer.writerow(
            (
                r["title"],
                "PT1H5M",
                quantities,
                vector(r["ingredients"]),
                vector(STEPS),
                120.5,
            )
        )
    return text.getvalue().encode()


def _page(records: list[dict[str, Any]]) -> bytes:
    """Return a page with the recipes as JSON-LD."""
    graph = {"@graph": [_marked_up(r) for r in records]}
    return (
        "<!doctype html><html><head><title>Soup &amp; more</title>"
        f"<script type='application/ld+json'>{json.dumps(graph)}</script></head><body>"
        "<p>Soup</p></body></html>"
    ).encode()


def _arrays() -> dict[str, bytes]:
    ids = np.arange(4, 204, dtype=np.uint16)
    flat, rows, bounded = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(flat, ids)
    np.savez(bounded, ids=ids, ends=np.array([50, 120, 200]))
    np.savez_compressed(rows, input_ids=ids.reshape(10, 20))
    return {
        "npy": flat.getvalue(),
        "npz": bounded.getvalue(),
        "npz-rows": rows.getvalue(),
    }


def _columnar(records: list[dict[str, Any]]) -> dict[str, bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(records)
    parquet, file, stream = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet)
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return {
        "parquet": parquet.getvalue(),
        "arrow": file.getvalue(),
        "arrow-stream": stream.getvalue(),
    }


def _workbook(records: list[dict[str, Any]]) -> bytes:
    import openpyxl

    workbook = openpyxl.Workbook()
    sheet = workbook.active
    sheet.append(["title", "ingredients", "directions", "minutes", "made"])
    for r in records:
        steps, ingredients = "\n".join(r["directions"]), "\n".join(r["ingredients"])
        sheet.append([r["title"], ingredients, steps, 20.5, datetime(2026, 5, 1)])  # noqa: DTZ001
    sheet["D3"] = "=1+1"
    workbook.create_sheet("Notes").append(["Eat it hot."])
    stream = io.BytesIO()
    workbook.save(stream)
    return stream.getvalue()


def toque(*words: str) -> None:
    """Run a command in a child process, so that this process keeps one thread."""
    done = subprocess.run(
        [sys.executable, "-m", "toque", *words], capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(
            f"toque {' '.join(words)} ended with {done.returncode}: {done.stderr}"
        )


def make(folder: Path, toque: Callable[..., object] = toque) -> None:
    """Make `run.yaml`, `store/`, `run/`, and `half/`, a run stopped at step 4."""
    config = folder / "run.yaml"
    config.write_text(RUN.format(folder=folder))
    toque(
        "cookbook", "--out", str(folder / "cookbook.jsonl"), "--n", "40", "--seed", "3"
    )
    toque("prepare", str(config))
    toque("train", str(config))
    # A half run can continue for two more steps.
    toque(
        "train",
        str(config),
        f"run_dir={folder}/half",
        "train.stop_after=4 steps",
        "optim.schedule=constant",
    )
