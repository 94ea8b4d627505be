"""Model families: a new one is one entry in `FAMILIES`, and one in tests/tiny.py."""

from __future__ import annotations

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

from toque.errors import ConfigError

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
}
"""Formats of matrix products by their names in the settings."""
FamilyName = Literal["t5", "gpt2", "neox", "llama"]


@dataclass(frozen=True)
class Family:
    """Family of models, as the rest of the package sees it."""

    name: FamilyName
    is_encoder_decoder: bool
    model_types: tuple[str, ...]  # of config.json that belong here; the first is built from scratch
    config_class: type[PretrainedConfig]  # of a model from scratch; `model.shape` are its arguments

    @property
    def fp16_is_safe(self) -> bool:
        """True if float16 holds its activations; T5's overflow."""
        return self.name != "t5"


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("t5", True, ("t5",), T5Config),
        Family("gpt2", False, ("gpt2",), GPT2Config),
        Family("neox", False, ("gpt_neox",), GPTNeoXConfig),
        # Same forward, same module names: RoPE, grouped-query attention, SwiGLU, RMSNorm.
        Family("llama", False, ("llama", "mistral", "qwen2", "qwen3"), LlamaConfig),
    )
}
MODEL_TYPES = frozenset(name for family in FAMILIES.values() for name in family.model_types)


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model's config; ConfigError if none holds its type and attention."""
    model_type = config.model_type
    for family in FAMILIES.values():
        if model_type not in family.model_types:
            continue
        window = getattr(config, "sliding_window", None)
        if window is not None and getattr(config, "use_sliding_window", True):
            # Our masks give every layer full attention, so it would silently be ignored.
            raise ConfigError(
                f"This {model_type} checkpoint limits attention to a sliding window of {window} "
                "tokens, which is not done here. Use one without, or, when all rows are shorter "
                'than it, set "sliding_window": null in its config.json: that is the same model.'
            )
        return family
    raise unknown_type(model_type)


def unknown_type(model_type: object, *, has_code: bool = False) -> ConfigError:
    """The error about a model of no family here; `has_code` where its folder names code to load."""
    known = ", ".join(t for family in FAMILIES.values() for t in family.model_types)
    code = " It brings code of its own (auto_map), which is never run here." if has_code else ""
    return ConfigError(
        f'The model\'s config.json says model_type "{model_type}", which no family here covers.'
        f"{code} Model types that work: {known}."
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
    limit = getattr(config, "max_position_embeddings", None)
    return None if limit is None else int(limit)
