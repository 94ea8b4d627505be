"""The output head's loss and slopes in bfloat16 on a CPU: products in 16 bits, softmax in float32.

Letters: C rows of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from toque.models.forward.bf16.weights import padded_length

CHUNKS = 4
"""A chunk has so many times the rows it has in float32.

The logits of both take as many bytes: in 16 bits half as many a row, and no second tensor beside
them but a block's. The head's gradient, which each chunk adds to, is read and written less often.
"""
_BLOCK_ELEMENTS = 1 << 21
"""Logits whose softmax is computed at once: 8 MiB in float32, so that a CPU's caches keep them.

1,088 rows of 32,100 on two cores with 32 MiB take 18 ms, in two blocks 39. Far smaller blocks wait
for all threads too often, which is slow beside other programs.
"""
_TINY = 1e-30


def loss_and_slopes(
    chunk: Tensor, matrix: Tensor, targets: Tensor, products: Tensor, *, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of a chunk, and its gradient by the logits: softmax minus one at the target.

    Args:
        chunk: [C, D] bfloat16, the head's inputs.
        matrix: [V, D] bfloat16.
        targets: [C] int64.
        products: [at least `padded_length(C)`, V] bfloat16, overwritten.
        bias: [V] or None.

    Returns:
        [] float32, the sum in nats; [P, D] the chunk with zeros below, as many rows as the slopes;
        [P, V] the slopes in `products`, zero below the chunk's own.
    """
    n = len(chunk)
    padded = functional.pad(chunk, (0, 0, 0, padded_length(n) - n))
    slopes = torch.mm(padded, matrix.T, out=products[: len(padded)])
    slopes[n:] = 0.0
    nats = torch.empty(n, dtype=torch.float32)
    rows = max(1, _BLOCK_ELEMENTS // len(matrix))
    block = torch.empty(min(rows, n), len(matrix), dtype=torch.float32)
    parts = (torch.split(tensor, rows) for tensor in (slopes[:n], targets, nats))
    for raw, chosen, lost in zip(*parts, strict=True):
        logits = block[: len(raw)].copy_(raw)
        if bias is not None:
            logits += bias
        column = chosen[:, None]
        # In place: the kernel is done with a row's logits when it writes the row.
        shares = torch.softmax(logits, 1, out=logits)
        picked = shares.gather(1, column)
        lost.copy_(_nats(picked.squeeze(1), raw, column, bias))
        raw.copy_(shares.scatter_(1, column, picked - 1.0))
    return nats.sum(), padded, slopes


def _nats(shares: Tensor, raw: Tensor, column: Tensor, bias: Tensor | None) -> Tensor:
    """-log of the targets' shares [C]; from the logits again where a share is next to nothing."""
    nats = -shares.log()
    lost = (shares < _TINY).nonzero().squeeze(1)
    if len(lost):
        logits = raw[lost].float()
        if bias is not None:
            logits += bias
        nats[lost] = -logits.log_softmax(1).gather(1, column[lost]).squeeze(1)
    return nats
