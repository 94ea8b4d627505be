"""Flash attention over examples of any length (Dao 2023, arXiv 2307.08691): no mask, no padding.

PyTorch's own kernel, by the operator that its attention over nested tensors calls. The documented
`torch.nn.attention.varlen` calls it too, but cannot drop attention weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from toque.models.forward.kernels.plan import Runs

DTYPES = (torch.bfloat16, torch.float16)
"""What the kernel computes in."""
LARGEST_HEAD = 256
"""Its largest head; heads are multiples of 8."""


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    *,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """softmax(scale * q @ k.T) @ v within each run; all [tokens, heads, d].

    On a CPU, where there is no such kernel, one run after the other: the same numbers, for tests.
    """
    ends, longest = runs.ends, runs.longest
    if query.device.type == "cpu":
        return _one_by_one(query, key, value, ends, causal=causal, scale=scale, dropout=dropout)
    output: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        query, key, value, ends, ends, longest, longest, dropout, causal, False, scale=scale
    )[0]
    return output


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    lengths = ends.diff().tolist()
    found = []
    for parts in zip(*(torch.split(t, lengths) for t in (query, key, value)), strict=True):
        if len(parts[0]) > 0:
            q, k, v = (part.transpose(0, 1)[None] for part in parts)
            one = functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=scale, dropout_p=dropout, enable_gqa=True
            )
            found.append(one[0].transpose(0, 1))
    return torch.cat(found)
