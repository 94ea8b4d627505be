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
    "A signal came during an evaluation, which was left. What was saved is whole; start the same "
    "command to continue."
)
GPU_TOKENS: Final = 32_768  # computed at once, halved where memory runs out; a guess
SUBSET_KEY = key_of(0x746F717565)  # draws the held-out subset, for every run and seed the same


@dataclass
class RowsAtOnce:
    """Packed rows that are computed at once; fewer, and told of, from where memory ran out."""

    rows: int
    on_notice: Callable[[str], object] = lambda _: None


@dataclass(frozen=True)
class HeldOut:
    """A fixed set of held-out examples, packed once; `rows` are packed rows of store rows."""

    layout: Layout
    rows: Sequence[Sequence[int]]
    loss_sum: Callable[[nn.Module, Batch], Tensor]  # (model, batch) -> nats summed over targets
    autocast: Callable[[], AbstractContextManager[object]]
    device: torch.device
    rows_per_batch: int = 8  # rows of a batch; batches are what ranks share
    weights: Sequence[float] | None = None  # of each row; None: 1. A batch has rows of one weight
    at_once: RowsAtOnce | None = None  # rows that this process computes at once; None for a batch
    share: tuple[int, int] = (0, 1)  # (rank, ranks): this process computes every ranks-th batch
    total: Callable[[Sequence[float]], Sequence[float]] = tuple  # all-reduce over the ranks, a sum
    in_step: bool = False
    """True if all ranks compute together: one with a batch less computes a row without labels."""
    n_bytes: int = 0  # bytes of all targets as text in UTF-8; 0 where they are no whole text

    @property
    def n_examples(self) -> int:
        """Held-out examples of an evaluation."""
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
        """Held-out loss over a fixed subset of a store, mixed by weight as training is.

        `trained` is the layout of the training batches; without `sharing` this process alone holds
        the model.
        """
        refuse_empty(store, "validation")
        rows, encoder = store.rows("validation"), trained.shape.source > 0
        spans = None
        if span_corruption is not None:
            spans = SpanCorruption.from_settings(span_corruption, store, encoder=encoder)
        lengths = ExampleLengths.of(store, rows, encoder=encoder, spans=spans)
        shape = choose_shape(*lengths.sample(), encoder=encoder)
        chosen = subset(rows, evaluation.max_examples)
        weights = held_out_weights(data, store, chosen)
        packed = [
            (weight, row)
            for weight in sorted(set(weights.tolist()))
            for row in choose_rows(store, chosen[weights == weight], shape, spans)
        ]
        held_rows = [row for _, row in packed]

        def together(_model: nn.Module, batch: Batch) -> Tensor:
            """The loss of a model that all ranks have to enter together."""
            assert sharing is not None
            return sharing.evaluate(loss_sum, batch)

        in_step = sharing is not None and sharing.is_sharded
        usual = usual_rows(shape.tokens)
        on_gpu = runtime.device.type == "cuda" and not in_step
        at_once = max(usual, GPU_TOKENS // shape.tokens) if on_gpu else usual
        return cls(
            layout=replace(
                trained, examples=store if spans is None else spans.held_out(store), shape=shape
            ),
            rows=held_rows,
            weights=[weight for weight, _ in packed],
            loss_sum=together if in_step else loss_sum,
            autocast=runtime.autocast,
            device=runtime.device,
            rows_per_batch=usual,
            at_once=RowsAtOnce(at_once, on_notice),
            share=(runtime.ranks.rank, runtime.ranks.world_size),
            total=runtime.ranks.all_reduce_sum,
            in_step=in_step,
            # The targets of a corrupted text are pieces: bits a byte would describe no text.
            n_bytes=text_bytes(store, held_rows) if spans is None else 0,
        )

    def alone(self) -> HeldOut:
        """The same examples, computed by this process alone, with the whole model."""
        return replace(self, loss_sum=loss_sum, in_step=False, share=(0, 1), total=tuple)

    def __call__(self, model: nn.Module, on_progress: Count = uncounted) -> dict[str, float]:
        """`loss` in nats per target token, `perplexity`, `target_tokens`, and `bits_per_byte`.

        The loss is sum(w_i nats_i) / sum(w_i tokens_i) with the weights w_i of the rows i. Bits a
        byte, sum(nats_i) / (n_bytes ln 2), compare models of different tokenizers. Draws nothing at
        random. `on_progress` counts the examples of all ranks, about; where it raises Interrupted
        on one, all ranks do.
        """
        nats, weighed, targets, plain, cut = 0.0, 0.0, 0, 0.0, False
        rank, ranks = self.share
        n_examples, done = self.n_examples, 0
        with evaluating(model), torch.no_grad(), suppress(Interrupted):
            cut = True
            on_progress(0, n_examples)
            batches = self._batches()
            own = batches[rank::ranks]
            for weight, batch, loss_of in self._computed(own, partial(self.loss_sum, model)):
                here = float(loss_of)
                nats += weight * here
                plain += here
                weighed += weight * batch.n_targets
                targets += batch.n_targets
                done += ranks * sum(map(len, batch.example_ids))
                on_progress(min(done, n_examples), n_examples)
            if self.in_step and rank >= len(batches) % ranks > 0:
                empty = self.layout.batch(batches[0][1]).unlabelled()
                with self.autocast():
                    self.loss_sum(model, empty.to(self.device))
                on_progress(n_examples, n_examples)
            cut = False
        nats, weighed, n_targets, plain, n_cut = self.total((nats, weighed, targets, plain, cut))
        if n_cut:
            raise Interrupted(LEFT)
        targets, loss = int(n_targets), nats / weighed
        found = {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "target_tokens": targets,
        }
        if self.n_bytes:
            found["bits_per_byte"] = plain / (math.log(2.0) * self.n_bytes)
        return found

    def by_example(
        self, model: nn.Module, on_progress: Count = uncounted
    ) -> list[tuple[int, float, float]]:
        """Store row, nats and weight of every example, computed by this process alone."""
        found: list[tuple[int, float, float]] = []
        total = sum(map(len, self.rows))
        with evaluating(model), torch.no_grad():
            computed = self._computed(self._batches(), partial(nats_by_example, model))
            for weight, batch, nats in computed:
                for ids, row in zip(batch.example_ids, nats, strict=True):
                    found += [(i, value, weight) for i, value in zip(ids, row, strict=True)]
                on_progress(len(found), total)
        return found

    def _computed(
        self,
        batches: Sequence[tuple[float, Sequence[Sequence[int]]]],
        compute: Callable[[Batch], T],
    ) -> Iterator[tuple[float, Batch, T]]:
        """Weight, batch and what is computed of it, for all rows of some batches in their order."""
        rows = [(weight, row) for weight, own in batches for row in own]
        at_once = self.at_once or RowsAtOnce(self.rows_per_batch)
        place = 0
        while place < len(rows):
            weight, own = next(groupby(rows[place : place + at_once.rows], key=itemgetter(0)))
            some = [row for _, row in own]
            batch = self.layout.batch(some)
            try:
                with self.autocast():
                    found = compute(batch.to(self.device))
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if self.in_step or not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0]
            else:
                yield weight, batch, found
                place += len(some)
                continue
            # Here what the failed try had computed, which the exception held, is freed.
            if at_once.rows == 1:
                raise ConfigError(
                    f"One row of held-out examples does not fit into memory: {reason} Cut the "
                    "examples (data.max_target_tokens), or end what else uses the memory."
                )
            release_memory()
            at_once.on_notice(
                f"Memory ran out with {at_once.rows} rows of held-out examples at once ({reason}). "
                f"From here on {at_once.rows // 2} are computed at once: the loss is the same."
            )
            at_once.rows //= 2

    def _batches(self) -> list[tuple[float, Sequence[Sequence[int]]]]:
        """The rows of each batch, with their weight."""
        found: list[tuple[float, Sequence[Sequence[int]]]] = []
        weights, n = self.weights or [1.0] * len(self.rows), self.rows_per_batch
        for weight, run in groupby(zip(weights, self.rows, strict=True), key=itemgetter(0)):
            rows = [row for _, row in run]
            found += [(weight, rows[i : i + n]) for i in range(0, len(rows), n)]
        return found


def choose_rows(
    store: TokenStore, rows: np.ndarray, shape: RowShape, spans: SpanCorruption | None = None
) -> list[tuple[int, ...]]:
    """Held-out examples `rows` of a store, as long as `spans` may make them, packed in order."""
    lengths, ids = (
        ExampleLengths.of(store, rows, encoder=shape.source > 0, spans=spans),
        rows.tolist(),
    )
    packed = pack(lengths.source, lengths.target, shape)
    return [tuple(ids[item] for item in row) for row in packed]


def text_bytes(store: TokenStore, rows: Iterable[Sequence[int]]) -> int:
    """Bytes, as UTF-8, of what is learnt of the targets that packed `rows` of store rows hold."""
    # Decoded, a character that two pieces of a document share would be two that cannot be read, so
    # tokens of byte-level vocabularies are counted one by one.
    codec, each = store.codec(), store.codec().token_bytes
    targets = (store.learnt(row) for packed in rows for row in packed)
    if each is not None:
        return sum(int(each[target].sum()) for target in targets)
    return sum(len(codec.decode(target).encode()) for target in targets)


def subset(rows: np.ndarray, n: int | None) -> np.ndarray:
    """Subset of at most `n` of `rows`, the same ones every time, shuffled."""
    count = len(rows) if n is None else min(n, len(rows))
    if count == 0:
        return rows[:0]
    return rows[permute(np.arange(count), n=len(rows), key=SUBSET_KEY)]
