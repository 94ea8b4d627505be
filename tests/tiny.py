"""Tiny models of every family with examples, batches and YAML for them.

A new family is one entry in `_ARGUMENTS` and one in `KINDS`; every test over families then runs it.
"""

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
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
from toque.data.loader.batch_stream import BatchStream
from toque.data.loader.collate import Layout
from toque.data.loader.epoch_plan import EpochPlan
from toque.data.loader.packing import RowShape
from toque.models.loading.from_scratch import build_model

VOCAB, PAD, EOS = 61, 0, 1
Example = tuple[list[int], list[int]]
"""Prompt and target ids; the target ends with EOS."""

_ROTARY = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip
# family: config arguments for (width, layers, heads, inner width, positions), and for dropout
_ARGUMENTS: dict[str, tuple[tuple[str | None, ...], tuple[str, ...]]] = {
    "t5": (("d_model", "num_layers", "num_heads", "d_ff", None), ("dropout_rate",)),
    "gpt2": (
        ("n_embd", "n_layer", "n_head", None, "n_positions"),
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "neox": (_ROTARY, ("attention_dropout", "hidden_dropout")),
    "llama": (_ROTARY, ("attention_dropout",)),
}
FAMILIES = list(_ARGUMENTS)


def shape_of(
    family: str,
    *,
    width: int = 32,
    layers: int = 2,
    heads: int = 4,
    inner: int = 48,
    positions: int = 64,
    dropout: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """`model.shape` of a tiny model; `dropout` None leaves the family's default."""
    names, dropouts = _ARGUMENTS[family]
    sizes = zip(names, (width, layers, heads, inner, positions), strict=True)
    shape: dict[str, Any] = {name: size for name, size in sizes if name is not None}
    if family == "t5":
        shape["d_kv"] = width // heads
    if dropout is not None:
        shape |= dict.fromkeys(dropouts, dropout)
    return shape | more


def shape_yaml(family: str, **sizes: Any) -> str:
    """The same for a configuration file."""
    return json.dumps(shape_of(family, **sizes))


def model_of(
    family: str,
    *,
    vocab: int = VOCAB,
    seed: int = 0,
    shape: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A model from scratch, the same weights every time; in evaluation mode."""
    return build_model(
        family=family,
        shape=shape_of(family) if shape is None else shape,
        vocab_size=vocab,
        pad_id=PAD,
        eos_id=EOS,
        bos_id=None,
        seed=seed,
    ).eval()


# Weights are drawn wide, so that a wrong mask moves the loss by far more than any tolerance.
_WIDE = {"initializer_range": 0.2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", shape_of("t5", num_decoder_layers=3)),
    "t5-v1.1": (
        "t5",
        shape_of("t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "gpt2": ("gpt2", shape_of("gpt2", **_WIDE)),
    "neox": ("neox", shape_of("neox", **_WIDE)),
    "llama": ("llama", shape_of("llama", num_key_value_heads=2, **_WIDE)),
}
_CLOSE_TO_LLAMA = {"mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
EVERY_KIND = [*KINDS, *_CLOSE_TO_LLAMA]


def make(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model of `kind` with the same weights every time; in evaluation mode."""
    if kind in KINDS:
        family, shape = KINDS[kind]
        return model_of(family, seed=seed, shape=shape)
    ids = {
        "vocab_size": VOCAB,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    extra = {"sliding_window": None} if kind == "mistral" else {}
    config = _CLOSE_TO_LLAMA[kind](**KINDS["llama"][1], **ids, **extra, head_dim=8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


class Listed:
    """Examples in a list: the smallest thing a layout reads."""

    def __init__(self, pairs: Sequence[Example]) -> None:
        self.pairs = pairs
        lengths = np.array([(len(prompt), len(target)) for prompt, target in pairs])
        self.prompt_lengths, self.target_lengths = lengths.T

    def prompt(self, row: int, /) -> np.ndarray:
        return np.array(self.pairs[row][0], np.int64)

    def target(self, row: int, /) -> np.ndarray:
        return np.array(self.pairs[row][1], np.int64)


def uneven_examples(n: int) -> list[Example]:
    """Prompts of 2 to 12 ids and targets of 3 to 24, all of which end with EOS."""
    rng = np.random.default_rng(7)

    def ids(low: int, high: int) -> list[int]:
        return [*rng.integers(3, VOCAB, rng.integers(low, high)).tolist(), EOS]

    return [(ids(1, 12), ids(2, 24)) for _ in range(n)]


def stream_of(
    pairs: Sequence[Example],
    family: str,
    *,
    shape: tuple[int, int, int] = (24, 48, 56),
    seed: int = 2,
    update_rows: int | None = None,
    window: int | None = None,
    packed: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> BatchStream:
    """The real plan and layout over these examples.

    `shape` is what a packed row holds: source and target of a T5, tokens of the others.
    """
    examples, encoder = Listed(pairs), family == "t5"
    p, t = examples.prompt_lengths, examples.target_lengths
    row = RowShape(*shape[:2]) if encoder else RowShape(0, shape[2])
    plan = EpochPlan(
        examples=np.arange(len(pairs)),
        source_lengths=p if encoder else np.zeros_like(p),
        target_lengths=t if encoder else p + t - 1,
        shape=row,
        seed=seed,
        update_rows=update_rows,
        window=window or len(pairs),
    )
    layout = Layout(examples, shape=row, pad_id=PAD, start_id=PAD, packed=packed)
    return BatchStream(plan, layout, p, t, rank=rank, world_size=world_size)


def examples(n: int, seed: int = 0) -> list[Example]:
    """Prompts of 2 to 6 tokens; targets of 1 to 8 tokens that end with EOS."""
    drawn = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [drawn.randrange(2, VOCAB) for _ in range(drawn.randint(low, high))]

    return [(tokens(2, 6), [*tokens(0, 7), EOS]) for _ in range(n)]


def pack(kind: str, rows: Sequence[Sequence[Example]]) -> Batch:
    """The batch whose row i holds the examples rows[i], laid out without the package's own code."""
    by_hand, batch = (
        (_encoder_decoder_ids, EncoderDecoderBatch)
        if kind.startswith("t5")
        else (_decoder_ids, DecoderBatch)
    )
    columns: dict[str, list[list[int]]] = defaultdict(list)
    names = by_hand(0, [PAD], [PAD])
    for row in rows:
        parts = [
            by_hand(segment, *example) for segment, example in enumerate(row, start=1)
        ]
        for name in names:
            columns[name].append([i for part in parts for i in part[name]])
    numbers = iter(range(sum(map(len, rows))))
    return batch(
        example_ids=tuple(tuple(next(numbers) for _ in row) for row in rows),
        **{name: _padded(name, lines) for name, lines in columns.items()},
    )


def _decoder_ids(
    segment: int, prompt: list[int], target: list[int]
) -> dict[str, list[int]]:
    inputs = (prompt + target)[:-1]
    return {
        "tokens": inputs,
        "labels": [IGNORE] * (len(prompt) - 1) + target,
        "segments": [segment] * len(inputs),
        "positions": list(range(len(inputs))),
    }


def _encoder_decoder_ids(
    segment: int, prompt: list[int], target: list[int]
) -> dict[str, list[int]]:
    return {
        "source_tokens": prompt,
        "source_segments": [segment] * len(prompt),
        "target_tokens": [PAD, *target[:-1]],
        "target_segments": [segment] * len(target),
        "labels": target,
    }


def _padded(name: str, rows: list[list[int]]) -> Tensor:
    width = max(map(len, rows)) + 1  # padding in every row, the longest included
    value = {"labels": IGNORE}.get(name, PAD if name.endswith("tokens") else 0)
    made = torch.tensor([row + [value] * (width - len(row)) for row in rows])
    return made.int() if name.endswith("segments") else made
