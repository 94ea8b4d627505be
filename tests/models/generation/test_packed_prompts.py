"""Prompts read in one row: the keys and values of each alone."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from toque.models.generation.packed_products import with_bf16_products
from toque.models.generation.packed_prompts import (
    LONGEST,
    PackedPrompts,
    cache_argument,
    reads_packed,
)

PROMPTS = [[5, 9, 7, 3, 8, 6, 4], [12], [9, 9, 30, 11], list(range(2, 42))]


def alone(model, prompt):
    """Keys and values of one prompt by the stock forward in float32, [H, tokens, d] a layer."""
    tokens = torch.tensor([prompt])
    if not model.config.is_encoder_decoder:
        cache = DynamicCache()
        model.base_model(input_ids=tokens, use_cache=True, **cache_argument(model, cache))
        return [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    states = model.encoder(input_ids=tokens).last_hidden_state[0]
    across = [block.layer[1].EncDecAttention for block in model.decoder.block]
    return [
        tuple(
            project(states).view(len(states), -1, model.config.d_kv).transpose(0, 1)
            for project in (attention.k, attention.v)
        )
        for attention in across
    ]


def test_each_prompt_is_read_as_if_it_were_alone(kind, tiny):
    model = tiny(kind).eval()
    twin = with_bf16_products(model)
    with torch.inference_mode():
        packed = PackedPrompts(PROMPTS)
        t5 = model.config.is_encoder_decoder
        found = packed.encoded(twin) if t5 else packed.causal(twin)
        for prompt, part in zip(PROMPTS, packed.parts, strict=True):
            for pair, exact in zip(found, alone(model, prompt), strict=True):
                for got, want in zip(pair, exact, strict=True):
                    error = (got[:, part].float() - want).abs().mean()
                    assert got[:, part].shape == want.shape
                    assert error < 2.0**-6 * want.abs().mean()
    assert model.config._attn_implementation == "sdpa"  # the model is left as it was


def test_neighbours_do_not_matter(kind, tiny):
    """To the bit: beside other prompts of like length, so that groups keep their shapes."""
    twin = with_bf16_products(tiny(kind).eval())
    read = "encoded" if twin.config.is_encoder_decoder else "causal"
    with torch.inference_mode():
        first, second = (
            getattr(PackedPrompts([[5, 9, 7, 3], other]), read)(twin)
            for other in ([4, 4, 4, 4], [8, 2, 30, 6])
        )
    for one, two in zip(first, second, strict=True):
        for mine, same in zip(one, two, strict=True):
            assert torch.equal(mine[:, :4], same[:, :4])
    assert not torch.equal(first[0][0][:, 4:8], second[0][0][:, 4:8])


@pytest.mark.parametrize(("length", "packed"), [(LONGEST, True), (LONGEST + 1, False)])
def test_long_prompts_and_float32_are_read_by_the_stock_forward(length, packed, tiny):
    model = tiny("llama")
    assert reads_packed(with_bf16_products(model), [[5] * length]) is packed
    assert not reads_packed(model, [[5]])
