"""bf16 in hardware: the rule by which every `precision: auto` decides."""

from __future__ import annotations

import torch


def has_fast_bf16(device: torch.device) -> bool:
    """True if the device multiplies bf16 natively; elsewhere it is emulated, slower than float32.

    On a CPU these are the instructions of AVX512-BF16 and AMX.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    )
