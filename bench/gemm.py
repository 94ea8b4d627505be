"""Matrix-product rate of this machine, in the precision of the run that is judged by it.

A utilisation divides a run's operations by this rate. A machine with AMX multiplies bf16 several
times as fast as float32, so the rate of another precision makes a utilisation meaningless.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS = 4096


def rate(
    precision: str, *, width: int, inner: int, device: str = "cpu", seconds: float = 0.5
) -> float:
    """FLOP/s of a feed-forward product on 4,096 tokens, forward and both gradients; the best.

    Args:
        precision: A key of `DTYPES`, as the record of a run names it.
        width: Of the model.
        inner: Of its feed-forward layer.
        device: "cpu" or "cuda".
        seconds: How long to try; at least two rounds.
    """
    made = {"dtype": DTYPES[precision], "device": device}
    x, w = torch.randn(TOKENS, width, **made), torch.randn(inner, width, **made)
    dy = torch.randn(TOKENS, inner, **made)
    flops, best, rounds, end = 3 * 2 * TOKENS * width * inner, 0.0, 0, time.perf_counter() + seconds
    while rounds < 2 or time.perf_counter() < end:
        begun = time.perf_counter()
        _ = x @ w.t(), dy @ w, dy.t() @ x
        if device == "cuda":
            torch.cuda.synchronize()
        best, rounds = max(best, flops / (time.perf_counter() - begun)), rounds + 1
    return best


class Rates:
    """Rates in every precision, sampled between pairs: a shared machine's clock goes up and down.

    Args:
        shape: Arguments of the family's Hugging Face config.
        threads: Of the CPU.
    """

    def __init__(self, shape: dict[str, Any], *, threads: int) -> None:
        torch.set_num_threads(threads)
        self.width = shape.get("d_model") or shape.get("n_embd") or shape["hidden_size"]
        self.inner = shape.get("d_ff") or shape.get("intermediate_size") or 4 * self.width
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        # Nothing trains in fp16 on a CPU, and its products crawl there.
        names = [name for name in DTYPES if name != "fp16" or self.device == "cuda"]
        self.sampled: dict[str, list[float]] = {name: [] for name in names}

    def sample(self) -> None:
        """Time every precision now."""
        for name, found in self.sampled.items():
            found.append(rate(name, width=self.width, inner=self.inner, device=self.device))

    def utilisation(self, flops_per_second: float, precision: str) -> float:
        """Share of the median rate in `precision`."""
        return round(flops_per_second / statistics.median(self.sampled[precision]), 4)

    def gflops(self) -> dict[str, dict[str, float]]:
        """Median and best of each precision, in GFLOP/s."""
        return {
            name: {
                "median": round(statistics.median(found) / 1e9, 1),
                "best": round(max(found) / 1e9, 1),
            }
            for name, found in self.sampled.items()
        }
