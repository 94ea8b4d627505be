"""Training updates as the trainer computes them, and batches of random tokens that need no data."""

from __future__ import annotations

import torch
from torch import Tensor

from toque.batch import Batch, DecoderBatch, EncoderDecoderBatch
from toque.models.forward.loss import loss_sum
from toque.training.runtime import Runtime


def update(
    model: torch.nn.Module,
    batch: Batch,
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    rows: int | None = None,
) -> float:
    """One update in micro-batches of `rows` rows (None: all at once); the mean loss in nats.

    Returns when the device has done it.
    """
    total = torch.zeros((), device=runtime.device)
    for micro in batch.split(rows or batch.n_rows):
        with runtime.autocast():
            loss = loss_sum(model, micro)
        runtime.backward(loss / batch.n_targets)
        total += loss.detach()
    norm = runtime.clip_gradients(optimizer, 1.0)
    runtime.optimizer_step(optimizer, lr=lr, only_if=torch.isfinite(norm))
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    return float(total) / batch.n_targets


def batch_of(
    family: str, *, rows: int, source: int, target: int, vocabulary: int, examples: int = 1
) -> Batch:
    """Full rows of equal examples, every target position with a label; `source` is T5's alone."""
    made = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, vocabulary, (rows, target), generator=made)
    ids = tuple(tuple(range(i * examples, (i + 1) * examples)) for i in range(rows))
    labels, segments = tokens.roll(-1, 1), _numbers(rows, target, examples)
    if family == "t5":
        prompt = torch.randint(2, vocabulary, (rows, source), generator=made)
        return EncoderDecoderBatch(
            labels=labels, example_ids=ids, source_tokens=prompt,
            source_segments=_numbers(rows, source, examples),
            target_tokens=tokens, target_segments=segments,
        )  # fmt: skip
    places = torch.arange(target).expand_as(tokens)
    firsts = torch.searchsorted(segments, segments)
    return DecoderBatch(labels, ids, tokens, segments, places - firsts)


def _numbers(rows: int, length: int, examples: int) -> Tensor:
    """[rows, length] segment numbers of equal examples."""
    numbers = 1 + torch.arange(length) * examples // length
    return numbers.int().expand(rows, length).contiguous()
