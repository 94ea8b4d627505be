"""GGUF layout: names and order of weights in llama.cpp, and the inverse conversion.

llama.cpp stores most matrices like transformers. The exceptions:

* transformers stores GPT-2's matrices transposed (`Conv1D`).
* In Llama and Mistral, the rotary halves of a head alternate: rows (i, i + d/2) are (2i, 2i + 1).
* GPT-NeoX has q, k and v together for each head. In llama.cpp all q come first, then all k, then
  all v.
* A T5 that scales its outputs by d_model ** -0.5 needs its own head, multiplied by this factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from toque.errors import ConfigError
from toque.models.config_values import scales_outputs, window_of
from toque.models.loading.from_scratch import give_own_head

ARCHITECTURES: Final = {  # llama.cpp's name for each `model_type`
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "t5": gguf.MODEL_ARCH.T5,
}

_LLAMA: Final[dict[str, tuple[Any, ...]]] = {"hidden_act": ("silu", "swish")}
# Entries of config.json with a fixed value in llama.cpp, by model type.
_COMPUTED: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    # llama.cpp always computes the tanh form. NeoX uses the exact one, which differs by up to 5e-4.
    "gpt_neox": {
        "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "attention_bias": (True,),
    },
    "t5": {
        "feed_forward_proj": ("relu", "gated-gelu"),
        "relative_attention_max_distance": (128,),
    },
}

_FACTOR_TYPES: Final = ("llama", "mistral")
"""Model types for which llama.cpp divides rotary frequencies by factors in the file."""

Reorder = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StoredWeight:
    """Weight of a model, and its name and order in a GGUF file."""

    weight: Tensor  # the model's own tensor
    name: str  # name in the file
    to_file: Reorder
    from_file: Reorder


def architecture_of(config: PretrainedConfig) -> gguf.MODEL_ARCH:
    """Return llama.cpp's architecture for a model.

    Raises:
        ConfigError: llama.cpp does not compute this model.
    """
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"A model of type {kind} cannot be written as GGUF. Allowed types: "
            f"{', '.join(ARCHITECTURES)}. Export this model with format hf."
        )
    unsupported = []
    for name, allowed in _COMPUTED.get(kind, _LLAMA).items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            unsupported.append(f"{name}={value}")
    rope_type = _rope_type(config)
    has_factors = rope_type == "llama3" and kind in _FACTOR_TYPES
    if rope_type != "default" and not has_factors:
        unsupported.append(f"rope_type={rope_type}")
    window = window_of(config)
    if window is not None:
        unsupported.append(f"sliding_window={window}")
    if unsupported:
        raise ConfigError(
            f"This {kind} model has {', '.join(unsupported)} in its config.json, which Toque does "
            "not write as GGUF. Export it with format hf."
        )
    return ARCHITECTURES[kind]


def _rope_type(config: PretrainedConfig) -> str:
    rope = getattr(config, "rope_parameters", None) or {}
    return str(rope.get("rope_type", "default"))


def remove_output_scale(model: PreTrainedModel) -> None:
    """Multiply a T5's output scale into a head of its own. Other models do not change."""
    config: Any = model.config
    if config.model_type == "t5" and scales_outputs(config):
        table = model.get_parameter("shared.weight").detach()
        give_own_head(model, table * config.d_model**-0.5)
        config.scale_decoder_outputs = False


def rotary_frequencies(model: PreTrainedModel) -> tuple[Tensor, Tensor] | None:
    """Return a model's scaled and unscaled rotary frequencies, if its file needs their ratio.

    The scaled frequencies are the model's own tensor.
    """
    if _rope_type(model.config) != "llama3":
        return None
    scaled = cast("Tensor", cast("Any", model).get_decoder().rotary_emb.inv_freq)
    size = 2 * len(scaled)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return scaled, 1.0 / model.config.rope_parameters["rope_theta"] ** exponents


def stored_weights(model: PreTrainedModel) -> Iterator[StoredWeight]:
    """Yield every weight of a model without output scale, in the order of the file."""
    config: Any = model.config
    arch = architecture_of(config)
    decoder_layers = getattr(config, "num_decoder_layers", 0) or 0
    n_blocks = max(config.num_hidden_layers, decoder_layers)
    file_names = gguf.get_tensor_name_map(arch, n_blocks)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in model.named_parameters()]
    # A shared weight is written once, and llama.cpp uses it for the head too, except in a NeoX.
    if arch == gguf.MODEL_ARCH.GPTNEOX and "lm_head.weight" not in names:
        names.append("lm_head.weight")
    for name in names:
        file_name = file_names.get_name(name, try_suffixes=(".weight", ".bias"))
        if file_name is None:
            raise ConfigError(
                f"This {config.model_type} model has a weight {name}, which Toque does not write "
                "as GGUF. Export it with format hf."
            )
        to_file, from_file = _reorderings(config, name)
        yield StoredWeight(parameters[name].detach(), file_name, to_file, from_file)


def _reorderings(config: Any, name: str) -> tuple[Reorder, Reorder]:
    """Return the reordering of a weight for the file, and its inverse."""
    kind = config.model_type
    if kind == "gpt2" and name.endswith(
        (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    ):
        return (lambda t: t.T), (lambda t: t.T)
    if kind in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):
        is_query = ".q_proj." in name
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        # Rows are (head, half, column) in the model and (head, column, half) in the file.
        to_file = partial(_swap_axes, sizes=(heads, 2, -1), axis=1)
        return to_file, partial(_swap_axes, sizes=(heads, -1, 2), axis=1)
    if kind == "gpt_neox" and ".query_key_value." in name:
        heads = config.num_attention_heads
        # Rows are (head, q/k/v, column) in the model and (q/k/v, head, column) in the file.
        to_file = partial(_swap_axes, sizes=(heads, 3, -1), axis=0)
        return to_file, partial(_swap_axes, sizes=(3, heads, -1), axis=0)
    return (lambda t: t), (lambda t: t)


def _swap_axes(weight: Tensor, sizes: tuple[int, ...], axis: int) -> Tensor:
    """View a weight's rows as a grid of `sizes`, and swap an axis with the next one."""
    grid = weight.reshape(*sizes, *weight.shape[1:])
    return grid.transpose(axis, axis + 1).reshape(weight.shape)


@torch.no_grad()
def replace_weight(
    stored: StoredWeight, data: NDArray[Any], shape: Sequence[int]
) -> None:
    """Copy float32 data from a file to a weight of the model."""
    values = torch.from_numpy(np.array(data)).reshape(shape)
    stored.weight.copy_(stored.from_file(values))
