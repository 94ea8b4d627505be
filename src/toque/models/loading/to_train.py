"""Model to train: new or from a checkpoint, with its adapter, in float32 or as it is held."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from toque.config.schema import ModelConfig
from toque.config.schema_methods import AdapterConfig
from toque.models.families import Family, family_named, vocabulary_rows
from toque.models.loading.from_scratch import build_model
from toque.models.loading.pretrained import (
    AdaptedBase,
    check_folder,
    grow_vocabulary,
    load_model,
)
from toque.models.lora.frozen import FrozenFormat
from toque.models.lora.layers import attach


class SpecialTokens(Protocol):
    """Facts of a tokenizer that a model is made for."""

    vocab_size: int  # rows of the embedding
    pad_id: int
    eos_id: int
    bos_id: int | None
    newline_id: int | None  # id of the marker that stands for a line break, if there is one


def family_to_train(model: ModelConfig) -> Family:
    """The family of the run's model, before any weight is read; raises as `check_folder` does."""
    if model.start_from == "scratch":
        return family_named(model.family)
    return check_folder(model.start_from, family=model.family).family


def new_model(section: ModelConfig, tokens: SpecialTokens, *, seed: int) -> PreTrainedModel:
    """A new model of the run's family and shape."""
    return build_model(
        family=section.family,
        shape=section.shape,
        vocab_size=tokens.vocab_size,
        pad_id=tokens.pad_id,
        eos_id=tokens.eos_id,
        bos_id=tokens.bos_id,
        seed=seed,
    )


def model_to_train(
    section: ModelConfig, adapter: AdapterConfig | None, tokens: SpecialTokens, *, seed: int
) -> PreTrainedModel:
    """The model to train, in float32 on the CPU, fitting the tokenizer, adapter and all."""
    if section.start_from == "scratch":
        return new_model(section, tokens, seed=seed)
    model = load_model(section.start_from, family=section.family)
    _fit(section, adapter, model, tokens, seed=seed)
    return model


def placed_model(
    section: ModelConfig,
    adapter: AdapterConfig | None,
    tokens: SpecialTokens,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[PreTrainedModel, str | None]:
    """The model to train on a device, and the hash of the weights beside its adapter, if any."""
    if adapter is None:
        model = model_to_train(section, None, tokens, seed=seed)
        model.to(device)  # type: ignore[arg-type]  # transformers annotates it away
        return model, None
    base = base_to_train(section, adapter, tokens, seed=seed)
    return base.placed(FrozenFormat(dtype, adapter.quantize_base), device)


def base_to_train(
    section: ModelConfig, adapter: AdapterConfig, tokens: SpecialTokens, *, seed: int
) -> AdaptedBase:
    """The base of a run with its adapter; raises as `check_folder` does."""
    return AdaptedBase(
        check_folder(section.start_from, family=section.family),
        lambda model: _fit(section, adapter, model, tokens, seed=seed),
        read_whole=adapter.kind == "dora",
    )


def add_adapter(
    adapter: AdapterConfig,
    model: PreTrainedModel,
    tokens: SpecialTokens,
    *,
    base: str,
    base_rows: int,
    seed: int,
) -> None:
    """Put the configured adapter into `model`, whose embedding had `base_rows` before it grew.

    Rows of tokens that are new, or stand for a line break, are trained besides.
    """
    marker = () if tokens.newline_id is None else (tokens.newline_id,)
    new = sorted({*marker, *range(base_rows, tokens.vocab_size)})
    folder = Path(base).expanduser()
    named = str(folder.resolve()) if folder.is_dir() else base
    attach(model, adapter, base=named, seed=seed, tokens=new)


def _fit(
    section: ModelConfig,
    adapter: AdapterConfig | None,
    model: PreTrainedModel,
    tokens: SpecialTokens,
    *,
    seed: int,
) -> None:
    """Give a checkpoint's model rows for the tokenizer's tokens, and the adapter."""
    rows, base = vocabulary_rows(model), section.start_from
    grow_vocabulary(model, tokens.vocab_size)
    if adapter is not None:
        add_adapter(adapter, model, tokens, base=base, base_rows=rows, seed=seed)
