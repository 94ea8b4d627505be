"""What a run says of itself before its first step."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2Config, T5Config

from toque.data.loader.batch_stream import BatchStream
from toque.data.loader.collate import Layout
from toque.data.loader.epoch_plan import Cursor, EpochPlan
from toque.data.loader.packing import RowShape
from toque.models.flops import flops_per_token
from toque.training.placement import arithmetic_of

PAIRS = [([5] * (n % 3 * 4), [6] * (2 + n % 5)) for n in range(30)]
"""Of uneven length; every third has no prompt."""


class Listed:
    def prompt(self, row: int, /) -> np.ndarray:
        return np.array(PAIRS[row][0], np.int64)

    def target(self, row: int, /) -> np.ndarray:
        return np.array(PAIRS[row][1], np.int64)


def test_a_decoders_head_is_counted_for_the_labels_of_its_batches():
    prompts, targets = (np.array([len(pair[i]) for pair in PAIRS]) for i in (0, 1))
    lengths, shape = prompts + targets - 1, RowShape(0, 20)
    plan = EpochPlan(
        examples=np.arange(30),
        source_lengths=np.zeros_like(lengths),
        target_lengths=lengths,
        shape=shape,
        seed=0,
        update_rows=3,
        window=30,
    )
    stream = BatchStream(plan, Layout(Listed(), shape=shape, pad_id=0), prompts, targets)
    labels, tokens, cursor = 0, 0, Cursor()
    while cursor.epoch == 0:
        step = stream.at(cursor)
        labels, tokens = labels + step.batch.n_targets, tokens + step.n_tokens
        cursor = step.cursor
    assert labels < tokens == lengths.sum()
    model = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    )
    context = (lengths**2).sum() / lengths.sum() / 2
    found = arithmetic_of(model, stream)
    assert found.flops_per_token == pytest.approx(
        flops_per_token(model, context=context, labelled_share=labels / tokens)
    )
    assert found.products[32, 61] == pytest.approx(6 * 32 * 61 * labels / tokens)


def test_a_target_token_of_t5_attends_the_source_of_its_own_example():
    """Long targets with short sources: a target token sees fewer than a source token does."""
    sources, targets = np.array([2, 10]), np.array([10, 2])
    shape = RowShape(12, 12)
    plan = EpochPlan(
        examples=np.arange(2),
        source_lengths=sources,
        target_lengths=targets,
        shape=shape,
        seed=0,
        update_rows=2,
        window=2,
    )
    model = AutoModelForSeq2SeqLM.from_config(
        T5Config(vocab_size=61, d_model=16, d_ff=24, d_kv=8, num_heads=2, num_layers=2)
    )
    stream = BatchStream(plan, Layout(Listed(), shape=shape, pad_id=0), sources, targets)
    expected = flops_per_token(
        model,
        context=(100 + 4) / 12 / 2,
        source_share=0.5,
        source_context=(4 + 100) / 12,
        cross_context=(2 * 10 + 10 * 2) / 12,
    )
    assert arithmetic_of(model, stream).flops_per_token == pytest.approx(expected)
