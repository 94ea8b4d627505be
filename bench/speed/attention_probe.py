"""Probe of the FlexAttention kernels on this GPU.

    python bench/speed/attention_probe.py [--sizes 32,64,80,128] [--workers 6]

The record has one row per precision and head size, with a bias (T5) and without, always including
dropout. Each row names the options of the chosen kernels, and the reason if the defaults of PyTorch
or all kernels fail. The probe calls the function that a run calls
(`models.forward.flex_attention.kernels_on`), so later runs reuse the compiled kernels if
TORCHINDUCTOR_CACHE_DIR is kept. Progress goes to stderr. Quality: every row has kernels.
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
    """Find the kernels of one combination. Return them and the seconds of the search."""
    import torch

    from toque.models.families import DTYPES
    from toque.models.forward.flex_attention import kernels_on

    begun = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = kernels_on(device, DTYPES[precision], size, biased=biased)
    return {
        "precision": precision,
        "head": size,
        "bias": biased,
        "options": None if kernels.options is None else dict(kernels.options),
        "words": str(kernels),
        "why": kernels.why,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def measure(a: argparse.Namespace) -> harness.Result:
    """Probe every combination in several processes."""
    combinations = list(
        product(a.precisions.split(","), map(int, a.sizes.split(",")), (True, False))
    )  # the most important rows first: the time limit may cut the rest
    result, rows = harness.Result(), []
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # compilers per worker
    with ProcessPoolExecutor(a.workers, mp_context=get_context("spawn")) as pool:
        pending = {
            pool.submit(row, precision, size, biased=biased)
            for precision, size, biased in combinations
        }
        for done in as_completed(pending):
            rows.append(done.result())
            harness.note(json.dumps(rows[-1]))
    result.ours = sorted(rows, key=lambda r: (r["precision"], r["head"], r["bias"]))
    failed = [f"{r['precision']} {r['head']}" for r in rows if r["options"] is None]
    if failed:
        result.void(f"no kernel works for {', '.join(failed)}")
    return result


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--precisions", default="bf16,fp16,float32")
    p.add_argument("--sizes", default="64,128,32,80", help="head sizes")
    p.add_argument("--workers", type=int, default=2, help="parallel processes")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
