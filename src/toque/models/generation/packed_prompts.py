"""Prompts packed in one row, without padding, in bf16 on a CPU.

The stock forward pads a batch's prompts to one length, casts around every product and attends by a
kernel that is slow in bf16. Here prompts are read as examples are in training: one row of all
tokens, activations of the products' precision between them, attention by groups of like length
(`forward/grouped_attention.py`). The residual stream and norms stay float32.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from toque.models.forward.bf16_linear import padded_length
from toque.models.forward.unpadded import t5_stack
from toque.models.forward.varlen_attention import (
    AttentionPlan,
    supports_varlen,
    varlen_attention,
)
from toque.models.generation.packed_products import has_bf16_products

LONGEST: Final = 1024
"""Tokens of a prompt that is read so: all scores of its heads exist at once, 2 MB a head."""


def reads_packed(core: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> bool:
    """Whether these prompts are read in one row: beside bf16 products on a CPU."""
    short = max(map(len, prompts), default=0) <= LONGEST
    return short and has_bf16_products(core) and supports_varlen(core, core.device)


def cache_argument(core: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """The cache under the name that this version's stock forward gives it.

    transformers 5.24 calls it `cache`; earlier ones call it `past_key_values`, which 5.40 drops.
    """
    takes = inspect.signature(type(core.base_model).forward).parameters
    return {"cache" if "cache" in takes else "past_key_values": cache}


class PackedPrompts:
    """Prompts in one row.

    Args:
        prompts: Token ids, at least one prompt; none is empty.
    """

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        ends = list(itertools.accumulate(map(len, prompts), initial=0))
        self.parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        """The places of each prompt's tokens."""
        # Tokens that nobody reads, so that few shapes of products occur.
        extra = (0, padded_length(ends[-1]) - ends[-1])
        flat = torch.tensor(list(itertools.chain.from_iterable(prompts)))
        positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
        self._tokens = functional.pad(flat, extra)[None]
        self._positions = functional.pad(positions, extra)[None]
        self._plan = AttentionPlan([(0, p.start, p.stop, p.start, p.stop) for p in self.parts])

    def causal(self, core: PreTrainedModel) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [H, tokens, d] of each layer of a decoder-only model."""
        cache = DynamicCache()
        with _packed(core):
            core.base_model(
                # Without a mask GPT-2 would look for padding among tokens.
                inputs_embeds=core.get_input_embeddings()(self._tokens),
                position_ids=self._positions,
                use_cache=True,
                **cache_argument(core, cache),
                plan=self._plan,
            )
        layers = cast("list[DynamicLayer]", cache.layers)
        return [(cast("Tensor", n.keys)[0], cast("Tensor", n.values)[0]) for n in layers]

    def encoded(self, core: PreTrainedModel) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [H, tokens, d] that each layer of a T5's decoder makes of the encoder."""
        encoder, blocks = core.get_submodule("encoder"), core.get_submodule("decoder.block")
        size, found = core.config.d_kv, []
        with _packed(core):
            plan = self._plan
            embedded = encoder.get_submodule("embed_tokens")(self._tokens)
            states = t5_stack(encoder, embedded, plan, None, longest=plan.longest)[0]
            for block in blocks.children():
                attention = block.get_submodule("layer.1.EncDecAttention")
                both = (attention.get_submodule(name)(states) for name in "kv")
                keys, values = (new.view(len(states), -1, size).transpose(0, 1) for new in both)
                found.append((keys, values))
        return found


@contextmanager
def _packed(core: PreTrainedModel) -> Iterator[None]:
    with varlen_attention(core), torch.autocast("cpu", torch.bfloat16):
        yield
