"""Prompts that begin like a finished row: only new tokens are computed, and texts are equal."""

import random

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from tiny import EOS, PAD, VOCAB, model_of, shape_of
from toque.hardware.onednn import has_fast_bf16
from toque.models.generation import causal
from toque.models.generation.live_rows import LiveRows, Order
from toque.models.generation.options import GenerationOptions
from toque.models.generation.packed_products import with_packed_products
from toque.models.generation.prefixes import PrefixCache

TURNS = 6
NEW = 10


def model(family: str):
    return model_of(family, shape=shape_of(family, positions=256))


def answer(rows: LiveRows, prompt: list[int]) -> list[int]:
    rows.admit([Order(prompt, NEW, GenerationOptions())])
    text: list[int] = []
    while rows.orders:
        text += [new.token for new in rows.step() if new.end != "stop"]
    return text


def talk(rows: LiveRows, seed: int) -> list[list[int]]:
    """A conversation of several turns. Each prompt repeats all earlier turns."""
    drawn = random.Random(seed)
    prompt = drawn.choices(range(2, VOCAB), k=40)
    answers = []
    for _ in range(TURNS):
        text = answer(rows, prompt)
        answers.append(text)
        prompt = [*prompt, *text, *drawn.choices(range(2, VOCAB), k=9)]
    return answers


@pytest.fixture
def computed(monkeypatch):
    """Number of prompt tokens in each forward pass of a prefill."""
    counts: list[int] = []
    forward = causal.decoder_hidden_states

    def counted(core, tokens, positions):
        if tokens.shape[1] > 1:
            counts.append(tokens.numel())
        return forward(core, tokens, positions)

    monkeypatch.setattr(causal, "decoder_hidden_states", counted)
    return counts


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox"])
def test_later_turns_compute_only_their_new_tokens(family, computed):
    core = model(family)
    plain = LiveRows(core, rows=4, columns=256, eos_id=EOS, pad_id=PAD)
    expected = talk(plain, 1)
    n_plain = sum(computed)
    computed.clear()
    cached = LiveRows(
        core, rows=4, columns=256, eos_id=EOS, pad_id=PAD, prefix_bytes=1 << 24
    )
    assert talk(cached, 1) == expected
    assert computed[0] == 39
    assert max(computed[1:]) <= 9 + 1
    assert sum(computed) < n_plain / 3
    assert cached.prefixes is not None
    assert cached.prefixes.n_reused > 0
    # The last turn has all earlier ones.
    assert len(cached.prefixes._entries) == 1


def test_an_equal_prompt_and_a_changed_one_are_right(computed):
    core = model("llama")
    prompt = list(range(2, 60))
    plain = LiveRows(core, rows=2, columns=128, eos_id=EOS, pad_id=PAD)
    cached = LiveRows(
        core, rows=2, columns=128, eos_id=EOS, pad_id=PAD, prefix_bytes=1 << 24
    )
    changed = [*prompt[:45], 7, *prompt[46:]]
    for one in (prompt, prompt, changed, prompt[:40], [*prompt, 9]):
        assert answer(cached, one) == answer(plain, one)
    # Of the first, second ... prompt, each with the cache and then without it. A single new token
    # is not counted.
    assert computed == [57, 57, 57, 12, 57, 39, 58]


def test_rows_that_run_together_use_their_own_prefixes():
    core = model("gpt2")
    rows = LiveRows(
        core, rows=4, columns=256, eos_id=EOS, pad_id=PAD, prefix_bytes=1 << 24
    )
    drawn = random.Random(5)
    prompts = [drawn.choices(range(2, VOCAB), k=n) for n in (70, 33, 50, 5)]
    for prompt in prompts:
        answer(rows, prompt)
    longer = [[*prompt, *drawn.choices(range(2, VOCAB), k=3)] for prompt in prompts]
    orders = [Order(p, NEW, GenerationOptions(), n) for n, p in enumerate(longer)]
    rows.admit(orders)
    texts: list[list[int]] = [[] for _ in longer]
    while rows.orders:
        for new in rows.step():
            if new.end != "stop":
                texts[new.order.number].append(new.token)
    plain = LiveRows(core, rows=1, columns=256, eos_id=EOS, pad_id=PAD)
    assert texts == [answer(plain, prompt) for prompt in longer]


@pytest.mark.skipif(
    not has_fast_bf16(torch.device("cpu")), reason="this processor emulates bf16"
)
def test_gathered_attention_reads_and_stores_entire_rows():
    core = with_packed_products(model("llama"), "bf16", {})
    prompt = [2 + n * n % 50 for n in range(77)]
    states = []
    for known in (0, 41):
        rows = LiveRows(
            core, rows=2, columns=256, eos_id=EOS, pad_id=PAD, prefix_bytes=1 << 24
        )
        if known:
            answer(rows, prompt[:known])
        rows.admit([Order(prompt, NEW, GenerationOptions())])
        states.append(rows._decoding.cache.read_row(0))  # type: ignore[union-attr]
    for (keys, values), (known_keys, known_values) in zip(*states, strict=True):
        assert keys.shape == known_keys.shape == (keys.shape[0], 76, keys.shape[2])
        assert torch.allclose(keys.float(), known_keys.float(), atol=0.05)
        assert torch.allclose(values.float(), known_values.float(), atol=0.05)


def test_models_with_sliding_windows_and_t5_keep_nothing():
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    for core in (MistralForCausalLM(config).eval(), model("t5")):
        rows = LiveRows(
            core, rows=2, columns=64, eos_id=EOS, pad_id=PAD, prefix_bytes=1 << 20
        )
        assert rows.prefixes is None
        answer(rows, [4] * 40)


def test_the_memory_is_bounded_and_the_oldest_rows_are_forgotten():
    states = [(torch.zeros(2, 40, 8), torch.zeros(2, 40, 8))]
    n_bytes = 2 * 2 * 40 * 8 * 4
    prefixes = PrefixCache(3 * n_bytes)
    for first in (1, 2, 3, 4):
        prefixes.add([first] * 40, states)
        if first == 3:
            assert prefixes.find([1] * 41) is not None  # now the newest
    assert prefixes.n_bytes == 3 * n_bytes
    assert prefixes.find([2] * 41) is None
    assert prefixes.find([1] * 41) is not None
    prefixes.add([5] * 31, states)
    assert prefixes.find([5] * 41) is None
    PrefixCache(9).add([1] * 40, states)
    assert np.array_equal(prefixes._entries[-1].ids, [1] * 40)
