"""Sizes and costs, against counts made by hand and published sizes."""

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    MistralConfig,
    Qwen2Config,
    T5Config,
)

from toque.models.flops import flops_by_shape, flops_per_token, parameter_counts


def on_meta(config):
    """A model of real size without memory."""
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def test_gpt2_small_is_124_million_85_without_embeddings():
    counts = parameter_counts(on_meta(GPT2Config()))
    assert counts.total == 124_439_808
    assert counts.non_embedding == 124_439_808 - 50257 * 768 - 1024 * 768
    assert counts.trainable == counts.total


def test_the_neox_of_1_2_billion_and_its_8_47_gflop_a_token():
    sizes = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16}
    sizes |= {"intermediate_size": 8192, "max_position_embeddings": 2048}
    config = GPTNeoXConfig(vocab_size=50257, **sizes)
    model = on_meta(config)
    counts = parameter_counts(model)
    assert (counts.total, counts.non_embedding) == (1_414_455_296, 1_208_602_624)
    assert round(flops_per_token(model, context=1024) / 1e9, 2) == 8.47


def test_attention_costs_12_layers_width_context(tiny):
    for kind, layers in (("gpt2", 2), ("neox", 2), ("llama", 2)):
        model = tiny(kind)
        extra = flops_per_token(model, context=100) - flops_per_token(model, context=0)
        assert extra == 12 * layers * 32 * 100
    model = tiny("t5")  # 2 encoder layers, 3 decoder layers that attend 100 + 40
    base = flops_per_token(model, context=0, source_context=0)
    assert (
        flops_per_token(model, context=100, source_context=40) - base
        == 12 * 3 * 32 * 140
    )


def test_a_sliding_window_is_all_that_its_layers_attend():
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"sliding_window": 40}
    some = {"use_sliding_window": True, "max_window_layers": 3}  # the last layer alone
    for config, attended in (
        (MistralConfig(**sizes), 4 * 40),
        (Gemma2Config(**sizes), 2 * 40 + 2 * 100),
        (Qwen2Config(**sizes), 4 * 100),
        (Qwen2Config(**sizes, **some), 40 + 3 * 100),
    ):
        model = on_meta(config)
        extra = flops_per_token(model, context=100) - flops_per_token(model, context=0)
        assert extra == 12 * 32 * attended


def test_products_are_the_matrices_a_token_passes():
    """GPT-2 of width 32: qkv, out, two of the feed-forward, and the head for labels alone."""
    model = on_meta(GPT2Config(vocab_size=61, n_embd=32, n_layer=3, n_head=4))
    products = flops_by_shape(model, labelled_share=0.25)
    layer = {(32, 96), (32, 32), (32, 128), (128, 32)}
    assert products == {
        **{shape: 6 * 3 * shape[0] * shape[1] for shape in layer},
        (32, 61): 6 * 32 * 61 / 4,
    }


def test_source_tokens_pass_the_encoder_and_cross_keys_target_tokens_the_rest():
    """Width 16, inner 24, 2 heads of 5; 1 encoder layer, 2 decoder layers, 61 words."""
    config = T5Config(
        vocab_size=61,
        d_model=16,
        d_ff=24,
        d_kv=5,
        num_heads=2,
        num_layers=1,
        num_decoder_layers=2,
    )
    model = on_meta(config)
    source = flops_by_shape(model, source_share=1.0)
    target = flops_by_shape(model, source_share=0.0)
    into, out, up, down = 6 * 160, 6 * 160, 6 * 384, 6 * 384
    assert source == {
        (16, 10): (3 + 2 * 2) * into, (10, 16): out, (16, 24): up, (24, 16): down, (16, 61): 0
    }  # fmt: skip
    assert target == {
        (16, 10): 2 * 4 * into, (10, 16): 2 * 2 * out, (16, 24): 2 * up, (24, 16): 2 * down,
        (16, 61): 6 * 16 * 61
    }  # fmt: skip


def test_frozen_weights_are_not_trained_and_need_no_gradient_of_their_own(tiny):
    model = tiny("llama")
    whole = flops_by_shape(model)
    model.model.embed_tokens.requires_grad_(False)
    counts = parameter_counts(model)
    assert counts.total - counts.trainable == 61 * 32
    model.requires_grad_(False)
    assert flops_by_shape(model) == {
        shape: cost * 4 / 6 for shape, cost in whole.items()
    }
