"""Work of a run: its rows, tokens and generated texts, from its store or from its settings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from transformers import PreTrainedModel

from toque.batch import EncoderDecoderBatch
from toque.config import RunConfig
from toque.data.loader.batch_stream import usual_rows, with_rejected
from toque.data.loader.packing import RowShape, round_up
from toque.errors import ConfigError
from toque.evaluation.reference_nats import RECORD
from toque.evaluation.rollouts import RolloutSettings
from toque.models.config_values import max_positions
from toque.models.families import family_of
from toque.models.flops import flops_by_shape, flops_per_token
from toque.models.forward.outline import OutlinedRows
from toque.runs.estimate import even_rows
from toque.runs.estimate_parts import Work
from toque.runs.generated_texts import GeneratedTexts
from toque.training.arithmetic import count_flops
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.workflows.build import build_stream

if TYPE_CHECKING:
    from toque.data.store.token_store import TokenStore

_PROMPT, _TARGET = 256, 512
"""Default lengths of a prompt and a target in tokens, see data.max_prompt_tokens."""
_HELD_OUT: Final = 512
"""Default number of held-out examples per evaluation."""


def work_from_store(
    config: RunConfig, model: PreTrainedModel, store: TokenStore
) -> Work:
    """Return the work of a run according to the lengths of its examples.

    Raises:
        ConfigError: The store, the model and the settings do not fit together.
    """
    stream = build_stream(config, store, model)
    shape = stream.layout.shape
    longest_source = int(stream.plan.source_lengths.max())
    longest_target = int(stream.plan.target_lengths.max())
    if not stream.layout.packed:
        shape = RowShape(longest_source if shape.source else 0, longest_target)
    # A row of a decoder has 0 source tokens.
    worst_examples = max(
        math.ceil(shape.source / max(1, longest_source)),
        math.ceil(shape.target / max(1, longest_target)),
    )

    # The first batch has about the average number of examples and tokens.
    step = stream.at(Cursor())
    batch = step.batch
    n_examples = sum(len(ids) for ids in batch.example_ids) / max(1, batch.n_rows)
    if isinstance(batch, EncoderDecoderBatch):
        n_tokens = (batch.source_segments > 0).sum() + (batch.target_segments > 0).sum()
    else:
        n_tokens = (batch.segments > 0).sum()

    manifest = store.manifest
    splits = manifest.splits
    all_tokens = manifest.tokens.prompt + manifest.tokens.target
    mean_tokens = all_tokens / max(1, manifest.examples)
    row = OutlinedRows(1, shape.source, shape.target, max(1, round(n_examples)))
    arithmetic = count_flops(model, stream)
    work = Work(
        row=row,
        worst_examples=worst_examples,
        update_rows=batch.n_rows,
        usual_rows=usual_rows(row.tokens),
        tokens_per_update=float(n_tokens),
        flops_per_token=arithmetic.flops_per_token,
        products=arithmetic.products,
        totals=stream.totals(config.train.stop_after),
        seconds=config.train.stop_after.seconds,
        held_out_tokens=_count_held_out(config, store) * mean_tokens,
        how=f"the {splits.train:,} training examples of {config.data.store}, "
        f"with {mean_tokens:,.0f} tokens on average",
    )
    if store.has_pairs:
        return _with_pairs(config, work, store, n_pairs=step.n_examples)
    if config.objective.learns_from_rewards:
        texts = _texts_from_store(config, model, store)
        return _with_texts(config, work, texts, examples_rows=batch.n_rows)
    return work


def _count_held_out(config: RunConfig, store: TokenStore) -> int:
    """Count the held-out store rows per evaluation. A pair has two rows."""
    rows_per_example = 2 if store.has_pairs else 1
    n_examples = store.manifest.splits.validation // rows_per_example
    if config.evaluation.max_examples:
        n_examples = min(n_examples, config.evaluation.max_examples)
    return rows_per_example * n_examples


def _with_pairs(
    config: RunConfig, work: Work, store: TokenStore, *, n_pairs: int
) -> Work:
    """Add the `n_pairs` of an update, and the pass of the reference over all answers."""
    chosen = np.concatenate([store.pair_rows(s) for s in ("train", "validation")])
    rows = list(with_rejected(chosen.tolist()))
    n_tokens = int(store.prompt_lengths[rows].sum() + store.target_lengths[rows].sum())
    n_train = len(store.pair_rows("train"))
    return replace(
        work,
        # Each answer attends only to itself and its prompt.
        worst_examples=2 * work.worst_examples,
        pairs=n_pairs,
        reference_tokens=0.0 if _has_reference(config) else float(n_tokens),
        reference_rows=store.n_rows,
        how=f"the {n_train:,} training pairs of {config.data.store}, "
        f"with {n_tokens / max(1, len(chosen)):,.0f} tokens on average",
    )


def _has_reference(config: RunConfig) -> bool:
    """Check whether the run folder has the reference already."""
    return (Path(config.run_dir) / RECORD).is_file()


def _texts_from_store(
    config: RunConfig, model: PreTrainedModel, store: TokenStore
) -> GeneratedTexts:
    """Return the texts of an update, with the prompts of the store.

    Generated texts are assumed to be as long as the targets.
    """
    settings = RolloutSettings.for_run(config, store, model, Runtime())
    rows = store.rows("train")
    return _describe_texts(
        config,
        longest_prompt=settings.longest_prompt,
        max_tokens=settings.max_new_tokens,
        mean_prompt=float(store.prompt_lengths[rows].mean()),
        mean_tokens=float(store.target_lengths[rows].mean()),
    )


def _describe_texts(
    config: RunConfig,
    *,
    longest_prompt: int,
    max_tokens: int,
    mean_prompt: float,
    mean_tokens: float,
) -> GeneratedTexts:
    objective = config.objective
    # best_of learns from one text per prompt.
    learnt_share = 1.0 if objective.kind == "grpo" else 1.0 / objective.samples
    return GeneratedTexts(
        prompts=int(config.train.batch.amount),
        samples=objective.samples,
        learnt_share=learnt_share,
        longest_prompt=longest_prompt,
        max_tokens=max_tokens,
        mean_prompt=mean_prompt,
        mean_tokens=mean_tokens,
    )


def _with_texts(
    config: RunConfig, work: Work, texts: GeneratedTexts, *, examples_rows: int
) -> Work:
    """Replace the examples of an update by generated texts.

    A row is as long as the longest prompt with the longest text. The prompts with their targets
    would need `examples_rows` rows.
    """
    source = 0
    target = round_up(texts.longest_prompt + texts.max_tokens)
    mean_source = 0.0
    mean_target = (
        texts.mean_prompt + texts.mean_tokens - 1
    )  # the last token is not read
    if work.row.source:
        source = round_up(max(work.row.source, texts.longest_prompt))
        target = round_up(texts.max_tokens + 1)
        mean_source = texts.mean_prompt
        mean_target = texts.mean_tokens

    texts_per_row = target // max(1.0, mean_target)
    if source:
        texts_per_row = min(texts_per_row, source // max(1.0, mean_source))
    texts_per_row = max(1, int(texts_per_row))
    tokens = texts.n_learnt * (mean_source + mean_target)
    totals = work.totals
    if config.train.stop_after.unit == "tokens" and "steps" in totals:
        ratio = work.tokens_per_update / tokens
        totals = {unit: ratio * amount for unit, amount in totals.items()}
    return replace(
        work,
        row=OutlinedRows(1, source, target, texts_per_row),
        worst_examples=1,
        update_rows=math.ceil(texts.n_learnt / texts_per_row),
        usual_rows=even_rows(examples_rows, work.usual_rows),
        largest_micro_batch=examples_rows,
        tokens_per_update=tokens,
        totals=totals,
        texts=texts,
    )


def work_from_settings(
    config: RunConfig, model: PreTrainedModel, example: float | None
) -> Work:
    """Return the work of a run with examples of `example` tokens, or the longest allowed ones.

    An answer of a pair counts as an example.

    Raises:
        ConfigError: The batch is smaller than a row.
    """
    train = config.train
    row = _longest_row(config, model)
    if example is not None:
        # Attention depends on a row's examples, which have at least one token on each side.
        max_examples = min(row.source or row.target, row.target)
        n_examples = min(max_examples, round(row.tokens / example))
        row = replace(row, examples=max(row.examples, n_examples))

    n_rows = int(train.batch.amount)
    if train.batch.unit == "tokens":
        n_rows //= row.tokens
    if n_rows < 1:
        raise ConfigError(
            f'train.batch is "{train.batch}", but the longest allowed row has {row.tokens} tokens. '
            f'Use at least train.batch="{row.tokens} tokens".'
        )

    tokens = float(n_rows * row.tokens)
    source_share = row.source / row.tokens
    source_context = row.source / row.examples
    n_held_out = config.evaluation.max_examples or _HELD_OUT
    work = Work(
        row=row,
        worst_examples=2 if config.objective.kind == "dpo" else 1,
        update_rows=n_rows,
        usual_rows=usual_rows(row.tokens),
        tokens_per_update=tokens,
        flops_per_token=flops_per_token(
            model,
            context=row.target / row.examples / 2,
            source_share=source_share,
            source_context=source_context,
            cross_context=source_context,
        ),
        products=flops_by_shape(model, source_share=source_share),
        totals=_totals_from_settings(config, n_rows, tokens),
        seconds=train.stop_after.seconds,
        held_out_tokens=float(n_held_out * row.tokens),
        how=f"the longest that the settings allow, because {config.data.store} is not prepared. "
        "Real texts are shorter, so memory is an upper bound",
    )
    if config.objective.kind == "dpo":
        return replace(
            work,
            pairs=n_rows * row.examples / 2,
            reference_tokens=_reference_tokens_from_settings(config, row),
            reference_rows=config.data.max_examples or 0,
        )
    if config.objective.learns_from_rewards:
        texts = _texts_from_settings(config, model)
        return _with_texts(config, work, texts, examples_rows=n_rows)
    return work


def _reference_tokens_from_settings(
    config: RunConfig, row: OutlinedRows
) -> float | None:
    """Return the tokens of all pairs, or None if their number depends on the data."""
    if _has_reference(config):
        return 0.0
    limit = config.data.max_examples
    # The limit counts answers.
    return None if limit is None else limit * row.tokens / row.examples


def _texts_from_settings(config: RunConfig, model: PreTrainedModel) -> GeneratedTexts:
    """Return the texts of an update, as long as the settings and the context length allow."""
    prompt, target = _length_limits(config)
    context_length = max_positions(model.config)
    if context_length is not None and not family_of(model.config).is_encoder_decoder:
        target = max(1, min(target, context_length + 1 - prompt))
    return _describe_texts(
        config,
        longest_prompt=prompt,
        max_tokens=target,
        mean_prompt=prompt,
        mean_tokens=target,
    )


def _totals_from_settings(
    config: RunConfig, n_rows: int, tokens: float
) -> dict[str, float]:
    """Return the run's totals, or {} if they depend on the data.

    An update has `n_rows` rows and `tokens` tokens.
    """
    data, stop_after = config.data, config.train.stop_after
    steps_per_unit = {"steps": 1.0, "examples": 1.0 / n_rows, "tokens": 1.0 / tokens}
    if data.max_examples:
        held_out_share = 0.0 if data.validation else data.validation_fraction
        n_examples = data.max_examples * (1.0 - held_out_share)
        if config.objective.kind == "dpo":
            n_examples /= 2  # the limit counts answers
        steps_per_unit["epochs"] = n_examples / n_rows
    if stop_after.unit not in steps_per_unit:
        return {}
    steps = stop_after.amount * steps_per_unit[stop_after.unit]
    return {"steps": steps, "examples": steps * n_rows, "tokens": steps * tokens}


def _length_limits(config: RunConfig) -> tuple[int, int]:
    """Return the most tokens of a prompt and of a target."""
    data = config.data
    prompt = _PROMPT if data.max_prompt_tokens == "auto" else data.max_prompt_tokens
    target = _TARGET if data.max_target_tokens == "auto" else data.max_target_tokens
    return prompt, target


def _longest_row(config: RunConfig, model: PreTrainedModel) -> OutlinedRows:
    """Return the longest row that the settings and the model's context length allow.

    A row of dpo has at least both answers of a pair, each with the prompt.
    """
    has_encoder = family_of(model.config).is_encoder_decoder
    prompt, target = _length_limits(config)
    row_tokens = config.train.row_tokens
    source = prompt if has_encoder else 0
    length = target if has_encoder else prompt + target
    has_pairs = config.objective.kind == "dpo"
    if isinstance(row_tokens, int) and not has_pairs:
        length = max(length, row_tokens) if has_encoder else row_tokens
    if (context_length := max_positions(model.config)) is not None:
        length = min(length, context_length)
    if not has_pairs:
        return OutlinedRows(1, source, length)
    length *= 2
    if isinstance(row_tokens, int):
        length = max(length, row_tokens)
    return OutlinedRows(1, 2 * source, length, examples=2)
