"""Defects that no CPU shows, run on the fake card; results are plain Python."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fake_cuda.card import ATEN, fake_card
from toque.models.families import DTYPES
from toque.models.forward.loss import cross_entropy_sum, logits_bytes
from toque.training.runtime import Runtime


class _FirstProduct(TorchDispatchMode):
    """Notes what cuBLAS would read at its first product on the card."""

    seen: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        product = func in (ATEN.mm.default, ATEN.addmm.default)
        if product and self.seen is None and args[0].device.type == "cuda":
            self.seen = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "nothing")
        return func(*args, **(kwargs or {}))


def workspace_at_first_product(*, deterministic: bool) -> str | None:
    """The setting of cuBLAS' workspace at the first product after a device was chosen."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    first = _FirstProduct()
    with fake_card(), first:
        Runtime.detect(precision="bf16", deterministic=deterministic)
        torch.empty(2, 2, device="cuda") @ torch.empty(2, 2, device="cuda")
    return first.seen


def bytes_of_a_logit(
    precision: str, *, smoothing: float, bias: bool
) -> tuple[float, float]:
    """Bytes that a logit of three chunks takes at most in the head, and those that are counted."""
    rows, vocabulary, width = 512, 32_128, 2
    with fake_card() as card:
        hidden = torch.empty(3 * rows, width, device="cuda", requires_grad=True)
        weight = torch.empty(vocabulary, width, device="cuda", requires_grad=True)
        added = (
            torch.empty(vocabulary, device="cuda", requires_grad=True) if bias else None
        )
        labels = torch.empty(3 * rows, dtype=torch.int64, device="cuda")
        card.peak = before = card.now
        with torch.autocast("cuda", DTYPES[precision], enabled=precision != "float32"):
            cross_entropy_sum(
                hidden,
                weight,
                labels,
                bias=added,
                smoothing=smoothing,
                chunk_rows=rows,
                n_labels=len(labels),
            )
        counted = logits_bytes(vocabulary, "cuda", positions=rows)
        return (card.peak - before) / (rows * vocabulary), counted / (rows * vocabulary)


def said_of_a_shared_card(free: int) -> tuple[str, ...]:
    """What a run says of a card of 24 GiB, of which others hold all but `free` bytes."""
    with (
        fake_card(),
        patch.object(torch.cuda, "mem_get_info", lambda *_: (free, 24 << 30)),
    ):
        return Runtime.detect(precision="bf16").warnings


def float32_products() -> tuple[str, dict[str, str]]:
    """How a float32 run multiplies on a card, and what its checkpoints say of that."""
    with fake_card():
        runtime = Runtime.detect(precision="float32")
        return torch.get_float32_matmul_precision(), runtime.numerics
