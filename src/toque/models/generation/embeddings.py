"""Embeddings of texts. The dot product of two embeddings measures the texts' similarity."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from toque.batch import IGNORE, DecoderBatch
from toque.models.families import family_of
from toque.models.forward.packed import hidden_states
from toque.models.generation.kv_cache import pad_prompts
from toque.models.generation.t5 import encode


@torch.inference_mode()
def embed_texts(
    core: PreTrainedModel, texts: Sequence[Sequence[int]], *, pad_id: int
) -> Tensor:
    """Compute the mean of a model's last hidden states over the tokens of each text.

    An encoder-decoder encodes the texts. Padding does not change a vector, except for rounding.

    Args:
        core: Model in evaluation mode.
        texts: Token ids of each text, at least one.
        pad_id: Padding token.

    Returns:
        Vectors of length 1 in float32, [texts, D].
    """
    if family_of(core.config).is_encoder_decoder:
        states, is_token = encode(core, texts, pad_id)
    else:
        states, is_token = _read(core, texts, pad_id)
    weights = is_token[..., None].float()
    sums = (states.float() * weights).sum(1)
    return functional.normalize(sums, dim=-1)  # the norm cancels the number of tokens


def _read(
    core: PreTrainedModel, texts: Sequence[Sequence[int]], pad_id: int
) -> tuple[Tensor, Tensor]:
    """Return what `encode` returns, for a decoder-only model."""
    tokens = pad_prompts(texts, pad_id, core.device)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    lengths = torch.tensor([len(text) for text in texts], device=tokens.device)
    is_token = places < lengths[:, None]
    batch = DecoderBatch(
        labels=torch.full_like(tokens, IGNORE),
        example_ids=tuple((row,) for row in range(len(texts))),
        tokens=tokens,
        segments=is_token.int(),
        positions=torch.where(is_token, places, 0),
    )
    return hidden_states(core, batch), is_token
