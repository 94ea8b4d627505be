"""Tiny models of every family, and batches made by hand from (prompt, target) pairs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from toque.batch import IGNORE, Batch, DecoderBatch, EncoderDecoderBatch
from toque.models.loading.pretrained import build_model

VOCAB, PAD, EOS = 61, 0, 1
Example = tuple[list[int], list[int]]

# Weights are drawn wide, so that a wrong mask moves the loss by far more than any tolerance.
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "t5": ("t5", {**_T5, "num_decoder_layers": 3}),
    "t5-v1.1": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "gpt2": (
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2},
    ),
    "neox": ("neox", {**{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}}),
    "llama": ("llama", _LLAMA),
}
_CLOSE_TO_LLAMA = {"mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
FAMILIES = list(SHAPES)
EVERY = [*FAMILIES, *_CLOSE_TO_LLAMA]


def make(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model of `kind` with the same weights every time; dropout off until train() is called."""
    if kind in SHAPES:
        family, shape = SHAPES[kind]
        model = build_model(
            family=family,
            shape=shape,
            vocab_size=VOCAB,
            pad_id=PAD,
            eos_id=EOS,
            bos_id=None,
            seed=seed,
        )
    else:
        ids = {"vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
        extra = {"sliding_window": None} if kind == "mistral" else {}
        config = _CLOSE_TO_LLAMA[kind](**_LLAMA, **ids, **extra, head_dim=8)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def examples(n: int, seed: int = 0) -> list[Example]:
    """Prompts of 2 to 6 tokens; targets of 1 to 8 tokens that end with EOS."""
    drawn = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [drawn.randrange(2, VOCAB) for _ in range(drawn.randint(low, high))]

    return [(tokens(2, 6), [*tokens(0, 7), EOS]) for _ in range(n)]


def pack(kind: str, rows: Sequence[Sequence[Example]]) -> Batch:
    """The batch whose row i holds the examples rows[i]."""
    ids, count = [], 0
    for row in rows:
        ids.append(tuple(range(count, count + len(row))))
        count += len(row)
    make_batch = _encoder_decoder if kind.startswith("t5") else _decoder_only
    return make_batch(rows, tuple(ids))


def _decoder_only(
    rows: Sequence[Sequence[Example]], ids: tuple[tuple[int, ...], ...]
) -> DecoderBatch:
    parts: dict[str, list[list[int]]] = {"t": [], "l": [], "s": [], "p": []}
    for row in rows:
        line: dict[str, list[int]] = {"t": [], "l": [], "s": [], "p": []}
        for segment, (prompt, target) in enumerate(row, start=1):
            inputs = (prompt + target)[:-1]
            line["t"] += inputs
            line["l"] += [IGNORE] * (len(prompt) - 1) + target
            line["s"] += [segment] * len(inputs)
            line["p"] += range(len(inputs))
        for name, values in line.items():
            parts[name].append(values)
    return DecoderBatch(
        labels=_padded(parts["l"], IGNORE),
        example_ids=ids,
        tokens=_padded(parts["t"], PAD),
        segments=_padded(parts["s"], 0).int(),
        positions=_padded(parts["p"], 0),
    )


def _encoder_decoder(
    rows: Sequence[Sequence[Example]], ids: tuple[tuple[int, ...], ...]
) -> EncoderDecoderBatch:
    parts: dict[str, list[list[int]]] = {"st": [], "ss": [], "tt": [], "ts": [], "l": []}
    for row in rows:
        line: dict[str, list[int]] = {"st": [], "ss": [], "tt": [], "ts": [], "l": []}
        for segment, (prompt, target) in enumerate(row, start=1):
            line["st"] += prompt
            line["ss"] += [segment] * len(prompt)
            line["tt"] += [PAD, *target[:-1]]
            line["ts"] += [segment] * len(target)
            line["l"] += target
        for name, values in line.items():
            parts[name].append(values)
    return EncoderDecoderBatch(
        labels=_padded(parts["l"], IGNORE),
        example_ids=ids,
        source_tokens=_padded(parts["st"], PAD),
        source_segments=_padded(parts["ss"], 0).int(),
        target_tokens=_padded(parts["tt"], PAD),
        target_segments=_padded(parts["ts"], 0).int(),
    )


def _padded(rows: list[list[int]], value: int) -> Tensor:
    width = max(map(len, rows)) + 1  # padding in every row, the longest included
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


@pytest.fixture(params=EVERY)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=FAMILIES)
def family_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    return make


@pytest.fixture
def some_examples() -> Callable[..., list[Example]]:
    return examples


@pytest.fixture
def packed() -> Callable[..., Batch]:
    return pack
