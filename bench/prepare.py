"""Preparing data against `datasets.map` with the fast tokenizer; prints JSON.

    python bench/prepare.py --family t5|gpt2 [--pairs 5] [--check-all]

Both sides read the same recipes, two processes each, and run in turn, a process of its own a run:

ours    `toque prepare`: from the raw JSON file to a store on disk; recipes are parsed, cleaned,
        scored, labelled, deduplicated and split on the way.
theirs  the shared peers/hf_tokenize.py on {"prompt", "target"} pairs made beforehand by
        make_pairs.py: from JSON to an Arrow file, tokenised and nothing else. Its own figure
        ("records_per_second") leaves out loading the JSON; "end_to_end" counts the process from
        its start, as ours does.

Quality: `--check-all` compares the stored ids of every recipe with the `tokenizers` library's on
the text that was stored; without it, of 2,000 recipes. One that differs voids the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

SHARED = Path(os.environ.get("TOQUE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
RECIPES = SHARED / "data" / "recipes" / "allrecipes_epicurious_as_is.jsonl.gz"
TOKENIZERS = {"t5": "t5", "gpt2": "gpt2"}
EVERYTHING = 10**9


def timed(command: list[str]) -> tuple[float, float, str]:
    """Wall seconds and processor seconds of a process and its children, and what it printed."""
    before, begun = os.times(), time.perf_counter()
    done = subprocess.run(  # noqa: S603  # commands of this file
        command, capture_output=True, text=True, check=False
    )
    seconds, after = time.perf_counter() - begun, os.times()
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    spent = after.children_user + after.children_system
    return seconds, spent - before.children_user - before.children_system, done.stdout


def ours(family: str, folder: Path, number: int) -> dict[str, Any]:
    """One `toque prepare` of all recipes."""
    config = {
        "model": {
            "family": family,
            "start_from": "scratch",
            "tokenizer": str(SHARED / "tokenizers" / TOKENIZERS[family]),
        },
        "data": {"sources": [{"path": str(RECIPES)}], "store": str(folder / f"store-{number}")},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    seconds, processor, _ = timed([sys.executable, "-m", "toque", "prepare", str(path)])
    manifest = json.loads((folder / f"store-{number}" / "manifest.json").read_text())
    read = manifest["records"]["read"]
    return {
        "records": read,
        "seconds": round(seconds, 2),
        "processor_seconds": round(processor, 2),
        "records_per_second": round(read / seconds, 1),
    }


def theirs(family: str, pairs: Path) -> dict[str, Any]:
    """One hf_tokenize.py."""
    tokenizer = SHARED / "tokenizers" / TOKENIZERS[family]
    script = SHARED / "peers" / "hf_tokenize.py"
    seconds, processor, printed = timed(
        [sys.executable, str(script), str(pairs), str(tokenizer), "2"]
    )
    said: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return said | {
        "end_to_end_seconds": round(seconds, 2),
        "end_to_end": round(said["records"] / seconds, 1),
        "processor_seconds": round(processor, 2),
    }


def ids_differ(store_folder: Path, *, most: int) -> dict[str, int]:
    """Recipes whose stored ids are not the `tokenizers` library's for the text they decode to."""
    from tokenizers import Tokenizer

    from toque.data.store import TokenStore

    store = TokenStore.open(store_folder)
    codec = store.codec()
    reference = Tokenizer.from_file(str(store_folder / "tokenizer" / "tokenizer.json"))
    special = {codec.eos_id, codec.pad_id, codec.bos_id}
    rows = np.concatenate([store.rows("train"), store.rows("validation")])
    rows = rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)]
    differ = compared = cut = 0
    for row in rows.tolist():
        for ids in (store.prompt(row).tolist(), store.target(row).tolist()):
            bare = [i for i in ids if i not in special]
            if bare == ids and codec.eos_id is not None:  # cut: its text may end within a word
                cut += 1
                bare = bare[: max(0, len(bare) - 12)]
            text = codec.decode(bare)
            again = [i for part in _lines(codec, reference, text) for i in part]
            compared += 1
            differ += again[: len(bare) - 12] != bare[: len(bare) - 12]
    return {"sides": compared, "differ": differ, "cut": cut}


def _lines(codec: Any, reference: Any, text: str) -> list[list[int]]:
    if codec.newline_id is None:
        return [reference.encode(text, add_special_tokens=False).ids]
    parts: list[list[int]] = []
    for number, line in enumerate(text.split("\n")):
        if number:
            parts.append([codec.newline_id])
        parts.append(reference.encode(line, add_special_tokens=False).ids)
    return parts


def main() -> None:
    """Measure and print."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--family", choices=sorted(TOKENIZERS), default="t5")
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--check-all", action="store_true")
    a = p.parse_args()
    runs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = folder / "pairs.jsonl"
        make = [sys.executable, str(SHARED / "peers" / "make_pairs.py"), str(RECIPES)]
        pairs.write_text(timed([*make, str(EVERYTHING)])[2])
        for number in range(a.pairs):
            runs.append((ours(a.family, folder, number), theirs(a.family, pairs)))
            print(f"pair {number + 1} of {a.pairs}: {runs[-1]}", file=sys.stderr)
        quality = ids_differ(folder / "store-0", most=EVERYTHING if a.check_all else 2000)
    sound = quality["differ"] == 0
    end = [o["records_per_second"] / t["end_to_end"] for o, t in runs]
    own = [o["records_per_second"] / t["records_per_second"] for o, t in runs]
    result = {
        "bench": "prepare",
        "family": a.family,
        "ratio_end_to_end": round(statistics.median(end), 2) if sound else "void",
        "worst_end_to_end": round(min(end), 2) if sound else "void",
        "ratio_to_map_alone": round(statistics.median(own), 2) if sound else "void",
        "quality": quality,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {n: version(n) for n in ("toque", "tokenizers", "datasets", "transformers")},
        "pairs": [{"ours": o, "theirs": t} for o, t in runs],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
