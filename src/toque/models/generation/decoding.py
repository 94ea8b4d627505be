"""Decoding with a KV cache, what all families share: the interface, the cache's shape, prefill.

Letters, also in `causal.py` and `t5.py`: n live rows, D hidden size, H key-value heads, G query
heads of one key-value head, d head size, P longest prompt of a prefill, K columns of a window.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from toque.models.families import family_of, head_size
from toque.models.generation.gathered_attention import DTYPE as GATHERED
from toque.models.generation.gathered_attention import can_gather
from toque.models.generation.packed_products import has_bf16_products

PREFILL_TOKENS = 4096
"""Prompt tokens, padding included, that one forward of the prefill reads; bounds its memory."""
WASTED_TOKENS = 128
"""Padding of one forward of the prefill on a CPU. A token of a 30 M model costs 0.15 ms in float32
there, and a forward more of few tokens 2 to 3 ms."""


class Decoding(ABC):
    """The live rows of one model: `admit` prefills prompts, `step` decodes one token a row."""

    @abstractmethod
    def admit(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Prefill new rows, numbered after the live ones; returns the first token of each step."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """One decoding step: a token of every live row [n] to the output head's input [n, D]."""

    @abstractmethod
    def drop(self, row: int) -> None:
        """Free a row; the last live one takes its number."""


def cache_dtype(core: PreTrainedModel) -> torch.dtype:
    """Precision of the KV cache: that of the matrix products, but for one that is gathered."""
    if has_bf16_products(core):
        return GATHERED if gathers(core) else torch.bfloat16
    kind = core.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else core.dtype


def gathers(core: PreTrainedModel) -> bool:
    """True if a step's attention is gathered: beside bf16 products; float32 keeps its sums."""
    return has_bf16_products(core) and can_gather(core.device)


def cache_shape(core: PreTrainedModel) -> tuple[int, int, int]:
    """Layers, key-value heads and head size of the decoder's KV cache."""
    config = core.config
    if family_of(config).is_encoder_decoder:
        return config.num_decoder_layers, config.num_heads, config.d_kv
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_hidden_layers, heads, head_size(config)


def layer_devices(core: PreTrainedModel) -> list[torch.device]:
    """The device of each layer of the decoder."""
    encoder = family_of(core.config).is_encoder_decoder
    decoder = core.get_submodule("decoder") if encoder else core.base_model
    layers = next(child for child in decoder.children() if isinstance(child, nn.ModuleList))
    return [next(layer.parameters()).device for layer in layers]


def cache_argument(core: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """The cache under the name that this version's stock forward gives it.

    transformers 5.24 calls it `cache`; earlier ones call it `past_key_values`, which 5.40 drops.
    """
    takes = inspect.signature(type(core.base_model).forward).parameters
    return {"cache" if "cache" in takes else "past_key_values": cache}


def groups(lengths: Sequence[int], device: torch.device) -> Iterator[slice]:
    """Consecutive prompts that are prefilled by one forward, at least one each.

    A group has at most PREFILL_TOKENS tokens with its padding; on a CPU, where a forward more costs
    little, at most WASTED_TOKENS of them are padding.

    >>> list(groups([900, 880, 100, 90], torch.device("cpu")))
    [slice(0, 2, None), slice(2, 4, None)]
    """
    most_wasted = WASTED_TOKENS if device.type == "cpu" else PREFILL_TOKENS
    start, longest, total = 0, 0, 0
    for number, length in enumerate(lengths):
        together = max(longest, length) * (number + 1 - start)
        too_many = together > PREFILL_TOKENS or together - total - length > most_wasted
        if number > start and too_many:
            yield slice(start, number)
            start, longest, total = number, 0, 0
        longest, total = max(longest, length), total + length
    if start < len(lengths):
        yield slice(start, len(lengths))


def padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    """[prompts, P] token ids, padded on the right."""
    width = max(map(len, prompts))
    rows = [list(prompt) + [pad_id] * (width - len(prompt)) for prompt in prompts]
    return torch.tensor(rows, device=device)
