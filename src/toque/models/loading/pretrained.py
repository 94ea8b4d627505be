"""Pretrained models from a Hugging Face folder or hub name, checked before use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from toque.errors import CheckpointError, ConfigError
from toque.models.families import (
    MODEL_TYPES,
    Family,
    embedding,
    family_named,
    family_of,
    unknown_type,
    vocabulary_rows,
)
from toque.models.loading.config_json import check_config, read_config_json
from toque.models.loading.from_scratch import config_in, give_own_head
from toque.models.loading.fused_activations import fuse_activations
from toque.models.loading.hub import resolve_folder
from toque.models.loading.stored_weights import StoredWeights, stored_weights
from toque.models.lora.files import CONFIG as ADAPTER_CONFIG
from toque.models.lora.files import load_adapter, merged, read_config, rows_needed

MOST_ROWS: Final = 500_000
"""Rows that an embedding is grown to, as many as a tokenizer may learn."""


@dataclass(frozen=True)
class CheckedFolder:
    """A model folder that may be read: its family, and what its files hold."""

    folder: Path
    family: Family
    stored: StoredWeights
    has_own_head: bool
    """Whether config.json says that head and embedding are two, and the files hold the head."""


@dataclass(frozen=True)
class Placement:
    """Where the weights of a stored model go as they are read, and in what precision."""

    devices: Mapping[str, torch.device]
    """By the names of its modules."""
    dtype: torch.dtype


Place = Callable[[CheckedFolder], Placement | None]
"""Where a stored model goes; None: on the CPU in float32."""


def check_folder(path: str, *, family: str = "auto") -> CheckedFolder:
    """The folder behind a path or hub name, its config and headers checked, no weight read.

    Args:
        path: A folder, or a hub name.
        family: t5, gpt2, neox or llama to insist on one; auto takes what the checkpoint is.

    Raises:
        ConfigError: no such model, of another family, or of none that works here.
        CheckpointError: the folder is incomplete, damaged or holds only pickles.
    """
    folder = resolve_folder(path)
    raw = _read_config(folder)
    model_type = str(raw.get("model_type"))
    if family != "auto" and model_type not in family_named(family).model_types:
        raise ConfigError(
            f'model.family is {family}, and {folder} holds a model of type "{model_type}". '
            "Set model.family=auto, or name another checkpoint in model.start_from."
        )
    if model_type not in MODEL_TYPES:
        raise unknown_type(model_type, has_code="auto_map" in raw)
    stored = stored_weights(folder)
    check_config(raw, folder / "config.json", stored.n_weights)
    own_head = raw.get("tie_word_embeddings") is False and "lm_head.weight" in stored.files
    return CheckedFolder(folder, family_of(config_in(folder)), stored, own_head)


def load_model(
    path: str,
    *,
    family: str = "auto",
    vocab_size: int | None = None,
    place: Place | None = None,
) -> PreTrainedModel:
    """A pretrained model in float32 on the CPU, in evaluation mode, dropout as its config says.

    Only safetensors are read: a pickle can run code while it loads. The weights must be all there
    and have the config's shapes; transformers alone would draw missing ones at random.

    Args:
        path: A folder, or a hub name.
        family: t5, gpt2, neox or llama to insist on one; auto takes what the checkpoint is.
        vocab_size: Rows the embedding must have at least. It is grown when smaller, each new row
            the mean of the old ones (Hewitt 2021), and never shrunk.
        place: Where it goes instead, without a copy on the CPU.

    Raises:
        ConfigError: no such model, of another family, or of none that works here.
        CheckpointError: the folder is incomplete, damaged or holds only pickles.
    """
    found = check_folder(path, family=family)
    placed = None if place is None else place(found)
    model = _read_weights(found.folder, found.family, placed)
    if placed is not None:  # transformers says so of several devices alone
        vars(model)["hf_device_map"] = dict(placed.devices)
    if found.has_own_head:
        _keep_apart(model)
    if vocab_size is not None:
        grow_vocabulary(model, vocab_size)
    fuse_activations(model)
    return model


def load_with_adapter(folder: Path, *, merge: bool = True) -> PreTrainedModel:
    """The base that `folder` names with the adapter in it, in float32, in evaluation mode.

    Args:
        folder: An adapter's.
        merge: Give back a plain model, the adapter added into its weights.

    Raises:
        ConfigError: the base is not there, or none that works here.
        CheckpointError: a folder is damaged, or the base is another than the adapter was made on.
    """
    config = read_config(folder)
    base = config.base_model_name_or_path
    if not base:
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG} does not say which model it belongs to. Write that model's "
            'folder or hub name into it as "base_model_name_or_path".'
        )
    model = load_model(str(base), vocab_size=rows_needed(folder))
    load_adapter(model, folder)
    return merged(model) if merge else model


def grow_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """Give embeddings and head `vocab_size` rows, when they have fewer.

    A new row is the mean of the old ones, so the model's predictions barely change (Hewitt 2021,
    "Initializing new word embeddings for pretrained language models"); nothing is random.
    """
    old = vocabulary_rows(model)
    if vocab_size <= old:
        return
    most = max(MOST_ROWS, 2 * old)
    if vocab_size > most:
        raise CheckpointError(
            f"The tokenizer, or an adapter's record, asks for an embedding of {vocab_size:,} rows "
            f"where the model has {old:,}; at most {most:,} are made. Look at the highest id of "
            "the tokenizer: it is damaged or belongs to another model."
        )
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        # A tied table is filled twice, with the same numbers.
        for table in (embedding(model), _head(model)):
            table[old:] = table[:old].mean(0)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if (folder / ADAPTER_CONFIG).exists() and not file.exists():
        raise ConfigError(
            f"{folder} holds an adapter, not a model. Name the model it was trained on in "
            "model.start_from."
        )
    if not file.exists():
        raise ConfigError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder. Name the "
            "folder that holds config.json and model.safetensors."
        )
    return read_config_json(folder)


def _read_weights(folder: Path, family: Family, placed: Placement | None) -> PreTrainedModel:
    # Loading is over before anyone could read a progress bar.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    auto = AutoModelForSeq2SeqLM if family.is_encoder_decoder else AutoModelForCausalLM
    try:
        loaded: Any = auto.from_pretrained(
            folder,
            dtype=torch.float32 if placed is None else placed.dtype,
            device_map=None if placed is None else dict(placed.devices),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,  # without it, transformers asks at the terminal
            output_loading_info=True,
        )
    except Exception as error:  # whatever transformers makes of a folder that may be anyone's
        raise CheckpointError(
            f"The model in {folder} does not load ({type(error).__name__}): "
            f"{' '.join(str(error).split())[:600]}. Its config.json and its weights do not belong "
            "together, or one of them is damaged: copy the model from its source again."
        ) from error
    model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weights its config.json asks for: {shown}. "
            "The two do not belong together, or the copy is not whole."
        )
    return model  # transformers hands it over in evaluation mode


def _keep_apart(model: PreTrainedModel) -> None:
    """Untie a T5 v1.1: transformers 5 ties its head whatever config.json says."""
    head = _head(model)
    if head is embedding(model):
        give_own_head(model, head.detach().clone())
    model.config.tie_word_embeddings = False


def _head(model: PreTrainedModel) -> Tensor:
    return model.get_parameter("lm_head.weight")
