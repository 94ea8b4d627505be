"""Losses of single labels and examples, and losses that are functions of them.

Letters: R rows, L row length of a decoder-only model, T row length of targets, as in `toque.batch`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from toque.batch import IGNORE, Batch, DecoderBatch
from toque.models.forward.cpu_linear import kind_of
from toque.models.forward.loss import capped, cross_entropy_sum, usual_chunk_rows
from toque.models.forward.packed import hidden_states, logit_cap, output_head

Weigh = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function of the nats of each label, in the shape of the labels. It returns the loss of the batch,
[] float32, and its derivatives by the nats, in the same shape."""


def weighted_loss_sum(
    model: nn.Module, batch: Batch, weigh: Weigh, *, chunk_rows: int | None = None
) -> Tensor:
    """Compute a loss that is a function of the nats of the batch's labels, [] float32.

    Its gradient is the gradient of sum(w_i nats_i), with constant weights w_i from `weigh`. So one
    forward pass is enough, although the weights depend on its result. The head's matmul is computed
    twice: once for the weights, and once for the gradient.

    Args:
        model: The language model.
        batch: The batch.
        weigh: Function that computes the loss and the weights. It is called without gradients.
        chunk_rows: As in `cross_entropy_sum`.
    """
    weight, bias = output_head(model)
    cap = logit_cap(model)
    hidden = hidden_states(model, batch)
    with torch.no_grad():
        nats = label_nats(hidden, weight, batch.labels, bias, cap)
        loss, label_weights = weigh(nats)
    if not torch.is_grad_enabled():
        return loss
    weighted = cross_entropy_sum(
        hidden,
        weight,
        batch.labels,
        bias=bias,
        chunk_rows=chunk_rows,
        n_labels=None if batch.labelled is None else sum(batch.labelled),
        cap=cap,
        label_weights=label_weights,
    )
    # The value of the loss with the gradient of the weighted sum.
    return weighted + (loss - weighted).detach()


def log_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the log-probability of each label in nats, in the shape of the labels.

    Positions without a label are 0.
    """
    weight, bias = output_head(model)
    hidden = hidden_states(model, batch)
    return -label_nats(hidden, weight, batch.labels, bias, logit_cap(model))


def label_nats(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    cap: float | None,
) -> Tensor:
    """Compute -log of each label's probability, float32 in the shape of the labels.

    Positions without a label are 0. The arguments are as in `cross_entropy_sum`.
    """
    is_labelled = labels != IGNORE
    chunk_rows = usual_chunk_rows(weight.shape[0], kind_of(hidden))
    chunks = torch.split(hidden[is_labelled], chunk_rows)
    label_chunks = torch.split(labels[is_labelled], chunk_rows)
    nats = []
    for chunk, targets in zip(chunks, label_chunks, strict=True):
        logits = F.linear(chunk, weight.to(chunk.dtype), bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(capped(logits, cap), targets, reduction="none")
        nats.append(loss)

    exact = torch.cat(nats)
    result = exact.new_zeros(labels.shape)
    result[is_labelled] = exact
    return result


def nats_by_example(model: nn.Module, batch: Batch) -> list[list[float]]:
    """Compute the loss of each example in nats, by row, in the order of `batch.example_ids`."""
    by_row = sum_by_example(-log_probabilities(model, batch), batch).tolist()
    return [row[: len(ids)] for row, ids in zip(by_row, batch.example_ids, strict=True)]


def most_examples(batch: Batch) -> int:
    """Return the most examples in a row, at least 2: a row without examples has one segment."""
    return max(2, *map(len, batch.example_ids), 0)


def sum_by_example(values: Tensor, batch: Batch) -> Tensor:
    """Sum the values of labels over each example, [R, `most_examples`].

    `values` has the shape of the labels. Rows with fewer examples end with zeros.
    """
    # Segment numbers start at 1. Number 0 is padding.
    sums = values.new_zeros(batch.n_rows, most_examples(batch) + 1)
    sums.scatter_add_(1, label_segments(batch).long(), values)
    return sums[:, 1:]


def values_by_example(values: NDArray[np.floating], batch: Batch) -> Tensor:
    """Look up the values of the batch's examples, [R, `most_examples`] on the CPU.

    `batch.example_ids` are indices into `values`. Rows with fewer examples end with zeros.
    """
    by_row = np.zeros((batch.n_rows, most_examples(batch)), values.dtype)
    for row, ids in enumerate(batch.example_ids):
        by_row[row, : len(ids)] = values[list(ids)]
    return torch.from_numpy(by_row)


def spread_by_example(values: Tensor, batch: Batch) -> Tensor:
    """Give every label the value of its example, in the shape of the labels.

    `values` are [R, `most_examples`]. Padding gets 0.
    """
    padded = F.pad(values, (1, 0))
    return padded.gather(1, label_segments(batch).long())


def label_segments(batch: Batch) -> Tensor:
    """Return the segments of the labels' positions, [R, L] or [R, T] int32."""
    return batch.segments if isinstance(batch, DecoderBatch) else batch.target_segments
