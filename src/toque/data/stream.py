"""Batches by position: `at(cursor)` gives an update's rows and the cursor after it.

The position travels with the batch, so reading ahead cannot lie about what was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from toque.batch import Batch
from toque.data.curriculum import StagedPlan
from toque.data.layout import Layout
from toque.data.plan import EpochPlan
from toque.data.varied import Varied
from toque.units import Cursor, Progress


@dataclass(frozen=True)
class Step:
    """What one update sees. Counts are over all ranks; `batch` is this rank's share."""

    batch: Batch
    cursor: Cursor
    """Where the next update begins."""
    n_targets: int
    n_tokens: int
    n_examples: int
    n_computed: int
    """Tokens computed by this rank, padding included."""
    epoch: float
    """Passes over the data after this update."""
    stage: int | None = None
    """Of the curriculum, counted from 1; None without one."""

    def after(self, before: Progress, seconds: float) -> Progress:
        """Progress once this update is done, which took `seconds`."""
        return Progress(
            step=before.step + 1,
            epoch=self.epoch,
            examples=before.examples + self.n_examples,
            tokens=before.tokens + self.n_tokens,
            target_tokens=before.target_tokens + self.n_targets,
            seconds=before.seconds + seconds,
        )


@dataclass
class BatchStream:
    """An epoch plan laid out for one rank of several.

    Args:
        plan: which examples each update sees.
        layout: how they become tensors.
        prompt_lengths: [all store rows] stored prompt tokens.
        target_lengths: [all store rows] stored target tokens.
        rank: this process.
        world_size: processes that share each update's rows.
        varied: the examples as they differ from epoch to epoch; None for as they are stored.
    """

    plan: EpochPlan | StagedPlan
    layout: Layout
    prompt_lengths: np.ndarray
    target_lengths: np.ndarray
    rank: int = 0
    world_size: int = 1
    varied: Varied | None = None

    def at(self, cursor: Cursor) -> Step:
        """The update that begins at `cursor`; costs at most one or two windows of packing."""
        update = self.plan.at(cursor)
        ids = np.fromiter((e for row in update.rows for e in row), np.int64)
        prompts, targets = self.prompt_lengths[ids], self.target_lengths[ids]
        here = None
        if self.varied is not None:
            here = self.varied.at(self.plan.epoch_key(cursor))
            prompts = np.array([len(here.prompt(row)) for row in ids.tolist()], np.int64)
            targets = np.array([len(here.target(row)) for row in ids.tolist()], np.int64)
        decoder_only = self.layout.shape.source == 0
        # A decoder-only example's last token is no input; without a prompt its first is no target.
        unpredicted = int((prompts == 0).sum()) if decoder_only else 0
        inputs = int(prompts.sum()) + int(targets.sum()) - (len(ids) if decoder_only else 0)
        batch = self.layout.batch(update.rows[self.rank :: self.world_size], here)
        return Step(
            batch=batch,
            cursor=update.next,
            n_targets=int(targets.sum()) - unpredicted,
            n_tokens=inputs,
            n_examples=len(ids),
            n_computed=batch.n_computed,
            epoch=update.epoch,
            stage=cursor.stage + 1 if isinstance(self.plan, StagedPlan) else None,
        )

    def starting_at(self, cursor: Cursor) -> Iterator[Step]:
        """Updates from `cursor` on, without end."""
        while True:
            step = self.at(cursor)
            cursor = step.cursor
            yield step
