"""Attention masks of packed rows, from segment numbers, built once per forward.

Letters: R rows, L row length of a decoder-only model, S source and T target row length.
A mask is bool, True where attention is allowed, with a head dimension of 1.

Every query must see at least one key, or the softmax of its row is NaN. Padding is segment 0, so
within one side it attends padding; across sides a row may hold no source padding, and padded
targets attend everything. Nothing reads what padding computes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toque.errors import ConfigError


def same_segment(segments: Tensor) -> Tensor:
    """[R, S] segment numbers -> [R, 1, S, S]: an encoder over packed examples."""
    return segments[:, None, :, None] == segments[:, None, None, :]


def causal_same_segment(segments: Tensor) -> Tensor:
    """[R, L] segment numbers -> [R, 1, L, L]: a decoder over packed examples.

    >>> causal_same_segment(torch.tensor([[1, 1, 2]]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return same_segment(segments) & causal


def cross_segment(target_segments: Tensor, source_segments: Tensor) -> Tensor:
    """[R, T] and [R, S] segment numbers -> [R, 1, T, S]: segment k reads the source's segment k.

    Every target segment needs at least one source token of the same number.
    """
    target = target_segments[:, None, :, None]
    return (target == source_segments[:, None, None, :]) | (target == 0)


def for_model(mask: Tensor, model: PreTrainedModel) -> Tensor:
    """`mask` in the form that the model's attention implementation takes.

    Args:
        mask: [R, 1, queries, keys] bool, True where attention is allowed.
        model: Its config names the implementation. Additive masks use the smallest number of the
            weights' dtype, not -inf, so that adding a position bias cannot make NaN.

    Raises:
        ConfigError: the implementation cannot take a mask of our own.
    """
    implementation = model.config._attn_implementation  # noqa: SLF001  # it has no public name
    if implementation == "sdpa":
        return mask
    if implementation == "eager":
        blocked = torch.zeros((), dtype=model.dtype, device=mask.device)
        return torch.where(mask, blocked, torch.finfo(model.dtype).min)
    raise ConfigError(
        f'The model was loaded with attn_implementation="{implementation}", which cannot keep '
        "packed examples apart with a mask. Load it with sdpa or eager."
    )
