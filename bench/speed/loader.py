"""Batches from a store against `datasets` + `DataCollatorForSeq2Seq`.

    python bench/speed/loader.py [--examples 60000] [--pairs 5]   # batches a second, seeking
    python bench/speed/loader.py --store FOLDER                   # open and read a store

Both sides hold the same tokenised cookbook recipes on disk (ours a store, theirs the Arrow file
that `save_to_disk` writes) and give shuffled batches of 64 examples as int64 tensors, padded on
their side, packed on ours, for T5's two sides; one process, one thread, in turn. The ratio is of
batches a second of the wall clock; that of the processor's stands in the details. Seeking: the
time to the first batch at a random position of the epoch; theirs by accelerate's
`skip_first_batches`.

Quality: the tokens of an epoch, counted in the tensors of both sides, must be equal.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import numpy as np
import peers
import psutil

from toque.cooking.cookbook.recipes import write_cookbook
from toque.cooking.schemas.reader import RecipeReader
from toque.data.loader.batch_stream import BatchStream, Step
from toque.data.loader.collate import Layout
from toque.data.loader.epoch_plan import EpochPlan
from toque.data.loader.packing import choose_shape
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.store.token_store import TokenStore
from toque.sources.records import Source
from toque.units import Cursor

BATCH = 64


def stream_of(store: TokenStore) -> BatchStream:
    """Packed T5 batches of 64 examples."""
    rows = store.rows("train")
    source, target = (
        lengths[rows].astype(np.int64) for lengths in (store.prompt_lengths, store.target_lengths)
    )
    sample = np.linspace(0, len(rows) - 1, 2048).astype(np.int64)
    sample = np.unique(np.append(sample, [source.argmax(), target.argmax()]))
    shape = choose_shape(source[sample], target[sample], encoder=True)
    plan = EpochPlan(
        examples=rows,
        source_lengths=source,
        target_lengths=target,
        shape=shape,
        seed=17,
        update_rows=None,
        window=BATCH,
    )
    return BatchStream(
        plan=plan,
        layout=Layout(store, shape=shape, pad_id=0),
        prompt_lengths=store.prompt_lengths,
        target_lengths=store.target_lengths,
    )


def their_loader(store: TokenStore, folder: Path) -> Any:
    """A shuffled DataLoader over the same ids, as the transformers examples write it."""
    import datasets
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq

    rows = store.rows("train").tolist()

    def records() -> Iterator[dict[str, list[int]]]:
        for row in rows:
            prompt = store.prompt(row).tolist()
            yield {
                "input_ids": prompt,
                "attention_mask": [1] * len(prompt),
                "labels": store.target(row).tolist(),
            }

    made = datasets.Dataset.from_generator(records, cache_dir=str(folder / "cache"))
    made.save_to_disk(str(folder / "arrow"))
    data = datasets.load_from_disk(str(folder / "arrow"))
    tokenizer = AutoTokenizer.from_pretrained(peers.tokenizer_folder("t5"))
    collate = DataCollatorForSeq2Seq(tokenizer, padding="longest")
    return DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate, num_workers=0)


def updates_of(stream: BatchStream) -> Iterator[Step]:
    """Updates from the beginning, without end."""
    cursor = Cursor()
    while True:
        step = stream.at(cursor)
        cursor = step.cursor
        yield step


def drawn(batches: Iterator[object], n: int) -> dict[str, int]:
    """Draw `n` batches."""
    return {"batches": sum(1 for _ in islice(batches, n))}


def seeks(stream: BatchStream, loader: Any, rng: random.Random) -> dict[str, Any]:
    """Milliseconds to the first batch at random positions."""
    from accelerate import skip_first_batches

    n_windows = len(stream.plan.examples) // BATCH
    ours = []
    for _ in range(20):
        cursor = Cursor(epoch=rng.randrange(50), window=rng.randrange(n_windows), row=0)
        begun = time.perf_counter()
        stream.at(cursor)
        ours.append(1e3 * (time.perf_counter() - begun))
    position = n_windows // 2
    begun = time.perf_counter()
    next(iter(skip_first_batches(loader, position)))
    return {
        "ours_ms_median": round(statistics.median(ours), 2),
        "ours_ms_worst": round(max(ours), 2),
        "theirs_ms_half_way": round(1e3 * (time.perf_counter() - begun), 1),
    }


def equal_tokens(stream: BatchStream, loader: Any) -> dict[str, int]:
    """Labelled tokens of one epoch on both sides."""
    n_updates = -(-len(stream.plan.examples) // BATCH)
    ours = sum(int((s.batch.labels >= 0).sum()) for s in islice(updates_of(stream), n_updates))
    theirs = sum(int((batch["labels"] >= 0).sum()) for batch in loader)
    return {"ours": ours, "theirs": theirs}


def compared(a: argparse.Namespace, folder: Path) -> harness.Result:
    """Both loaders on a cookbook of `a.examples`."""
    tokenizer = str(peers.tokenizer_folder("t5"))
    cookbook = folder / "cookbook.jsonl"
    write_cookbook(cookbook, a.examples, 3)
    settings = PrepareSettings(family_kind="encoder-decoder", tokenizer=tokenizer, dedup="none")
    source = Source(str(cookbook), RecipeReader())
    store = prepare([source], store=folder / "store", settings=settings).store
    stream, loader = stream_of(store), their_loader(store, folder)
    tokens = equal_tokens(stream, loader)
    result = harness.paired(
        lambda _: drawn(updates_of(stream), 800),
        lambda _: drawn(iter(loader), 100),
        pairs=a.pairs,
        score=lambda run: run.value["batches"] / run.wall,
        quality=lambda *_: {"passes": tokens["ours"] == tokens["theirs"], "tokens": tokens},
    )
    result.details = {
        "examples": len(stream.plan.examples),
        "ratio_of_processor_seconds": result.ratio_by(
            lambda run: run.value["batches"] / run.processor
        ),
        "milliseconds_a_batch": {
            side: round(1e3 * statistics.median(run["wall"] / run["batches"] for run in runs), 3)
            for side, runs in (("ours", result.ours), ("theirs", result.theirs))
        },
        "seek": seeks(stream, loader, random.Random(5)),
    }
    return result


def read_whole(folder: Path) -> dict[str, Any]:
    """Opening a store, and what reading every training batch of it adds to this process."""
    opened = harness.timed(lambda: TokenStore.open(folder))
    store = opened.value
    stream = stream_of(store)
    steps = updates_of(stream)
    next(steps)
    me = psutil.Process()
    before, own = me.memory_info().rss, private(me)
    begun, n_updates = time.perf_counter(), -(-len(stream.plan.examples) // BATCH)
    largest = own
    for number in range(n_updates - 1):
        next(steps)
        if number % 1000 == 0:
            largest = max(largest, private(me))
    return {
        "examples": store.manifest.examples,
        "open_seconds": round(opened.wall, 3),
        "open_processor_seconds": round(opened.processor, 3),
        "batches": n_updates,
        "batches_per_second": round((n_updates - 1) / (time.perf_counter() - begun), 1),
        "private_growth_mb": round((largest - own) / 1e6, 1),
        "resident_growth_with_page_cache_mb": round((me.memory_info().rss - before) / 1e6, 1),
    }


def private(process: psutil.Process) -> int:
    """Resident bytes that are this process's own: mapped files are the page cache's."""
    info = process.memory_info()
    return int(info.rss - info.shared)


def measure(a: argparse.Namespace) -> harness.Result:
    """One store alone, or both loaders."""
    if a.store is not None:
        return harness.Result(ours=read_whole(a.store))
    with tempfile.TemporaryDirectory() as name:
        return compared(a, Path(name))


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--examples", type=int, default=10_000)
    p.add_argument("--pairs", type=int, default=3)
    p.add_argument("--store", type=Path, help="only open and read this store")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
