"""Draws follow the filtered distribution, and nothing but the counter."""

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from toque.models.generation.sampling import sampled, uniform


def logits(rows=1, vocabulary=12, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2.0


def shares(row, *how, draws=4000):
    """How often each token is drawn, over prompts."""
    many = row.expand(draws, -1)
    tokens = sampled(many, [uniform(0, prompt, 3) for prompt in range(draws)], *how)
    return torch.bincount(tokens, minlength=row.shape[-1]) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_are_the_softmax(temperature):
    row = logits()
    expected = (row / temperature).softmax(-1)[0]
    got = shares(row, temperature)
    assert (got - expected).abs().max() < 0.025


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(3, 1.0), (None, 0.6), (5, 0.7), (100, 1.0), (1, 1.0), (None, 0.01)]
)
def test_filters_keep_what_transformers_keeps(top_k, top_p):
    row = logits()
    kept = TopKLogitsWarper(top_k)(None, row) if top_k else row
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1.0 else kept
    expected = kept.softmax(-1)[0]
    got = shares(row, 1.0, top_k, top_p)
    assert ((got > 0) <= (expected > 0)).all()
    assert (got - expected).abs().max() < 0.025


def test_top_k_zero_keeps_all_and_impossible_tokens_are_never_drawn():
    row = logits()
    assert torch.equal(shares(row, 1.0, 0), shares(row, 1.0, None))
    row = torch.full((1, 5), -torch.inf)
    row[0, 2], row[0, 3] = 1.0, 1.0
    got = shares(row, 1.0)
    assert got[[0, 1, 4]].sum() == 0


def test_uniform_is_uniform_and_fixed():
    """The pinned numbers hold a text that a seed once gave."""
    drawn = torch.tensor(
        [uniform(17, prompt, position) for prompt in range(60) for position in range(60)]
    )
    assert abs(drawn.mean() - 0.5) < 0.02
    assert abs(drawn.var() - 1 / 12) < 0.005
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    assert uniform(17, 3, 5) == 0.6042320255139217
    assert len(set(drawn.tolist())) == 3600
    assert uniform(-1, 0, 0) != uniform(1, 0, 0)
    assert uniform(0, 1, 2) != uniform(0, 2, 1)
