"""Data preparation against `datasets.map` with the fast tokenizer.

    python bench/speed/prepare.py --family t5|gpt2 [--input pairs|recipes] [--records N]
                                  [--pairs 5] [--check-all]

Both sides read a file and write to disk with two processes. They run in turn.

theirs  The shared peers/hf_tokenize.py tokenises {"prompt", "target"} pairs from JSON to Arrow. Its
        own "records_per_second" does not include loading the JSON.
ours    `toque prepare`. With --input pairs it reads the same file, and also hashes it, makes a
        split and looks for duplicates. With --input recipes it reads the raw recipes, and also
        parses, cleans, scores and labels them.

The ratio compares records per second from file to disk. The details have the ratio of processor
seconds and the ratio to the "records_per_second" of the other side. Quality: the stored ids equal
the ids of the `tokenizers` library for 2,000 records, or for all records with `--check-all`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import numpy as np
import peers


def ours(family: str, source: Path, folder: Path, number: int) -> dict[str, Any]:
    """Run `toque prepare` on all records."""
    store = folder / f"store-{number}"
    model, data = {"start_from": "scratch"}, {"store": str(store)}
    config = peers.write_config(folder, family, source, model=model, data=data)
    peers.toque("prepare", config)
    return {
        "records": json.loads((store / "manifest.json").read_text())["records"]["read"]
    }


def theirs(family: str, pairs: Path) -> dict[str, Any]:
    """Run hf_tokenize.py."""
    return peers.last_json(
        peers.peer("hf_tokenize.py", pairs, peers.tokenizer_folder(family), 2)
    )


def ids_differ(store_folder: Path, *, max_rows: int) -> dict[str, int]:
    """Count stored ids that differ from the ids of the `tokenizers` library.

    The source is read again by the reader that `prepare` used. Its examples are the rows of the
    store in order, including duplicates.
    """
    from tokenizers import Tokenizer

    from toque.cooking.schemas.reader import reader_for
    from toque.data.store.token_store import TokenStore
    from toque.data.tokenizer.codec import prompt_bounds

    store = TokenStore.open(store_folder)
    codec = store.codec()
    around = prompt_bounds(codec, store.manifest.family_kind)
    reference = Tokenizer.from_file(str(store_folder / "tokenizer" / "tokenizer.json"))
    (source,) = store.manifest.sources
    # The recorded name of a reader of pairs ends with its columns.
    reader = reader_for(json.loads(source.reader.partition("pairs=")[2] or "{}"))
    assert source.reader == reader.recorded_name
    checked_rows = set(
        np.linspace(0, store.n_rows - 1, min(max_rows, store.n_rows))
        .astype(int)
        .tolist()
    )
    differ = compared = row = 0
    for block in reader.blocks(Path(source.path)):
        for example in reader.examples(block).examples:
            if row in checked_rows:
                sides = (
                    (example.prompt, store.prompt(row)),
                    (example.target, store.target(row)),
                )
                for side, (text, ids) in enumerate(sides):
                    first, last = (None, codec.eos_id) if side else around
                    bare = ids.tolist()
                    if first is not None and bare[:1] == [first]:
                        del bare[0]
                    if bare[-1:] == [last]:
                        del bare[-1]
                    expected = _reference_ids(codec, reference, codec.normalise(text))
                    compared += 1
                    # A truncated side has only the beginning.
                    differ += expected[: len(bare)] != bare
            row += 1
    return {
        "sides": compared,
        "differ": differ,
        "rows": row,
        "rows_in_store": store.n_rows,
    }


def _reference_ids(codec: Any, reference: Any, text: str) -> list[int]:
    """Tokenise by the library, with the reserved token for line breaks of T5."""
    if codec.newline_id is None:
        ids: list[int] = reference.encode(text, add_special_tokens=False).ids
        return ids
    joined: list[int] = []
    for number, line in enumerate(text.split("\n")):
        if number:
            joined.append(codec.newline_id)
        joined += reference.encode(line, add_special_tokens=False).ids
    return joined


def measure(a: argparse.Namespace) -> harness.Result:
    """Run the pairs and compute the other ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = peers.write_pairs(folder / "pairs.jsonl", a.records)
        source = pairs if a.input == "pairs" else peers.shared(peers.RECIPES)

        def quality(*_: object) -> dict[str, Any]:
            result = ids_differ(
                folder / "store-0", max_rows=peers.ALL if a.check_all else 2000
            )
            same = result["differ"] == 0 and result["rows"] == result["rows_in_store"]
            return {"passes": same, **result}

        result = harness.paired(
            lambda number: ours(a.family, source, folder, number),
            lambda _: theirs(a.family, pairs),
            pairs=a.pairs,
            score=lambda run: run.value["records"] / run.wall,
            quality=quality,
        )
    alone = result.ratio_by(
        lambda run: run.value.get("records_per_second", run.value["records"] / run.wall)
    )
    result.details = {
        "ratio_of_processor_seconds": result.ratio_by(
            lambda run: run.value["records"] / run.processor
        ),
        "ratio_to_map_alone": alone,
    }
    return result


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--family", choices=("gpt2", "t5"), default="t5")
    p.add_argument("--input", choices=("pairs", "recipes"), default="pairs")
    p.add_argument(
        "--records", type=int, default=20_000, help="pairs to prepare, at most 67,977"
    )
    p.add_argument("--pairs", type=int, default=2)
    p.add_argument("--check-all", action="store_true")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
