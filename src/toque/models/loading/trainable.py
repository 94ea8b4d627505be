"""Models to train: new or from a checkpoint, with their adapter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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
from toque.models.lora.continued import (
    load_start,
    load_start_tables,
    refuse_base_of_other,
    with_values_of_start,
)
from toque.models.lora.frozen import FrozenFormat, base_sha256
from toque.models.lora.layers import attach
from toque.user_paths import named_path


class SpecialTokens(Protocol):
    """Properties of a tokenizer that a model needs."""

    vocab_size: int  # number of rows of the embedding
    pad_id: int
    eos_id: int
    bos_id: int | None
    newline_id: int | None  # id of the marker for a line break, if there is one


def family_to_train(model: ModelConfig) -> Family:
    """Return the family of a run's model without reading weights.

    Raises the same errors as `check_folder`.
    """
    if model.start_from == "scratch":
        return FAMILIES[model.family]
    return check_folder(model.start_from, family=model.family).family


@dataclass(frozen=True)
class ModelToTrain:
    """Model of a run, with rows for the tokens of its tokenizer.

    The methods that read a model raise the same errors as `check_folder`.
    """

    section: ModelConfig
    adapter: AdapterConfig | None
    tokens: SpecialTokens
    seed: int

    @cached_property
    def _adapter(self) -> AdapterConfig | None:
        """Settings of the adapter, with the values of the adapter to continue."""
        return None if self.adapter is None else with_values_of_start(self.adapter)

    def new(self) -> PreTrainedModel:
        """Build a new model of the run's family and shape."""
        return build_model(
            family=self.section.family,
            shape=self.section.shape,
            vocab_size=self.tokens.vocab_size,
            pad_id=self.tokens.pad_id,
            eos_id=self.tokens.eos_id,
            bos_id=self.tokens.bos_id,
            seed=self.seed,
        )

    def adapt(self, model: PreTrainedModel) -> None:
        """Add rows for the tokenizer's tokens to a pretrained model, and attach the adapter.

        An adapter also trains the rows of new tokens and of the marker for a line break.
        """
        n_rows = vocabulary_rows(model)
        grow_vocabulary(model, self.tokens.vocab_size)
        if self._adapter is None:
            return
        new_tokens = set(range(n_rows, self.tokens.vocab_size))
        if self.tokens.newline_id is not None:
            new_tokens.add(self.tokens.newline_id)

        base = self.section.start_from
        folder = named_path(base)
        if folder.is_dir():  # not a hub name
            base = str(folder.resolve())
        tokens = sorted(new_tokens)
        attach(model, self._adapter, base=base, seed=self.seed, tokens=tokens)
        load_start(model, self._adapter)

    def _load_start_tables(self, model: PreTrainedModel) -> None:
        load_start_tables(model, self._adapter)

    def in_float32(self) -> PreTrainedModel:
        """Read or build the model with its adapter, in float32 on the CPU."""
        if self.section.start_from == "scratch":
            return self.new()
        model = load_model(self.section.start_from, family=self.section.family)
        self.adapt(model)
        refuse_base_of_other(self.adapter, lambda: base_sha256(model))
        self._load_start_tables(model)
        return model

    def base(self) -> AdaptedBase:
        """Check the base of an adapter run. `AdaptedBase.placed` reads its matrices later."""
        checked = check_folder(self.section.start_from, family=self.section.family)
        is_dora = self._adapter is not None and self._adapter.kind == "dora"
        return AdaptedBase(
            checked, self.adapt, read_whole=is_dora, fill_tables=self._load_start_tables
        )

    def placed(
        self, dtype: torch.dtype, device: torch.device
    ) -> tuple[PreTrainedModel, str | None]:
        """Read or build the model on a device.

        Returns:
            The model, and the hash of its base if it has an adapter.
        """
        if self.adapter is not None:
            frozen_format = FrozenFormat(dtype, self.adapter.quantize_base)
            model, base_hash = self.base().placed(frozen_format, device)
            refuse_base_of_other(self.adapter, lambda: base_hash)
            return model, base_hash
        model = self.in_float32()
        model.to(device)  # type: ignore[arg-type]  # transformers annotates it away
        return model, None
