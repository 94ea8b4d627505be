"""GGUF layout: the name and the order of every weight as llama.cpp reads them, and the way back.

llama.cpp keeps most matrices as transformers does. What it turns around:

* GPT-2's products are stored the other way round in transformers (`Conv1D`);
* Llama's and Mistral's rotary halves lie side by side: row pairs (i, i + d/2) become (2i, 2i + 1);
* GPT-NeoX has q, k and v of each head together; here all q come first, then all k, all v;
* a T5 whose outputs are scaled by d_model ** -0.5 needs a head of its own that holds the factor.
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
from toque.models.families import window_of
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
# Entries that llama.cpp takes for granted and a config.json may change, by type.
_COMPUTED: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    # llama.cpp computes the tanh form for all; that of a NeoX is exact, and differs by up to 5e-4.
    "gpt_neox": {
        "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "attention_bias": (True,),
    },
    "t5": {"feed_forward_proj": ("relu", "gated-gelu"), "relative_attention_max_distance": (128,)},
}

_TURNS_BY_FACTORS: Final = ("llama", "mistral")
"""Types for which llama.cpp divides each rotary frequency by a factor in the file."""

Turn = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """Place of a weight in a GGUF file."""

    weight: Tensor  # name in the model, as its own module keeps it
    name: str  # name in the file
    to_file: Turn
    from_file: Turn


def architecture_of(config: PretrainedConfig) -> gguf.MODEL_ARCH:
    """llama.cpp's architecture for a model; ConfigError if none computes the same."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"A model of type {kind} cannot be written as GGUF. Types that can: "
            f"{', '.join(ARCHITECTURES)}; export this one in the format hf."
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    odd = {
        name: found
        for name, allowed in _COMPUTED.get(kind, _LLAMA).items()
        if (found := getattr(config, name, allowed[0])) not in allowed
    }
    if rope != "default" and not (rope == "llama3" and kind in _TURNS_BY_FACTORS):
        odd["rope_type"] = rope
    odd |= {} if window_of(config) is None else {"sliding_window": window_of(config)}
    if odd:
        shown = ", ".join(f"{name}={value}" for name, value in odd.items())
        raise ConfigError(
            f"This {kind} has {shown} in its config.json, which Toque does not write as "
            "GGUF. Export it in the format hf."
        )
    return ARCHITECTURES[kind]


def suit(model: PreTrainedModel) -> None:
    """Give a T5 with scaled outputs the same function without the scale; others stay."""
    config: Any = model.config
    if config.model_type == "t5" and getattr(config, "scale_decoder_outputs", True):
        table = model.get_parameter("shared.weight").detach()
        give_own_head(model, table * config.d_model**-0.5)
        config.scale_decoder_outputs = False


def rotary(model: PreTrainedModel) -> tuple[Tensor, Tensor] | None:
    """Rotary frequencies of a model whose file holds factors of them, and the unscaled ones."""
    if (getattr(model.config, "rope_parameters", None) or {}).get("rope_type") != "llama3":
        return None
    scaled = cast("Tensor", cast("Any", model).get_decoder().rotary_emb.inv_freq)
    size = 2 * len(scaled)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return scaled, 1.0 / model.config.rope_parameters["rope_theta"] ** exponents


def places(model: PreTrainedModel) -> Iterator[Place]:
    """Every weight of a model that `suit` has seen, in the order of the file."""
    config: Any = model.config
    arch = architecture_of(config)
    blocks = max(config.num_hidden_layers, getattr(config, "num_decoder_layers", 0) or 0)
    names = gguf.get_tensor_name_map(arch, blocks)
    shared = dict(model.named_parameters(remove_duplicate=False))
    wanted = [name for name, _ in model.named_parameters()]
    # A shared weight is written once, and llama.cpp takes it for the head too, but of a NeoX.
    if arch == gguf.MODEL_ARCH.GPTNEOX and "lm_head.weight" not in wanted:
        wanted.append("lm_head.weight")
    for name in wanted:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ConfigError(
                f"This {config.model_type} has a weight {name}, for which Toque knows no place "
                "in a GGUF. Export it in the format hf."
            )
        yield Place(shared[name].detach(), found, *_turns(config, name))


def _turns(config: Any, name: str) -> tuple[Turn, Turn]:
    kind = config.model_type
    if kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return (lambda t: t.T), (lambda t: t.T)
    if kind in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):
        queries = ".q_proj." in name
        heads = config.num_attention_heads if queries else config.num_key_value_heads
        # Rotary halves of each head to neighbours, and back.
        return partial(_swapped, outer=(heads, 2), at=1), partial(
            _swapped, outer=(heads, -1, 2), at=1
        )
    if kind == "gpt_neox" and ".query_key_value." in name:
        heads = config.num_attention_heads
        return partial(_swapped, outer=(heads, 3), at=0), partial(_swapped, outer=(3, heads), at=0)
    return (lambda t: t), (lambda t: t)


def _swapped(weight: Tensor, outer: tuple[int, ...], at: int) -> Tensor:
    """Rows numbered by (a, b, ...) with the numbers at `at` and after it swapped."""
    rest = () if -1 in outer else (-1,)
    grouped = weight.reshape(*outer, *rest, *weight.shape[1:])
    return grouped.transpose(at, at + 1).reshape(weight.shape)


@torch.no_grad()
def put(place: Place, data: NDArray[Any], shape: Sequence[int]) -> None:
    """Replace a weight of the model by what lies in its place of a file, in float32."""
    place.weight.copy_(place.from_file(torch.from_numpy(np.array(data)).reshape(shape)))
