"""Peak FLOP/s for model FLOPs utilisation: from data sheets for known GPUs, else measured.

The peak and its origin are recorded beside every utilisation, because a wrong peak is the most
common cause of a wrong utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

# Dense bfloat16 with float32 accumulation, TFLOP/s, from the makers' data sheets. The first entry
# found in the device's name wins, so longer names come first.
_STATED_TFLOPS: Final = (
    ("B200", 2250.0),
    ("H200", 989.5),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.5),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)
_MEASURE_SECONDS: Final = 0.2


@dataclass(frozen=True)
class Peak:
    """Floating-point operations per second, and where the figure comes from."""

    flops_per_second: float
    origin: str


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """The peak of dense matrix products in `dtype` on `device`.

    Stated for known GPUs in 16 bits; otherwise measured, which takes about a fifth of a second.
    """
    if device.type == "cuda" and dtype in {torch.bfloat16, torch.float16}:
        name = torch.cuda.get_device_name(device)
        for known, tflops in _STATED_TFLOPS:
            if known in name:
                return Peak(tflops * 1e12, f"stated for {name}, dense 16-bit")
    return measure_peak(device, dtype)


def measure_peak(
    device: torch.device, dtype: torch.dtype, *, seconds: float = _MEASURE_SECONDS
) -> Peak:
    """The best rate of a square matrix product within `seconds`."""
    from torch.utils.benchmark import Timer  # loaded only where the peak is not known

    size, n_threads = 8192 if device.type == "cuda" else 768, torch.get_num_threads()
    a = torch.full((size, size), 0.5, dtype=dtype, device=device)
    b = torch.full((size, size), 0.25, dtype=dtype, device=device)
    product = {"a": a, "b": b, "out": torch.empty_like(a), "mm": torch.mm}
    timer = Timer("mm(a, b, out=out)", globals=product, num_threads=n_threads)
    best = min(timer.blocked_autorange(min_run_time=seconds).times)
    threads = f", {n_threads} threads" if device.type == "cpu" else ""
    kind = str(dtype).removeprefix("torch.")
    return Peak(2.0 * size**3 / best, f"measured, {size}³ product in {kind}{threads}")
