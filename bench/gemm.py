"""Matrix-product rates of this machine, at a model's shapes, in every precision it trains in.

A utilisation divides a run's operations by the rate in the precision of that run. A machine with
AMX multiplies bf16 several times as fast as float32, so the rate of another precision makes a
utilisation meaningless.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch

from toque.runs.outlined_update import Products, measure_peak

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SECONDS = 0.5


class Rates:
    """Rates in every precision, sampled between pairs: a shared machine's clock goes up and down.

    Args:
        products: The model's matrices and the FLOPs spent in each, the head's among them.
        threads: Of the CPU.
    """

    def __init__(self, products: Products, *, threads: int) -> None:
        torch.set_num_threads(threads)
        self.products = products
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # Nothing trains in fp16 on a CPU, and its products crawl there.
        names = [name for name in DTYPES if name != "fp16" or self.device.type == "cuda"]
        self.sampled: dict[str, list[float]] = {name: [] for name in names}

    def sample(self) -> None:
        """Time every precision now."""
        for name, found in self.sampled.items():
            peak = measure_peak(self.device, DTYPES[name], self.products, seconds=SECONDS)
            found.append(peak.flops_per_second)

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


def products_of_run(config: Any) -> Mapping[tuple[int, int], float]:
    """The products of one token of a prepared run, by its configuration file."""
    from toque.config import load_config
    from toque.training.placement import arithmetic_of
    from toque.workflows.build import build_language_model, build_stream
    from toque.workflows.prepared_store import open_store

    loaded = load_config(config, []).config
    store = open_store(loaded)
    model = build_language_model(loaded, store)
    return arithmetic_of(model, build_stream(loaded, store, model)).products
