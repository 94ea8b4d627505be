"""What a run says of itself before its first step."""

import numpy as np
import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    T5Config,
)

from tiny import stream_of
from toque.data.loader.epoch_plan import Cursor
from toque.models.flops import flops_per_token
from toque.training.arithmetic import count_flops

PAIRS = [([5] * (n % 3 * 4), [6] * (2 + n % 5)) for n in range(30)]
"""Of uneven length; every third has no prompt."""


def test_a_decoders_head_is_counted_for_the_labels_of_its_batches():
    prompts, targets = (np.array([len(pair[i]) for pair in PAIRS]) for i in (0, 1))
    lengths = prompts + targets - 1
    stream = stream_of(PAIRS, "gpt2", shape=(0, 0, 20), update_rows=3)
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
    found = count_flops(model, stream)
    assert found.flops_per_token == pytest.approx(
        flops_per_token(model, context=context, labelled_share=labels / tokens)
    )
    assert found.products[32, 61] == pytest.approx(6 * 32 * 61 * labels / tokens)


def test_a_target_token_of_t5_attends_the_source_of_its_own_example():
    """Long targets with short sources: a target token sees fewer than a source token does."""
    pairs = [([5] * 2, [6] * 10), ([5] * 10, [6] * 2)]
    stream = stream_of(pairs, "t5", shape=(12, 12, 0), update_rows=2)
    model = AutoModelForSeq2SeqLM.from_config(
        T5Config(vocab_size=61, d_model=16, d_ff=24, d_kv=8, num_heads=2, num_layers=2)
    )
    expected = flops_per_token(
        model,
        context=(100 + 4) / 12 / 2,
        source_share=0.5,
        source_context=(4 + 100) / 12,
        cross_context=(2 * 10 + 10 * 2) / 12,
    )
    assert count_flops(model, stream).flops_per_token == pytest.approx(expected)
