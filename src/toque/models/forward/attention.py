"""Choice of attention for packed forwards, by device and setting.

The choice follows rules and does not use timings, so that a machine's load does not change the
results of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from toque.models.config_values import head_size
from toque.models.families import family_of, unwrapped
from toque.models.forward import flex_attention as flex

Attention = Literal["segments", "flex", "dense"]
"""Attention of one example at a time on a CPU, FlexAttention on a GPU, or masks of all pairs."""
AttentionSetting = Literal["auto", "segments", "flex", "dense"]
_SETTINGS: WeakKeyDictionary[nn.Module, AttentionSetting] = WeakKeyDictionary()


@dataclass(frozen=True)
class AttentionChoice:
    """Selected attention, and the reasons why a better one is not used."""

    name: Attention
    notes: tuple[str, ...] = ()
    options: flex.Kernels = flex.DEFAULT_KERNELS
    blocks: str = ""  # description of FlexAttention's blocks on a GPU


def use_attention(model: nn.Module, setting: AttentionSetting) -> None:
    """Set the attention of a model's packed forward. "auto" is the fastest one that works."""
    _SETTINGS[unwrapped(model)] = setting


def attention_of(model: nn.Module, device: torch.device) -> AttentionChoice:
    """Choose the attention of a model's packed forward on a device, in the current precision."""
    core = unwrapped(model)
    setting = _SETTINGS.get(core, "auto")
    if setting == "dense" or device.type not in {"cpu", "cuda"}:
        return AttentionChoice("dense")
    if device.type == "cpu":
        if setting == "flex":  # computed by its definition
            return AttentionChoice("flex")
        # With segments, the compiler would compile again for every division of a row.
        return AttentionChoice("dense" if _has_compiled(core) else "segments")
    if setting == "segments":
        note = f"attention by segments is not used: it needs a CPU, not {device}"
        return AttentionChoice("dense", (note,))
    return _flex_on_gpu(core, device)


def _has_compiled(core: nn.Module) -> bool:
    """True if a module is compiled, or the compiler runs."""
    return torch.compiler.is_compiling() or any(
        getattr(module, "_compiled_call_impl", None) is not None
        for module in core.modules()
    )


def _flex_on_gpu(core: PreTrainedModel, device: torch.device) -> AttentionChoice:
    """Choose FlexAttention if its kernels work on a GPU, else masks."""
    dtype = core.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    size = head_size(core.config)
    has_bias = family_of(core.config).is_encoder_decoder
    plain = flex.kernels_on(device, dtype, size, biased=False)
    biased = flex.kernels_on(device, dtype, size, biased=has_bias)

    if plain.options is None or biased.options is None:
        reason = (plain if plain.options is None else biased).why
        return AttentionChoice("dense", (f"attention by flex is not used: {reason}",))
    blocks = str(plain) if plain == biased else f"{plain}; with T5's bias, {biased}"
    return AttentionChoice(
        "flex", options=(plain.options, biased.options), blocks=blocks
    )
