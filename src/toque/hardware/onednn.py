"""oneDNN's float32 matmuls, for processors on which torch's default library (MKL) is slow.

On two AMD Zen 5 cores, MKL reaches 150 to 190 GFLOP/s and oneDNN 340 to 430 GFLOP/s, both with
AVX-512 (lab/notes.md). The libraries add in different orders, so results differ in the last bits.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_MAX_KERNELS: Final = "256"
_KERNEL_CACHES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables for oneDNN's cache of compiled matmuls, and for torch's cache above it."""
EMULATED_BF16: Final = (
    "This {device} has no bf16 in hardware. It emulates bf16 matmuls, which are slower than "
    "float32. Use precision auto for the fastest precision."
)
# The packed order is fastest for this number of rows, and works for any number.
_USUAL_ROWS: Final = 64


def has_fast_bf16(device: torch.device) -> bool:
    """True if the device multiplies bf16 natively: a GPU, or a CPU with AVX512-BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    )


def has_vnni() -> bool:
    """True for a CPU with AVX512-VNNI, which multiplies int8 natively and exactly."""
    return bool(torch.cpu._is_vnni_supported())  # noqa: SLF001  # it has no public name


@cache
def onednn_is_faster() -> bool:
    """True on AVX-512 processors that are not Intel's, where oneDNN is faster than MKL in float32.

    This is a rule and not a measurement, so that a machine's load does not change results.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    vendors = (
        line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")
    )
    is_intel = next(vendors, "GenuineIntel") == "GenuineIntel"
    return not is_intel and torch.backends.cpu.get_cpu_capability() == "AVX512"


def keep_fewer_kernels() -> None:
    """Let this process cache 256 compiled matmuls instead of 1,024.

    Call it before the first matmul. oneDNN compiles a matmul for every new size. After some hundred
    updates the default cache uses 0.1 to 0.3 GB, and most of its entries are never used again. With
    128 entries, updates of a small model took 10 % longer (lab/notes.md, 2026-11-23). The user's
    environment variables have precedence. Results do not change.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, _MAX_KERNELS)


def onednn_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `functional.linear` by oneDNN. The weight [out, in] may be packed."""
    if not states.numel():  # oneDNN rejects empty tensors
        zeros = states.new_zeros(*states.shape[:-1], weight.shape[0])
        return zeros if bias is None else zeros + bias
    # torch has no public name for this operator.
    output = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")  # noqa: SLF001
    return cast("Tensor", output)


def pack_weight(weight: Tensor) -> Tensor:
    """Copy a weight [out, in] into the order in which oneDNN reads it."""
    return cast("Tensor", torch.ops.mkldnn._reorder_linear_weight(weight, _USUAL_ROWS))  # noqa: SLF001


class PackedLinear(nn.Module):
    """Linear layer with a copy of a weight [out, in] in any precision, in oneDNN's order or not."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        is_packed: bool,
    ) -> None:
        super().__init__()
        self.dtype, self.is_packed = dtype, is_packed
        rounded = weight.detach().to(dtype).contiguous()
        self.weight = pack_weight(rounded) if is_packed else rounded
        self.bias = None if bias is None else bias.detach().to(dtype)

    def forward(self, states: Tensor) -> Tensor:
        """Map [..., in] to [..., out]. The output has the precision of the input."""
        linear = onednn_linear if self.is_packed else functional.linear
        output = linear(states.to(self.dtype), self.weight, self.bias)
        return output.to(states.dtype)
