"""Model families: those with parts of their own, and all other dense causal models.

A new one is one entry in `FAMILIES`, and one in tests/tiny.py; the others have none, and prove
themselves (`loading/proof.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

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
from toque.models.positions import short_positions

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
}
"""Formats of matrix products by their names in the settings."""
FamilyName = Literal["t5", "gpt2", "neox", "llama", "causal"]


@dataclass(frozen=True)
class Family:
    """Family of models, as the rest of the package sees it."""

    name: FamilyName
    is_encoder_decoder: bool
    model_types: tuple[str, ...]  # of config.json that belong here; the first is built from scratch
    config_class: type[PretrainedConfig]  # of a model from scratch; `model.shape` are its arguments

    @property
    def fp16_is_safe(self) -> bool:
        """True if float16 holds its activations; T5's and Gemma's overflow, others' may."""
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
"""Dense causal models of any other type, and those with sliding windows; never from scratch."""
_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
_EXPERTS = re.compile(r"(?:moe_)?(?:n|num)_(?:\w+_)?experts")  # how configs name their number
MODEL_TYPES = frozenset(name for family in FAMILIES.values() for name in family.model_types)


def is_read(model_type: object) -> bool:
    """True if models of the type are read here, or may be, by what their config.json says."""
    return model_type in MODEL_TYPES or model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model's config; ConfigError if none reads its type."""
    for family in FAMILIES.values():
        if config.model_type in family.model_types and window_of(config) is None:
            return family
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise unknown_type(config.model_type)
    return CAUSAL


def window_of(config: PretrainedConfig) -> int | None:
    """Tokens, itself included, that a token sees in layers with a sliding window; None: no such."""
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    return int(window) if window is not None and used else None


def refuse_unfit(config: PretrainedConfig) -> None:
    """Refuse, with a ConfigError, a model whose config says that it is no dense causal one."""
    if family_of(config) != CAUSAL:
        return
    experts = [n for n in vars(config) if _EXPERTS.fullmatch(n) and (getattr(config, n) or 0) > 1]
    kinds = {*(getattr(config, "layer_types", None) or ())} - _LAYER_TYPES
    parts = [name for name in config.sub_configs if getattr(config, name, None) is not None]
    if experts:
        named = ", ".join(f"{name}={getattr(config, name)}" for name in experts)
        found = f"layers that are mixtures of experts ({named}), of which each token passes a few"
    elif kinds:
        found = f"layers that are no plain attention ({', '.join(sorted(kinds))})"
    elif getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        found = "a state that passes from token to token (a state-space or recurrent model)"
    elif parts:
        found = f"parts beside one that reads text ({', '.join(parts)})"
    else:
        return
    raise ConfigError(
        f"This {config.model_type} model has {found}. Packed examples could not be kept apart in "
        "it, or not all of it would be trained. Use a dense model of text with attention alone."
    )


def unknown_type(model_type: object, *, has_code: bool = False) -> ConfigError:
    """The error about a model of no family here; `has_code` where its folder names code to load."""
    known = ", ".join(t for family in FAMILIES.values() for t in family.model_types)
    code = " It brings code of its own (auto_map), which is never run here." if has_code else ""
    return ConfigError(
        f'The model\'s config.json says model_type "{model_type}", which no family here covers.'
        f"{code} Model types that work: {known}, and others of dense causal language models that "
        "this version of transformers knows."
    )


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT or data-parallel wrapper, adapters still in place."""
    parallel = isinstance(model, nn.parallel.DistributedDataParallel)
    inner: object = model.module if parallel else model
    base = getattr(inner, "get_base_model", None)
    return cast("PreTrainedModel", base() if callable(base) else inner)


def embedding(model: nn.Module) -> Tensor:
    """The token embedding's weight, [V, D]."""
    table: Tensor = cast("nn.Embedding", unwrapped(model).get_input_embeddings()).weight
    return table


def vocabulary_rows(model: nn.Module) -> int:
    """V: rows of the token embedding, which may be more than the tokenizer has tokens."""
    return int(embedding(model).shape[0])


def exchange_parameters(model: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters, by the id of the old ones, wherever they are; shared ones stay shared."""
    for module in model.modules():
        for name, old in module._parameters.items():  # noqa: SLF001  # what __setattr__ writes to
            if old is not None:
                module._parameters[name] = others[id(old)]  # noqa: SLF001


def head_size(config: Any) -> int:
    """Columns of one attention head of a decoder-only model."""
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def max_positions(config: PretrainedConfig) -> int | None:
    """The most tokens of a row; None for T5. RoPE computes longer ones, never trained on."""
    named = getattr(config, "max_position_embeddings", None)
    limits = (named, short_positions(getattr(config, "rope_parameters", None)))
    return min((int(limit) for limit in limits if limit is not None), default=None)
