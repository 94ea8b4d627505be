"""The output head's loss and slopes in bfloat16 on a CPU: products in 16 bits, softmax in float32.

Letters: C rows of a chunk, D hidden size, V vocabulary, P the vocabulary padded.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from toque.models.forward.bf16_linear import padded_length

CHUNKS: Final = 4
"""A chunk of bfloat16 logits is so many times one of float32 logits and their gradient.

It takes as many bytes as both, because the softmax's float32 block is small. The products of 1,344
rows with GPT-2's head reach 770 GFLOP/s where those of 672 reach 720 (two Zen 5 cores), and the
head's gradient, which each chunk adds to, is read and written less often.
"""
_BLOCK_ELEMENTS: Final = 1 << 21
"""Elements of the softmax's float32 block: 8 MiB, which a cache keeps; 64 MiB take longer."""
_COLUMNS: Final = 4096
"""Columns of the slopes in one product with the matrix; 32,128 at once are a seventh slower."""
_TINY: Final = 1e-30


def even_chunks(n: int, usual: int) -> int:
    """Rows of a chunk when `n` are divided evenly; at most a quarter more than `usual`.

    A last chunk of few rows would cost a pass over the whole gradient of the weight for next to no
    products.

    >>> even_chunks(2272, 2176), even_chunks(2272, 1344), even_chunks(5, 1344)
    (2272, 1136, 5)
    """
    chunks = max(1, -(-n // (usual + usual // 4)))
    return max(1, -(-n // chunks))


def loss_and_slopes(
    chunk: Tensor,
    matrix: Tensor,
    targets: Tensor,
    products: Tensor,
    *,
    bias: Tensor | None,
    vocabulary: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of a chunk, and its gradient by the logits: softmax minus one at the target.

    Args:
        chunk: [C, D] bfloat16, the head's inputs.
        matrix: [P, D] bfloat16; rows from V on are zero.
        targets: [C] int64.
        products: [at least `padded_length(C)`, P] bfloat16, overwritten.
        bias: [V] or None.
        vocabulary: V.

    Returns:
        [] float32, the sum in nats; [R, D] the chunk with zeros below, as many rows as the slopes;
        [R, P] the slopes in `products`, zero below the chunk's own and beside the vocabulary.
    """
    n = len(chunk)
    padded = functional.pad(chunk, (0, 0, 0, padded_length(n) - n))
    slopes = torch.mm(padded, matrix.T, out=products[: len(padded)])
    slopes[n:] = 0.0
    slopes[:, vocabulary:] = 0.0
    loss = torch.zeros((), dtype=torch.float32)
    rows = max(1, _BLOCK_ELEMENTS // vocabulary)
    block = torch.empty(min(rows, n), vocabulary, dtype=torch.float32)
    parts = (torch.split(tensor, rows) for tensor in (slopes[:n, :vocabulary], targets))
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


def input_gradient(slopes: Tensor, matrix: Tensor) -> Tensor:
    """`slopes @ matrix`, [R, P] and [P, D] to [R, D] float32."""
    parts = (torch.split(slopes, _COLUMNS, 1), torch.split(matrix, _COLUMNS))
    total = slopes.new_empty(len(slopes), matrix.shape[1], dtype=torch.float32)
    for i, (slope, rows) in enumerate(zip(*parts, strict=True)):
        add_in_pieces(total, torch.mm(slope, rows), first=i == 0)
    return total


def add_in_pieces(total: Tensor, part: Tensor, *, first: bool) -> None:
    """`total += part`, float32 and bfloat16 of one shape; the first part sets it.

    By pieces that a cache keeps: torch would first copy all of `part` to float32, for GPT-2's head
    77 MB of fresh memory, whose first touch takes longer than the sum.
    """
    rows = max(1, _BLOCK_ELEMENTS // total.shape[1])
    for whole, piece in zip(torch.split(total, rows), torch.split(part, rows), strict=True):
        if first:
            whole.copy_(piece)
        else:
            whole.add_(piece)


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
