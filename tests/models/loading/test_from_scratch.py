"""Models from scratch: deterministic, told the tokenizer's ids, and refused in words."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.activations import NewGELUActivation

from tiny import EOS, KINDS, PAD, VOCAB, shape_of
from toque.errors import ConfigError
from toque.models.forward.loss import loss_sum
from toque.models.loading.from_scratch import build_model, stock_activations

IDS = {"vocab_size": VOCAB, "pad_id": PAD, "eos_id": EOS, "bos_id": None, "seed": 0}
SMALL_T5 = shape_of("t5", width=16, layers=1, inner=16)
WIDE = shape_of("neox")


def same_bits(a, b):
    theirs = dict(b.named_parameters())
    return all(torch.equal(p, theirs[n]) for n, p in a.named_parameters())


def test_the_seed_decides_the_weights_and_nothing_else_moves(family_kind, tiny):
    state = torch.get_rng_state()
    first = tiny(family_kind, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert same_bits(first, tiny(family_kind, seed=3))
    assert not same_bits(first, tiny(family_kind, seed=4))
    assert all(p.dtype == torch.float32 for p in first.parameters())


def test_the_tokenizers_ids_are_everywhere(family_kind, tiny):
    model = tiny(family_kind)
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (
            0,
            1,
            None,
        )
        assert not model.config.is_encoder_decoder or config.decoder_start_token_id == 0
    assert model.config.vocab_size == 61
    assert model.get_input_embeddings().weight.shape[0] == 61


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_is_near_that_of_a_uniform_guess(kind, some_examples, packed):
    """The usual initial scale, not the tests' wide one; ln 61 = 4.1 nats."""
    family, wide = KINDS[kind]
    shape = {name: value for name, value in wide.items() if name != "initializer_range"}
    model = build_model(family=family, shape=shape, **IDS).eval()
    batch = packed(kind, [[example] for example in some_examples(12)])
    assert 3.6 < loss_sum(model, batch).item() / batch.n_targets < 5.2


def test_a_t5_asked_for_a_head_of_its_own_has_one(tiny):
    tied, own = tiny("t5"), tiny("t5-v1.1")
    assert tied.lm_head.weight is tied.shared.weight
    assert tied.config.scale_decoder_outputs
    assert own.lm_head.weight is not own.shared.weight
    assert not own.config.scale_decoder_outputs
    assert own.config.tie_word_embeddings is False
    own.tie_weights()
    assert own.lm_head.weight is not own.shared.weight


def test_dropout_is_the_familys_own_unless_the_shape_says_otherwise():
    for shape, share in ((SMALL_T5, 0.1), ({**SMALL_T5, "dropout_rate": 0.0}, 0.0)):
        assert build_model(family="t5", shape=shape, **IDS).encoder.dropout.p == share


@pytest.mark.parametrize(
    ("family", "shape", "words"),
    [
        ("t5", {"d_modell": 16}, r"model\.shape\.d_modell.*Nearest: d_model\."),
        (
            "gpt2",
            {"num_heads": 4},
            r"model\.shape\.num_heads is not an argument of a gpt2",
        ),
        ("llama", {"vocab_size": 9}, "vocab_size comes from the tokenizer"),
        ("t5", {**SMALL_T5, "d_model": "big"}, "does not describe a t5 model.*d_model"),
        (
            "gpt2",
            {"n_embd": 10, "n_head": 4},
            "does not describe a gpt2 model.*divisible",
        ),
        (
            "neox",
            {**WIDE, "hidden_size": 10},
            "does not describe a neox model.*divisible",
        ),
        ("neox", {}, r"does not set hidden_size.*GPT-NeoX-20B \(80 GB"),
        (
            "t5",
            {**SMALL_T5, "feed_forward_proj": "gated-nonsense"},
            "does not describe a t5 model",
        ),
        (
            "t5",
            {**SMALL_T5, "num_layers": -1},
            r"num_layers must be at least 1, not -1",
        ),
        (
            "llama",
            {**WIDE, "num_key_value_heads": 3},
            r"multiple of num_key_value_heads \(3\)",
        ),
        (
            "llama",
            {**WIDE, "hidden_size": 4},
            r"rotate 1 of them\. This number must be even",
        ),
        (
            "neox",
            {**WIDE, "hidden_size": 16},
            r"4 heads 4 dimensions, and .* rotate 1 ",
        ),
        (
            "gpt2",
            shape_of("gpt2", initializer_range=-1.0),
            "does not describe a gpt2 model.*std",
        ),
        (
            "llama",
            {**WIDE, "attention_dropout": 1.5},
            "must be a number from 0 to 1, not 1.5",
        ),
        (
            "llama",
            {**WIDE, "rms_norm_eps": -1.0},
            "must be a number above 0 and up to 1, not -1.0",
        ),
        (
            "neox",
            {**WIDE, "rotary_pct": 2.0},
            "each head 8 dimensions, but .* rotate 16",
        ),
        ("t5", {**SMALL_T5, "relative_attention_num_buckets": 3}, "at least 4, not 3"),
    ],
)
def test_what_makes_no_model_is_refused(family, shape, words):
    with pytest.raises(ConfigError, match=words):
        build_model(family=family, shape=shape, **IDS)


@pytest.mark.parametrize("kind", ["gpt2", "t5-v1.1"])
def test_the_fused_activation_is_transformers_own_to_rounding(kind, tiny):
    ours = tiny(kind)
    assert not any(isinstance(module, NewGELUActivation) for module in ours.modules())
    stock = copy.deepcopy(ours)
    stock_activations(stock)
    assert any(isinstance(module, NewGELUActivation) for module in stock.modules())
    tokens = torch.tensor([[5, 9, 13, 21]])
    found = []
    for model in (ours, stock):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-4, atol=1e-5)
