"""LoRA, rsLoRA and DoRA layers of peft, injected into the transformers model in place.

A linear layer W of the model becomes W + s B A with A [r, in] and B [out, r], and only A and B are
trained (Hu et al. 2021, arXiv 2106.09685, eq. 3). s is alpha / r, and for rsLoRA alpha / sqrt(r)
(Kalajdzievski 2023, arXiv 2312.03732). DoRA also trains the length of each row of the sum (Liu et
al. 2024, arXiv 2402.09353, eq. 5). B starts at zero, so that training starts from the model itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toque.config.schema_methods import AdapterConfig
from toque.errors import ConfigError
from toque.models.families import embedding, family_of
from toque.models.lora.quantised import silence_bitsandbytes

ADAPTER: Final = "default"  # peft's name for the trained adapter
# Minimum of parameters for a lower rank; FLAN-T5-XL has 2.85e9.
LARGE: Final = 2_500_000_000

_ATTENTION: Final = {  # modules for `target_modules: auto` (Hu et al. 2021, section 7.1)
    "t5": ("q", "v"),
    "gpt2": ("c_attn",),
    "neox": ("query_key_value",),
    "llama": ("q_proj", "v_proj"),
}
_OTHER_ATTENTION: Final = (
    ("q_proj", "v_proj"),
    *((name,) for name in ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack")),
)
"""Modules for other families: the first entry with modules that the model has."""
_LAST = re.compile(r"[^.]+(?:\.\d+)?$")


def attach(
    model: PreTrainedModel,
    adapter: AdapterConfig,
    *,
    base: str,
    seed: int,
    tokens: Sequence[int] = (),
) -> None:
    """Freeze a model and attach an adapter. The same seed gives the same A.

    Args:
        model: The model, changed in place.
        adapter: Settings of the adapter.
        base: Folder or hub name of the model, for adapter_config.json.
        seed: Seed of A.
        tokens: Ids of new tokens. Their rows of the embedding and the output head are trained too,
            except in a T5 with its own output head.

    Raises:
        ConfigError: `target_modules` contains an unknown name.
    """
    peft, family = _peft(), family_of(model.config)
    is_large = sum(p.numel() for p in model.parameters()) >= LARGE
    auto_rank = 8 if is_large else 16
    rank = auto_rank if adapter.r == "auto" else adapter.r
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if adapter.alpha == "auto" else adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=_targets(model, adapter.target_modules),
        use_dora=adapter.kind == "dora",
        use_rslora=adapter.kind == "rslora",
        # GPT-2's Conv1D stores its matrix transposed.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        trainable_token_indices=_token_tables(model, tokens),
        task_type="SEQ_2_SEQ_LM" if family.is_encoder_decoder else "CAUSAL_LM",
        base_model_name_or_path=base,
    )
    training = model.training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, ADAPTER)
    model.train(training)


def is_adapted(model: nn.Module) -> bool:
    """True if a model has an adapter."""
    return hasattr(model, "peft_config")


def refuse_unreached(model: nn.Module) -> None:
    """Raise a ConfigError if parameters of the adapter have no gradient. Call it after backward.

    B starts at zero, so the gradient of A is zero at first and only needs to exist. The gradient of
    B must have a value other than zero.
    """
    names = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad
        and (p.grad is None or (".lora_B." in name and not bool(p.grad.any())))
    ]
    if names:
        shown = ", ".join(names[:4]) + (
            f" and {len(names) - 4} more" if len(names) > 4 else ""
        )
        raise ConfigError(
            f"{len(names)} parts of the adapter receive no gradient: {shown}. They would not be "
            "trained. Remove their layers from adapter.target_modules."
        )


def _targets(
    model: PreTrainedModel, setting: Sequence[str] | Literal["auto", "all"]
) -> list[str]:
    paths = (
        n for n, module in model.named_modules() if is_linear(module) and n != "lm_head"
    )
    # Inside a `Sequential`, a layer's last name is a number, which would also select blocks.
    existing = sorted({_LAST.search(path)[0] for path in paths})  # type: ignore[index]
    if setting == "all":
        return existing
    names: Sequence[str] = setting
    if setting == "auto":
        suitable = (names for names in _OTHER_ATTENTION if {*names} <= {*existing})
        names = _ATTENTION.get(family_of(model.config).name) or next(suitable, existing)
    unknown = [name for name in names if name not in existing]
    if unknown:
        raise ConfigError(
            f"adapter.target_modules contains {', '.join(unknown)}, but this "
            f"{model.config.model_type} model has no linear layer with that name. Allowed: "
            f"{', '.join(existing)}, auto or all."
        )
    return list(names)


def _token_tables(
    model: PreTrainedModel, tokens: Sequence[int]
) -> dict[str, list[int]] | None:
    """Map the last parts of the tables' names to the trained rows; None without any."""
    inputs = model.get_input_embeddings()
    tied = model.get_submodule("lm_head").weight is embedding(model)
    # In a T5 with an untied head, encoder and decoder each have the table. peft would train two
    # sets of rows, which cannot be merged.
    if not tokens or (family_of(model.config).name == "t5" and not tied):
        return None
    name = next(n for n, module in model.named_modules() if module is inputs)
    tables = {name.rsplit(".", 1)[-1]: list(tokens)}
    if not tied:  # a tied head shares the rows
        tables["lm_head"] = list(tokens)
    return tables


def is_of_dora(model: nn.Module, name: str) -> bool:
    """True if the layer with this name is inside a layer of DoRA."""
    parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
    return bool(getattr(parent, "lora_magnitude_vector", None))


def is_linear(module: nn.Module) -> bool:
    """True if a module is a product with a matrix, such as GPT-2's `Conv1D`."""
    return isinstance(module, nn.Linear | Conv1D)


def _peft() -> Any:
    silence_bitsandbytes()
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "The section adapter needs the package peft. Install it with `pip install "
            "'peft>=0.21,<0.23'`, or train all weights with adapter=null."
        ) from error
    return peft
