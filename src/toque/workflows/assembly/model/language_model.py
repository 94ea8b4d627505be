"""The model to train: in float32 on the CPU, or as it is held on its device."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.codec import Codec
from toque.models.families import Family, family_named, vocabulary_rows
from toque.models.loading.frame import load_frame, matrix_of
from toque.models.loading.from_scratch import build_model
from toque.models.loading.pretrained import check_folder, grow_vocabulary, load_model
from toque.models.lora.frozen import base_sha256, hold_frozen, read_frozen
from toque.models.lora.quantised import form_named
from toque.workflows.assembly.optim_and_adapter import add_adapter


def build_language_model(config: RunConfig, store: TokenStore) -> PreTrainedModel:
    """The model to train, in float32 on the CPU, fitting the store's tokenizer, adapter and all."""
    codec = store.codec()
    if config.model.start_from == "scratch":
        return model_from_scratch(config, codec)
    model = load_model(config.model.start_from, family=config.model.family)
    _fit(config, model, codec)
    return model


class SpecialTokens(Protocol):
    """What a new model must know of its tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def pad_id(self) -> int:
        """Of padding."""

    @property
    def eos_id(self) -> int:
        """Of the end of a text."""

    @property
    def bos_id(self) -> int | None:
        """Of the begin of a text, if it has one."""


def model_from_scratch(config: RunConfig, tokens: SpecialTokens) -> PreTrainedModel:
    """A new model of the run's family and shape."""
    return build_model(
        family=config.model.family,
        shape=config.model.shape,
        vocab_size=tokens.vocab_size,
        pad_id=tokens.pad_id,
        eos_id=tokens.eos_id,
        bos_id=tokens.bos_id,
        seed=config.seed,
    )


def place_language_model(
    config: RunConfig, store: TokenStore, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, str | None]:
    """The model to train on a device, and the hash of the weights beside its adapter, if any.

    Frozen matrices are read one by one in the format they are held in; only DoRA, which computes
    with them in float32, and files with older names are read whole first.

    Args:
        config: of the run.
        store: its prepared data.
        dtype: of the run's matrix products.
        device: where all of the model is then.

    Raises:
        ConfigError: no such model, or a package is missing that its format needs.
        CheckpointError: its files are damaged.
    """
    adapter = config.adapter
    if adapter is None:
        model = build_language_model(config, store)
        model.to(device)  # type: ignore[arg-type]  # transformers annotates it away
        return model, None
    form = None if adapter.quantize_base is None else form_named(adapter.quantize_base)
    found = check_folder(config.model.start_from, family=config.model.family)
    frame = load_frame(found) if adapter.kind != "dora" else None
    if frame is None:
        model = build_language_model(config, store)
        base_hash = base_sha256(model)
        hold_frozen(model, dtype, form)
        model.to(device)  # type: ignore[arg-type]  # transformers annotates it away
        return model, base_hash
    _fit(config, frame, store.codec())
    base_hash = read_frozen(
        frame,
        partial(matrix_of, found, frame),
        dtype=dtype,
        form=form,
        device=device,
    )
    return frame, base_hash


def family_to_train(config: RunConfig) -> Family:
    """The family of the run's model, before any weight is read.

    Raises:
        ConfigError: no such model, or none of a family that works here.
        CheckpointError: its folder is damaged.
    """
    if config.model.start_from == "scratch":
        return family_named(config.model.family)
    return check_folder(config.model.start_from, family=config.model.family).family


def _fit(config: RunConfig, model: PreTrainedModel, codec: Codec) -> None:
    """Give a checkpoint's model rows for the tokenizer's tokens, and the adapter."""
    rows = vocabulary_rows(model)
    grow_vocabulary(model, codec.vocab_size)
    add_adapter(config, model, codec, base_rows=rows)
