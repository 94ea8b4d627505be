"""Batches of random tokens, every row full, for benchmarks that need no data."""

from __future__ import annotations

import torch

from toque.batch import Batch, DecoderBatch, EncoderDecoderBatch


def batch_of(family: str, *, rows: int, source: int, target: int, vocabulary: int) -> Batch:
    """One example a row, every target position with a label; `source` counts for T5 alone."""
    made = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, vocabulary, (rows, target), generator=made)
    ids = tuple((i,) for i in range(rows))
    labels, segments = tokens.roll(-1, 1), torch.ones_like(tokens, dtype=torch.int32)
    if family == "t5":
        prompt = torch.randint(2, vocabulary, (rows, source), generator=made)
        return EncoderDecoderBatch(
            labels=labels, example_ids=ids, source_tokens=prompt,
            source_segments=torch.ones_like(prompt, dtype=torch.int32),
            target_tokens=tokens, target_segments=segments,
        )  # fmt: skip
    positions = torch.arange(target).expand_as(tokens).contiguous()
    return DecoderBatch(labels, ids, tokens, segments, positions)
