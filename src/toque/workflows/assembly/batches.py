"""Batch stream of a run, assembled: rows, micro-batches, epochs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.data.loader.batch_stream import BatchStream
from toque.data.loader.collate import Layout
from toque.data.loader.curriculum import StagedPlan
from toque.data.loader.epoch_plan import WINDOW_EXAMPLES, EpochPlan
from toque.data.loader.mixture import Mixture
from toque.data.loader.packing import RowShape, choose_shape
from toque.data.loader.span_corruption import SpanCorruption
from toque.data.store.token_store import Split, TokenStore
from toque.errors import ConfigError
from toque.models.families import max_positions
from toque.workflows.assembly.augmentation import varied_of
from toque.workflows.assembly.curriculum import plan_of_stages
from toque.workflows.assembly.mixture import mixture_of
from toque.workflows.assembly.span_corruption import corrupted, spans_of

CPU_MICRO_BATCH_TOKENS = 4096
"""Tokens at once in training; in evaluating, where the search for the fastest number begins."""
SHAPE_SAMPLE = 2048
"""Examples whose lengths choose the row; the longest of all are always among them."""


def usual_rows(tokens: int) -> int:
    """Rows of so many tokens at once on a CPU, and wherever a number cannot be measured."""
    return max(1, CPU_MICRO_BATCH_TOKENS // tokens)


@dataclass(frozen=True)
class Lengths:
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
    ) -> Lengths:
        """Of store rows: a decoder-only model reads prompt and target joined, less the last.

        With `spans`, the most that corrupting leaves of them.
        """
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


def row_shape(config: RunConfig, lengths: Lengths, mixture: Mixture | None = None) -> RowShape:
    """What a packed row holds: as configured, or the cheapest for what an epoch draws.

    Raises:
        ConfigError: a row holds more tokens than an update.
    """
    batch, asked = config.train.batch, config.train.row_tokens
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


def check_positions(model: PreTrainedModel, lengths: Lengths) -> None:
    """Refuse examples longer than the model has positions.

    Raises:
        ConfigError: the longest example does not fit.
    """
    limit, longest = max_positions(model.config), int(lengths.target.max())
    if limit is not None and longest > limit:
        raise ConfigError(
            f"The model has {limit} positions, and the longest example of the store has {longest} "
            f"tokens. Set data.max_prompt_tokens and data.max_target_tokens so that together they "
            f"are at most {limit + 1}, and prepare again."
        )


def refuse_empty(store: TokenStore, split: Split) -> None:
    """Refuse a store without an example to train on, or to hold out.

    Raises:
        ConfigError: with the cause: too few different records, or nothing held out on purpose.
    """
    if getattr(store.manifest.splits, split):
        return
    n, asked = store.manifest.examples, store.manifest.settings.get("validation_fraction")
    if asked == 0:
        raise ConfigError(
            f"The store {store.path} was prepared with data.validation_fraction=0: none of its "
            f"{n:,} examples is held out, so nothing can be evaluated. Prepare it with a share "
            "above 0, e.g. 0.1."
        )
    which = "training" if split == "train" else "held-out"
    raise ConfigError(
        f"The store {store.path} has no {which} example: its {n:,} are of one record, or of "
        "copies of one, and a record is never on both sides of the split. Add to data.sources "
        "(data.max_examples may leave some out) until there are at least two different ones."
    )


def build_stream(
    config: RunConfig, store: TokenStore, model: PreTrainedModel, *, rank: int = 0, ranks: int = 1
) -> BatchStream:
    """Training batches by position."""
    refuse_empty(store, "train")
    rows = store.rows("train")
    spans = spans_of(config, store, encoder=model.config.is_encoder_decoder)
    lengths = Lengths.of(store, rows, encoder=model.config.is_encoder_decoder, spans=spans)
    check_positions(model, lengths)
    shape = row_shape(config, lengths, mixture_of(config, store, rows))
    batch = config.train.batch
    in_tokens = batch.unit == "tokens"
    if spans is None:
        varied = varied_of(config, store, rows, encoder=lengths.encoder)
    else:
        varied = corrupted(store, spans)

    def make(chosen: np.ndarray, seed: int) -> EpochPlan:
        mixture = mixture_of(config, store, rows[chosen])
        return EpochPlan(
            examples=rows[chosen],
            source_lengths=lengths.source[chosen],
            target_lengths=lengths.target[chosen],
            shape=shape,
            seed=seed,
            update_rows=max(1, int(batch.amount // shape.tokens)) if in_tokens else None,
            window=WINDOW_EXAMPLES if in_tokens else int(batch.amount),
            mixture=mixture and replace(mixture, seed=seed),
            varied=varied,
        )

    plan = plan_of_stages(config, store, rows, make)
    return BatchStream(
        plan=plan,
        layout=build_layout(store, model, shape, packed=config.train.pack),
        prompt_lengths=store.prompt_lengths,
        target_lengths=store.target_lengths,
        rank=rank,
        world_size=ranks,
        varied=varied,
        readers=config.train.readers,
    )


def build_layout(
    store: TokenStore, model: PreTrainedModel, shape: RowShape, *, packed: bool
) -> Layout:
    """How examples become the model's inputs."""
    start_id = getattr(model.config, "decoder_start_token_id", None) or 0
    pad_id = model.config.pad_token_id or 0
    return Layout(store, shape=shape, pad_id=pad_id, start_id=start_id, packed=packed)


def expected_totals(config: RunConfig, stream: BatchStream) -> dict[str, float]:
    """Steps, epochs, examples and tokens of the whole run, as far as they can be known before."""
    plan, stop = stream.plan, config.train.stop_after
    if isinstance(plan, StagedPlan):
        return plan.totals
    per_epoch = {
        "epochs": 1.0,
        "steps": plan.updates_per_epoch(),
        "examples": float(plan.n_drawn),
        "tokens": plan.n_tokens,
    }
    if stop.unit not in per_epoch:
        return {}
    epochs = stop.amount / per_epoch[stop.unit]
    return {unit: amount * epochs for unit, amount in per_epoch.items()}
