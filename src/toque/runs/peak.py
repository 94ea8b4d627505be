"""Peak speed of a device in dense matmuls, for model FLOPs utilisation.

For known GPUs, the manufacturer states the 16-bit peak. Any other peak is measured in the run's
precision and with the shapes of the model's weights, because both can change the peak by several
times.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from toque.hardware.cards import card_of_device
from toque.hardware.onednn import onednn_is_faster, onednn_linear

_KINDS: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_MEASURE_SECONDS: Final = 0.2
_MIN_ROUNDS: Final = 2
"""Minimum number of rounds per shape. The first round loads and chooses kernels."""
_MIN_TOKENS: Final = 512
_MAX_TOKENS: Final = 4096
_FLOPS_PER_ROUND: Final = 2e10
"""FLOPs per round. They limit the number of tokens for large matrices, such as the output head."""
Products = Mapping[tuple[int, int], float]
"""FLOPs of matmuls by the weight's (in, out) size, as returned by `models.flops.flops_by_shape`."""


@dataclass(frozen=True)
class Peak:
    """Floating-point operations per second, and the origin of this number."""

    flops_per_second: float
    origin: str

    @property
    def too_low_message(self) -> str:
        """Message to print instead of a utilisation over 100 %."""
        message = f"the updates are faster than the peak speed of this machine ({self.origin})"
        if self.origin.startswith("measured"):
            return (
                f"{message}. Other programs probably slowed the measurement. End them before the "
                "next session, which measures again"
            )
        return f"{message}. This peak belongs to a slower device"

    def of_ranks(self, ranks: int) -> Peak:
        """Return the peak of all ranks together. Each rank has a device."""
        if ranks == 1:
            return self
        rate = self.flops_per_second
        return Peak(rate * ranks, f"{ranks} ranks of {rate:.3g}; {self.origin}")


def peak_of(device: torch.device, dtype: torch.dtype, products: Products) -> Peak:
    """Look up the stated 16-bit peak of a known GPU. Measure any other peak in about 0.2 s."""
    if device.type == "cuda" and dtype in _KINDS:
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
    """Measure the FLOP/s of a model's matmuls: the forward pass and both gradients.

    Each shape contributes the time of its fastest round.

    Args:
        device: Device to measure.
        dtype: Number format of the matrices.
        products: FLOPs of the matmuls by shape.
        seconds: Time for all measurements, 0.2 by default. Each shape has at least two rounds.
    """
    total_seconds = _MEASURE_SECONDS if seconds is None else seconds
    seconds_per_shape = total_seconds / len(products)
    computing_seconds = sum(
        flops / _measure_rate(shape, device, dtype, seconds=seconds_per_shape)
        for shape, flops in products.items()
    )
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    kind = str(dtype).removeprefix("torch.")
    origin = f"measured in {kind}, matmuls of {len(products)} shapes{threads}"
    return Peak(sum(products.values()) / computing_seconds, origin)


def _measure_rate(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, *, seconds: float
) -> float:
    """Measure the FLOP/s of one layer's matmuls: y = x W', and the gradients of x and W."""
    n_in, n_out = shape
    # Three matmuls, each with a multiplication and an addition per weight.
    flops_per_token = 6 * n_in * n_out
    n = int(min(_MAX_TOKENS, max(_MIN_TOKENS, _FLOPS_PER_ROUND / flops_per_token)))
    x = torch.randn(n, n_in, dtype=dtype, device=device)
    w = torch.randn(n_out, n_in, dtype=dtype, device=device)
    dy = torch.randn(n, n_out, dtype=dtype, device=device)
    uses_onednn = device.type == "cpu" and dtype == torch.float32 and onednn_is_faster()

    best = float("inf")
    rounds = 0
    end = time.perf_counter() + seconds
    while rounds < _MIN_ROUNDS or time.perf_counter() < end:
        started = time.perf_counter()
        if uses_onednn:
            _ = (
                onednn_linear(x, w),
                onednn_linear(dy, w.t()),
                onednn_linear(dy.t(), x.t()),
            )
        else:
            _ = x @ w.t(), dy @ w, dy.t() @ x
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
        rounds += 1
    return n * flops_per_token / best
