"""Worst batch, the one that takes most memory and time: full rows of the longest examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toque.batch import Batch, DecoderBatch, EncoderDecoderBatch


@dataclass(frozen=True)
class WorstBatch:
    """Makes worst batches without reading data; every token has loss.

    Args:
        source: tokens of a row's source side; 0 for a decoder-only model.
        target: tokens of its target side, or of the whole row.
        longest_source: tokens of the longest example's source.
        longest_target: of its target, or of the whole example.
        vocab_size: token ids are below it.
    """

    source: int
    target: int
    longest_source: int
    longest_target: int
    vocab_size: int

    def __call__(self, rows: int) -> Batch:
        """A batch of `rows` rows, without padding.

        >>> WorstBatch(0, 5, 0, 3, 99)(1).segments.tolist()
        [[1, 1, 2, 2, 2]]
        """
        examples = -(-self.target // max(1, self.longest_target))
        if self.source:
            examples = max(examples, -(-self.source // max(1, self.longest_source)))
        ids = tuple(tuple(range(examples)) for _ in range(rows))
        targets, positions = _segments(self.target, examples)
        tokens = (torch.arange(self.target) % self.vocab_size).expand(rows, -1).contiguous()
        segments = targets.expand(rows, -1).contiguous()
        if not self.source:
            places = positions.expand(rows, -1).contiguous()
            return DecoderBatch(tokens.clone(), ids, tokens, segments, places)
        sources, _ = _segments(self.source, examples)
        source = (torch.arange(self.source) % self.vocab_size).expand(rows, -1).contiguous()
        own = sources.expand(rows, -1).contiguous()
        return EncoderDecoderBatch(tokens.clone(), ids, source, own, tokens, segments)


def _segments(length: int, examples: int) -> tuple[Tensor, Tensor]:
    """[length] segment numbers from 1, as equal as can be, and positions within each."""
    at = torch.arange(length)
    numbers = at * examples // length
    starts = -(-numbers * length // examples)
    return (numbers + 1).int(), at - starts
