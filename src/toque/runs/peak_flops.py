"""Peak FLOP/s for model FLOPs utilisation: from data sheets for known GPUs, else measured.

The peak and its origin are recorded beside every utilisation, because a wrong peak is the most
common cause of a wrong utilisation: a machine with 16-bit units multiplies bfloat16 several times
as fast as float32, and a small matrix slower than a large one. So it is measured in the precision
of the run, at the model's own shapes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from toque.hardware.cards import card_of_device
from toque.models.onednn import onednn_is_faster, product

_KINDS: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_MEASURE_SECONDS: Final = 0.2
_ROUNDS: Final = 2
"""Fewest rounds of each shape: the first loads and chooses kernels."""
_FEW_TOKENS, _MANY_TOKENS = 512, 4096
_FLOPS_OF_A_ROUND: Final = 2e10
"""Fewer tokens for large matrices, such as the output head's, so that a round stays short."""
Products = Mapping[tuple[int, int], float]
"""FLOPs spent in products with matrices, by their (in, out), as `models.flops.products_of` has."""


@dataclass(frozen=True)
class Peak:
    """Floating-point operations per second, and where the figure comes from."""

    flops_per_second: float
    origin: str

    @property
    def too_low(self) -> str:
        """Sentence in place of a use over 100 %: the peak was too low."""
        measured = self.origin.startswith("measured")
        why = "measured while other programs computed" if measured else "stated for another device"
        return f"the peak is too low, as if {why} ({self.origin})"

    def of_ranks(self, ranks: int) -> Peak:
        """Peak of all ranks together, each on a device of its own."""
        if ranks == 1:
            return self
        rate = self.flops_per_second
        return Peak(rate * ranks, f"{ranks} ranks of {rate:.3g}; {self.origin}")


def peak_of(device: torch.device, dtype: torch.dtype, products: Products) -> Peak:
    """The peak of dense matrix products in `dtype` on `device`.

    Stated for known GPUs in 16 bits; otherwise measured, which takes about a fifth of a second.
    """
    if device.type == "cuda" and dtype in {torch.bfloat16, torch.float16}:
        name = torch.cuda.get_device_name(device)
        card = card_of_device(name)
        rate = card.flops_per_second.get(_KINDS[dtype]) if card is not None else None
        if rate is not None:
            return Peak(rate, f"stated for {name}, dense 16-bit")
    return measure_peak(device, dtype, products)


def measure_peak(
    device: torch.device,
    dtype: torch.dtype,
    products: Products,
    *,
    seconds: float | None = None,
) -> Peak:
    """The rate of `products` one after another, forward and both gradients, each at its best.

    Args:
        device: where.
        dtype: of the matrices.
        products: those of the model; a shape with more FLOPs weighs more.
        seconds: how long to try, all together, a fifth of one by default; at least two rounds each.
    """
    share = (_MEASURE_SECONDS if seconds is None else seconds) / len(products)
    needed = sum(
        flops / _rate(shape, device, dtype, seconds=share) for shape, flops in products.items()
    )
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    kind = str(dtype).removeprefix("torch.")
    origin = f"measured in {kind}, products of {len(products)} shapes{threads}"
    return Peak(sum(products.values()) / needed, origin)


def _rate(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, *, seconds: float
) -> float:
    """FLOP/s of one layer's products: y = x W', and the gradients of x and W."""
    n_in, n_out = shape
    of_a_token = 6 * n_in * n_out
    n = int(min(_MANY_TOKENS, max(_FEW_TOKENS, _FLOPS_OF_A_ROUND / of_a_token)))
    x = torch.randn(n, n_in, dtype=dtype, device=device)
    w = torch.randn(n_out, n_in, dtype=dtype, device=device)
    dy = torch.randn(n, n_out, dtype=dtype, device=device)
    by_onednn = device.type == "cpu" and dtype == torch.float32 and onednn_is_faster()
    best, rounds, end = float("inf"), 0, time.perf_counter() + seconds
    while rounds < _ROUNDS or time.perf_counter() < end:
        begun = time.perf_counter()
        if by_onednn:
            _ = product(x, w), product(dy, w.t()), product(dy.t(), x.t())
        else:
            _ = x @ w.t(), dy @ w, dy.t() @ x
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best, rounds = min(best, time.perf_counter() - begun), rounds + 1
    return n * of_a_token / best
