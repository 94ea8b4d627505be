"""Model families: four with separate code, and one for all other dense causal models.

To add a family, add an entry to `FAMILIES` and an entry to tests/tiny.py. A causal model of another
type is checked on its own weights when it is loaded (`loading/self_check.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from toque.errors import ConfigError
from toque.models.config_values import window_of

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
}
"""Precisions of matmuls by their names in the settings."""
FamilyName = Literal["t5", "gpt2", "neox", "llama", "causal"]


@dataclass(frozen=True)
class Family:
    """Family of models with the same architecture."""

    name: FamilyName
    is_encoder_decoder: bool
    # Accepted values of `model_type` in config.json. A model trained from scratch uses the first.
    model_types: tuple[str, ...]
    config_class: type[PretrainedConfig]  # its arguments are the keys of `model.shape`

    @property
    def fp16_is_safe(self) -> bool:
        """True if activations fit into float16. The activations of T5 and Gemma overflow."""
        return self.name not in ("t5", "causal")


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("t5", True, ("t5", "mt5", "umt5"), T5Config),
        Family("gpt2", False, ("gpt2",), GPT2Config),
        Family("neox", False, ("gpt_neox",), GPTNeoXConfig),
        # Same forward, same module names: RoPE, grouped-query attention, SwiGLU, RMSNorm.
        Family("llama", False, ("llama", "mistral", "qwen2", "qwen3"), LlamaConfig),
    )
}
CAUSAL: Final = Family("causal", False, (), PretrainedConfig)
"""Dense causal models of any other type or with sliding windows. They are never built from scratch.
"""
_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
# Config entries with a number of experts.
_EXPERTS = re.compile(r"(?:moe_)?(?:n|num)_(?:\w+_)?experts")
MODEL_TYPES = frozenset(
    name for family in FAMILIES.values() for name in family.model_types
)


def may_be_supported(model_type: object) -> bool:
    """True unless a model of this `model_type` is rejected without its config."""
    return model_type in MODEL_TYPES or model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a model's config. Raise a ConfigError if its type is not supported."""
    for family in FAMILIES.values():
        if config.model_type in family.model_types and window_of(config) is None:
            return family
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise unsupported_type(config.model_type)
    return CAUSAL


def refuse_unsupported_layers(config: PretrainedConfig) -> None:
    """Raise a ConfigError for a model that is not a dense causal language model."""
    if family_of(config) != CAUSAL:
        return
    if problem := _find_unsupported_layers(config):
        raise ConfigError(
            f"This {config.model_type} model {problem}. Toque cannot separate packed examples in "
            "it, or would not train all of it. Use a dense text model that has only attention "
            "layers."
        )


def _find_unsupported_layers(config: PretrainedConfig) -> str:
    """Describe the layers of a causal model that Toque does not support; "" without any."""
    counts = {name: n for name, n in vars(config).items() if _EXPERTS.fullmatch(name)}
    experts = [f"{name}={n}" for name, n in counts.items() if (n or 0) > 1]
    if experts:
        return f"has mixtures of experts ({', '.join(experts)})"

    layer_types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if layer_types:
        return f"has layers without plain attention ({', '.join(sorted(layer_types))})"
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        return "passes a state from token to token (a state-space or recurrent model)"

    parts = [
        name for name in config.sub_configs if getattr(config, name, None) is not None
    ]
    return f"has parts for other data than text ({', '.join(parts)})" if parts else ""


def unsupported_type(model_type: object, *, has_code: bool = False) -> ConfigError:
    """Build the error about an unsupported `model_type`.

    Args:
        model_type: Entry of config.json.
        has_code: True if config.json refers to Python code in the folder.
    """
    supported = ", ".join(sorted(MODEL_TYPES))
    code = " Toque never runs a model's own code (auto_map)." if has_code else ""
    return ConfigError(
        f'config.json has model_type "{model_type}", which is not supported.{code} Supported types '
        f"are {supported}, and other dense causal language models in this transformers version."
    )


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a PEFT or data-parallel wrapper, with its adapters."""
    inner: object = model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
    base = getattr(inner, "get_base_model", None)
    return cast("PreTrainedModel", base() if callable(base) else inner)


def embedding(model: nn.Module) -> Tensor:
    """Return the token embedding's weight, [V, D]."""
    table = cast("nn.Embedding", unwrapped(model).get_input_embeddings())
    return table.weight


def vocabulary_rows(model: nn.Module) -> int:
    """Return V, the number of rows of the token embedding. The tokenizer may have fewer tokens."""
    return int(embedding(model).shape[0])


def exchange_parameters(
    model: nn.Module, replacements: Mapping[int, nn.Parameter]
) -> None:
    """Replace every parameter of a model, in place.

    Args:
        model: Model to change. Its shared parameters remain shared.
        replacements: New parameters by the id of the old ones.
    """
    for module in model.modules():
        # The mapping that `setattr` writes to.
        for name, old in module._parameters.items():  # noqa: SLF001
            if old is not None:
                module._parameters[name] = replacements[id(old)]  # noqa: SLF001
