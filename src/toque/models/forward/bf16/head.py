"""The output head's loss and slopes in bfloat16 on a CPU: products in 16 bits, softmax in float32.

Letters: C rows of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from toque.models.forward.bf16.weights import padded_length

CHUNKS = 2
"""A chunk of products holds so many blocks of softmax rows.

In 16 bits a row's logits take half the room, and the head's gradient, which each chunk adds to, is
read and written half as often. As many bytes as one block of both in float32.
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
    loss = torch.zeros((), dtype=torch.float32)
    rows = -(-len(products) // CHUNKS)
    block = torch.empty(min(rows, n), len(matrix), dtype=torch.float32)
    parts = (torch.split(tensor, rows) for tensor in (slopes[:n], targets))
    for raw, chosen in zip(*parts, strict=True):
        logits = block[: len(raw)].copy_(raw)
        if bias is not None:
            logits += bias
        column = chosen[:, None]
        # In place: the kernel is done with a row's logits when it writes the row.
        shares = torch.softmax(logits, 1, out=logits)
        picked = shares.gather(1, column)
        loss += _nats(picked.squeeze(1), raw, column, bias).sum()
        raw.copy_(shares.scatter_(1, column, picked - 1.0))
    return loss, padded, slopes


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
