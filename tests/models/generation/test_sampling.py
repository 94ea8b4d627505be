"""Draws follow the filtered distribution, and nothing but the counter."""

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from toque.models.generation.sampling import sample_tokens, uniform


def logits(rows=1, vocabulary=12, seed=0):
    return (
        torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
        * 2.0
    )


def shares(row, *how, draws=4000):
    """How often each token is drawn, over prompts."""
    many = row.expand(draws, -1)
    tokens = sample_tokens(
        many, [uniform(0, prompt, 3) for prompt in range(draws)], *how
    )
    return torch.bincount(tokens, minlength=row.shape[-1]) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_are_the_softmax(temperature):
    row = logits()
    expected = (row / temperature).softmax(-1)[0]
    got = shares(row, temperature)
    assert (got - expected).abs().max() < 0.025


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(3, 1.0), (None, 0.6), (5, 0.7), (100, 1.0), (1, 1.0), (None, 0.01)],
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


@pytest.mark.parametrize("how", [(None, 1.0), (3, 1.0), (None, 0.95), (3, 0.95)])
@pytest.mark.parametrize("temperature", [1e-20, 1e-37, 1e-40, 1e-46, 1e-300])
def test_the_smallest_temperatures_take_the_likeliest(temperature, how):
    """Divided by them the logits are infinite, in float32, and the draws were of NaN: token 0."""
    rows = logits(rows=40, vocabulary=500)
    rows[1] -= 100.0  # all below zero
    rows[2, :7] = -torch.inf
    draws = [uniform(0, row, 0) for row in range(len(rows))]
    tokens = sample_tokens(rows, draws, temperature, *how)
    assert torch.equal(tokens, rows.argmax(-1))
    equal = torch.tensor([[0.0, 2.0, 2.0, -1.0]])
    assert sorted(
        {sample_tokens(equal, [u], temperature, *how).item() for u in (0.1, 0.9)}
    ) == [1, 2]


def by_sorting_all(rows, draws, temperature, top_p):
    """The definition of nucleus sampling: sort, keep the fewest, invert the running sum."""
    sorted_rows, ids = (rows / temperature).sort(dim=-1, descending=True, stable=True)
    shares = sorted_rows.softmax(-1).double()
    before = shares.cumsum(-1) - shares
    kept = shares.masked_fill(before >= top_p, 0.0).cumsum(-1)
    goal = torch.tensor(draws, dtype=torch.float64)[:, None] * kept[:, -1:]
    return ids.gather(-1, torch.searchsorted(kept, goal, right=True)).squeeze(-1)


@pytest.mark.parametrize("top_p", [0.3, 0.95, 0.9999])
@pytest.mark.parametrize(
    ("kind", "scale"), [("peaked", 3.0), ("flat", 0.01), ("of few values", 1.0)]
)
def test_a_nucleus_that_few_tokens_hold_is_found_without_sorting_all(
    kind, scale, top_p
):
    """Rows whose nucleus is 1 to 3,000 tokens wide, together; equal logits go by their id."""
    rows = logits(rows=300, vocabulary=3000, seed=4) * scale
    rows = rows.round() if kind == "of few values" else rows
    rows[::3] *= torch.linspace(0.1, 8.0, 100)[:, None]
    draws = [uniform(1, row, 0) for row in range(len(rows))]
    got = sample_tokens(rows, draws, 0.7, None, top_p)
    assert torch.equal(got, by_sorting_all(rows, draws, 0.7, top_p))
    assert got[7] == sample_tokens(
        rows[7:8], draws[7:8], 0.7, None, top_p
    )  # whatever is beside it


def test_a_nucleus_holds_no_token_that_is_impossible():
    rows = torch.full((2, 500), -torch.inf)
    rows[:, [3, 499]] = torch.tensor([[1.0, 1.0], [30.0, 0.0]])
    for draw, expected in ((0.0, [3, 3]), (0.999, [499, 3])):
        assert sample_tokens(rows, [draw, draw], 1.0, None, 0.95).tolist() == expected


def test_a_model_that_broke_still_names_a_token_of_its_vocabulary():
    """Logits that are no numbers, as of weights that training has ruined, in rows beside others."""
    rows = logits(rows=3, vocabulary=500)
    rows[1] = torch.nan
    tokens = sample_tokens(rows, [0.5] * 3, 0.7, None, 0.95).tolist()
    assert 0 <= tokens[1] < 500
    whole = sample_tokens(rows[::2], [0.5] * 2, 0.7, None, 0.95).tolist()
    assert [tokens[0], tokens[2]] == whole


def test_uniform_is_uniform_and_fixed():
    """The pinned numbers hold a text that a seed once gave."""
    drawn = torch.tensor(
        [
            uniform(17, prompt, position)
            for prompt in range(60)
            for position in range(60)
        ]
    )
    assert abs(drawn.mean() - 0.5) < 0.02
    assert abs(drawn.var() - 1 / 12) < 0.005
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    assert uniform(17, 3, 5) == 0.6042320255139217
    assert len(set(drawn.tolist())) == 3600
    assert uniform(-1, 0, 0) != uniform(1, 0, 0)
    assert uniform(0, 1, 2) != uniform(0, 2, 1)
