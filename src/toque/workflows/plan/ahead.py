"""Run ahead: its rows, updates and tokens, from its store or from the settings alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.batch import Batch, EncoderDecoderBatch
from toque.config import RunConfig
from toque.data.loader.packing import RowShape
from toque.errors import ConfigError
from toque.models.families import family_of, max_positions
from toque.models.flops import flops_per_token, products_of
from toque.models.forward.outline import OutlinedRows
from toque.training.arithmetic import Arithmetic, arithmetic_of
from toque.units import Cursor
from toque.workflows.build import build_stream

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from toque.data.store.token_store import TokenStore

_PROMPT, _TARGET = 256, 512
"""Tokens that documents are split at when nothing else is said; see data.max_prompt_tokens."""


@dataclass(frozen=True)
class Ahead:
    """The work of a run."""

    row: OutlinedRows
    """One row, filled with as many examples as rows have on average."""
    worst_examples: int
    """Of a row of the longest examples, whose attention takes most memory."""
    update_rows: int
    tokens_per_update: float
    """That are no padding, both sides."""
    totals: dict[str, float]
    """Steps, epochs, examples, tokens of the whole run; without those that are not known."""
    seconds: float | None
    """Of the run, where it ends by the clock."""
    arithmetic: Arithmetic
    held_out_tokens: float
    how: str
    """Where the lengths are from."""
    batches: Callable[[], Iterator[Batch]] | None = None
    """Those of the run's updates, from the first on, where a store has them."""

    @property
    def steps(self) -> float | None:
        """Updates of the run."""
        return self.totals.get("steps")

    @property
    def useful_share(self) -> float:
        """Tokens that are no padding, of those computed where rows are computed whole."""
        return min(1.0, self.tokens_per_update / (self.update_rows * self.row.tokens))


def store_of(config: RunConfig) -> TokenStore | None:
    """The prepared store, if there is one."""
    from toque.data.store.token_store import TokenStore

    folder = Path(config.data.store)
    return TokenStore.open(folder) if (folder / "manifest.json").exists() else None


def what_lies_ahead(config: RunConfig, model: PreTrainedModel, store: TokenStore | None) -> Ahead:
    """Rows, updates and tokens of the run.

    Raises:
        ConfigError: rows that do not fit the update or the model.
    """
    return _from_store(config, model, store) if store is not None else _as_asked(config, model)


def _from_store(config: RunConfig, model: PreTrainedModel, store: TokenStore) -> Ahead:
    stream = build_stream(config, store, model)
    batch, shape = stream.at(Cursor()).batch, stream.layout.shape
    longest = int(stream.plan.source_lengths.max()), int(stream.plan.target_lengths.max())
    if not stream.layout.packed:
        shape = RowShape(longest[0] if shape.source else 0, longest[1])
    examples = sum(len(ids) for ids in batch.example_ids) / max(1, batch.n_rows)
    splits, whole = store.manifest.splits, store.manifest.tokens
    held_out = min(splits.validation, config.evaluation.max_examples or splits.validation)
    each = (whole.prompt + whole.target) / max(1, store.manifest.examples)
    worst = -(-shape.target // max(1, longest[1]))
    if shape.source:
        worst = max(worst, -(-shape.source // max(1, longest[0])))
    return Ahead(
        row=OutlinedRows(1, shape.source, shape.target, max(1, round(examples))),
        worst_examples=worst,
        update_rows=batch.n_rows,
        tokens_per_update=float(_real_tokens(batch)),
        totals=stream.totals(config.train.stop_after),
        seconds=config.train.stop_after.seconds,
        arithmetic=arithmetic_of(model, stream),
        held_out_tokens=held_out * each,
        how=f"the {splits.train:,} training examples of {config.data.store}, "
        f"{each:,.0f} tokens each on average",
        batches=lambda: (step.batch for step in stream.starting_at(Cursor())),
    )


def _real_tokens(batch: Batch) -> int:
    if isinstance(batch, EncoderDecoderBatch):
        return int((batch.source_segments > 0).sum() + (batch.target_segments > 0).sum())
    return int((batch.segments > 0).sum())


def _as_asked(config: RunConfig, model: PreTrainedModel) -> Ahead:
    data, train = config.data, config.train
    encoder = family_of(model.config).is_encoder_decoder
    prompt = _PROMPT if data.max_prompt_tokens == "auto" else data.max_prompt_tokens
    target = _TARGET if data.max_target_tokens == "auto" else data.max_target_tokens
    length = target if encoder else prompt + target
    if isinstance(train.row_tokens, int):
        length = max(length, train.row_tokens) if encoder else train.row_tokens
    limit = max_positions(model.config)
    length = length if limit is None else min(length, limit)
    row = OutlinedRows(1, prompt if encoder else 0, length)
    in_tokens = train.batch.unit == "tokens"
    rows = int(train.batch.amount // row.tokens) if in_tokens else int(train.batch.amount)
    if rows < 1:
        raise ConfigError(
            f'train.batch is "{train.batch}", and one row as long as allowed takes {row.tokens} '
            f'tokens. Use at least train.batch="{row.tokens} tokens".'
        )
    tokens = float(rows * row.tokens)
    held_out = float((config.evaluation.max_examples or 512) * row.tokens)
    return Ahead(
        row=row,
        worst_examples=1,
        update_rows=rows,
        tokens_per_update=tokens,
        totals=_totals(config, rows, tokens),
        seconds=train.stop_after.seconds,
        arithmetic=_arithmetic(model, row),
        held_out_tokens=held_out,
        how="the settings alone, every example as long as they allow, because "
        f"{data.store} is not prepared: real texts are shorter, so memory is an upper bound",
    )


def _totals(config: RunConfig, rows: int, tokens: float) -> dict[str, float]:
    stop, data = config.train.stop_after, config.data
    examples = data.max_examples and data.max_examples * (1.0 - data.validation_fraction)
    of_a_unit: dict[str, float | None] = {
        "steps": 1.0,
        "examples": 1.0 / rows,
        "tokens": 1.0 / tokens,
        "epochs": examples / rows if examples else None,
    }
    steps_each = of_a_unit.get(stop.unit)
    if steps_each is None:
        return {}
    steps = stop.amount * steps_each
    return {"steps": steps, "examples": steps * rows, "tokens": steps * tokens}


def _arithmetic(model: PreTrainedModel, row: OutlinedRows) -> Arithmetic:
    shares: dict[str, Any] = {}
    if row.source:
        shares = {"source_share": row.source / row.tokens}
        flops = flops_per_token(
            model,
            context=row.target / 2,
            source_context=float(row.source),
            cross_context=float(row.source),
            **shares,
        )
    else:
        flops = flops_per_token(model, context=row.target / 2)
    return Arithmetic(flops, products_of(model, **shares))
