"""Argmax by int8 bounds: always the argmax of all the float32 logits."""

import pytest
import torch

from toque.models.generation.sampling import BLOCK, Int8Argmax, supports_int8

VOCAB, SIZE = 70 * BLOCK + 5, 48


@pytest.fixture
def weight():
    return torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(3))


def states(n, seed=4):
    return torch.randn(n, SIZE, generator=torch.Generator().manual_seed(seed))


def of_all(hidden, weight):
    return (hidden @ weight.T).argmax(1).tolist()


@torch.inference_mode()
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_token_is_that_of_all_logits(weight, spread):
    weight = weight * torch.linspace(0.0, spread, VOCAB).exp()[:, None]
    head, hidden = Int8Argmax(weight, rows=40), states(40)
    assert head(hidden).tolist() == of_all(hidden, weight)
    assert head(hidden[:1]).tolist() == of_all(hidden[:1], weight)


@torch.inference_mode()
def test_first_of_equals_wins_and_the_last_block_is_read_to_its_end(weight):
    hidden = states(3)
    for row, token in enumerate((VOCAB - 1, 7, VOCAB - 3)):
        weight[token] = hidden[row] * 2
    weight[4000] = weight[7]
    found = Int8Argmax(weight, rows=3)(hidden)
    assert found.tolist() == [VOCAB - 1, 7, VOCAB - 3]


@torch.inference_mode()
def test_rows_in_doubt_are_computed_whole(weight):
    weight = weight * 1e-5 + torch.ones(SIZE)  # hardly a difference between tokens
    head, hidden = Int8Argmax(weight, rows=4), states(4).abs()
    mixed = torch.cat([hidden[:3], states(1)])
    for given in (mixed, hidden):
        logits = given @ weight.T
        largest = logits.max(1).values
        found = logits.gather(1, head(given)[:, None])[:, 0]
        torch.testing.assert_close(found, largest, rtol=1e-6, atol=0.0)


@torch.inference_mode()
def test_zeros_and_values_that_are_no_numbers(weight):
    hidden = states(3)
    hidden[1] = 0.0
    assert Int8Argmax(weight, rows=3)(hidden).tolist()[1] == 0
    hidden[2, 0] = torch.nan
    assert Int8Argmax(weight, rows=3)(hidden).tolist() == of_all(hidden, weight)
    weight[9] = torch.inf
    hidden[2, 0] = 0.0
    assert Int8Argmax(weight, rows=3)(hidden).tolist() == of_all(hidden, weight)


def test_only_where_the_logits_are_exact_and_the_machine_is_fast(weight):
    assert not supports_int8(weight, torch.zeros(VOCAB))
    assert not supports_int8(weight.bfloat16(), None)
    assert not supports_int8(weight[: 8 * BLOCK], None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not supports_int8(weight, None)
    native = torch.cpu._is_vnni_supported()
    assert supports_int8(weight, None) == native
