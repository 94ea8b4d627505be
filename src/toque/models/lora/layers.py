"""LoRA, rsLoRA and DoRA layers, through peft, injected into the transformers model in place.

A linear layer W of the model becomes W + s B A with A [r, in] and B [out, r]; only A and B are
trained (Hu et al. 2021, arXiv 2106.09685, eq. 3). s is alpha / r, for rsLoRA alpha / sqrt(r)
(Kalajdzievski 2023, arXiv 2312.03732); DoRA also trains the length of each row of the sum (Liu et
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

ADAPTER: Final = "default"  # peft's name for the one adapter that is trained
LARGE: Final = 2_500_000_000  # parameters from which a model counts as 3B; FLAN-T5-XL has 2.85e9

_ATTENTION: Final = {  # modules of `target_modules: auto`: Hu et al. 2021, section 7.1
    "t5": ("q", "v"),
    "gpt2": ("c_attn",),
    "neox": ("query_key_value",),
    "llama": ("q_proj", "v_proj"),
}
_LIKEWISE: Final = (
    ("q_proj", "v_proj"),
    *((name,) for name in ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack")),
)
"""The same of any other type: the first of these that it has."""
_LAST = re.compile(r"[^.]+(?:\.\d+)?$")


def attach(
    model: PreTrainedModel,
    adapter: AdapterConfig,
    *,
    base: str,
    seed: int,
    tokens: Sequence[int] = (),
) -> None:
    """Freeze `model` and put an adapter into it; the same seed gives the same A.

    `base` is what adapter_config.json says it was trained on: a folder or hub name. `tokens` are
    ids new to the model, whose embedding (and output) rows are trained too, but not in a T5 with an
    output head of its own. ConfigError for an unknown name in `target_modules`.
    """
    peft, family = _peft(), family_of(model.config)
    large = sum(p.numel() for p in model.parameters()) >= LARGE
    rank = (8 if large else 16) if adapter.r == "auto" else adapter.r
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
    """True if an adapter is attached."""
    return hasattr(model, "peft_config")


def refuse_unreached(model: nn.Module) -> None:
    """Refuse, between backward and update, an adapter with parameters that get no gradient.

    A's gradient is zero at first, since B is, so it must only exist; B's must be nonzero somewhere.
    """
    dead = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and (p.grad is None or (".lora_B." in name and not bool(p.grad.any())))
    ]
    if dead:
        shown = ", ".join(dead[:4]) + (f" and {len(dead) - 4} more" if len(dead) > 4 else "")
        raise ConfigError(
            f"{len(dead)} parts of the adapter receive no gradient: {shown}. They would stay as "
            "they are for the whole run. Leave their layers out of adapter.target_modules."
        )


def _targets(model: PreTrainedModel, asked: Sequence[str] | Literal["auto", "all"]) -> list[str]:
    paths = (n for n, module in model.named_modules() if is_linear(module) and n != "lm_head")
    # A number alone, of a layer in a `Sequential`, would name blocks, too.
    there = sorted({_LAST.search(path)[0] for path in paths})  # type: ignore[index]
    if asked == "all":
        return there
    names: Sequence[str] = asked
    if asked == "auto":
        own = _ATTENTION.get(family_of(model.config).name)
        fitting = (names for names in _LIKEWISE if {*names} <= {*there})
        names = own or next(fitting, there)
    unknown = [name for name in names if name not in there]
    if unknown:
        raise ConfigError(
            f"adapter.target_modules names {', '.join(unknown)}, and this {model.config.model_type}"
            f" model has no linear layer of that name. It has {', '.join(there)}. Use some of "
            "these, auto, or all."
        )
    return list(names)


def _token_tables(model: PreTrainedModel, tokens: Sequence[int]) -> dict[str, list[int]] | None:
    """Last parts of the tables' names -> the trained rows; None for none."""
    inputs = model.get_input_embeddings()
    tied = model.get_submodule("lm_head").weight is embedding(model)
    # In a T5 with an untied head, encoder and decoder each hold the table, and peft would give them
    # two sets of rows that cannot be merged into one.
    if not tokens or (family_of(model.config).name == "t5" and not tied):
        return None
    name = next(n for n, module in model.named_modules() if module is inputs)
    tables = {name.rsplit(".", 1)[-1]: list(tokens)}
    if not tied:  # a shared one follows by itself
        tables["lm_head"] = list(tokens)
    return tables


def is_of_dora(model: nn.Module, name: str) -> bool:
    """True if the layer at `name` lies inside one of DoRA's."""
    parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
    return bool(getattr(parent, "lora_magnitude_vector", None))


def is_linear(module: nn.Module) -> bool:
    """True if it is a product with a matrix, GPT-2's transposed one among them."""
    return isinstance(module, nn.Linear | Conv1D)


def _peft() -> Any:
    silence_bitsandbytes()
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "An adapter is asked for and the package peft is not installed. Install it with "
            "`pip install 'peft>=0.21,<0.23'`, or train all weights with adapter=null."
        ) from error
    return peft
