"""GGUF layout: names and order of weights in llama.cpp, and the way back.

llama.cpp stores most matrices as transformers does. The exceptions:

* transformers stores GPT-2's products transposed (`Conv1D`).
* In Llama and Mistral, the rotary halves of a head alternate: rows (i, i + d/2) are (2i, 2i + 1).
* GPT-NeoX has q, k and v together for each head. In llama.cpp all q come first, then all k, all v.
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
from toque.models.config_values import window_of
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

Turn = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """Weight of a model, and its place in a GGUF file."""

    weight: Tensor  # the model's own tensor
    name: str  # name in the file
    to_file: Turn
    from_file: Turn


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
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    unsupported = {
        name: value
        for name, allowed in _COMPUTED.get(kind, _LLAMA).items()
        if (value := getattr(config, name, allowed[0])) not in allowed
    }
    if rope != "default" and not (rope == "llama3" and kind in _FACTOR_TYPES):
        unsupported["rope_type"] = rope
    if window_of(config) is not None:
        unsupported["sliding_window"] = window_of(config)
    if unsupported:
        shown = ", ".join(f"{name}={value}" for name, value in unsupported.items())
        raise ConfigError(
            f"This {kind} model has {shown} in its config.json, which Toque does not write as "
            "GGUF. Export it with format hf."
        )
    return ARCHITECTURES[kind]


def remove_output_scale(model: PreTrainedModel) -> None:
    """Move the output scale of a T5 to its own head. Other models do not change."""
    config: Any = model.config
    if config.model_type == "t5" and getattr(config, "scale_decoder_outputs", True):
        table = model.get_parameter("shared.weight").detach()
        give_own_head(model, table * config.d_model**-0.5)
        config.scale_decoder_outputs = False


def rotary(model: PreTrainedModel) -> tuple[Tensor, Tensor] | None:
    """Return a model's rotary frequencies and the unscaled ones, if its file needs factors."""
    if (getattr(model.config, "rope_parameters", None) or {}).get(
        "rope_type"
    ) != "llama3":
        return None
    scaled = cast("Tensor", cast("Any", model).get_decoder().rotary_emb.inv_freq)
    size = 2 * len(scaled)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return scaled, 1.0 / model.config.rope_parameters["rope_theta"] ** exponents


def places(model: PreTrainedModel) -> Iterator[Place]:
    """Yield every weight of a model without output scale, in the order of the file."""
    config: Any = model.config
    arch = architecture_of(config)
    blocks = max(
        config.num_hidden_layers, getattr(config, "num_decoder_layers", 0) or 0
    )
    file_names = gguf.get_tensor_name_map(arch, blocks)
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
        yield Place(parameters[name].detach(), file_name, *_turns(config, name))


def _turns(config: Any, name: str) -> tuple[Turn, Turn]:
    kind = config.model_type
    if kind == "gpt2" and name.endswith(
        (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    ):
        return (lambda t: t.T), (lambda t: t.T)
    if kind in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):
        queries = ".q_proj." in name
        heads = config.num_attention_heads if queries else config.num_key_value_heads
        # The halves of each head alternate in the file.
        return partial(_swapped, outer=(heads, 2), at=1), partial(
            _swapped, outer=(heads, -1, 2), at=1
        )
    if kind == "gpt_neox" and ".query_key_value." in name:
        heads = config.num_attention_heads
        return partial(_swapped, outer=(heads, 3), at=0), partial(
            _swapped, outer=(3, heads), at=0
        )
    return (lambda t: t), (lambda t: t)


def _swapped(weight: Tensor, outer: tuple[int, ...], at: int) -> Tensor:
    """Swap the numbers at `at` and after it, in rows that are numbered by (a, b, ...)."""
    rest = () if -1 in outer else (-1,)
    grouped = weight.reshape(*outer, *rest, *weight.shape[1:])
    return grouped.transpose(at, at + 1).reshape(weight.shape)


@torch.no_grad()
def put(place: Place, data: NDArray[Any], shape: Sequence[int]) -> None:
    """Replace a weight of the model by its float32 data from a file."""
    place.weight.copy_(place.from_file(torch.from_numpy(np.array(data)).reshape(shape)))
