"""Outlined model of a plan: the run's model, adapter and all, with shapes and no numbers."""

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
from toque.models.forward.keyed_dropout import use_keyed_dropout
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
    """Facts of a tokenizer that is not here; a codec has them as well."""

    vocab_size: int
    pad_id: int = 0
    eos_id: int = 1
    bos_id: int | None = None
    newline_id: int | None = None


def vocabulary_of(config: RunConfig, store: TokenStore | None) -> SpecialTokens | None:
    """The store's vocabulary, or what the settings say of it; None where a checkpoint decides."""
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


def outlined_model(
    config: RunConfig, known: SpecialTokens | None, *, where: Where, precision: str
) -> PreTrainedModel:
    """The run's model with its layers as they are on that kind of device; inside `outlining`."""
    adapter = config.adapter
    if config.model.start_from == "scratch":
        if known is None:
            raise ConfigError("A model from scratch needs a tokenizer: name model.tokenizer.")
        model = model_to_train(config, known).new()
    else:
        model = _of_checkpoint(config.model.start_from)
        wanted = model_to_train(config, known or Vocabulary(vocabulary_rows(model)))
        # On the device "meta", for peft cannot move fake tensors.
        with unset_fake_temporarily(), torch.device("meta"):
            remake(model, "meta")
            wanted.fit(model)
        remake(model)
    form = None if adapter is None else adapter.quantize_base
    hold_frozen(model, DTYPES[precision], None if form is None else Outlined(form))
    use_keyed_dropout(model)
    if where == "cpu" and precision == "bf16":
        use_cpu_layers(model)
    return model


def outlined_stream(config: RunConfig, store: TokenStore) -> BatchStream:
    """The run's batches, laid out for its model, of which no weight is read or made."""
    with outlining():
        plain = config.model_copy(update={"adapter": None})
        outline = outlined_model(plain, store.codec(), where="cuda", precision="float32")
    return build_stream(config, store, outline)


def remake(model: nn.Module, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
    """Exchange every parameter for an empty one, of `dtype` if given; shared ones stay shared."""
    made = {}
    for old in model.parameters():
        new = torch.empty(old.shape, dtype=dtype or old.dtype, device=device)
        made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
    exchange_parameters(model, made)


def _of_checkpoint(start: str) -> PreTrainedModel:
    folder = named_path(start)
    if not folder.is_dir():
        known = known_model(start)
        if known is not None:
            return known
        try:
            folder = resolve_folder(start, needs=("config.json",), also=())
        except ConfigError as error:
            raise ConfigError(
                f"{error} A plan needs its config.json alone, and knows without it: "
                f"{', '.join(KNOWN)}."
            ) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.start_from is {folder}, which has no config.json.")
    return outline_of(folder)
