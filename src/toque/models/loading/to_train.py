"""Model to train: new or from a checkpoint, with its adapter, in float32 or as it is held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from toque.config.schema import ModelConfig
from toque.config.schema_methods import AdapterConfig
from toque.models.families import FAMILIES, Family, vocabulary_rows
from toque.models.loading.from_scratch import build_model
from toque.models.loading.pretrained import (
    AdaptedBase,
    check_folder,
    grow_vocabulary,
    load_model,
)
from toque.models.lora.frozen import FrozenFormat
from toque.models.lora.layers import attach
from toque.user_paths import named_path


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
        return FAMILIES[model.family]
    return check_folder(model.start_from, family=model.family).family


@dataclass(frozen=True)
class ModelToTrain:
    """The model of a run, fitting its tokenizer; reading one raises as `check_folder` does."""

    section: ModelConfig
    adapter: AdapterConfig | None
    tokens: SpecialTokens
    seed: int

    def new(self) -> PreTrainedModel:
        """A new model of the run's family and shape."""
        return build_model(
            family=self.section.family,
            shape=self.section.shape,
            vocab_size=self.tokens.vocab_size,
            pad_id=self.tokens.pad_id,
            eos_id=self.tokens.eos_id,
            bos_id=self.tokens.bos_id,
            seed=self.seed,
        )

    def fit(self, model: PreTrainedModel) -> None:
        """Give a checkpoint's model rows for the tokenizer's tokens, and the adapter.

        Rows of tokens that are new, or stand for a line break, are trained beside an adapter.
        """
        rows, tokens, base = vocabulary_rows(model), self.tokens, self.section.start_from
        grow_vocabulary(model, tokens.vocab_size)
        if self.adapter is None:
            return
        marker = () if tokens.newline_id is None else (tokens.newline_id,)
        new = sorted({*marker, *range(rows, tokens.vocab_size)})
        folder = named_path(base)
        named = str(folder.resolve()) if folder.is_dir() else base
        attach(model, self.adapter, base=named, seed=self.seed, tokens=new)

    def in_float32(self) -> PreTrainedModel:
        """The model, adapter and all, in float32 on the CPU."""
        if self.section.start_from == "scratch":
            return self.new()
        model = load_model(self.section.start_from, family=self.section.family)
        self.fit(model)
        return model

    def base(self) -> AdaptedBase:
        """The base of the run with its adapter."""
        found = check_folder(self.section.start_from, family=self.section.family)
        is_dora = self.adapter is not None and self.adapter.kind == "dora"
        return AdaptedBase(found, self.fit, read_whole=is_dora)

    def placed(
        self, dtype: torch.dtype, device: torch.device
    ) -> tuple[PreTrainedModel, str | None]:
        """The model on a device, and the hash of the weights beside its adapter, if any."""
        if self.adapter is not None:
            return self.base().placed(FrozenFormat(dtype, self.adapter.quantize_base), device)
        model = self.in_float32()
        model.to(device)  # type: ignore[arg-type]  # transformers annotates it away
        return model, None
