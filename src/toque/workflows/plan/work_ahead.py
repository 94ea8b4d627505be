"""Work ahead of a run: its rows, updates and tokens, from its store or from the settings alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toque.batch import Batch, EncoderDecoderBatch
from toque.config import RunConfig
from toque.data.loader.batch_stream import usual_rows
from toque.data.loader.packing import RowShape
from toque.errors import ConfigError
from toque.models.families import family_of, max_positions
from toque.models.flops import flops_per_token, products_of
from toque.models.forward.outline import OutlinedRows
from toque.runs.estimate import Work
from toque.training.placement import arithmetic_of
from toque.units import Cursor
from toque.workflows.build import build_stream

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from toque.data.store.token_store import TokenStore

_PROMPT, _TARGET = 256, 512
"""Tokens that documents are split at when nothing is set; see data.max_prompt_tokens."""
_HELD_OUT = 512
"""Held-out examples where nothing is set."""


def work_ahead(config: RunConfig, model: PreTrainedModel, store: TokenStore | None) -> Work:
    """Rows, updates and tokens of the run.

    Raises:
        ConfigError: rows that do not fit the update or the model.
    """
    return _from_store(config, model, store) if store is not None else _as_set(config, model)


def _from_store(config: RunConfig, model: PreTrainedModel, store: TokenStore) -> Work:
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
    row, arithmetic = OutlinedRows(1, shape.source, shape.target), arithmetic_of(model, stream)
    return Work(
        row=OutlinedRows(1, shape.source, shape.target, max(1, round(examples))),
        worst_examples=worst,
        update_rows=batch.n_rows,
        usual_rows=usual_rows(row.tokens),
        tokens_per_update=float(_real_tokens(batch)),
        flops_per_token=arithmetic.flops_per_token,
        products=arithmetic.products,
        totals=stream.totals(config.train.stop_after),
        seconds=config.train.stop_after.seconds,
        held_out_tokens=held_out * each,
        how=f"the {splits.train:,} training examples of {config.data.store}, "
        f"{each:,.0f} tokens each on average",
    )


def _real_tokens(batch: Batch) -> int:
    if isinstance(batch, EncoderDecoderBatch):
        return int((batch.source_segments > 0).sum() + (batch.target_segments > 0).sum())
    return int((batch.segments > 0).sum())


def _as_set(config: RunConfig, model: PreTrainedModel) -> Work:
    """Every example as long as the settings allow."""
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
    shares: dict[str, Any] = {"source_share": row.source / row.tokens} if row.source else {}
    side = float(row.source)
    across = {"source_context": side, "cross_context": side} if row.source else {}
    tokens = float(rows * row.tokens)
    return Work(
        row=row,
        worst_examples=1,
        update_rows=rows,
        usual_rows=usual_rows(row.tokens),
        tokens_per_update=tokens,
        flops_per_token=flops_per_token(model, context=row.target / 2, **shares, **across),
        products=products_of(model, **shares),
        totals=_totals(config, rows, tokens),
        seconds=train.stop_after.seconds,
        held_out_tokens=float((config.evaluation.max_examples or _HELD_OUT) * row.tokens),
        how="the settings alone, every example as long as they allow, because "
        f"{data.store} is not prepared: real texts are shorter, so memory is an upper bound",
    )


def _totals(config: RunConfig, rows: int, tokens: float) -> dict[str, float]:
    stop, data = config.train.stop_after, config.data
    examples = data.max_examples and data.max_examples * (1.0 - data.validation_fraction)
    steps_of_a_unit = {
        "steps": 1.0,
        "examples": 1.0 / rows,
        "tokens": 1.0 / tokens,
        "epochs": examples / rows if examples else None,
    }
    steps_each = steps_of_a_unit.get(stop.unit)
    if steps_each is None:
        return {}
    steps = stop.amount * steps_each
    return {"steps": steps, "examples": steps * rows, "tokens": steps * tokens}
