"""The training loss: a sum over target tokens, to be divided once by the update's count."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toque.batch import IGNORE, Batch, DecoderBatch
from toque.models.forward.cross_entropy import cross_entropy_sum, usual_chunk_rows
from toque.models.forward.packed import hidden_states, output_head


def loss_sum(
    model: nn.Module, batch: Batch, *, smoothing: float = 0.0, chunk_rows: int | None = None
) -> Tensor:
    """Cross-entropy of the batch's labels in nats, [] float32: summed, never averaged.

    The sum over a batch equals the sum over any split of it into micro-batches, and over its
    examples alone, so the one division by the update's target tokens is left to the caller.

    Args:
        model: A transformers model of one of the families.
        batch: On the model's device.
        smoothing: Label smoothing, see `cross_entropy_sum`; 0 when evaluating.
        chunk_rows: Positions whose logits exist at once; by default as many as are efficient.
    """
    weight, bias = output_head(model)
    return cross_entropy_sum(
        hidden_states(model, batch),
        weight,
        batch.labels,
        bias=bias,
        smoothing=smoothing,
        chunk_rows=chunk_rows,
        n_labels=None if batch.labelled is None else sum(batch.labelled),
    )


def log_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    """The log-probability in nats the model gives each label, [R, L] or [R, T]; 0 without a label.

    Logits exist for some of the labelled positions at a time.
    """
    weight, bias = output_head(model)
    hidden = hidden_states(model, batch)
    labelled = batch.labels != IGNORE
    kept, labels = hidden[labelled], batch.labels[labelled]
    at_once = usual_chunk_rows(weight.shape[0], labels.device.type)
    found = torch.zeros(batch.labels.shape, device=labels.device)
    nats = []
    for part, chosen in zip(torch.split(kept, at_once), torch.split(labels, at_once), strict=True):
        logits = F.linear(part, weight.to(kept.dtype), bias).float()
        nats.append(F.cross_entropy(logits, chosen, reduction="none"))
    found[labelled] = -torch.cat(nats)
    return found


def nats_by_example(model: nn.Module, batch: Batch) -> list[list[float]]:
    """The loss of each example alone, by row in the order of `batch.example_ids`, in nats.

    Their sum is `loss_sum` but for rounding.
    """
    segments = batch.segments if isinstance(batch, DecoderBatch) else batch.target_segments
    nats = -log_probabilities(model, batch)
    n_segments = max(map(len, batch.example_ids), default=0)
    sums = nats.new_zeros(batch.n_rows, n_segments + 1).scatter_add_(1, segments.long(), nats)
    table = sums[:, 1:].tolist()
    return [row[: len(ids)] for row, ids in zip(table, batch.example_ids, strict=True)]
