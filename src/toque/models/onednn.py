"""oneDNN's float32 products on processors that MKL, torch's library for them, does not know well.

On AMD's Zen 5 MKL reaches 150 to 190 GFLOP/s on two cores and oneDNN 340 to 430 (both AVX-512,
lab/notes.md). Sums run in another order, so the last bit differs.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_KERNELS: Final = "256"
_KERNEL_CACHES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's cache of compiled products and torch's above it."""
EMULATED_BF16: Final = (
    "This {device} has no bf16 in hardware: its products are emulated, which is slower than "
    "float32. The precision auto takes what is fast."
)
_USUAL_ROWS: Final = 64  # rows of a product that the packed order is chosen for; any number runs


def has_fast_bf16(device: torch.device) -> bool:
    """True if the device multiplies bf16 natively (a CPU: AVX512-BF16, AMX); else it is slower."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    )


@cache
def onednn_is_faster() -> bool:
    """True if float32 products go by oneDNN, by rule: an AVX-512 processor that is not Intel's."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    makers = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    known = next(makers, "GenuineIntel") != "GenuineIntel"
    return known and torch.backends.cpu.get_cpu_capability() == "AVX512"


def keep_fewer_kernels() -> None:
    """Let this process keep 256 compiled products, not 1,024, unless its environment says a number.

    oneDNN compiles a product for every size it meets: after some hundred updates the default holds
    0.1 to 0.3 GB that seldom serve again; with 128 a small model's updates took a tenth longer
    (lab/notes.md, 2026-11-23). To be called before the first product. Results do not change.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, _KERNELS)


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear` by oneDNN: [..., in] times [out, in], plain or packed, plus [out]."""
    if not states.numel():  # which oneDNN refuses
        zeros = states.new_zeros(*states.shape[:-1], weight.shape[0])
        return zeros if bias is None else zeros + bias
    # torch has no public name for it.
    found = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")  # noqa: SLF001
    return cast("Tensor", found)


def packed(weight: Tensor, usual_rows: int) -> Tensor:
    """A weight [out, in] in the order in which oneDNN reads it, best for so many rows of states."""
    return cast("Tensor", torch.ops.mkldnn._reorder_linear_weight(weight, usual_rows))  # noqa: SLF001


class PackedLinear(nn.Module):
    """A linear layer beside a weight [out, in], in its own precision, packed for oneDNN or not."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, is_packed: bool
    ) -> None:
        super().__init__()
        self.dtype, self.is_packed = dtype, is_packed
        rounded = weight.detach().to(dtype).contiguous()
        self.weight = packed(rounded, _USUAL_ROWS) if is_packed else rounded
        self.bias = None if bias is None else bias.detach().to(dtype)

    def forward(self, states: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the precision of the input."""
        multiplied = product if self.is_packed else functional.linear
        return multiplied(states.to(self.dtype), self.weight, self.bias).to(states.dtype)
