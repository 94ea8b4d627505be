"""Held-out loss and perplexity: sums over a fixed set of examples, divided once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Final, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from toque.batch import Batch
from toque.config.schema import DataConfig, EvaluationConfig
from toque.config.schema_methods import SpanCorruptionConfig
from toque.data.loader.batch_stream import ExampleLengths, refuse_empty, usual_rows
from toque.data.loader.collate import Layout
from toque.data.loader.epoch_plan import held_out_weights
from toque.data.loader.packing import RowShape, choose_shape, pack
from toque.data.loader.span_corruption import SpanCorruption
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError, Interrupted
from toque.hardware.memory import is_out_of_memory, release_memory
from toque.keyed_random import key_of, permute
from toque.models.forward.loss import loss_sum, nats_by_example
from toque.models.generation.engine import evaluating
from toque.reporter import Count, uncounted
from toque.training.distributed.data_parallel import DataParallel
from toque.training.runtime import Runtime

T = TypeVar("T")
LEFT = (
    "A signal stopped an evaluation. All saved files are complete. Run the same command again to "
    "continue."
)
GPU_TOKENS: Final = 32_768
"""Initial tokens per step on a GPU. An estimate, halved when memory runs out."""
SUBSET_KEY = key_of(0x746F717565)
"""Key of the held-out subset, the same for all runs and seeds."""


@dataclass
class RowsAtOnce:
    """Number of packed rows per step. It is halved, with a notice, when memory runs out."""

    rows: int
    on_notice: Callable[[str], object] = lambda _: None


@dataclass(frozen=True)
class HeldOut:
    """Fixed set of held-out examples, packed once."""

    layout: Layout
    rows: Sequence[Sequence[int]]
    """Store rows of each packed row."""
    loss_sum: Callable[[nn.Module, Batch], Tensor]
    """Function from model and batch to the sum of nats over the targets."""
    autocast: Callable[[], AbstractContextManager[object]]
    device: torch.device
    rows_per_batch: int = 8
    """Packed rows per batch. The batches are divided among the ranks."""
    weights: Sequence[float] | None = None
    """Weight per packed row, 1 by default. All rows of a batch have the same weight."""
    at_once: RowsAtOnce | None = None
    """Packed rows per step of this process, `rows_per_batch` by default."""
    share: tuple[int, int] = (0, 1)
    """Rank and number of ranks. This process computes every n-th batch."""
    total: Callable[[Sequence[float]], Sequence[float]] = tuple
    """Function that sums numbers over all ranks."""
    in_step: bool = False
    """True if all ranks compute together. A rank with one batch less computes an unlabelled row."""
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
    ) -> Self:
        """Choose and pack a fixed subset of a store, weighted like the training examples.

        `trained` is the layout of the training batches. Without `sharing`, the entire model is in
        this process.
        """
        refuse_empty(store, "validation")
        rows = store.rows("validation")
        encoder = trained.shape.source > 0
        spans = None
        if span_corruption is not None:
            spans = SpanCorruption.for_store(span_corruption, store, encoder=encoder)
        lengths = ExampleLengths.from_store(store, rows, encoder=encoder, spans=spans)
        shape = choose_shape(*lengths.sample(), encoder=encoder)
        chosen = subset(rows, evaluation.max_examples)
        weights = held_out_weights(data, store, chosen)
        packed = [
            (weight, row)
            for weight in sorted(set(weights.tolist()))
            for row in choose_rows(store, chosen[weights == weight], shape, spans)
        ]
        packed_rows = [row for _, row in packed]

        def loss_of_shards(_model: nn.Module, batch: Batch) -> Tensor:
            """Compute the loss of a sharded model on all ranks."""
            assert sharing is not None
            return sharing.evaluate(loss_sum, batch)

        in_step = sharing is not None and sharing.is_sharded
        rows_per_batch = usual_rows(shape.tokens)
        at_once = rows_per_batch
        if runtime.device.type == "cuda" and not in_step:
            at_once = max(at_once, GPU_TOKENS // shape.tokens)
        examples = store if spans is None else spans.held_out(store)
        return cls(
            layout=replace(trained, examples=examples, shape=shape),
            rows=packed_rows,
            weights=[weight for weight, _ in packed],
            loss_sum=loss_of_shards if in_step else loss_sum,
            autocast=runtime.autocast,
            device=runtime.device,
            rows_per_batch=rows_per_batch,
            at_once=RowsAtOnce(at_once, on_notice),
            share=(runtime.ranks.rank, runtime.ranks.world_size),
            total=runtime.ranks.all_reduce_sum,
            in_step=in_step,
            # The targets of span corruption are fragments, so bits per byte have no meaning.
            n_bytes=text_bytes(store, packed_rows) if spans is None else 0,
        )

    def alone(self) -> HeldOut:
        """Return the same examples for an evaluation of the entire model in this process."""
        return replace(
            self, loss_sum=loss_sum, in_step=False, share=(0, 1), total=tuple
        )

    def __call__(
        self, model: nn.Module, on_progress: Count = uncounted
    ) -> dict[str, float]:
        """Compute `loss` (nats per target token), `perplexity`, `target_tokens`, `bits_per_byte`.

        The loss is sum(w_i nats_i) / sum(w_i tokens_i) with the weights w_i of the rows i. Bits per
        byte are sum(nats_i) / (n_bytes ln 2) and compare models across tokenizers. No random
        numbers are used. `on_progress` receives the approximate number of examples of all ranks.

        Raises:
            Interrupted: `on_progress` raised it on a rank. All ranks raise it.
        """
        nats = 0.0
        unweighted_nats = 0.0
        weighted_targets = 0.0
        targets = 0
        is_interrupted = True
        rank, ranks = self.share
        n_examples, done = self.n_examples, 0
        with evaluating(model), torch.no_grad(), suppress(Interrupted):
            on_progress(0, n_examples)
            batches = self._batches()
            local_batches = batches[rank::ranks]
            computed = self._compute_all(local_batches, partial(self.loss_sum, model))
            for weight, batch, batch_loss in computed:
                batch_nats = float(batch_loss)
                nats += weight * batch_nats
                unweighted_nats += batch_nats
                weighted_targets += weight * batch.n_targets
                targets += batch.n_targets
                done += ranks * sum(map(len, batch.example_ids))
                on_progress(min(done, n_examples), n_examples)
            if self.in_step and rank >= len(batches) % ranks > 0:
                empty = self.layout.batch(batches[0][1]).unlabelled()
                with self.autocast():
                    self.loss_sum(model, empty.to(self.device))
                on_progress(n_examples, n_examples)
            is_interrupted = False

        local_sums = (nats, weighted_targets, targets, unweighted_nats, is_interrupted)
        nats, weighted_targets, n_targets, unweighted_nats, n_interrupted = self.total(
            local_sums
        )
        if n_interrupted:
            raise Interrupted(LEFT)
        loss = nats / weighted_targets
        metrics = {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "target_tokens": int(n_targets),
        }
        if self.n_bytes:
            metrics["bits_per_byte"] = unweighted_nats / (math.log(2.0) * self.n_bytes)
        return metrics

    def by_example(
        self, model: nn.Module, on_progress: Count = uncounted
    ) -> list[tuple[int, float, float]]:
        """Compute store row, nats and weight of every example, in this process alone."""
        losses: list[tuple[int, float, float]] = []
        with evaluating(model), torch.no_grad():
            computed = self._compute_all(
                self._batches(), partial(nats_by_example, model)
            )
            for weight, batch, nats in computed:
                for ids, row in zip(batch.example_ids, nats, strict=True):
                    losses += [
                        (i, value, weight) for i, value in zip(ids, row, strict=True)
                    ]
                on_progress(len(losses), self.n_examples)
        return losses

    def _compute_all(
        self,
        batches: Sequence[tuple[float, Sequence[Sequence[int]]]],
        compute: Callable[[Batch], T],
    ) -> Iterator[tuple[float, Batch, T]]:
        """Compute a function of all rows, in order. Yield the weight, batch and result per step."""
        rows = [(weight, row) for weight, batch_rows in batches for row in batch_rows]
        at_once = self.at_once or RowsAtOnce(self.rows_per_batch)
        start = 0
        while start < len(rows):
            candidates = rows[start : start + at_once.rows]
            weight, same_weight = next(groupby(candidates, key=itemgetter(0)))
            step_rows = [row for _, row in same_weight]
            batch = self.layout.batch(step_rows)
            try:
                with self.autocast():
                    result = compute(batch.to(self.device))
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if self.in_step or not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0]
            else:
                yield weight, batch, result
                start += len(step_rows)
                continue

            # The tensors of the failed step are freed only outside of the except clause.
            if at_once.rows == 1:
                raise ConfigError(
                    f"One row of held-out examples does not fit into memory: {reason} Shorten the "
                    "examples (data.max_target_tokens), or stop other programs that use the memory."
                )
            release_memory()
            at_once.on_notice(
                f"Memory ran out with {at_once.rows} rows of held-out examples per step "
                f"({reason}). The evaluation continues with {at_once.rows // 2} rows per step. The "
                "loss does not change."
            )
            at_once.rows //= 2

    def _batches(self) -> list[tuple[float, Sequence[Sequence[int]]]]:
        """Group the rows into batches of equal weight."""
        batches: list[tuple[float, Sequence[Sequence[int]]]] = []
        weights = self.weights or [1.0] * len(self.rows)
        n = self.rows_per_batch
        for weight, same_weight in groupby(
            zip(weights, self.rows, strict=True), key=itemgetter(0)
        ):
            rows = [row for _, row in same_weight]
            batches += [(weight, rows[i : i + n]) for i in range(0, len(rows), n)]
        return batches


def choose_rows(
    store: TokenStore,
    rows: np.ndarray,
    shape: RowShape,
    spans: SpanCorruption | None = None,
) -> list[tuple[int, ...]]:
    """Pack held-out examples in order. `spans` may change their length."""
    lengths = ExampleLengths.from_store(
        store, rows, encoder=shape.source > 0, spans=spans
    )
    ids = rows.tolist()
    packed = pack(lengths.source, lengths.target, shape)
    return [tuple(ids[item] for item in row) for row in packed]


def text_bytes(store: TokenStore, rows: Iterable[Sequence[int]]) -> int:
    """Count the UTF-8 bytes of the targets in packed rows that contribute to the loss."""
    codec = store.codec()
    targets = (store.learnt_ids(row) for packed in rows for row in packed)
    # The boundary of a piece of a document may divide a character, which cannot be decoded.
    # Therefore tokens of byte-level vocabularies are counted one by one.
    if codec.token_bytes is not None:
        return sum(int(codec.token_bytes[target].sum()) for target in targets)
    return sum(len(codec.decode(target).encode()) for target in targets)


def subset(rows: np.ndarray, n: int | None) -> np.ndarray:
    """Choose at most `n` rows in a random order that is always the same."""
    count = len(rows) if n is None else min(n, len(rows))
    if count == 0:
        return rows[:0]
    return rows[permute(np.arange(count), n=len(rows), key=SUBSET_KEY)]
