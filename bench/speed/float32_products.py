"""Float32 matrix products by oneDNN against torch's own library, at a layer's shapes.

    python bench/speed/float32_products.py [--rows 1,32,1024] [--pairs 5]

For every number of rows and matrix: the product of a forward pass both ways, with the weight as it
lies and packed for oneDNN, and both products of a backward pass. Each way is called for a while in
turn with the others; the rate is its best. The record's ratio is that of all forward products.

Quality: both ways give the same numbers to a relative 1e-4 of the largest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import torch
from torch import Tensor
from torch.nn import functional

from toque.models.onednn import onednn_is_faster, packed, product

SHAPES = ((384, 384), (384, 1024), (512, 512), (512, 2048), (2048, 512))
"""Inputs and outputs of the layers."""


def gflops(work: Callable[[], Tensor], flops: float, seconds: float) -> float:
    """The best rate of a call within some seconds."""
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return flops / best / 1e9


def ways_of(rows: int, n_in: int, n_out: int) -> dict[str, Callable[[], Tensor]]:
    """The products of one layer, by name: library and which."""
    x, w, dy = torch.randn(rows, n_in), torch.randn(n_out, n_in), torch.randn(rows, n_out)
    laid = packed(w, rows)
    return {
        "torch forward": lambda: functional.linear(x, w),
        "oneDNN forward": lambda: product(x, w),
        "oneDNN forward, packed": lambda: product(x, laid),
        "torch input gradient": lambda: dy @ w,
        "oneDNN input gradient": lambda: product(dy, w.T),
        "torch weight gradient": lambda: dy.T @ x,
        "oneDNN weight gradient": lambda: product(dy.T, x.T),
    }


def agree(ways: dict[str, Callable[[], Tensor]]) -> bool:
    """Whether each product is the same by either library."""
    for what in ("forward", "input gradient", "weight gradient"):
        exact, other = ways[f"torch {what}"](), ways[f"oneDNN {what}"]()
        if float((exact - other).abs().max()) > 1e-4 * float(exact.abs().max()):
            return False
    return True


def measure(a: argparse.Namespace) -> harness.Result:
    """Rates of all ways, in turn, and the ratio of the forward products' times."""
    torch.set_num_threads(a.threads)
    rates: dict[str, dict[str, list[float]]] = {}
    same = True

    def whole(which: str) -> Callable[[int], dict[str, Any]]:
        def run(_: int) -> dict[str, Any]:
            nonlocal same
            seconds = 0.0
            for rows in a.rows:
                for n_in, n_out in SHAPES:
                    flops, ways = 2.0 * rows * n_in * n_out, ways_of(rows, n_in, n_out)
                    same = same and agree(ways)
                    found = rates.setdefault(f"{rows} x {n_in} x {n_out}", {})
                    for name, work in ways.items():
                        if name.startswith(which):
                            found.setdefault(name, []).append(gflops(work, flops, a.seconds))
                    seconds += flops / found[f"{which} forward"][-1] / 1e9
            return {"forward_ms": round(seconds * 1e3, 3)}

        return run

    def speed(run: harness.Run) -> float:
        return 1.0 / float(run.value["forward_ms"])

    with torch.inference_mode():
        result = harness.paired(whole("oneDNN"), whole("torch"), pairs=a.pairs, score=speed)
    result.quality = {"passes": same}
    if not same:
        result.void("the products differ")
    result.details = {
        "rule": onednn_is_faster(),
        "gflops": {
            shape: {name: round(max(found)) for name, found in ways.items()}
            for shape, ways in rates.items()
        },
    }
    return result


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument(
        "--rows", type=lambda text: [int(n) for n in text.split(",")], default=[32, 1024]
    )
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--seconds", type=float, default=0.1, help="for each way of each product")
    p.add_argument("--threads", type=int, default=2)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
