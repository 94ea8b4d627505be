"""Batch stream: the batch of the update at a cursor, and the cursor of the next update.

Threads prepare batches ahead of the training loop and copy them to a GPU. Each batch has its own
cursor, so a checkpoint stores the position of the last trained batch, not of the last prepared one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from transformers import PretrainedConfig

from toque.batch import Batch
from toque.config.schema import RunConfig, TrainConfig
from toque.data.array_types import Ints
from toque.data.loader.collate import Layout
from toque.data.loader.curriculum import StagedPlan
from toque.data.loader.epoch_plan import (
    WINDOW_EXAMPLES,
    EpochExamples,
    EpochPlan,
    Mixture,
    Update,
    Varied,
)
from toque.data.loader.packing import RowShape, choose_shape, computed_lengths
from toque.data.loader.span_corruption import SpanCorruption
from toque.data.store.token_store import Split, TokenStore
from toque.errors import ConfigError
from toque.keyed_random import key_of, keys_of
from toque.units import Cursor, Duration, Progress

CPU_MICRO_BATCH_TOKENS = 4096
"""Tokens per micro-batch on a CPU. Evaluation starts its search for the fastest size here."""
# Separates these keys from other keys of the same rows.
_DROPOUT = key_of(0x64726F70)
# Examples that determine the row shape, including the longest ones.
SHAPE_SAMPLE = 2048


class RewardedText(NamedTuple):
    """Generated text with its reward."""

    prompt: str
    text: str
    tokens: int
    """Number of generated tokens."""
    reward: float


@dataclass(frozen=True)
class Step:
    """Batch of an update, and the update's counts."""

    batch: Batch  # rows of this rank
    cursor: Cursor  # cursor of the next update
    n_targets: int  # number of tokens with loss on all ranks
    n_tokens: int  # number of tokens without padding on all ranks
    n_examples: int  # number of examples on all ranks; a pair is one example
    n_computed: int  # number of tokens with padding on this rank
    epoch: float  # passes over the data after this update
    loss_count: int  # divisor of the summed loss: target tokens with loss, or pairs
    # Curriculum stage, from 1. None without a curriculum.
    stage: int | None = None
    # Measurements of generated texts, by metric name, as means over all ranks.
    measured: Mapping[str, float] = field(default_factory=dict)
    # Best and worst generated text of one prompt of this rank.
    texts: Sequence[RewardedText] = ()

    def progress_after(self, before: Progress, seconds: float) -> Progress:
        """Compute the run's progress after this update, which took `seconds`."""
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
    """Stream of collated batches in the order of a plan. The ranks divide each update's rows."""

    plan: EpochPlan | StagedPlan
    layout: Layout
    prompt_lengths: np.ndarray  # [store rows] number of prompt tokens
    target_lengths: np.ndarray  # [store rows] target tokens
    rank: int = 0
    world_size: int = 1
    varied: Varied | None = None  # examples that change every epoch
    readers: int = 1  # number of threads that collate
    learnt_lengths: np.ndarray | None = None
    """[store rows] Number of target tokens with loss. None if all target tokens have a loss."""

    @classmethod
    def for_training(
        cls,
        config: RunConfig,
        store: TokenStore,
        model: PretrainedConfig,
        *,
        context_length: int | None,
        spans: SpanCorruption | None = None,
        varied: Varied | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> Self:
        """Create the stream of training batches from a store for a model.

        Args:
            config: Configuration of the run.
            store: Store with the training examples.
            model: Configuration of the model.
            context_length: Context length of the model in tokens. None means no limit.
            spans: Span corruption of the texts. It replaces `varied`.
            varied: Augmented examples.
            rank: Rank of this process.
            world_size: Number of ranks.

        Raises:
            ConfigError: The store has no training example, or its examples are too long.
        """
        refuse_empty(store, "train")
        refuse_other_objective(config.objective.kind, store)
        encoder = model.is_encoder_decoder
        rows = store.rows("train")
        lengths = ExampleLengths.from_store(store, rows, encoder=encoder, spans=spans)
        refuse_overlong(lengths, context_length)
        if store.has_pairs:
            rows = store.pair_rows("train")
            lengths = ExampleLengths.of_pairs(store, rows, encoder=encoder)
        mixture = Mixture.for_rows(config.data, store, rows, seed=config.seed)
        shape = row_shape(config.train, lengths, mixture)
        if spans is not None:
            varied = spans.in_store(store)
        update_rows, window = _size_updates(config.train.batch, shape)

        def make_plan(selection: Ints, plan_seed: int) -> EpochPlan:
            """Plan the examples at the positions `selection` of `rows`."""
            plan_rows = rows[selection]
            return EpochPlan(
                examples=plan_rows,
                source_lengths=lengths.source[selection],
                target_lengths=lengths.target[selection],
                shape=shape,
                seed=plan_seed,
                update_rows=update_rows,
                window=window,
                mixture=Mixture.for_rows(config.data, store, plan_rows, seed=plan_seed),
                varied=varied,
            )

        layout = Layout.for_model(store, model, shape, packed=config.train.pack)
        if store.has_pairs:
            layout = replace(layout, group=2)
        return cls(
            plan=_plan_run(config, store, rows, make_plan),
            layout=layout,
            prompt_lengths=store.prompt_lengths,
            target_lengths=store.target_lengths,
            rank=rank,
            world_size=world_size,
            varied=varied,
            readers=config.train.readers,
            learnt_lengths=store.learnt_lengths,
        )

    def at(self, cursor: Cursor) -> Step:
        """Plan, read and collate the update at `cursor`. This plans at most two windows."""
        return self.collate(cursor, self.plan_update(cursor))

    def plan_update(self, cursor: Cursor) -> Update:
        """Plan the update at `cursor`. Only one thread at a time may call this."""
        return self.plan.at(cursor)

    def collate(self, cursor: Cursor, update: Update) -> Step:
        """Read and collate a planned update. Threads may call this at the same time."""
        rows = update.rows
        has_pairs = self.layout.group == 2
        if has_pairs:
            rows = tuple(map(with_rejected, rows))
        ids = np.array(list(chain.from_iterable(rows)), np.int64)
        examples = None
        if self.varied is not None:
            examples = self.varied.for_epoch(self.plan.epoch_key(cursor))
        n_tokens, n_targets = self._count_tokens(ids, examples)

        # The ranks take turns at the rows.
        owner = np.arange(len(rows)) % self.world_size
        is_own = np.repeat(owner, list(map(len, rows))) == self.rank
        own_rows = rows[self.rank :: self.world_size]
        own_keys = example_keys(ids)[is_own]
        batch = self.layout.batch(own_rows, examples, keys=own_keys)
        n_examples = len(ids) // self.layout.group
        return Step(
            batch=batch,
            cursor=update.cursor,
            n_targets=n_targets,
            n_tokens=n_tokens,
            n_examples=n_examples,
            n_computed=batch.n_computed,
            epoch=update.epoch,
            loss_count=n_examples if has_pairs else n_targets,
            stage=cursor.stage + 1 if isinstance(self.plan, StagedPlan) else None,
        )

    def _count_tokens(
        self, ids: Ints, examples: EpochExamples | None
    ) -> tuple[int, int]:
        """Count the tokens without padding, and the tokens with loss, of store rows `ids`."""
        prompts = self.prompt_lengths[ids]
        targets = self.target_lengths[ids]
        if examples is not None:
            rows = ids.tolist()
            prompts = np.array([len(examples.prompt(row)) for row in rows], np.int64)
            targets = np.array([len(examples.target(row)) for row in rows], np.int64)

        n_tokens = prompts + targets
        n_targets = targets
        if self.layout.shape.source == 0:
            # A decoder does not read the last token of an example. Without a prompt, it does not
            # predict the first token.
            n_tokens = n_tokens - 1
            n_targets = targets - (prompts == 0)
        if self.learnt_lengths is not None:
            without_loss = self.target_lengths[ids] - self.learnt_lengths[ids]
            n_targets = n_targets - without_loss
        return int(n_tokens.sum(dtype=np.int64)), int(n_targets.sum(dtype=np.int64))

    def totals(self, stop_after: Duration) -> dict[str, float]:
        """Estimate the steps, epochs, examples and tokens of a run.

        If the run's length is a time, return {}.
        """
        if isinstance(self.plan, StagedPlan):
            return self.plan.totals
        per_epoch = self.plan.amounts
        if stop_after.unit not in per_epoch:
            return {}
        epochs = stop_after.amount / per_epoch[stop_after.unit]
        return {unit: amount * epochs for unit, amount in per_epoch.items()}


def _plan_run(
    config: RunConfig,
    store: TokenStore,
    rows: Ints,
    make_plan: Callable[[Ints, int], EpochPlan],
) -> EpochPlan | StagedPlan:
    """Plan all rows together, or the stages of the curriculum."""
    if config.curriculum is None:
        return make_plan(np.arange(len(rows)), config.seed)
    return StagedPlan.from_curriculum(
        config.curriculum,
        store,
        rows,
        make_plan,
        stop_after=config.train.stop_after,
        seed=config.seed,
    )


def _size_updates(batch: Duration, shape: RowShape) -> tuple[int | None, int]:
    """Choose the rows per update and the examples per window.

    If the batch size is in examples, an update is a window, and the rows per update are None.
    """
    if batch.unit != "tokens":
        return None, int(batch.amount)
    return max(1, int(batch.amount // shape.tokens)), WINDOW_EXAMPLES


def with_rejected(chosen: Sequence[int]) -> tuple[int, ...]:
    """Return the store rows of pairs: each chosen answer, and the rejected one behind it.

    >>> with_rejected([4, 10])
    (4, 5, 10, 11)
    """
    return tuple(row for first in chosen for row in (first, first + 1))


def example_keys(ids: Ints) -> Ints:
    """Compute a random key for each example of an update, int64 [examples].

    A key depends on the store row and on how often the row has already occurred in the update.

    >>> len({*example_keys(np.array([5, 8, 5])).tolist()})
    3
    """
    order = np.argsort(ids, kind="stable")
    sorted_ids = ids[order]
    occurrence = np.empty(len(ids), np.int64)
    occurrence[order] = np.arange(len(ids)) - np.searchsorted(sorted_ids, sorted_ids)
    return keys_of(_DROPOUT, ids, occurrence).view(np.int64)


def usual_rows(tokens: int) -> int:
    """Choose the rows per micro-batch from the tokens per row, without measuring the speed."""
    return max(1, CPU_MICRO_BATCH_TOKENS // tokens)


@dataclass(frozen=True)
class ExampleLengths:
    """Number of computed tokens per example. For a decoder, the target includes the prompt."""

    source: Ints  # [examples] number of encoder tokens; 0 for a decoder
    target: Ints  # [examples] number of decoder tokens
    encoder: bool

    @classmethod
    def from_store(
        cls,
        store: TokenStore,
        rows: Ints,
        *,
        encoder: bool,
        spans: SpanCorruption | None = None,
    ) -> Self:
        """Collect the lengths of store rows. With `spans`, these are upper bounds."""
        prompt = store.prompt_lengths[rows].astype(np.int64)
        target = store.target_lengths[rows].astype(np.int64)
        if spans is not None:
            prompt, target = spans.longest(prompt, target)
        source, target = computed_lengths(prompt, target, encoder=encoder)
        return cls(source, target, encoder=encoder)

    @classmethod
    def of_pairs(cls, store: TokenStore, chosen: Ints, *, encoder: bool) -> Self:
        """Collect the lengths of pairs, both answers together, from the rows of chosen answers."""
        first = cls.from_store(store, chosen, encoder=encoder)
        second = cls.from_store(store, chosen + 1, encoder=encoder)
        return cls(
            first.source + second.source, first.target + second.target, encoder=encoder
        )

    def sample(self, mixture: Mixture | None = None) -> tuple[Ints, Ints]:
        """Sample source and target lengths evenly from an epoch, with the longest of each."""
        # Choose evenly spaced positions of an unshuffled epoch.
        n = len(self.target) if mixture is None else sum(mixture.draws)
        ids = np.linspace(0, n - 1, min(n, SHAPE_SAMPLE)).astype(np.int64)
        if mixture is not None:
            ids = mixture.examples_at(ids, epoch=0)
        ids = np.unique(np.append(ids, [self.source.argmax(), self.target.argmax()]))
        return self.source[ids], self.target[ids]


def row_shape(
    train: TrainConfig, lengths: ExampleLengths, mixture: Mixture | None = None
) -> RowShape:
    """Choose the shape of a packed row: the configured shape, or the cheapest for an epoch.

    Raises:
        ConfigError: The batch is smaller than a row.
    """
    batch = train.batch
    source, target = lengths.sample(mixture)
    limit = batch.amount if batch.unit == "tokens" else np.inf
    shape = choose_shape(source, target, encoder=lengths.encoder, at_most=limit)
    if isinstance(train.row_tokens, int):
        source_tokens = 0
        if shape.source:
            # Keep the ratio of the sides, but make the source as long as its longest example.
            scaled_source = round(train.row_tokens * (shape.source / shape.target))
            source_tokens = max(int(lengths.source.max()), scaled_source)
        shape = RowShape(source_tokens, train.row_tokens)
    if shape.tokens > limit:
        raise ConfigError(
            f'train.batch is "{batch}", but a row of this data has {shape.tokens} tokens. Set '
            f'train.batch to "{shape.tokens} tokens" or more, or to a number of examples.'
        )
    return shape


def refuse_overlong(lengths: ExampleLengths, context_length: int | None) -> None:
    """Refuse examples that are longer than the model's context length. None means no limit."""
    longest = int(lengths.target.max())
    if context_length is not None and longest > context_length:
        # The model does not read the last token of an example, so one more token fits.
        raise ConfigError(
            f"The model's context length is {context_length} tokens, but the longest example in "
            f"the store has {longest}. Set data.max_prompt_tokens and data.max_target_tokens to at "
            f"most {context_length + 1} in total, and prepare the data again."
        )


def refuse_other_objective(kind: str, store: TokenStore) -> None:
    """Refuse to imitate the rejected answers of pairs, and to compare answers without pairs.

    Raises:
        ConfigError: The store has pairs and `objective.kind` is not dpo, or the reverse.
    """
    if store.has_pairs and kind != "dpo":
        raise ConfigError(
            f"The store {store.path} has preference pairs, but objective.kind is {kind}. Set it to "
            "dpo. To imitate the chosen answers instead, set the columns of the source to "
            "{prompt: prompt, target: chosen}, and prepare the data again."
        )
    if kind == "dpo" and not store.has_pairs:
        raise ConfigError(
            f"objective.kind is dpo, but the store {store.path} has no preference pairs. Name "
            "sources with the fields prompt, chosen and rejected, or map others with columns, and "
            "prepare the data again."
        )


def refuse_empty(store: TokenStore, split: Split) -> None:
    """Refuse a store without an example in a split, and explain the cause."""
    if getattr(store.manifest.splits, split):
        return
    n = store.manifest.examples
    settings = store.manifest.settings
    has_held_out_sources = "held_out_from" in settings
    if split == "train" and has_held_out_sources:
        raise ConfigError(
            f"The store {store.path} has no training examples: every record in data.sources is "
            "also in data.validation, or was dropped (the data report lists the reasons). Add more "
            "data to data.sources, or remove sources from data.validation."
        )
    if settings.get("validation_fraction") == 0 and not has_held_out_sources:
        raise ConfigError(
            f"The store {store.path} was prepared with data.validation_fraction=0, so none of its "
            f"{n:,} examples is held out for evaluation. Set it to 0.1, for example, and prepare "
            "the data again."
        )
    name = "training" if split == "train" else "held-out"
    raise ConfigError(
        f"The store {store.path} has no {name} example: its {n:,} examples come from one record or "
        "its copies, and a record is never on both sides of the split. Add at least one different "
        "record to data.sources. If data.max_examples is set, it may have excluded records."
    )


DeviceBatch = tuple[Batch, torch.cuda.Event]
"""Batch on the device, and the event at the end of its copy."""


class DeviceFeed:
    """Copier of batches to a GPU on a separate stream. The training loop does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: Batch) -> DeviceBatch:
        """Start the copy of a batch."""
        pinned = batch.counted().pin()
        with torch.cuda.stream(self._stream):
            return pinned.to(self._device), self._stream.record_event()

    def receive(self, sent: DeviceBatch) -> Batch:
        """Make the current stream wait for the copy, and return the batch on the device."""
        batch, event = sent
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for tensor in batch.tensors().values():
            # Otherwise the copy stream could reuse the tensor's memory too early.
            tensor.record_stream(stream)
        return batch


class Feed(Protocol):
    """Queue of updates for the training loop."""

    def __enter__(self) -> Self:
        """Start to prepare updates."""

    def __exit__(self, *_: object) -> None:
        """Stop to prepare updates."""

    def next(self) -> tuple[Step, Batch]:
        """Return the next update and its batch, on the device if there is a feed."""


class Prefetch:
    """Queue of updates that threads prepare ahead of the training loop.

    Leaving the context stops the threads.

    Args:
        batches: Stream of batches.
        cursor: Cursor of the first update.
        depth: Number of updates to prepare ahead, plus one per reader after the first. 0 prepares
            none.
        feed: Feed that copies batches to a GPU. None means that batches stay in host memory.
    """

    def __init__(
        self,
        batches: BatchStream,
        cursor: Cursor,
        *,
        depth: int = 2,
        feed: DeviceFeed | None = None,
    ) -> None:
        self._batches = batches
        self._cursor = cursor
        self._feed = feed
        self._depth = depth + batches.readers - 1 if depth else 0
        self._queue: deque[Future[tuple[Step, Batch | DeviceBatch]]] = deque()
        # A single thread plans the updates, so they are in the order of the plan.
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="toque-prefetch")
        self._readers = ThreadPoolExecutor(
            batches.readers, thread_name_prefix="toque-prefetch"
        )

    def __enter__(self) -> Self:
        for _ in range(self._depth):
            self._submit()
        return self

    def __exit__(self, *_: object) -> None:
        self._planner.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def next(self) -> tuple[Step, Batch]:
        """Return the next update and its batch, on the device if there is a feed."""
        self._submit()
        step, batch = self._queue.popleft().result()
        if isinstance(batch, tuple):
            assert self._feed is not None
            batch = self._feed.receive(batch)
        return step, batch

    def _submit(self) -> None:
        plan = self._planner.submit(self._plan_next)
        self._queue.append(self._readers.submit(self._prepare, plan))

    def _plan_next(self) -> tuple[Cursor, Update]:
        """Plan the update at the cursor, and advance the cursor."""
        cursor = self._cursor
        update = self._batches.plan_update(cursor)
        self._cursor = update.cursor
        return cursor, update

    def _prepare(
        self, plan: Future[tuple[Cursor, Update]]
    ) -> tuple[Step, Batch | DeviceBatch]:
        """Collate a planned update, and start the copy of its batch."""
        step = self._batches.collate(*plan.result())
        if self._feed is None:
            return step, step.batch
        return step, self._feed.send(step.batch)
