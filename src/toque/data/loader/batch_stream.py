"""Batch stream: `at(cursor)` gives an update's batch and the cursor of the next update.

Threads make batches ahead of the loop and copy them to a GPU. A batch carries its own cursor, so a
checkpoint stores the position of the last one trained on, however many are waiting.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Final, Self

import numpy as np
import torch
from transformers import PretrainedConfig

from toque.batch import Batch
from toque.config.schema import DataConfig, TrainConfig
from toque.config.schema_methods import CurriculumConfig
from toque.data.loader.collate import Layout
from toque.data.loader.curriculum import StagedPlan
from toque.data.loader.epoch_plan import WINDOW_EXAMPLES, EpochPlan, Mixture, Update, Varied
from toque.data.loader.packing import RowShape, choose_shape
from toque.data.loader.span_corruption import SpanCorruption
from toque.data.store.token_store import Split, TokenStore
from toque.errors import ConfigError
from toque.keyed_random import key_of, keys_of
from toque.units import Cursor, Duration, Progress

CPU_MICRO_BATCH_TOKENS = 4096
"""Tokens computed at once; evaluating looks for the fastest from there."""
_DROPOUT: Final = key_of(0x64726F70)  # sets these keys apart from others of the same rows
SHAPE_SAMPLE = 2048  # examples whose lengths choose the row, the longest among them


@dataclass(frozen=True)
class Step:
    """The data of one update. Counts are over all ranks; `batch` is this rank's share."""

    batch: Batch
    cursor: Cursor  # cursor of the next update
    n_targets: int
    n_tokens: int
    n_examples: int
    n_computed: int  # tokens computed by this rank, padding included
    epoch: float  # passes over the data after this update
    stage: int | None = None  # stage of the curriculum, counted from 1; None without one

    def after(self, before: Progress, seconds: float) -> Progress:
        """Progress once this update, which took `seconds`, is done."""
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
    """An epoch plan, collated for one `rank` of `world_size` that share each update's rows."""

    plan: EpochPlan | StagedPlan
    layout: Layout
    prompt_lengths: np.ndarray  # [all store rows] stored prompt tokens; and stored target tokens
    target_lengths: np.ndarray
    rank: int = 0
    world_size: int = 1
    varied: Varied | None = None  # examples that change every epoch; None for the stored ones
    readers: int = 1  # threads that may collate at once
    learnt_lengths: np.ndarray | None = None  # [all store rows]; None: all target tokens are learnt

    @classmethod
    def from_settings(
        cls,
        train: TrainConfig,
        data: DataConfig,
        curriculum: CurriculumConfig | None,
        store: TokenStore,
        model: PretrainedConfig,
        *,
        seed: int,
        positions: int | None,
        spans: SpanCorruption | None = None,
        varied: Varied | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> Self:
        """The training batches of a store for a model.

        `positions` are the model's, None without a limit; `spans` corrupts the texts and goes
        before `varied`, which are augmented examples. ConfigError where the examples do not fit.
        """
        refuse_empty(store, "train")
        rows = store.rows("train")
        lengths = ExampleLengths.of(store, rows, encoder=model.is_encoder_decoder, spans=spans)
        refuse_longer(lengths, positions)
        mixture = Mixture.from_settings(data, store, rows, seed=seed)
        shape = row_shape(train, lengths, mixture)
        varied = varied if spans is None else spans.in_store(store)
        in_tokens = train.batch.unit == "tokens"

        def plan_of(chosen: np.ndarray, seed_of_plan: int) -> EpochPlan:
            return EpochPlan(
                examples=rows[chosen],
                source_lengths=lengths.source[chosen],
                target_lengths=lengths.target[chosen],
                shape=shape,
                seed=seed_of_plan,
                update_rows=max(1, int(train.batch.amount // shape.tokens)) if in_tokens else None,
                window=WINDOW_EXAMPLES if in_tokens else int(train.batch.amount),
                mixture=Mixture.from_settings(data, store, rows[chosen], seed=seed_of_plan),
                varied=varied,
            )

        plan: EpochPlan | StagedPlan
        if curriculum is None:
            plan = plan_of(np.arange(len(rows)), seed)
        else:
            plan = StagedPlan.from_settings(
                curriculum, store, rows, plan_of, stop_after=train.stop_after, seed=seed
            )
        return cls(
            plan=plan,
            layout=Layout.for_model(store, model, shape, packed=train.pack),
            prompt_lengths=store.prompt_lengths,
            target_lengths=store.target_lengths,
            rank=rank,
            world_size=world_size,
            varied=varied,
            readers=train.readers,
            learnt_lengths=store.learnt_lengths,
        )

    def at(self, cursor: Cursor) -> Step:
        """The update that begins at `cursor`; costs at most one or two windows of packing."""
        return self.collated(cursor, self.planned(cursor))

    def planned(self, cursor: Cursor) -> Update:
        """The update that begins at `cursor`, not yet read; one thread at a time."""
        return self.plan.at(cursor)

    def collated(self, cursor: Cursor, update: Update) -> Step:
        """Step of what `planned` gave, read and collated; any number of threads may call it."""
        ids = np.array(list(chain.from_iterable(update.rows)), np.int64)
        prompts, targets = self.prompt_lengths[ids], self.target_lengths[ids]
        changed = None
        if self.varied is not None:
            changed = self.varied.at(self.plan.epoch_key(cursor))
            prompts = np.array([len(changed.prompt(row)) for row in ids.tolist()], np.int64)
            targets = np.array([len(changed.target(row)) for row in ids.tolist()], np.int64)
        n_tokens, n_targets = prompts + targets, targets
        if self.layout.shape.source == 0:
            # A decoder-only example's last token is no input; without a prompt its first is no
            # target.
            n_tokens, n_targets = n_tokens - 1, targets - (prompts == 0)
        if self.learnt_lengths is not None:  # the rest of a conversation, which nothing varies
            n_targets = n_targets - (self.target_lengths[ids] - self.learnt_lengths[ids])
        owner = np.arange(len(update.rows)) % self.world_size
        mine = np.repeat(owner, list(map(len, update.rows))) == self.rank
        rows = update.rows[self.rank :: self.world_size]
        batch = self.layout.batch(rows, changed, keys=example_keys(ids)[mine])
        return Step(
            batch=batch,
            cursor=update.cursor,
            n_targets=int(n_targets.sum(dtype=np.int64)),
            n_tokens=int(n_tokens.sum(dtype=np.int64)),
            n_examples=len(ids),
            n_computed=batch.n_computed,
            epoch=update.epoch,
            stage=cursor.stage + 1 if isinstance(self.plan, StagedPlan) else None,
        )

    def totals(self, stop_after: Duration) -> dict[str, float]:
        """Steps, epochs, examples and tokens of a run, as far as they can be known before it."""
        plan = self.plan
        if isinstance(plan, StagedPlan):
            return plan.totals
        per_epoch = plan.amounts
        if stop_after.unit not in per_epoch:
            return {}
        epochs = stop_after.amount / per_epoch[stop_after.unit]
        return {unit: amount * epochs for unit, amount in per_epoch.items()}


def example_keys(ids: np.ndarray) -> np.ndarray:
    """Keys [examples] int64 of the examples of an update, by store row and how often it came.

    >>> len({*example_keys(np.array([5, 8, 5])).tolist()})
    3
    """
    order = np.argsort(ids, kind="stable")
    in_order = ids[order]
    first = np.searchsorted(in_order, in_order)
    times = np.empty(len(ids), np.int64)
    times[order] = np.arange(len(ids)) - first
    return keys_of(_DROPOUT, ids, times).view(np.int64)


def usual_rows(tokens: int) -> int:
    """Rows of so many tokens computed at once on a CPU, and where the number is not measured."""
    return max(1, CPU_MICRO_BATCH_TOKENS // tokens)


@dataclass(frozen=True)
class ExampleLengths:
    """Tokens each side computes for some store rows, and the row they are packed into."""

    source: np.ndarray
    target: np.ndarray
    encoder: bool

    @classmethod
    def of(
        cls,
        store: TokenStore,
        rows: np.ndarray,
        *,
        encoder: bool,
        spans: SpanCorruption | None = None,
    ) -> Self:
        """Lengths of store rows, with `spans` the most; a decoder's joined, less the last token."""
        prompt = store.prompt_lengths[rows].astype(np.int64)
        target = store.target_lengths[rows].astype(np.int64)
        if spans is not None:
            prompt, target = spans.longest(prompt, target)
        if encoder:
            return cls(prompt, target, encoder=True)
        return cls(np.zeros_like(prompt), prompt + target - 1, encoder=False)

    def sample(self, mixture: Mixture | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of an even sample of what is drawn, and of the longest example of either side."""
        n = len(self.target) if mixture is None else sum(mixture.draws)
        ids = np.linspace(0, n - 1, min(n, SHAPE_SAMPLE)).astype(np.int64)
        ids = ids if mixture is None else mixture.examples(ids, epoch=0)
        ids = np.unique(np.append(ids, [self.source.argmax(), self.target.argmax()]))
        return self.source[ids], self.target[ids]


def row_shape(
    train: TrainConfig, lengths: ExampleLengths, mixture: Mixture | None = None
) -> RowShape:
    """The packed row that is configured, or the cheapest for what an epoch draws."""
    batch, asked = train.batch, train.row_tokens
    source, target = lengths.sample(mixture)
    limit = batch.amount if batch.unit == "tokens" else np.inf
    shape = choose_shape(source, target, encoder=lengths.encoder, at_most=limit)
    if isinstance(asked, int):
        ratio = shape.source / shape.target
        source_side = max(int(lengths.source.max()), round(asked * ratio)) if ratio else 0
        shape = RowShape(source_side, asked)
    if shape.tokens > limit:
        raise ConfigError(
            f'train.batch is "{batch}", and one row of this data takes {shape.tokens} tokens. '
            f'Use at least train.batch="{shape.tokens} tokens", or a batch in examples.'
        )
    return shape


def refuse_longer(lengths: ExampleLengths, positions: int | None) -> None:
    """Refuse examples longer than the model has positions; None: it has no limit."""
    longest = int(lengths.target.max())
    if positions is not None and longest > positions:
        raise ConfigError(
            f"The model has {positions} positions, and the longest example of the store has "
            f"{longest} tokens. Set data.max_prompt_tokens and data.max_target_tokens so that "
            f"together they are at most {positions + 1}, and prepare again."
        )


def refuse_empty(store: TokenStore, split: Split) -> None:
    """Refuse a store without an example to train on, or to hold out, with the cause."""
    if getattr(store.manifest.splits, split):
        return
    n, settings = store.manifest.examples, store.manifest.settings
    if split == "train" and "held_out_from" in settings:
        raise ConfigError(
            f"The store {store.path} has no training example: every record of data.sources is in "
            "data.validation, too, and so held out alone, or was dropped, which its report counts. "
            "Add others to data.sources, or take those away from data.validation."
        )
    if settings.get("validation_fraction") == 0 and "held_out_from" not in settings:
        raise ConfigError(
            f"The store {store.path} was prepared with data.validation_fraction=0: none of its "
            f"{n:,} examples is held out to be evaluated. Prepare it with a share such as 0.1."
        )
    which = "training" if split == "train" else "held-out"
    raise ConfigError(
        f"The store {store.path} has no {which} example: its {n:,} are of one record, or of "
        "copies of one, and a record is never on both sides of the split. Add to data.sources "
        "(data.max_examples may leave some out) until there are at least two different ones."
    )


Sent = tuple[Batch, torch.cuda.Event]  # a batch on the device, and when it will be whole
Made = tuple[Step, Batch | Sent]


class DeviceFeed:
    """Sends whole updates to a GPU, on a stream of its own: neither a reader nor the loop waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: Batch) -> Sent:
        """Begin the copy of `batch`."""
        pinned = batch.counted().pin()
        with torch.cuda.stream(self._stream):
            return pinned.to(self._device), self._stream.record_event()

    def receive(self, sent: Sent) -> Batch:
        """The batch, for work that the loop's stream is given from now on."""
        batch, whole = sent
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(whole)
        for tensor in batch.tensors().values():
            tensor.record_stream(stream)  # its memory is the copying stream's to give away again
        return batch


class Prefetch:
    """Updates ahead of the loop, from `cursor` on, which `feed` copies to a GPU as they are made.

    `depth` batches may wait, and one more for each further reader; 0 makes each when it is asked
    for. Leaving the context ends the threads.
    """

    def __init__(
        self,
        batches: BatchStream,
        cursor: Cursor,
        *,
        depth: int = 2,
        feed: DeviceFeed | None = None,
    ) -> None:
        self._batches, self._cursor, self._feed = batches, cursor, feed
        self._depth = depth + batches.readers - 1 if depth else 0
        self._ahead: deque[Future[Made]] = deque()
        # Updates are planned one after the other, so their order is the plan's; readers wait.
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="toque-prefetch")
        self._readers = ThreadPoolExecutor(batches.readers, thread_name_prefix="toque-prefetch")

    def __enter__(self) -> Self:
        for _ in range(self._depth):
            self._submit()
        return self

    def __exit__(self, *_: object) -> None:
        self._planner.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def next(self) -> tuple[Step, Batch]:
        """The next update, and its batch, on the device with a feed; raises what making it did."""
        self._submit()
        step, made = self._ahead.popleft().result()
        if isinstance(made, tuple):
            assert self._feed is not None
            made = self._feed.receive(made)
        return step, made

    def _submit(self) -> None:
        self._ahead.append(self._readers.submit(self._make, self._planner.submit(self._plan)))

    def _plan(self) -> tuple[Cursor, Update]:
        cursor, update = self._cursor, self._batches.planned(self._cursor)
        self._cursor = update.cursor
        return cursor, update

    def _make(self, planned: Future[tuple[Cursor, Update]]) -> Made:
        step = self._batches.collated(*planned.result())
        return step, step.batch if self._feed is None else self._feed.send(step.batch)
