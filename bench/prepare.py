"""Preparing data against `datasets.map` with the fast tokenizer; prints JSON.

    python bench/prepare.py --family t5|gpt2 [--input pairs|recipes] [--pairs 5] [--check-all]

Both sides use two processes and run in turn, a process of its own a run:

theirs  the shared peers/hf_tokenize.py on {"prompt", "target"} pairs made beforehand by
        make_pairs.py: from JSON to an Arrow file, tokenised and nothing else. Its own figure
        ("records_per_second") leaves out loading the JSON; "end_to_end" counts the process from
        its start, as ours does.
ours    `toque prepare`. With --input pairs, the same file of pairs: the same work (and hashes, a
        split, duplicates looked for). With --input recipes, the raw recipe file: recipes are
        parsed, cleaned, scored and labelled too, which the other side does not do.

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


def ours(family: str, source: Path, folder: Path, number: int) -> dict[str, Any]:
    """One `toque prepare` of all records."""
    config = {
        "model": {
            "family": family,
            "start_from": "scratch",
            "tokenizer": str(SHARED / "tokenizers" / TOKENIZERS[family]),
        },
        "data": {"sources": [{"path": str(source)}], "store": str(folder / f"store-{number}")},
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
    """Rows whose ids are not the `tokenizers` library's for the text that was read.

    The source is read again by the reader that `prepare` used; its examples are the store's rows
    in order, duplicates included.
    """
    from tokenizers import Tokenizer

    from toque.cooking.schemas import RecipeReader
    from toque.data.prepare.example_rows import prompt_bounds
    from toque.data.store.token_store import TokenStore

    store = TokenStore.open(store_folder)
    codec = store.codec()
    around = prompt_bounds(codec, store.manifest.family_kind)
    reference = Tokenizer.from_file(str(store_folder / "tokenizer" / "tokenizer.json"))
    (source,) = store.manifest.sources
    reader = RecipeReader()
    assert source.reader == reader.recorded_name
    wanted = set(np.linspace(0, store.n_rows - 1, min(most, store.n_rows)).astype(int).tolist())
    differ = compared = row = 0
    for block in reader.blocks(Path(source.path)):
        for example in reader.examples(block).examples:
            if row in wanted:
                sides = (example.prompt, store.prompt(row)), (example.target, store.target(row))
                for side, (text, ids) in enumerate(sides):
                    first, last = (None, codec.eos_id) if side else around
                    bare = ids.tolist()
                    if first is not None and bare[:1] == [first]:
                        del bare[0]
                    if bare[-1:] == [last]:
                        del bare[-1]
                    expected = _reference_ids(codec, reference, codec.normalise(text))
                    compared += 1
                    # A side that was cut holds the beginning; a whole one must be equal.
                    differ += expected[: len(bare)] != bare
            row += 1
    return {"sides": compared, "differ": differ, "rows": row, "rows_in_store": store.n_rows}


def _reference_ids(codec: Any, reference: Any, text: str) -> list[int]:
    """Ids by the library alone; a reserved token stands for a line break T5 cannot write."""
    if codec.newline_id is None:
        ids: list[int] = reference.encode(text, add_special_tokens=False).ids
        return ids
    joined: list[int] = []
    for number, line in enumerate(text.split("\n")):
        if number:
            joined.append(codec.newline_id)
        joined += reference.encode(line, add_special_tokens=False).ids
    return joined


def main() -> None:
    """Measure and print."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--family", choices=sorted(TOKENIZERS), default="t5")
    p.add_argument("--input", choices=("pairs", "recipes"), default="pairs")
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
            source = pairs if a.input == "pairs" else RECIPES
            runs.append((ours(a.family, source, folder, number), theirs(a.family, pairs)))
            print(f"pair {number + 1} of {a.pairs}: {runs[-1]}", file=sys.stderr)
        quality = ids_differ(folder / "store-0", most=EVERYTHING if a.check_all else 2000)
    sound = quality["differ"] == 0 and quality["rows"] == quality["rows_in_store"]
    end = [o["records_per_second"] / t["end_to_end"] for o, t in runs]
    cores = [
        (t["processor_seconds"] / t["records"]) / (o["processor_seconds"] / o["records"])
        for o, t in runs
    ]
    own = [o["records_per_second"] / t["records_per_second"] for o, t in runs]
    result = {
        "bench": "prepare",
        "family": a.family,
        "input": a.input,
        "ratio_end_to_end": round(statistics.median(end), 2) if sound else "void",
        "worst_end_to_end": round(min(end), 2) if sound else "void",
        "ratio_of_processor_seconds": round(statistics.median(cores), 2) if sound else "void",
        "ratio_to_map_alone": round(statistics.median(own), 2) if sound else "void",
        "quality": quality,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {n: version(n) for n in ("toque", "tokenizers", "datasets", "transformers")},
        "pairs": [{"ours": o, "theirs": t} for o, t in runs],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
