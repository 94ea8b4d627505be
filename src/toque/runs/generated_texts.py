"""Texts that a run generates per update for grpo and best_of, and the memory for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toque.hardware.memory import BESIDE_TRAINING
from toque.models.config_values import max_positions
from toque.models.families import family_of, vocabulary_rows
from toque.models.forward.outline import OutlinedRows, Where
from toque.models.generation.engine import MAX_ROWS, row_bytes
from toque.models.generation.kv_cache import (
    MAX_INITIAL_COLUMNS,
    PREFILL_TOKENS,
    SPARE,
    cache_shape,
)
from toque.models.generation.packed_products import should_pack_float32
from toque.models.lora.frozen import PLAIN, format_of

_SAMPLING_BYTES: Final = {"cpu": 36, "cuda": 12}
"""Bytes per logit while tokens are sampled: float32 on a GPU, and float64 sums on a CPU."""


@dataclass(frozen=True)
class GeneratedTexts:
    """Texts that the model in training generates per update."""

    prompts: int
    """Prompts per update, of all ranks together."""
    samples: int
    """Texts per prompt."""
    learnt_share: float
    """Fraction of the texts that the update learns from."""
    longest_prompt: int
    max_tokens: int
    """Longest text in tokens."""
    mean_prompt: float
    mean_tokens: float
    """Assumed mean length of a text in tokens."""
    prompt_bytes: int | None = None
    """Temporary bytes to read prompts, or None if they are not known yet."""

    @property
    def n_texts(self) -> int:
        """Texts per update."""
        return self.prompts * self.samples

    @property
    def n_learnt(self) -> int:
        """Texts that an update learns from."""
        return max(1, round(self.learnt_share * self.n_texts))

    @property
    def tokens(self) -> float:
        """Generated tokens per update."""
        return self.n_texts * self.mean_tokens

    def prompt_rows(self, *, encoder: bool) -> OutlinedRows:
        """Return the longest prompts that are read together."""
        n = min(self.n_texts, max(1, PREFILL_TOKENS // self.longest_prompt))
        if encoder:
            return OutlinedRows(n, self.longest_prompt, 1)
        return OutlinedRows(n, 0, self.longest_prompt)

    def of_rank(self, ranks: int) -> GeneratedTexts:
        """Return the texts of the rank with the most prompts."""
        return replace(self, prompts=-(-self.prompts // ranks))


@dataclass(frozen=True)
class GenerationMemory:
    """Memory while the texts of an update are generated, in bytes."""

    rows: int
    """Texts that are generated at a time."""
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes in addition to the weights, gradients and optimizer states."""
        return sum(self.parts.values())


def estimate_generation(
    model: PreTrainedModel,
    texts: GeneratedTexts,
    *,
    where: Where,
    precision: str,
    free: int,
) -> GenerationMemory:
    """Estimate the memory to generate the texts of an update.

    Args:
        model: The outlined model.
        texts: The texts of this rank.
        where: Kind of the device.
        precision: Number format of the matmuls.
        free: Free bytes when generation starts.
    """
    has_encoder = family_of(model.config).is_encoder_decoder
    columns = texts.max_tokens
    if not has_encoder:
        columns += texts.longest_prompt
        context_length = max_positions(model.config)
        if context_length is not None:
            columns = min(columns, context_length + 1)

    is_16_bit = precision == "bf16" or format_of(model) != PLAIN
    itemsize = 2 if is_16_bit else 4
    row = row_bytes(model, columns, texts.longest_prompt, itemsize)
    affordable_rows = max(1, int(BESIDE_TRAINING * free / row))
    rows = min(MAX_ROWS[where], texts.n_texts, affordable_rows)

    width = _cache_width(columns, grows=rows < texts.n_texts)
    if has_encoder:
        # The cache of the prompts is allocated for the first ones, with spare columns.
        width += texts.longest_prompt + max(SPARE, texts.longest_prompt // 4)
    layers, heads, size = cache_shape(model)
    parts = {
        "keys and values": 2 * layers * heads * size * itemsize * rows * width,
        "weights for its matmuls": _packed_bytes(model, where, precision),
        # Prompts are read before the first token.
        "activations and logits": max(
            texts.prompt_bytes or 0,
            _SAMPLING_BYTES[where] * vocabulary_rows(model) * rows,
        ),
    }
    return GenerationMemory(rows, parts)


def _cache_width(columns: int, *, grows: bool) -> int:
    """Return the allocated columns of a cache at its peak, when an old buffer is copied.

    A cache grows if it begins smaller than its longest row, or if a text begins later than another.
    """
    width = peak = min(columns, MAX_INITIAL_COLUMNS)
    needed = columns + SPARE if grows else columns
    while width < needed:
        larger = width + max(SPARE, width // 4)
        peak = width + larger
        width = larger
    return peak


def _packed_bytes(model: PreTrainedModel, where: Where, precision: str) -> int:
    """Return the bytes of the weights that `with_packed_products` copies."""
    if format_of(model) != PLAIN:
        return 0
    itemsize = 4
    if precision == "bf16":
        itemsize = 2
    elif where == "cuda" or not should_pack_float32(model):
        return 0
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not head
    ]
    return itemsize * sum(layer.weight.numel() for layer in layers)
