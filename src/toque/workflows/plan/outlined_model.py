"""Outlined model of a plan: the run's model and adapter, with shapes but without values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.config.schema import TRAINED
from toque.errors import ConfigError
from toque.models.families import DTYPES, exchange_parameters, vocabulary_rows
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.forward.keyed_dropout import turn_off_dropout, use_keyed_dropout
from toque.models.forward.outline import Where
from toque.models.loading.from_scratch import KNOWN, known_model, outline_of
from toque.models.loading.hub import resolve_folder
from toque.models.loading.trainable import SpecialTokens
from toque.models.lora.frozen import hold_frozen
from toque.models.lora.quantised import Outlined
from toque.runs.outlined_update import outlining
from toque.user_paths import named_path
from toque.workflows.build import build_stream, model_to_train

if TYPE_CHECKING:
    from toque.data.loader.batch_stream import BatchStream
    from toque.data.store.token_store import TokenStore


@dataclass
class Vocabulary:
    """Size and special tokens of a tokenizer that is not loaded."""

    vocab_size: int
    pad_id: int = 0
    eos_id: int = 1
    bos_id: int | None = None
    newline_id: int | None = None


def find_vocabulary(
    config: RunConfig, store: TokenStore | None
) -> SpecialTokens | None:
    """Return the vocabulary of the store or the settings. None if the checkpoint determines it."""
    if store is not None:
        return store.codec()
    source = config.model.tokenizer_source
    if source.startswith(TRAINED):
        return Vocabulary(int(source.removeprefix(TRAINED)))
    if config.model.start_from != "scratch":
        return None
    if source in KNOWN:
        return Vocabulary(KNOWN[source]["vocab_size"])
    from toque.data.tokenizer.codec import load_codec
    from toque.data.tokenizer.tokenizer_folder import resolve_tokenizer

    return load_codec(resolve_tokenizer(source))


def outline_model(
    config: RunConfig, vocabulary: SpecialTokens | None, *, where: Where, precision: str
) -> PreTrainedModel:
    """Build the run's model with the layers for a device. Call this inside `outlining`."""
    if config.model.start_from == "scratch":
        if vocabulary is None:
            raise ConfigError(
                "A model from scratch needs a tokenizer. Set model.tokenizer."
            )
        model = model_to_train(config, vocabulary).new()
    else:
        model = _outline_checkpoint(config.model.start_from)
        to_train = model_to_train(
            config, vocabulary or Vocabulary(vocabulary_rows(model))
        )
        # peft cannot move fake tensors, so the adapter is added on the meta device.
        with unset_fake_temporarily(), torch.device("meta"):
            replace_parameters(model, "meta")
            to_train.adapt(model)
        replace_parameters(model)
    form = None if config.adapter is None else config.adapter.quantize_base
    hold_frozen(model, DTYPES[precision], None if form is None else Outlined(form))
    use_keyed_dropout(model)
    if config.objective.kind != "sft":
        turn_off_dropout(model)
    if where == "cpu" and precision == "bf16":
        use_cpu_layers(model)
    return model


def outline_stream(config: RunConfig, store: TokenStore) -> BatchStream:
    """Build the stream of the run's batches without loading its model."""
    with outlining():
        plain = config.model_copy(update={"adapter": None})
        outline = outline_model(plain, store.codec(), where="cuda", precision="float32")
    return build_stream(config, store, outline)


def replace_parameters(
    model: nn.Module, device: str = "cpu", dtype: torch.dtype | None = None
) -> None:
    """Replace every parameter by an empty parameter. Shared parameters stay shared.

    Without `dtype`, the parameters keep their types.
    """
    replacements = {}
    for old in model.parameters():
        new = torch.empty(old.shape, dtype=dtype or old.dtype, device=device)
        replacements[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
    exchange_parameters(model, replacements)


def _outline_checkpoint(start: str) -> PreTrainedModel:
    """Build the model of `model.start_from` from its config.json, or from its known shape."""
    folder = named_path(start)
    if not folder.is_dir():
        model = known_model(start)
        if model is not None:
            return model
        try:
            folder = resolve_folder(start, needs=("config.json",), also=())
        except ConfigError as error:
            raise ConfigError(
                f"{error} A plan needs only its config.json, and no file at all for "
                f"{', '.join(KNOWN)}."
            ) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.start_from is {folder}, which has no config.json.")
    return outline_of(folder)
