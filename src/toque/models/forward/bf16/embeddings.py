"""Embeddings that share their weight with the head; their gradient holds the rows read alone."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from toque.models.forward.bf16.linear import in_bf16


class TiedEmbedding16(nn.Embedding):
    """`nn.Embedding` whose gradient is added to the head's, row by row, in a bfloat16 forward.

    PyTorch's own gradient is a table of zeros but for the rows that were read. It is made for
    every look-up, a T5's two in each micro-batch, and then added to the head's gradient in full.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        """[...] ids -> [..., D]."""
        if not in_bf16(self.weight) or self.max_norm is not None:
            return super().forward(input)
        # The sum with the head's gradient is dense: sparse never leaves the backward pass.
        return functional.embedding(input, self.weight, self.padding_idx, sparse=True)
