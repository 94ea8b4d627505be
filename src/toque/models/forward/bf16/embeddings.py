"""Embeddings that share their weight with the head; their gradient holds the rows read alone."""

from __future__ import annotations

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from toque.models.forward.bf16.linear import in_bf16


class TiedEmbedding16(nn.Embedding):
    """`nn.Embedding` whose gradient is added to the head's, row by row, in a bfloat16 forward.

    PyTorch's own gradient is a table of zeros but for the rows that were read, 77 MB of GPT-2's
    vocabulary at a width of 384, which is then added to the head's gradient in full.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        """[...] ids -> [..., D]."""
        # An outline's tensors, which have no memory, cannot be sparse.
        if not in_bf16(self.weight) or isinstance(self.weight, FakeTensor):
            return super().forward(input)
        # The sum with the head's gradient is dense: sparse never leaves the backward pass.
        return functional.embedding(input, self.weight, self.padding_idx, sparse=True)
