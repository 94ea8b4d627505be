"""Held-out loss and perplexity: sums over a fixed set of examples, with a single division."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Final, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from toque.batch import Batch
from toque.config.schema import DataConfig, EvaluationConfig
from toque.config.schema_methods import SpanCorruptionConfig
from toque.data.loader.batch_stream import (
    ExampleLengths,
    refuse_empty,
    usual_rows,
    with_rejected,
)
from toque.data.loader.collate import Examples, Layout
from toque.data.loader.epoch_plan import held_out_weights
from toque.data.loader.packing import RowShape, choose_shape, pack
from toque.data.loader.span_corruption import SpanCorruption
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError, Interrupted
from toque.hardware.memory import is_out_of_memory, release_memory
from toque.keyed_random import key_of, permute
from toque.models.forward.example_losses import nats_by_example
from toque.models.generation.engine import evaluating
from toque.reporter import Count, uncounted
from toque.training.distributed.data_parallel import DataParallel, LossFn
from toque.training.objectives.objective import Objective, imitation
from toque.training.runtime import Runtime

T = TypeVar("T")
LEFT = (
    "A signal stopped an evaluation. All saved files are complete. Run the same command again to "
    "continue."
)
GPU_TOKENS: Final = 32_768
"""Initial tokens per step on a GPU. An estimate, halved when memory runs out."""
SUBSET_KEY = key_of(0x746F717565)
"""Random key of the held-out subset, the same for all runs and seeds."""
WeightedBatch = tuple[float, Sequence[Sequence[int]]]
"""Weight of a batch, and the store rows in each of its packed rows."""


@dataclass
class RowsPerStep:
    """Number of packed rows per step. When memory runs out, it is halved with a notice."""

    rows: int
    on_notice: Callable[[str], object] = lambda _: None

    def halve(self, reason: str) -> None:
        """Halve the number after memory ran out.

        Raises:
            ConfigError: A single row does not fit.
        """
        if self.rows == 1:
            raise ConfigError(
                f"One row of held-out examples does not fit into memory: {reason} Shorten the "
                "examples (data.max_target_tokens), or stop other programs that use the memory."
            )
        release_memory()
        self.on_notice(
            f"Memory ran out with {self.rows} rows of held-out examples per step "
            f"({reason}). The evaluation continues with {self.rows // 2} rows per step. The "
            "loss does not change."
        )
        self.rows //= 2


@dataclass(frozen=True)
class HeldOut:
    """Fixed set of held-out examples, packed once."""

    layout: Layout
    rows: Sequence[Sequence[int]]
    """Store rows in each packed row."""
    objective: Objective
    """Loss of the examples: the nats of the targets, or the loss of pairs."""
    autocast: Callable[[], AbstractContextManager[object]]
    device: torch.device
    rows_per_batch: int = 8
    """Packed rows per batch. The batches are divided among the ranks."""
    weights: Sequence[float] | None = None
    """Weight per packed row, 1 by default. All rows of a batch have the same weight."""
    rows_per_step: RowsPerStep | None = None
    """Packed rows per step of this process, `rows_per_batch` by default."""
    share: tuple[int, int] = (0, 1)
    """Rank and number of ranks n. This process computes every n-th batch."""
    total: Callable[[Sequence[float]], Sequence[float]] = tuple
    """Function that sums numbers over all ranks."""
    in_step: bool = False
    """True if all ranks compute together. A rank without a batch computes an unlabelled batch."""
    n_bytes: int = 0
    """UTF-8 bytes of all target texts, or 0 if the targets are not complete texts."""

    @property
    def n_examples(self) -> int:
        """Number of held-out examples per evaluation."""
        return sum(map(len, self.rows))

    @classmethod
    def from_settings(
        cls,
        evaluation: EvaluationConfig,
        data: DataConfig,
        span_corruption: SpanCorruptionConfig | None,
        store: TokenStore,
        trained: Layout,
        runtime: Runtime,
        sharing: DataParallel | None = None,
        on_notice: Callable[[str], object] = lambda _: None,
        preference: Objective | None = None,
    ) -> Self:
        """Choose and pack a fixed subset of a store, weighted like the training examples.

        `trained` is the layout of the training batches. Without `sharing`, the entire model is in
        this process. With an objective `preference`, the loss is of pairs. Without one, the loss
        of a store with pairs is of the chosen answers.
        """
        refuse_empty(store, "validation")
        rows = store.wanted_rows("validation")
        encoder = trained.shape.source > 0
        spans = None
        examples: Examples = store
        if span_corruption is not None:
            spans = SpanCorruption.for_store(span_corruption, store, encoder=encoder)
            examples = spans.held_out(store)
        lengths = ExampleLengths.from_store(store, rows, encoder=encoder, spans=spans)
        if preference is not None:
            lengths = ExampleLengths.of_pairs(store, rows, encoder=encoder)
        shape = choose_shape(*lengths.sample(), encoder=encoder)

        chosen = subset(rows, evaluation.max_examples)
        example_weights = held_out_weights(data, store, chosen)
        packed_rows, weights = _pack_by_weight(
            store, chosen, example_weights, shape, spans, pairs=preference is not None
        )
        # The targets of span corruption are fragments, so bits per byte have no meaning.
        n_bytes = text_bytes(store, packed_rows) if spans is None else 0

        objective = preference or imitation()
        group = 1
        if preference is not None:
            packed_rows = list(map(with_rejected, packed_rows))
            group = 2
        in_step = False
        if sharing is not None and sharing.is_sharded:
            loss_fn = partial(_loss_of_shards, sharing, objective.loss_fn)
            objective = replace(objective, loss_fn=loss_fn)
            in_step = True
        rows_per_batch = usual_rows(shape.tokens)
        rows_per_step = rows_per_batch
        if runtime.device.type == "cuda" and not in_step:
            rows_per_step = max(rows_per_step, GPU_TOKENS // shape.tokens)
        return cls(
            layout=replace(trained, examples=examples, shape=shape, group=group),
            rows=packed_rows,
            weights=weights,
            objective=objective,
            autocast=runtime.autocast,
            device=runtime.device,
            rows_per_batch=rows_per_batch,
            rows_per_step=RowsPerStep(rows_per_step, on_notice),
            share=(runtime.ranks.rank, runtime.ranks.world_size),
            total=runtime.ranks.all_reduce_sum,
            in_step=in_step,
            n_bytes=n_bytes,
        )

    def alone(self) -> HeldOut:
        """Return the same examples for an evaluation of the entire model in this process."""
        return replace(
            self, objective=imitation(), in_step=False, share=(0, 1), total=tuple
        )

    def __call__(
        self, model: nn.Module, on_progress: Count = uncounted
    ) -> dict[str, float]:
        """Compute `loss` (nats per target token), `perplexity`, `target_tokens`, `bits_per_byte`.

        The loss is sum(w_i nats_i) / sum(w_i tokens_i) with the weights w_i of the rows i. Bits per
        byte are sum(nats_i) / (n_bytes ln 2) and compare models across tokenizers. The loss of
        pairs is a mean over pairs. They have no perplexity, their bits per byte are of the chosen
        answers, and the rewards follow. No random numbers are used. `on_progress` receives the
        approximate number of examples of all ranks.

        Raises:
            Interrupted: `on_progress` raised the error on a rank. All ranks raise it.
        """
        local_sums = [0.0, 0.0, 0.0, 0.0]
        is_interrupted = True
        with evaluating(model), torch.no_grad(), suppress(Interrupted):
            local_sums = self._sum_local_batches(model, on_progress)
            is_interrupted = False

        names = self.objective.measurements.names
        measured = self.objective.measurements.sums.tolist() if names else []
        totals = self.total((*local_sums, is_interrupted, *measured))
        total_loss, weighted_count, n_targets, nats, n_interrupted, *measured = totals
        if n_interrupted:
            raise Interrupted(LEFT)
        loss = total_loss / weighted_count
        metrics = {"loss": loss, "target_tokens": int(n_targets)}
        if names:
            n_pairs = self.n_examples / 2
            means = {n: v / n_pairs for n, v in zip(names, measured, strict=True)}
            metrics |= means
            nats = -means["logps/chosen"] * n_pairs
        else:
            metrics["perplexity"] = math.exp(loss) if loss < 700 else math.inf
        if self.n_bytes:
            metrics["bits_per_byte"] = nats / (math.log(2.0) * self.n_bytes)
        return metrics

    def _sum_local_batches(self, model: nn.Module, on_progress: Count) -> list[float]:
        """Sum the weighted loss and count, and the targets and loss, of the rank's batches."""
        rank, ranks = self.share
        n_examples = self.n_examples
        sums = np.zeros(4)
        objective = self.objective
        objective.measurements.clear(self.device)
        done = 0
        on_progress(0, n_examples)
        batches = self._batches()
        local_batches = batches[rank::ranks]
        computed = self._compute_all(local_batches, partial(objective.loss_fn, model))
        for weight, batch, batch_loss in computed:
            loss = float(batch_loss)
            weighted_count = weight * objective.count(batch)
            sums += weight * loss, weighted_count, batch.n_targets, loss
            done += ranks * sum(map(len, batch.example_ids))
            on_progress(min(done, n_examples), n_examples)

        # In the last round, only `n_last` ranks may have a batch.
        n_last = len(batches) % ranks
        if self.in_step and 0 < n_last <= rank:
            empty = self.layout.batch(batches[0][1]).unlabelled()
            with self.autocast():
                objective.loss_fn(model, empty.to(self.device))
            on_progress(n_examples, n_examples)
        return sums.tolist()

    def by_example(
        self, model: nn.Module, on_progress: Count = uncounted
    ) -> list[tuple[int, float, float]]:
        """Compute the store row, nats and weight of every example, in this process alone."""
        losses: list[tuple[int, float, float]] = []
        with evaluating(model), torch.no_grad():
            compute = partial(nats_by_example, model)
            for weight, batch, nats in self._compute_all(self._batches(), compute):
                ids = chain.from_iterable(batch.example_ids)
                values = chain.from_iterable(nats)
                pairs = zip(ids, values, strict=True)
                losses += [(row, value, weight) for row, value in pairs]
                on_progress(len(losses), self.n_examples)
        return losses

    def _compute_all(
        self, batches: Sequence[WeightedBatch], compute: Callable[[Batch], T]
    ) -> Iterator[tuple[float, Batch, T]]:
        """Compute a function of all rows, in order. Yield the weight, batch and result per step."""
        rows = [(weight, row) for weight, batch_rows in batches for row in batch_rows]
        per_step = self.rows_per_step or RowsPerStep(self.rows_per_batch)
        start = 0
        while start < len(rows):
            candidates = rows[start : start + per_step.rows]
            weight, same_weight = next(groupby(candidates, key=itemgetter(0)))
            step_rows = [row for _, row in same_weight]
            batch = self.layout.batch(step_rows)
            try:
                with self.autocast():
                    result = compute(batch.to(self.device))
            except RuntimeError as error:  # the base class of torch.OutOfMemoryError
                if self.in_step or not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0]
            else:
                yield weight, batch, result
                start += len(step_rows)
                continue
            # Outside the except clause, the tensors of the failed step can be freed.
            per_step.halve(reason)

    def _batches(self) -> list[WeightedBatch]:
        """Group the rows into batches of equal weight."""
        batches: list[WeightedBatch] = []
        weights = self.weights or itertools.repeat(1.0, len(self.rows))
        weighted_rows = zip(weights, self.rows, strict=True)
        n = self.rows_per_batch
        for weight, same_weight in groupby(weighted_rows, key=itemgetter(0)):
            rows = [row for _, row in same_weight]
            batches += [(weight, rows[i : i + n]) for i in range(0, len(rows), n)]
        return batches


def _loss_of_shards(
    sharing: DataParallel, loss_fn: LossFn, _model: nn.Module, batch: Batch
) -> Tensor:
    """Compute the loss of a sharded model on all ranks."""
    return sharing.evaluate(loss_fn, batch)


def pack_rows(
    store: TokenStore,
    rows: np.ndarray,
    shape: RowShape,
    spans: SpanCorruption | None = None,
    *,
    pairs: bool = False,
) -> list[tuple[int, ...]]:
    """Pack held-out examples in order. `spans` may change their lengths.

    With `pairs`, the rows are of chosen answers, and each leaves space for its rejected answer.
    """
    encoder = shape.source > 0
    if pairs:
        lengths = ExampleLengths.of_pairs(store, rows, encoder=encoder)
    else:
        lengths = ExampleLengths.from_store(store, rows, encoder=encoder, spans=spans)
    ids = rows.tolist()
    packed = pack(lengths.source, lengths.target, shape)
    return [tuple(ids[item] for item in row) for row in packed]


def _pack_by_weight(
    store: TokenStore,
    chosen: np.ndarray,
    example_weights: np.ndarray,
    shape: RowShape,
    spans: SpanCorruption | None,
    *,
    pairs: bool,
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Pack examples of equal weight together. Return the packed rows and their weights.

    Rows of equal weight follow each other, so that they can share a batch.
    """
    packed_rows: list[tuple[int, ...]] = []
    row_weights: list[float] = []
    for weight in sorted(set(example_weights.tolist())):
        same_weight = chosen[example_weights == weight]
        packed = pack_rows(store, same_weight, shape, spans, pairs=pairs)
        packed_rows += packed
        row_weights += itertools.repeat(weight, len(packed))
    return packed_rows, row_weights


def text_bytes(store: TokenStore, rows: Iterable[Sequence[int]]) -> int:
    """Count the UTF-8 bytes of the packed rows' target tokens that contribute to the loss."""
    codec = store.codec()
    targets = (store.learnt_ids(row) for packed in rows for row in packed)
    # A piece of a document may begin or end within a character, which then cannot be decoded.
    # Therefore the bytes of byte-level tokens are counted per token.
    if codec.token_bytes is not None:
        return sum(int(codec.token_bytes[target].sum()) for target in targets)
    return sum(len(codec.decode(target).encode()) for target in targets)


def subset(rows: np.ndarray, n: int | None) -> np.ndarray:
    """Choose at most `n` rows, in a random order that is always the same."""
    count = len(rows) if n is None else min(n, len(rows))
    if count == 0:
        return rows[:0]
    return rows[permute(np.arange(count), n=len(rows), key=SUBSET_KEY)]
