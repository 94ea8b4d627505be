"""LoRA, rsLoRA and DoRA layers of peft, injected into the transformers model in place.

A linear layer W of the model becomes W + s B A with A [r, in] and B [out, r], and only A and B are
trained (Hu et al. 2021, arXiv 2106.09685, eq. 3). s is alpha / r, and for rsLoRA alpha / sqrt(r)
(Kalajdzievski 2023, arXiv 2312.03732). DoRA also trains the norm of each row of the sum (Liu et
al. 2024, arXiv 2402.09353, eq. 5). B starts at zero, so training starts from the model itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toque.config.field_types import TableName
from toque.config.schema_methods import AdapterConfig
from toque.errors import ConfigError
from toque.models.families import embedding, family_of
from toque.models.lora.quantised import silence_bitsandbytes
from toque.models.lora.tables import HEAD, train_tables

ADAPTER: Final = "default"  # peft's name for the trained adapter
# Number of parameters from which rank 8 is the default. FLAN-T5-XL has 2.85e9.
LARGE: Final = 2_500_000_000

_ATTENTION: Final = {  # modules for `target_modules: auto` (Hu et al. 2021, section 7.1)
    "t5": ("q", "v"),
    "gpt2": ("c_attn",),
    "neox": ("query_key_value",),
    "llama": ("q_proj", "v_proj"),
}
_OTHER_ATTENTION: Final = (
    ("q_proj", "v_proj"),
    ("qkv_proj",),
    ("query_key_value",),
    ("c_attn",),
    ("Wqkv",),
    ("W_pack",),
)
"""Modules for other families. The first entry that matches the model is used."""
_LAST_NAME = re.compile(r"[^.]+(?:\.\d+)?$")


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
            except in a T5 with its own output head. `also_train` replaces them.

    Raises:
        ConfigError: `target_modules` contains an unknown name.
    """
    peft = import_peft()
    family = family_of(model.config)
    rank = adapter.r
    if rank == "auto":
        is_large = sum(p.numel() for p in model.parameters()) >= LARGE
        rank = 8 if is_large else 16
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if adapter.alpha == "auto" else adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=_resolve_targets(model, adapter.target_modules),
        use_dora=adapter.kind == "dora",
        use_rslora=adapter.kind == "rslora",
        # GPT-2's Conv1D stores its matrix transposed.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        trainable_token_indices=_token_tables(model, tokens, adapter.also_train),
        task_type="SEQ_2_SEQ_LM" if family.is_encoder_decoder else "CAUSAL_LM",
        base_model_name_or_path=base,
    )
    training = model.training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, ADAPTER)
    # peft would train copies of the modules.
    config.modules_to_save = train_tables(model, adapter.also_train) or None
    model.train(training)


def is_adapted(model: nn.Module) -> bool:
    """True if a model has an adapter."""
    return hasattr(model, "peft_config")


def refuse_unreached(model: nn.Module) -> None:
    """Raise a ConfigError if parameters of the adapter have no gradient.

    Call it after the first backward pass. B starts at zero, so the gradient of A is zero and only
    needs to exist. The gradient of B must have a value other than zero.
    """
    names = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if gradient is None or (".lora_B." in name and not bool(gradient.any())):
            names.append(name)
    if not names:
        return
    shown = ", ".join(names[:4])
    if len(names) > 4:
        shown += f" and {len(names) - 4} more"
    raise ConfigError(
        f"{len(names)} parts of the adapter receive no gradient: {shown}. They would not be "
        "trained. Remove their layers from adapter.target_modules."
    )


def _resolve_targets(
    model: PreTrainedModel, setting: Sequence[str] | Literal["auto", "all"]
) -> list[str]:
    """Return the names of the linear layers that a setting selects.

    Raises:
        ConfigError: The model has no linear layer with one of the names.
    """
    paths = (
        path
        for path, module in model.named_modules()
        if is_linear(module) and path != "lm_head"
    )
    # Inside a `Sequential`, a layer's last name is a number, which would also select blocks.
    existing = sorted({_LAST_NAME.search(path)[0] for path in paths})  # type: ignore[index]
    if setting == "all":
        return existing
    names: Sequence[str] = setting
    if setting == "auto":
        names = _default_targets(model, existing)
    unknown = [name for name in names if name not in existing]
    if unknown:
        raise ConfigError(
            f"adapter.target_modules contains {', '.join(unknown)}, but this "
            f"{model.config.model_type} model has no linear layer with that name. Allowed: "
            f"{', '.join(existing)}, auto or all."
        )
    return list(names)


def _default_targets(model: PreTrainedModel, existing: Sequence[str]) -> Sequence[str]:
    """Return the names of the attention layers, or all names if they are not known."""
    family = family_of(model.config).name
    if family in _ATTENTION:
        return _ATTENTION[family]
    for names in _OTHER_ATTENTION:
        if set(names) <= set(existing):
            return names
    return existing


def _token_tables(
    model: PreTrainedModel, tokens: Sequence[int], also_train: Sequence[TableName]
) -> dict[str, list[int]] | None:
    """Map the names of the embedding and an untied head to their trained rows.

    None if no rows are trained. A matrix in `also_train` is trained entirely.
    """
    inputs = model.get_input_embeddings()
    is_tied = model.get_submodule("lm_head").weight is embedding(model)
    # In a T5 with an untied head, the encoder and the decoder have their own copies of the
    # embedding table. peft would train two sets of rows, which cannot be merged.
    if not tokens or (family_of(model.config).name == "t5" and not is_tied):
        return None
    if is_tied and also_train:
        return None
    tables = {}
    if "embeddings" not in also_train:
        path = next(path for path, module in model.named_modules() if module is inputs)
        tables[path.rsplit(".", 1)[-1]] = list(tokens)
    if not is_tied and "head" not in also_train:  # a tied head shares the rows
        tables[HEAD] = list(tokens)
    return tables or None


def is_of_dora(model: nn.Module, name: str) -> bool:
    """True if a DoRA layer wraps the layer with this name."""
    parent = model.get_submodule(name.rpartition(".")[0])  # "" is the model itself
    return bool(getattr(parent, "lora_magnitude_vector", None))


def is_linear(module: nn.Module) -> bool:
    """True for linear layers, including GPT-2's `Conv1D`."""
    return isinstance(module, nn.Linear | Conv1D)


def import_peft() -> Any:
    """Import peft. Raise a ConfigError if it is not installed."""
    silence_bitsandbytes()
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "The section `adapter` needs the package peft. Install it with `pip install "
            "'peft>=0.21,<0.23'`, or train all weights with adapter=null."
        ) from error
    return peft
