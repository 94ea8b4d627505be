"""What the choice of attention finds on this card: FlexAttention's kernels, tried one by one.

    python bench/speed/attention_probe.py [--sizes 32,64,80,128] [--workers 6]

A row for every precision, size of heads, with a bias (T5) and without, dropout's always among them:
the options of the kernels that are taken, and why torch's own are not, or why none works.
What is asked is what a run asks (`models.forward.flex_attention.kernels_on`), so its kernels are
compiled here, and where TORCHINDUCTOR_CACHE_DIR is kept they are there for the runs that follow.
Rows are told on stderr as they come. Quality: every row has kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness


def row(precision: str, size: int, *, biased: bool) -> dict[str, Any]:
    """One row: kernels taken, and seconds that finding and compiling them took."""
    import torch

    from toque.models.families import DTYPES
    from toque.models.forward.flex_attention import kernels_on

    begun = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = kernels_on(device, DTYPES[precision], size, biased=biased)
    return {
        "precision": precision,
        "head": size,
        "bias": biased,
        "options": None if found.options is None else dict(found.options),
        "words": str(found),
        "why": found.why,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def measure(a: argparse.Namespace) -> harness.Result:
    """Every row, some at a time: most of it is compiling."""
    asked = list(
        product(a.precisions.split(","), map(int, a.sizes.split(",")), (True, False))
    )  # the rows that a cut loses last come first
    result, rows = harness.Result(), []
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # each worker has compilers, too
    with ProcessPoolExecutor(a.workers, mp_context=get_context("spawn")) as pool:
        waited = {
            pool.submit(row, precision, size, biased=biased) for precision, size, biased in asked
        }
        for done in as_completed(waited):
            rows.append(done.result())
            harness.note(json.dumps(rows[-1]))
    result.ours = sorted(rows, key=lambda r: (r["precision"], r["head"], r["bias"]))
    none = [f"{r['precision']} {r['head']}" for r in rows if r["options"] is None]
    if none:
        result.void(f"no kernel works for {', '.join(none)}")
    return result


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--precisions", default="bf16,fp16,float32")
    p.add_argument("--sizes", default="64,128,32,80", help="columns of a head")
    p.add_argument("--workers", type=int, default=2, help="rows at once")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
