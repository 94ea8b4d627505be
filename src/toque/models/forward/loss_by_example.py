"""Loss of each example alone, from rows that hold several."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.nn import functional as F

from toque.batch import IGNORE, Batch, DecoderBatch
from toque.models.forward.packed import hidden_states, output_head

_LOGITS_AT_ONCE: Final = 1 << 24
"""Elements: 64 MiB of float32."""


def nats_by_example(model: nn.Module, batch: Batch) -> list[list[float]]:
    """The loss of each example alone, in nats; their sum is `loss_sum` but for rounding.

    Args:
        model: A transformers model of one of the families.
        batch: On the model's device.

    Returns:
        a list for each row, in the order of `batch.example_ids`.
    """
    weight, bias = output_head(model)
    hidden = hidden_states(model, batch)
    segments = batch.segments if isinstance(batch, DecoderBatch) else batch.target_segments
    labelled = batch.labels != IGNORE
    kept, labels = hidden[labelled], batch.labels[labelled]
    n_segments = max(map(len, batch.example_ids), default=0)
    rows = torch.arange(batch.n_rows, device=labels.device)[:, None].expand_as(segments)
    places = (rows * (n_segments + 1) + segments)[labelled]
    sums = torch.zeros(batch.n_rows * (n_segments + 1), device=labels.device)
    at_once = max(1, _LOGITS_AT_ONCE // weight.shape[0])
    for start in range(0, len(labels), at_once):
        part = slice(start, start + at_once)
        logits = F.linear(kept[part], weight.to(kept.dtype), bias).float()
        nats = F.cross_entropy(logits, labels[part], reduction="none")
        sums.index_add_(0, places[part], nats)
    table = sums.view(batch.n_rows, n_segments + 1)[:, 1:].tolist()
    return [row[: len(ids)] for row, ids in zip(table, batch.example_ids, strict=True)]
