"""Held-out loss per source of the data, before and after a run. An increase is forgetting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from toque.data.store.token_store import TokenStore
from toque.evaluation.heldout_loss import HeldOut, pack_rows
from toque.evaluation.text_samples import source_labels
from toque.reporter import Count, uncounted
from toque.runs.history import METRICS, number, read_metrics


@dataclass(frozen=True)
class SourceLoss:
    """Held-out loss of a source, in nats per target token, before and after training."""

    source: str
    """Number of the source and name of its first file."""
    examples: int
    before: float
    after: float

    @property
    def change(self) -> float:
        """Loss after training minus loss before. A positive number means that the model forgot."""
        return self.after - self.before

    def record(self) -> dict[str, float]:
        """Return the losses as JSON values."""
        losses = {"before": self.before, "after": self.after, "change": self.change}
        return {"examples": self.examples, **losses}

    def __str__(self) -> str:
        return (
            f"{self.source}: loss {self.before:.4f} before, {self.after:.4f} after "
            f"({self.change:+.4f}, {self.examples:,} examples)"
        )


def group_by_source(store: TokenStore, rows: Sequence[int]) -> dict[str, list[int]]:
    """Group held-out store rows by source, in the order of the sources.

    The result is empty if all rows have the same source.
    """
    groups: dict[str, list[int]] = {}
    for row, label in zip(rows, source_labels(store, rows), strict=False):
        groups.setdefault(label, []).append(row)
    if len(groups) < 2:
        return {}
    return dict(sorted(groups.items(), key=lambda item: int(item[0].split()[1])))


def measure_by_source(
    heldout: HeldOut,
    model: nn.Module,
    store: TokenStore,
    on_progress: Count = uncounted,
) -> dict[str, float]:
    """Compute the held-out loss of each source, in nats per target token, on all ranks.

    The result is empty for a single source, for pairs, and for targets that are parts of texts.
    """
    if store.has_pairs or not heldout.n_bytes:
        return {}
    rows = [row for packed in heldout.rows for row in packed]
    losses: dict[str, float] = {}
    for label, members in group_by_source(store, rows).items():
        packed_rows = pack_rows(store, np.array(members), heldout.layout.shape)
        of_source = replace(heldout, rows=packed_rows, weights=None)
        losses[label] = of_source(model, on_progress)["loss"]
    return losses


def read_before(run: Path) -> dict[str, float]:
    """Read the losses before a run's first update. The result is empty without a record."""
    try:
        events = read_metrics(run / METRICS)
    except OSError:
        return {}
    stored: Any = {}
    for event in events:
        if event["event"] == "before":
            stored = event.get("source_losses")
    if not isinstance(stored, Mapping):
        return {}
    losses = {str(source): number(loss) for source, loss in stored.items()}
    return {source: loss for source, loss in losses.items() if loss is not None}


def compare_with_before(
    store: TokenStore,
    measured: Sequence[tuple[int, float, float]],
    before: Mapping[str, float],
    *,
    encoder: bool,
) -> list[SourceLoss]:
    """Compare the losses of held-out examples with the losses before training, by source.

    Args:
        store: The store.
        measured: Store row, nats and weight of each example.
        before: Loss of each source before training.
        encoder: Whether the model has an encoder. A decoder does not predict the first token of an
            example without a prompt.
    """
    nats = {row: value for row, value, _weight in measured}
    compared = []
    for source, rows in group_by_source(store, [*nats]).items():
        if source not in before:
            continue
        counts = store.learnt_lengths[rows].astype(np.int64)
        if not encoder:
            counts = counts - (store.prompt_lengths[rows] == 0)
        after = sum(nats[row] for row in rows) / int(counts.sum())
        compared.append(SourceLoss(source, len(rows), before[source], after))
    return compared
