"""Preparing data against `datasets.map` with the fast tokenizer.

    python bench/speed/prepare.py --family t5|gpt2 [--input pairs|recipes] [--records N]
                                  [--pairs 5] [--check-all]

Both sides use two processes and run in turn, a process of its own a run, from a file to disk:

theirs  the shared peers/hf_tokenize.py on {"prompt", "target"} pairs made beforehand by
        make_pairs.py: from JSON to an Arrow file, tokenised and nothing else. Its own figure
        ("records_per_second") leaves out loading the JSON.
ours    `toque prepare`. With --input pairs, the same file of pairs: the same work (and hashes, a
        split, duplicates looked for). With --input recipes, the raw recipe file: recipes are
        parsed, cleaned, scored and labelled too, which the other side does not do.

The ratio is of records a second from end to end; `ratio_of_processor_seconds` and
`ratio_to_map_alone` (their own figure) stand in the details. Quality: `--check-all` compares the
stored ids of every record with the `tokenizers` library's on the text that was stored; without it,
of 2,000 records. One that differs voids the ratio.
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
    """One `toque prepare` of all records."""
    store = folder / f"store-{number}"
    model, data = {"start_from": "scratch"}, {"store": str(store)}
    config = peers.write_config(folder, family, source, model=model, data=data)
    peers.toque("prepare", config)
    return {"records": json.loads((store / "manifest.json").read_text())["records"]["read"]}


def theirs(family: str, pairs: Path) -> dict[str, Any]:
    """One hf_tokenize.py."""
    return peers.last_json(peers.peer("hf_tokenize.py", pairs, peers.tokenizer_folder(family), 2))


def ids_differ(store_folder: Path, *, most: int) -> dict[str, int]:
    """Rows whose ids are not the `tokenizers` library's for the text that was read.

    The source is read again by the reader that `prepare` used; its examples are the store's rows
    in order, duplicates included.
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
    # Pairs are read by their columns, which the recorded name ends with; recipes by none.
    reader = reader_for(json.loads(source.reader.partition("pairs=")[2] or "{}"))
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


def measure(a: argparse.Namespace) -> harness.Result:
    """The pairs, and the two other ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = peers.write_pairs(folder / "pairs.jsonl", a.records)
        source = pairs if a.input == "pairs" else peers.shared(peers.RECIPES)

        def quality(*_: object) -> dict[str, Any]:
            found = ids_differ(folder / "store-0", most=peers.ALL if a.check_all else 2000)
            same = found["differ"] == 0 and found["rows"] == found["rows_in_store"]
            return {"passes": same, **found}

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
    """The command line."""
    p.add_argument("--family", choices=("gpt2", "t5"), default="t5")
    p.add_argument("--input", choices=("pairs", "recipes"), default="pairs")
    p.add_argument("--records", type=int, default=20_000, help="pairs to prepare; there are 67,977")
    p.add_argument("--pairs", type=int, default=2)
    p.add_argument("--check-all", action="store_true")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
